"""Process groups: gloo does the work of nccl, and each collective gets what the group's back end serves."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from tests.pretended.places import CPU, device_of, memory_of, put
from tests.pretended.record import RECORD, caller
from tests.pretended.streams import Event, Memory, Stream, current, within

TrueGloo = dist.ProcessGroupGloo
ABORT_S = 60.0


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
    dist.ProcessGroupGloo, dist.ProcessGroupNCCL = Gloo, Nccl  # type: ignore[misc, attr-defined]


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
    on_device = any(place.type == "cuda" for place in places)
    try:
        out = func(*tree_map(_on_cpu, args), **kwargs)
        if on_device and name not in ("send", "recv_"):  # in a batch, whose other half this rank is to begin first
            out = tree_map(lambda value: _waited(value, written), out)
    except RuntimeError as error:
        if on_device:
            _abort_expected()
            raise RuntimeError(f"NCCL communicator was aborted: {error}") from error
        raise
    device = next((place for place in places if place.type == "cuda"), None)
    if device is not None:
        for made in torch.utils._pytree.tree_leaves(out):
            if isinstance(made, Tensor) and memory_of(made) is None:
                memory = Memory(device)
                memory.write()
                put(made, memory)
    return out


def _waited(value: Any, written: list[Tensor]) -> Any:
    """A collective's work is over at once. One that waits for a lost rank is over once the group was aborted, without
    an error on the host, and its results are arbitrary.
    """
    if not isinstance(value, torch.ScriptObject) or "Work" not in str(value._type()):
        return value
    try:
        dist.Work.unbox(value).wait()
    except RuntimeError:
        _abort_expected()
        with torch.utils._python_dispatch._disable_current_modes():
            for tensor in written:
                tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)  # NaN, or -1
        return TrueGloo(dist.HashStore(), 0, 1, timedelta(seconds=9)).barrier().boxed()  # type: ignore[attr-defined]
    return value


def _abort_expected() -> None:
    """Wait until the process's groups are aborted."""
    deadline = time.monotonic() + ABORT_S
    while dist.is_initialized():
        if time.monotonic() > deadline:
            RECORD.fault("a collective waits for a lost rank, and nobody aborts it")
        time.sleep(0.01)


def _on_cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) else value


class Gloo:
    """As ProcessGroupGloo, for who makes a group without torch.distributed: no dispatcher sees its collectives."""

    backend = "gloo"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._group, self._rank = TrueGloo(store, rank, size, timeout), rank

    def barrier(self) -> Any:
        return self._group.barrier()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        work = self._group.broadcast
        return self._run("broadcast", tensors, options.rootRank != self._rank, lambda: work(tensors, options))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._run("send", tensors, False, lambda: self._group.send(tensors, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._run("recv", tensors, True, lambda: self._group.recv(tensors, source, tag))

    def _run(self, name: str, tensors: list[Tensor], writes: bool, work: Callable[[], Any]) -> Any:
        for tensor in tensors:
            place = device_of(tensor)
            if place.type not in served(self.backend):
                RECORD.fault(f"{name}: a tensor on {place} for a group of {self.backend}")
            RECORD.collectives[RECORD.phase, f"{name} {place.type}", caller()] += 1
        return self._start(tensors, writes, work)

    def shutdown(self) -> None:
        self._group.shutdown()

    def abort(self) -> None:
        self._group.abort()

    def _start(self, tensors: list[Tensor], writes: bool, work: Callable[[], Any]) -> Any:
        for tensor in tensors:
            memory = memory_of(tensor)
            if memory is not None:
                memory.host_writes() if writes else memory.host_reads()
        return work()


class Nccl(Gloo):
    """As ProcessGroupNCCL: a collective is work of a stream of its own, which follows the one that asks for it; who
    needs the result has to wait for it.
    """

    backend = "nccl"

    class Options:
        """As ProcessGroupNCCL.Options."""

        _timeout: timedelta

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        self._stream = Stream()

    def _start(self, tensors: list[Tensor], writes: bool, work: Callable[[], Any]) -> Any:
        self._stream.wait_stream(current())
        with within(self._stream):
            for tensor in tensors:
                memory = memory_of(tensor)
                assert memory is not None, "on a device"
                memory.write() if writes else memory.read()
                memory.kept_for.add(self._stream)  # torch keeps the tensors of a collective
        work().wait()
        return NcclWork(self._stream)


class NcclWork:
    """As the Work of a collective: the current stream waits for it, and not the host."""

    def __init__(self, stream: Stream) -> None:
        self._done = Event().record(stream)

    def wait(self) -> bool:
        current().wait_event(self._done)
        return True
