"""The Python side of torch.cuda and of tensors, pretended; for the rest of a process."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.pretended import graphs, groups, rules, streams, transfers
from tests.pretended.places import CPU, device_of, memory_of, put
from tests.pretended.record import RECORD, Record
from tests.pretended.streams import HOST, Memory

NAME = "NVIDIA H100 80GB HBM3"
MEMORY = 80 * 10**9
true = SimpleNamespace(
    numpy=Tensor.numpy,
    tolist=Tensor.tolist,
    array=Tensor.__array__,
    from_numpy=torch.from_numpy,
    clone=torch.UntypedStorage.clone,
    copy=torch.UntypedStorage.copy_,
    resize=torch.UntypedStorage.resize_,
)


def install(gpus: int = 1, local_rank: int = 0) -> Record:
    """Pretend that this process has `gpus` GPUs. Only for a forked process: there is no way back."""
    _install_module(gpus, local_rank)
    _install_tensors()
    _install_storages()
    _install_factories()
    _install_threads()
    groups.install()
    rules.Rules().__enter__()
    return RECORD


def _install_module(gpus: int, local_rank: int) -> None:
    at = [local_rank]

    def set_device(device: Any) -> None:
        at[0] = device if isinstance(device, int) else torch.device(device).index or 0

    properties = SimpleNamespace(name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, uuid="0")
    vars(properties).update(pci_domain_id=0, pci_bus_id=15, pci_device_id=0)
    numbers = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    nothing = ("init", "_lazy_init", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: gpus,
        "current_device": lambda: at[0],
        "set_device": set_device,
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": streams.synchronize,
        "current_stream": streams.current,
        "default_stream": lambda *_: streams.DEFAULT,
        "set_stream": streams.set_current,
        "stream": streams.within,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "CUDAGraph": graphs.CUDAGraph,
        "graph": graphs.graph,
        "is_current_stream_capturing": lambda: RECORD.tape is not None,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_stats": lambda *_: {},
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    cuda |= dict.fromkeys(numbers, lambda *_: 0) | dict.fromkeys(nothing, lambda *_: None)
    _replace(torch.cuda, cuda)
    _replace(torch.cuda.nccl, {"version": lambda: (2, 29, 0)})  # which torch notes with each collective
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": lambda: gpus,
        "current_device_index": lambda: at[0],
        "current_stream": streams.current,
        "synchronize": streams.synchronize,
    }
    _replace(torch.accelerator, accelerator)
    _replace(torch, {"Generator": Generator, "get_device_module": _get_device_module})


def _replace(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _get_device_module(device: Any = None) -> Any:
    return torch.cuda if device is None or torch.device(device).type == "cuda" else torch.cpu


class Generator(torch._C.Generator):
    """Numbers of a CPU's generator for the device that was asked for."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")
        made._device = rules.GENERATORS[made._cdata] = transfers.whole(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def _install_tensors() -> None:
    values = {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
        "get_device": lambda tensor: device_of(tensor).index if device_of(tensor).type == "cuda" else -1,
        "to": _to,
        "type_as": lambda tensor, other: _to(tensor, other),
        "cpu": lambda tensor, *_, **__: _to(tensor, CPU),
        "cuda": lambda tensor, device=None, non_blocking=False: _to(tensor, "cuda", non_blocking=non_blocking),
        "new_tensor": lambda tensor, data, **kwargs: torch.tensor(
            data, **{"dtype": tensor.dtype, "device": device_of(tensor), **kwargs}
        ),
        "numpy": _numpy,
        "__array__": _array,
        "tolist": _tolist,
        "pin_memory": _pin_memory,
        "is_pinned": _is_pinned,
        "record_stream": rules.record_stream,
    }
    _replace(Tensor, values)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (device_of(args[0]), args[0].dtype, *args[1:])
    elif args and isinstance(args[0], torch.dtype):
        args = (None, *args)
    options = dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False)) | kwargs
    device = options.get("device")
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    late, copy = bool(options.get("non_blocking")), bool(options.get("copy"))
    return transfers.to(tensor, device, options.get("dtype"), late, copy, options.get("memory_format"))


def _on_host(tensor: Tensor) -> None:
    """A fault for a tensor on the device, and for one whose values may not have arrived."""
    memory = memory_of(tensor)
    if memory is None:
        return
    if memory.device.type == "cuda":
        RECORD.fault(f"a tensor on {memory.device} cannot become a NumPy array")
    if not memory.asked:
        memory.host_reads()


def _numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    _on_host(tensor)
    array = true.numpy(tensor, *args, **kwargs)
    memory = memory_of(tensor)
    if memory is not None:
        storage = tensor.untyped_storage()
        _shared[storage.data_ptr(), storage.nbytes()] = memory
    return array


# host memory with arrays over it, by address and size
_shared: WeakValueDictionary[tuple[int, int], Memory] = WeakValueDictionary()


def _from_numpy(array: Any) -> Tensor:
    made: Tensor = true.from_numpy(array)
    for (start, size), memory in _shared.items():
        if start <= made.data_ptr() < start + size:
            put(made, memory)
    return made


def _array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    _on_host(tensor)
    return true.array(tensor, *args, **kwargs)


def _tolist(tensor: Tensor) -> Any:
    memory = memory_of(tensor)
    if memory is not None and memory.device.type == "cuda":
        memory.read()
        RECORD.sync("tolist")
        HOST.follow(streams.current())
    elif memory is not None:
        memory.host_reads()
    with torch.utils._python_dispatch._disable_current_modes():
        return true.tolist(tensor)


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    if device_of(tensor).type == "cuda":
        RECORD.fault("a tensor on the device cannot be pinned")
    return tensor if _is_pinned(tensor) else put(tensor.clone(), Memory(CPU, pinned=True))


def _is_pinned(tensor: Tensor, *_: Any) -> bool:
    memory = memory_of(tensor)
    return memory is not None and memory.pinned


def _install_storages() -> None:
    """Copies and sizes of whole storages, with which torch saves states, copies modules and frees gathered weights."""

    def memory_in(storage: Any) -> Memory | None:
        memory: Memory | None = vars(storage).get("memory")
        return memory

    def clone(storage: Any) -> Any:
        made = true.clone(storage)
        memory = memory_in(storage)
        if memory is not None:
            vars(made)["memory"] = Memory(memory.device, memory.pinned)
            transfers.transfer(memory, memory_in(made), storage.nbytes(), False)
        return made

    def copy(storage: Any, source: Any, non_blocking: bool = False) -> Any:
        transfers.transfer(memory_in(source), memory_in(storage), source.nbytes(), non_blocking)
        return true.copy(storage, source)

    def resize(storage: Any, size: int) -> Any:
        memory = memory_in(storage)
        if memory is not None and size != storage.nbytes():
            memory.renew()
        return true.resize(storage, size)

    _replace(torch.UntypedStorage, {"clone": clone, "copy_": copy, "resize_": resize})


def _install_factories() -> None:
    """Functions that take values of Python, and whose C++ would move them by itself."""

    def on_device(make: Any) -> Any:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if isinstance(data, Tensor):
                tensor = make(data, *args, **kwargs)
                return tensor if device is None else _to(tensor, device)
            if device is None or torch.device(device).type != "cuda":
                return make(data, *args, device=device, **kwargs)
            with torch.utils._python_dispatch._disable_current_modes():
                values = make(data, *args, **kwargs)
            return transfers.moved(values, transfers.whole(device), False)

        return made

    _device_constructors()  # kept for good, so that `with torch.device(...)` knows the true ones
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, on_device(vars(torch)[name]))
    torch.from_numpy = _from_numpy


def _install_threads() -> None:
    """Rules are in force in each thread that starts."""
    run = threading.Thread.run

    def run_by_the_rules(thread: threading.Thread) -> None:
        with rules.Rules():
            run(thread)

    threading.Thread.run = run_by_the_rules  # type: ignore[method-assign]
