"""vLLM's engines beside training: when they sleep, and how they schedule. A pretended vLLM on a pretended GPU has vLLM's own rules
of sleeping.
"""

from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.engines.vllm import load_llm
from phalanx.engines.vllm_text import TextEngineConfig
from phalanx.run.rules import load_config
from tests.helpers.ranks import RankError, run_ranks
from tests.pretended import install
from tests.pretended.vllm import JUDGE, ROLLOUT, Groups, pretend_vllm, steps


def order(rollout_sleeps: bool, judge_sleeps: bool) -> list[str]:
    """What happens on a pretended GPU."""
    install()
    return steps(rollout_sleeps, judge_sleeps)


def test_a_sleeping_rollout_beside_a_judge() -> None:
    (events,) = run_ranks(order, 1, True, False, init=False)
    assert events == ["rollout sleeps at 2", *2 * [*ROLLOUT, "judge answers", "update"]]


def test_a_sleeping_judge_beside_a_rollout() -> None:
    (events,) = run_ranks(order, 1, False, True, init=False)
    assert events == ["judge sleeps at 1", *2 * ["rollout loads", "rollout answers", *JUDGE, "update"]]


def options(tensor_parallel_size: int) -> dict[str, Any]:
    """What an engine on pretended GPUs is made with."""
    install()
    pretend_vllm()
    config = TextEngineConfig("rollout", None, "bfloat16", tensor_parallel_size, 0.5, 64, 4, True)
    made = load_llm(config, Groups()).options  # type: ignore[arg-type]
    return {name: made[name] for name in ("async_scheduling", "tensor_parallel_size", "kv_cache_memory_bytes")}


@pytest.mark.parametrize(("ranks", "scheduling"), [(1, None), (2, False)])
def test_one_rank_schedules_as_vllm_does_by_itself(ranks: int, scheduling: bool | None) -> None:
    """Which is asynchronously on GPUs; ranks that share a model take the same steps. Memory is measured, not given."""
    expected = {"async_scheduling": scheduling, "tensor_parallel_size": ranks, "kv_cache_memory_bytes": None}
    assert run_ranks(options, 1, ranks, init=False) == [expected]


def test_two_that_sleep_are_refused_before_vllm_does() -> None:
    with pytest.raises(RankError, match="Sleep mode can only be used for one instance per process"):
        run_ranks(order, 1, True, True, init=False)
    keys = ["model.path=x", "data.train_files=[x]", "rollout.engine=vllm", "reward.model.path=y"]
    with pytest.raises(ConfigError, match=r"reward\.model\.sleep: true does not work with rollout\.sleep=true"):
        load_config(LMRLConfig, None, keys)
