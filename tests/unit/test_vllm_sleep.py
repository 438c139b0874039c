"""When vLLM's engines sleep beside training: a pretended vLLM on a pretended GPU has vLLM's own rules of sleeping."""

import pytest

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from tests.helpers.ranks import RankError, run_ranks
from tests.pretended import install
from tests.pretended.vllm import JUDGE, ROLLOUT, steps


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


def test_two_that_sleep_are_refused_before_vllm_does() -> None:
    with pytest.raises(RankError, match="Sleep mode can only be used for one instance per process"):
        run_ranks(order, 1, True, True, init=False)
    keys = ["model.path=x", "data.train_files=[x]", "rollout.engine=vllm", "reward.model.path=y"]
    with pytest.raises(ConfigError, match=r"reward\.model\.sleep: true does not work with rollout\.sleep=true"):
        load_config(LMRLConfig, None, keys)
