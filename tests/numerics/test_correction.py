"""Corrections for engines whose log-probabilities differ from the policy's."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.config.flow import FlowRolloutConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.functional.correction import correction_weight
from phalanx.rollout.rescore import rescore
from phalanx.types import Samples
from tests.helpers.policies import make_policy, make_rollout, sample

POLICY = torch.tensor([[-1.0, -1.2], [-0.9, -1.1]])
ENGINE = torch.tensor([[-1.0, -1.2 - 4e-4], [-0.9 + 3e-3, -1.1 - 3e-3]])
MASK = torch.ones(2, 2, dtype=torch.bool)


def test_truncated_importance_weights() -> None:
    weight = correction_weight(POLICY, ENGINE, MASK, kind="truncated_is", limit=1e-3)
    expected = torch.tensor([[1.0, math.exp(4e-4)], [math.exp(-3e-3), math.exp(1e-3)]])
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)


def test_rejection_drops_what_is_too_far_off() -> None:
    assert correction_weight(POLICY, ENGINE, MASK, kind="rejection", limit=1e-3).tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("kind", ["rescore", "none"])
def test_the_others_weigh_nothing(kind: str) -> None:
    assert correction_weight(POLICY, ENGINE, MASK, kind=kind, limit=1e-3).tolist() == [[1, 1], [1, 1]]


def test_corrections_of_tokens() -> None:
    """Ratios of 0.25, 1 and 4 in one response, and of 3 and 0.5 in another, whose third token is padding."""
    rho = torch.tensor([[0.25, 1.0, 4.0], [3.0, 0.5, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def weights(kind: str) -> list[list[float]]:
        found = correction_weight(torch.log(rho), torch.zeros(2, 3), mask, kind=kind, limit=2.0)
        return [[round(x, 5) for x in row] for row in (found * mask).tolist()]

    assert weights("token_tis") == [[0.25, 1, 2], [2, 0.5, 0]]
    assert weights("token_mask") == [[0, 1, 0], [0, 0.5, 0]]
    assert weights("sequence_tis") == [[1, 1, 1], [1.5, 1.5, 0]]
    assert weights("sequence_mask") == [[1, 1, 1], [1, 1, 0]]  # geometric means 1 and 1.22
    rho[1, 0] = 30
    assert weights("sequence_tis")[1] == [2, 2, 0] and weights("sequence_mask")[1] == [0, 0, 0]


@pytest.mark.parametrize(
    "kind", ["truncated_is", "rejection", "token_tis", "token_mask", "sequence_tis", "sequence_mask"]
)
def test_log_probs_of_minus_infinity(kind: str) -> None:
    """Two equal ones have a ratio of 1, a single one gives 0 or infinity; none gives NaN, not even in padding."""
    never, mask = -math.inf, torch.tensor([[True, True, False]] * 4)
    policy = torch.tensor([[never, -1, never], [never, -1, 0], [-1, -1, never], [never, -1, math.nan]])
    engine = torch.tensor([[never, -1, never], [-1, -1, never], [never, -1, 0], [-1, never, 0]])
    weight = correction_weight(policy, engine, mask, kind=kind, limit=2.0) * mask
    assert weight.isfinite().all()
    assert weight[0].tolist() == [1, 1, 0]
    assert weight[1, 0] == pytest.approx(0, abs=1e-8)


def off_by(samples: Samples, error: float) -> Samples:
    """Imitate an engine: the second sample's log-probabilities are too large by `error`."""
    assert samples.log_prob is not None
    log_prob = samples.log_prob.clone()
    log_prob[1] += error
    return replace(samples, log_prob=log_prob)


@pytest.mark.parametrize("correction", ["rescore", "truncated_is", "rejection"])
def test_rescored_samples_have_the_policys_log_probs(world: World, sd3_folder: Path, correction: str) -> None:
    """Bit for bit if shapes are equal: 6 images with 1 step at a time, replayed 3 at a time with 2 steps."""
    policy = make_policy(world, sd3_folder)
    samples = sample(make_rollout(policy, 6))
    config = FlowRolloutConfig(correction=correction)
    rescored, row = rescore(policy, off_by(samples, 2e-3), config, Passes(3))
    assert samples.log_prob is not None and rescored.log_prob is not None and rescored.weight is not None
    assert rescored.log_prob.equal(samples.log_prob)
    second = {"rescore": 1.0, "truncated_is": math.exp(-2e-3), "rejection": 0.0}[correction]
    expected = torch.ones(6, 2)
    expected[1] = second
    torch.testing.assert_close(rescored.weight, expected, rtol=0, atol=1e-6)
    assert row["rollout/logprob_abs_diff_max"] == pytest.approx(2e-3, abs=1e-6)
    assert row["rollout/logprob_abs_diff_mean"] == pytest.approx(2e-3 / 6, abs=1e-6)
    assert row["rollout/correction_weight_mean"] == pytest.approx((5 + second) / 6, abs=1e-6)


def test_none_keeps_the_engines_log_probs(world: World, sd3_folder: Path) -> None:
    policy = make_policy(world, sd3_folder)
    samples = sample(make_rollout(policy, 6))
    assert rescore(policy, samples, FlowRolloutConfig(correction="none"), Passes(3)) == (samples, {})
