"""CUDA's rules of devices, for each operator of the forward and the backward pass."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended import graphs, groups, transfers
from tests.pretended.places import CPU, device_of, memory_of, put
from tests.pretended.record import RECORD
from tests.pretended.streams import HOST, Memory, Stream, current

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# the size of the result is in the tensors' values, or the result is a number
WAITING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount", "histc"}
# no values are read
VALUELESS = {"set_", "detach", "alias", "lift_fresh", "_has_compatible_shallow_copy_type", "_unsafe_view", "is_pinned"}
VALUELESS |= {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "resize_",
    "is_same_size",
}
VALUELESS |= {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "_reshape_alias", "record_stream"}

# of frames between an operator and who asked for it
BETWEEN = ("torch/utils/_python_dispatch.py", "tests/pretended/rules.py")
GENERATORS: dict[int, torch.device] = {}  # devices, by the address behind a generator


@dataclass(frozen=True)
class Facts:
    """What the schema of an operator says."""

    name: str
    space: str
    valueless: bool
    writes: tuple[int, ...]  # the positions of arguments that it writes to, in the schema's order
    keywords: tuple[str, ...]  # and their names
    pointwise: bool
    composite: bool


@cache
def facts(operator: Any) -> Facts:
    space, name = operator._schema.name.split("::")
    writes, keywords = [], []
    for i, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(i)
            keywords.append(argument.name)
    valueless = operator.is_view or name in VALUELESS
    pointwise = torch.Tag.pointwise in operator.tags or name.startswith("_foreach_") or name in ("where", "fill_")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    return Facts(name, space, valueless, tuple(writes), tuple(keywords), pointwise, composite)


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Rules(TorchDispatchMode):
    """In force for all operators of a thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and torch's guard against that takes as long as a small operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if FakeTensor in types or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for the shape of a result
        for kind in types:
            if kind not in PLAIN and issubclass(kind, Tensor):
                return NotImplemented  # a DTensor: the operators of its local tensors come here
        RECORD.operators += 1
        op = facts(func)
        tensors = tensors_of((args, kwargs))
        if op.space in ("c10d", "_c10d_functional", "symm_mem"):
            return groups.collective(func, op.name, tensors_of_writes(op, args, kwargs), tensors, args, kwargs)
        if op.composite:  # in inference mode these come whole
            with self:
                return func.decompose(*args, **kwargs)
        if op.name == "copy_":
            target, source = args[0], args[1]
            late = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            transfers.transfer(memory_of(source), memory_of(target), source.numel() * source.element_size(), late)
            graphs.note(func, (target, source), {}, target)
            return func(target, source)
        device = asked_device(kwargs, tensors)
        if op.name == "_to_copy":
            # Tensor.to moves by itself, so that this one casts; C++ may name the CPU, where it takes the tensor to be
            if device is not None and device.type == "cuda" and device != device_of(args[0]):
                late = kwargs.pop("non_blocking", False)
                return transfers.moved(args[0], device, late, dtype=kwargs.get("dtype") or args[0].dtype)
            device = None if device is None or device.type != "meta" else device
            if device is None:
                kwargs.pop("device", None)
        return run(func, op, tensors, device, args, kwargs)


def run(func: Any, op: Facts, tensors: list[Tensor], device: torch.device | None, args: Any, kwargs: Any) -> Any:
    """Do what is asked on the CPU, if the devices agree; its results are on the device."""
    places = [device_of(tensor) for tensor in tensors]
    on_device = [place for place in places if place.type == "cuda"]
    if on_device and not op.valueless:
        check_devices(op, args, tensors, places)
    pinned = bool(kwargs.pop("pin_memory", False))
    if device is not None and device.type == "cuda":
        kwargs["device"] = CPU
    if op.space == "fsdp":
        args = tree_map(lambda value: CPU if isinstance(value, torch.device) else value, args)
    result_on = device or (on_device[0] if on_device else CPU)
    check_generator(op, result_on, args, kwargs)
    if op.name == "record_stream":
        return None
    if on_device and is_waiting(op, args, kwargs):
        RECORD.sync(op.name)
    elif on_device and op.name == "_local_scalar_dense":
        RECORD.sync("item")
    use(op, tensors, tensors_of_writes(op, args, kwargs), bool(on_device), args, kwargs)
    if op.name == "resize_" and on_device:
        renewed(args[0])
    out = func(*args, **kwargs)
    graphs.note(func, args, kwargs, out)
    if result_on.type == "cuda" or pinned:
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors if torch._C._has_storage(tensor)}
        for made in tensors_of(out):
            if memory_of(made) is None and made.untyped_storage()._cdata not in inputs:
                memory = Memory(CPU if pinned else result_on, pinned=pinned)
                if not op.name.startswith(("empty", "new_empty")) and not pinned:
                    memory.write()
                put(made, memory)
    return out


def renewed(tensor: Tensor) -> None:
    memory = memory_of(tensor)
    if memory is not None:
        memory.renew()


def asked_device(kwargs: Any, tensors: list[Tensor]) -> torch.device | None:
    """The device that is named; None where it is that of the operands."""
    device = kwargs.get("device")
    if device is None:
        return None
    device = transfers.whole(device)
    if device.type == "cpu" and torch._C._current_graph_task_id() != -1 and from_autograd():
        # autograd's formulas take the device from an operand, which says "cpu" in C++
        places = [device_of(tensor) for tensor in tensors]
        return next((place for place in places if place.type == "cuda"), transfers.whole("cuda"))
    return device


def from_autograd() -> bool:
    """Whether it was C++ in a backward pass that asked, and no function of Python."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def tensors_of_writes(op: Facts, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to."""
    written = [args[i] for i in op.writes if i < len(args)]
    written += [kwargs[name] for name in op.keywords if name in kwargs]
    return tensors_of(written)


def use(op: Facts, tensors: list[Tensor], written: list[Tensor], on_device: bool, args: Any, kwargs: Any) -> None:
    """Account for what an operator reads and writes, by the current stream or by the host."""
    if op.valueless:
        return
    targets = {id(tensor) for tensor in written}
    for tensor in tensors:
        memory = memory_of(tensor)
        if memory is None:
            continue
        device = memory.device.type == "cuda"
        if id(tensor) in targets:
            memory.write() if device else memory.host_writes()
        else:
            memory.read() if device else memory.host_reads()
    if on_device and (op.name == "_local_scalar_dense" or is_waiting(op, args, kwargs)):
        HOST.follow(current())


def is_waiting(op: Facts, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether the host waits for the operator's result."""
    if op.name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if op.name in INDEXING:
        masks = [index for index in args[1] or () if index is not None and index.dtype in (torch.bool, torch.uint8)]
        hosts = [index for index in args[1] or () if index is not None and device_of(index).type == "cpu"]
        return bool(masks or hosts)
    return op.name in WAITING


def check_devices(op: Facts, args: Any, tensors: list[Tensor], places: list[torch.device]) -> None:
    """All operands are on one device, but for numbers of pointwise operators, and indices."""
    if op.name in INDEXING:
        base = device_of(args[0])
        indices = [index for index in args[1] if index is not None]
        if base.type == "cpu" and any(device_of(index).type == "cuda" for index in indices):
            RECORD.fault(f"{op.name}: indices on the device, and a tensor on the CPU")
        for value in args[2:]:
            if isinstance(value, Tensor) and value.dim() > 0 and device_of(value) != base:
                RECORD.fault(f"{op.name}: a value on {device_of(value)}, and a tensor on {base}")
        return
    if len(set(places)) == 1:
        return
    for tensor, place in zip(tensors, places, strict=True):
        if place.type == "cpu" and (tensor.dim() > 0 or not op.pointwise):
            # counts of steps, but for those of the fused kernel, may stay on the CPU
            if op.name.startswith("_foreach") and tensor.dim() == 0:
                continue
            RECORD.fault(f"{op.name}: operands on {sorted(map(str, set(places)))}; {tuple(tensor.shape)} on the CPU")
    if len({place for place in places if place.type == "cuda"}) > 1:
        RECORD.fault(f"{op.name}: operands on {sorted(map(str, set(places)))}")


def check_generator(op: Facts, result_on: torch.device, args: Any, kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch._C.Generator):
            device = GENERATORS.get(value._cdata, CPU)
            if device.type != result_on.type:
                RECORD.fault(f"{op.name}: a generator of {device} for a tensor on {result_on}")


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """As Tensor.record_stream."""
    memory = memory_of(tensor)
    if memory is not None:
        memory.kept_for.add(stream)
