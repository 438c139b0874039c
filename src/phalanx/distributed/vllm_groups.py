"""vLLM beside training in one process: its groups are cut from our world, and what it changes is undone.

vLLM keeps its groups in globals of `parallel_state`, one set per process, and would cut the whole world by one tensor
parallel size. Here each engine has a separate set, which stands in those globals only while the engine is built or
called. It knows only the ranks of its replica, so a model may be on some of the ranks only.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from phalanx.distributed.mesh import group_timeout

T = TypeVar("T")

# vLLM reads its environment when it is imported and when an engine is built.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core stays in this process
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent to its makers
    "VLLM_SKIP_P2P_CHECK": "1",  # the driver's word counts: the check waits for all ranks of the world
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # its buffers are one set per process, whichever engine's group made them
}
# unlike those, the user's own setting wins: many warnings on a CPU, none for the user of a task
DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}
# vLLM's names for tensor, expert, pipeline, data and context parallelism
SHARED = ("_TP", "_ETP", "_EP")  # groups of all ranks of a replica
ALONE = ("_PP", "_DP", "_DCP", "_PCP")  # groups of one rank
GLOBALS = ("_WORLD", "_NODE_COUNT", *SHARED, *ALONE)


class VllmGroups:
    """The groups of one engine, on the tensor parallel `ranks`, this rank among them.

    All ranks of the world make one at the same point; a rank without a part of the model gives only itself.
    """

    def __init__(self, ranks: Sequence[int], local_rank: int, timeout_s: float) -> None:
        with as_before():
            from vllm.distributed import parallel_state
            from vllm.platforms import current_platform

            self._globals = vars(parallel_state)
            backend, new_group = current_platform.dist_backend, dist.new_group

            def ours(members: list[int], backend: str, timeout: timedelta | None) -> Any:
                """Make a group that vLLM asks for, with the time limit of our world."""
                # Without local synchronization all ranks of the world would have to make all groups
                # of all replicas, in one order; vLLM here knows only those of this replica.
                limit = group_timeout(timeout_s)
                return new_group(members, limit, backend, use_local_synchronization=True)

            def coordinator(members: Sequence[int], name: str) -> Any:
                # vLLM's fast all-reduces of GPUs are for groups of exactly this name. On CPUs the same name would
                # get shared memory, which waits forever for a rank that died, and whose files outlive a killed
                # process.
                make = parallel_state.init_model_parallel_group
                return make([list(members)], local_rank, backend, group_name=name)

            # The group of all ranks is there already; vLLM would connect them all twice more.
            with _new_group(lambda *_, **__: dist.group.WORLD):
                everyone = list(range(dist.get_world_size()))
                world = parallel_state.init_world_group(everyone, local_rank, backend)
            parallel_state.set_custom_all_reduce(current_platform.use_custom_allreduce())
            with _new_group(ours):
                shared = coordinator(ranks, "replica" if current_platform.is_cpu() else "tp")
                alone = coordinator([dist.get_rank()], "alone")
        self.cpu_group: dist.ProcessGroup = shared.cpu_group
        self._groups: dict[str, Any] = {"_WORLD": world, "_NODE_COUNT": 1}
        self._groups |= dict.fromkeys(SHARED, shared) | dict.fromkeys(ALONE, alone)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks of the replica, in their order; for small values that can be pickled."""
        out: list[Any] = [value] * self.cpu_group.size()
        if len(out) > 1:
            dist.all_gather_object(out, value, group=self.cpu_group)
        return out

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let vLLM work on these groups within the block; afterwards the process is as before."""
        # another engine's groups, or None of each where vLLM has not been called yet
        outside = {name: self._globals[name] for name in GLOBALS}
        with as_before():
            self._globals.update(self._groups)
            try:
                yield
            finally:
                self._globals.update(outside)


@contextmanager
def _new_group(function: Callable[..., Any]) -> Iterator[None]:
    """Let `torch.distributed.new_group` be `function` within the block."""
    original = dist.new_group
    dist.new_group = function
    try:
        yield
    finally:
        dist.new_group = original


@contextmanager
def as_before() -> Iterator[None]:
    """Undo what vLLM changes for the whole process, so that training is the same with it and without.

    That is random states, threads, matmul precision, environment, and the stream that this thread's kernels go to.
    """
    environment = dict(os.environ)
    numbers, arrays = random.getstate(), np.random.get_state()
    # on a CPU vLLM replaces the function too, by one that does nothing but warn
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    stream = torch.cuda.current_stream() if devices else None
    os.environ.update({**DEFAULTS, **environment, **ENVIRONMENT})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            if stream is not None:
                # what comes next on our stream must find the results of vLLM's
                stream.wait_stream(torch.cuda.current_stream())
                torch.cuda.set_stream(stream)
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            random.setstate(numbers)
            np.random.set_state(arrays)
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
