"""vLLM beside the training in one process: its process groups are cut from our world, and what it changes is undone.

vLLM keeps its groups in globals of `parallel_state`, one set a process, and would cut the whole world by one tensor
parallel size. Here each engine has a set of its own, which stands in those globals only while the engine is built or
called. It knows no more of the world than the ranks of its replica, so that the model may stand on some ranks only.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from phalanx.distributed.mesh import group_timeout

# What every engine here needs; vLLM reads these when it is imported and built.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core stays in this process
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent to its makers
}
DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}  # its warnings on a CPU are many, and none is for the user of a task
SHARED = ("_TP", "_ETP", "_EP")  # groups of all ranks of a replica
ALONE = ("_PP", "_DP", "_DCP", "_PCP")  # groups of one rank
GLOBALS = ("_WORLD", "_NODE_COUNT", *SHARED, *ALONE)


class VllmGroups:
    """The groups of one engine, on the tensor parallel `ranks` of which this rank is one.

    All ranks of the world make one at the same point; a rank that holds no part of the model gives itself alone.
    """

    def __init__(self, ranks: Sequence[int], local_rank: int, timeout_s: float) -> None:
        with as_before():
            from vllm.distributed import parallel_state
            from vllm.platforms import current_platform

            self._globals = vars(parallel_state)
            backend, new_group = current_platform.dist_backend, dist.new_group

            def ours(members: list[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
                """As vLLM asks for a group; only its own ranks take part, and it has the time limit of our world."""
                return new_group(members, group_timeout(timeout_s), backend, use_local_synchronization=True)

            def coordinator(members: Sequence[int], name: str) -> Any:
                # vLLM uses shared memory where a name begins with tp: it waits forever for a rank that died, and its
                # files outlive a killed process
                return parallel_state.init_model_parallel_group([list(members)], local_rank, backend, group_name=name)

            with patch.object(dist, "new_group", lambda *_, **__: dist.group.WORLD):
                world = parallel_state.init_world_group(list(range(dist.get_world_size())), local_rank, backend)
            with patch.object(dist, "new_group", ours):
                shared, alone = coordinator(ranks, "replica"), coordinator([dist.get_rank()], "alone")
        self.cpu_group: dist.ProcessGroup = shared.cpu_group
        self._groups: dict[str, Any] = {"_WORLD": world, "_NODE_COUNT": 1}
        self._groups |= dict.fromkeys(SHARED, shared) | dict.fromkeys(ALONE, alone)

    @contextmanager
    def active(self) -> Iterator[None]:
        """For the time of the block, vLLM works on these groups; afterwards the process is as before."""
        outside = {name: self._globals[name] for name in GLOBALS}
        with as_before():
            self._globals.update(self._groups)
            try:
                yield
            finally:
                self._globals.update(outside)


@contextmanager
def as_before() -> Iterator[None]:
    """Undo what vLLM changes for the whole process: random states, threads, matmul precision, environment, and the
    stream that this thread's kernels go to.
    """
    environment = dict(os.environ)
    numbers, arrays = random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    stream = torch.cuda.current_stream() if devices else None
    os.environ.update({**DEFAULTS, **environment, **ENVIRONMENT})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            if stream is not None:
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
