"""vLLM in the processes of training: its groups are subgroups of our world, and its process-wide changes are undone.

vLLM keeps its groups in globals of `parallel_state`, one set per process, and would divide the whole world by one
tensor-parallel size. Here each engine has a separate set, which is in those globals only while the engine is built or
called. It contains only the ranks of its replica, so that a model may be on a subset of the ranks.
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
from torch import Tensor

from phalanx.distributed.mesh import group_timeout

T = TypeVar("T")

# vLLM reads these variables when it is imported and when an engine is built.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core stays in this process
    "VLLM_NO_USAGE_STATS": "1",  # send no usage data
    "VLLM_SKIP_P2P_CHECK": "1",  # trust the driver: the check waits for all ranks of the world
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # its buffers are process-wide, whichever engine's group created them
}
# the user's setting takes precedence here; on a CPU, vLLM prints many warnings that do not matter to users of a task
DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}
# vLLM's names for tensor, expert, pipeline, data and context parallelism
SHARED = ("_TP", "_ETP", "_EP")  # groups of all ranks of a replica
ALONE = ("_PP", "_DP", "_DCP", "_PCP")  # groups of one rank
GLOBALS = ("_WORLD", "_NODE_COUNT", *SHARED, *ALONE)


class VllmGroups:
    """The groups of one engine on the tensor-parallel `ranks`, which include this rank.

    All ranks of the world create one at the same point; a rank without a part of the model passes only itself.
    """

    def __init__(self, ranks: Sequence[int], local_rank: int, timeout_s: float) -> None:
        self.local_rank = local_rank
        with as_before():
            from vllm.distributed import parallel_state
            from vllm.platforms import current_platform

            self._globals = vars(parallel_state)
            backend, new_group = current_platform.dist_backend, dist.new_group

            def ours(members: list[int], backend: str, timeout: timedelta | None) -> Any:
                """Create a group that vLLM requests, with our world's time limit."""
                # Without local synchronization, all ranks of the world would have to create the groups of all
                # replicas in the same order, but vLLM knows only those of this replica.
                limit = group_timeout(timeout_s)
                return new_group(members, limit, backend, use_local_synchronization=True)

            def coordinator(members: Sequence[int], name: str) -> Any:
                # vLLM's fast GPU all-reduces need the group name "tp". On CPUs, that name would select shared memory,
                # which waits forever for a dead rank and leaves files behind when a process is killed.
                make = parallel_state.init_model_parallel_group
                return make([list(members)], local_rank, backend, group_name=name)

            # The group of all ranks exists already; vLLM would connect them all twice more.
            with _new_group(lambda *_, **__: dist.group.WORLD):
                everyone = list(range(dist.get_world_size()))
                world = parallel_state.init_world_group(everyone, local_rank, backend)
            # vLLM's all-reduce shares addresses of CUDA graphs by a call that rejects expandable segments and ends the
            # process (vllm-project/vllm#42609); without it NCCL reduces
            custom = current_platform.use_custom_allreduce() and "expandable_segments:true" not in allocator().lower()
            parallel_state.set_custom_all_reduce(custom)
            with _new_group(ours):
                shared = coordinator(ranks, "replica" if current_platform.is_cpu() else "tp")
                alone = coordinator([dist.get_rank()], "alone")
        self.cpu_group: dist.ProcessGroup = shared.cpu_group
        self._groups: dict[str, Any] = {"_WORLD": world, "_NODE_COUNT": 1}
        self._groups |= dict.fromkeys(SHARED, shared) | dict.fromkeys(ALONE, alone)

    def gather(self, value: T) -> list[T]:
        """Values of all ranks of the replica, in rank order. For small values that can be pickled."""
        out: list[Any] = [value] * self.cpu_group.size()
        if len(out) > 1:
            dist.all_gather_object(out, value, group=self.cpu_group)
        return out

    def any(self, values: Tensor) -> Tensor:
        """Whether values [K] bool are true on any rank of the replica."""
        if self.cpu_group.size() > 1:
            dist.all_reduce(values := values.to(torch.uint8), dist.ReduceOp.MAX, group=self.cpu_group)
        return values.bool()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, make vLLM use these groups. Afterwards the process is as before."""
        # another engine's groups, or None for each if vLLM has not been called yet
        outside = {name: self._globals[name] for name in GLOBALS}
        with as_before():
            self._globals.update(self._groups)
            try:
                yield
            finally:
                self._globals.update(outside)


def allocator() -> str:
    """The settings of torch's allocator of device memory; torch reads the first of these variables that is set."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next(filter(None, map(os.environ.get, names)), "")


@contextmanager
def _new_group(function: Callable[..., Any]) -> Iterator[None]:
    """Within the block, replace `torch.distributed.new_group` by `function`."""
    original = dist.new_group
    dist.new_group = function
    try:
        yield
    finally:
        dist.new_group = original


@contextmanager
def as_before() -> Iterator[None]:
    """Undo vLLM's process-wide changes after the block, so that training is the same with and without vLLM.

    They concern random states, the number of threads, matmul precision, cuDNN attention, the environment and the
    current CUDA stream.
    """
    environment = dict(os.environ)
    numbers, arrays = random.getstate(), np.random.get_state()
    # on a CPU, vLLM also replaces the function by one that only warns
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    stream = torch.cuda.current_stream() if devices else None
    os.environ.update({**DEFAULTS, **environment, **ENVIRONMENT})
    if allocator():  # vLLM 0.30 switches expandable segments off for the memory that sleeps if this variable names them
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            if stream is not None:
                # later work on our stream must wait for the results of vLLM's stream
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
