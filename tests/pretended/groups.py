"""Process groups: gloo does the work of nccl, and each collective gets what the group's back end serves."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from tests.pretended.places import CPU, device_of, memory_of, put
from tests.pretended.record import RECORD, caller
from tests.pretended.streams import Memory


def served(backend: str) -> set[str]:
    """The kinds of devices that a back end serves, of a name such as `cpu:gloo,cuda:nccl`."""
    if ":" in backend:
        return {part.split(":")[0] for part in backend.split(",")}
    return {"cuda"} if backend == "nccl" else {"cpu"}


def install() -> None:
    """From now on groups are of gloo, whatever back end was asked for."""
    make = distributed_c10d._new_process_group_helper

    def made(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        RECORD.groups[name] = str(backend).lower()
        group, prefix = make(size, rank, ranks, dist.Backend("gloo"), store, name, *args, **kwargs)
        if prefix is not None:  # this rank is a member; groups that are cut from this one ask for its back end
            distributed_c10d._world.pg_map[group] = (backend, prefix)
        return group, prefix

    distributed_c10d._new_process_group_helper = made


def backend_of(args: Any, kwargs: Any) -> str:
    """The back end of the group of a collective's arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return RECORD.groups[dist.ProcessGroup.unbox(value).group_name]
        if isinstance(value, str) and value in RECORD.groups:
            return RECORD.groups[value]
    return "cpu:gloo,cuda:nccl"  # of an operator without a group, such as wait_tensor


def collective(func: Any, name: str, written: list[Tensor], tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
    """Run a collective on what its group can serve. The current stream does the work, and waits for it."""
    places = {device_of(tensor) for tensor in tensors}
    backend = backend_of(args, kwargs)
    if name != "barrier":
        for place in places:
            if place.type not in served(backend):
                RECORD.fault(f"{name}: a tensor on {place} for a group of {backend}")
        if len(places) > 1:
            RECORD.fault(f"{name}: tensors on {sorted(map(str, places))}")
    if places:
        RECORD.collectives[RECORD.phase, f"{name} {','.join(sorted(p.type for p in places))}", caller()] += 1
    targets = {id(tensor) for tensor in written}
    for tensor in tensors:
        memory = memory_of(tensor)
        if memory is not None and memory.device.type == "cuda":
            memory.write() if id(tensor) in targets else memory.read()
        elif memory is not None:
            memory.host_writes() if id(tensor) in targets else memory.host_reads()
    out = func(*tree_map(_on_cpu, args), **kwargs)
    device = next((place for place in places if place.type == "cuda"), None)
    if device is not None:
        for made in torch.utils._pytree.tree_leaves(out):
            if isinstance(made, Tensor) and memory_of(made) is None:
                memory = Memory(device)
                memory.write()
                put(made, memory)
    return out


def _on_cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) else value
