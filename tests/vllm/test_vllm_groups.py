"""The groups that vLLM works on: their names decide how they reduce."""

from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def of_this_rank(cfg: Any) -> tuple[str, str, bool]:
    """vLLM's name for the tensor-parallel group on a CPU, and elsewhere; and whether it has shared memory on a CPU."""
    from vllm.platforms import current_platform

    from phalanx.distributed.vllm_groups import VllmGroups

    def tensor_parallel(ranks: list[int]) -> Any:
        return VllmGroups(ranks, 0, 60)._groups["_TP"]

    shared = tensor_parallel([0, 1])
    with patch.object(type(current_platform), "is_cpu", lambda self: False):
        alone = tensor_parallel([dist.get_rank()]).unique_name
    return shared.unique_name, alone, shared.device_communicator.dist_module is not dist


def test_only_gpus_have_the_name_that_vllm_reduces_fast_for() -> None:
    """vLLM's shared memory of CPUs would wait forever for a rank that died."""
    for names in run_ranks(of_this_rank, 2, None, timeout=200):
        on_cpu, on_gpu, shares_memory = names
        assert not on_cpu.startswith("tp") and not shares_memory
        assert on_gpu.split(":")[0] == "tp"
