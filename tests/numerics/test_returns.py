"""Generalized advantages, whitening over ranks and the critic's loss, on ragged masks, against plain computations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.algorithms import ppo, reinforce_plus_plus
from phalanx.functional.losses import kl_estimate
from phalanx.functional.returns import at_last, gae, moments, placed, value_loss, whitened
from phalanx.types import Scored
from tests.helpers.checks import normal, reduced

# responses: complete, short, of one token, with a token in between that is not the policy's, and empty
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()


def alone(values: Tensor) -> Tensor:
    return values


def by_hand(reward: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition for the tokens of one sample: A_t is the sum of (gamma lam)^k delta_{t+k}."""
    deltas = [
        r + gamma * after - v for r, v, after in zip(reward, values, [*values[1:], 0.0][: len(values)], strict=True)
    ]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)])
def test_generalised_advantages(gamma: float, lam: float) -> None:
    reward, values = normal(5, 5, seed=1), normal(5, 5, seed=2)
    advantage, returns = gae(reward, values, MASK, gamma=gamma, lam=lam)
    for i, mask in enumerate(MASK):
        expected = by_hand(reward[i][mask].tolist(), values[i][mask].tolist(), gamma, lam)
        assert advantage[i][mask].tolist() == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(returns[i][mask], advantage[i][mask] + values[i][mask])
    assert not advantage[~MASK].any() and not returns[~MASK].any()


def test_what_stands_outside_of_the_mask_is_not_looked_at() -> None:
    reward, values = normal(5, 5, seed=1), normal(5, 5, seed=2)
    first, _ = gae(reward, values, MASK, gamma=0.9, lam=0.8)
    again, _ = gae(reward.where(MASK, 9.0), values.where(MASK, -9.0), MASK, gamma=0.9, lam=0.8)
    assert torch.equal(first, again)


def test_the_reward_comes_with_the_last_token() -> None:
    found = at_last(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), MASK)
    assert found.nonzero().tolist() == [[0, 4], [1, 1], [2, 0], [3, 3]]
    assert found[MASK].sum() == 10


def test_rewards_of_turns_are_where_they_were_earned() -> None:
    """With the remainder at the last token, they sum up to the sample's reward, bit for bit with a single turn."""
    reward, earned = normal(5, seed=7), normal(5, 5, seed=8) * (normal(5, 5, seed=9) > 0)
    found = placed(reward, earned, MASK)
    for i, mask in enumerate(MASK):
        places = mask.nonzero().flatten().tolist()
        expected = [0.0] * 5
        rest = reward[i].item()
        for t in places:
            expected[t] = earned[i, t].item()
            rest -= expected[t]
        if places:
            expected[places[-1]] += rest
        assert found[i].tolist() == pytest.approx(expected, abs=1e-6)
    single = at_last(normal(5, seed=10), MASK)
    assert torch.equal(placed(reward, single, MASK), at_last(reward, MASK))
    assert torch.equal(placed(reward, None, MASK), at_last(reward, MASK))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_whitening_is_that_of_all_ranks(ranks: int) -> None:
    """For any distribution of tokens over ranks; a rank may have none."""
    values = normal(5, 5, seed=3) * 4 + 100
    real = values[MASK].double()
    expected = (values - real.mean()) / torch.sqrt(real.var(correction=0) + 1e-8)
    parts = [(values[part], MASK[part]) for part in torch.arange(5).chunk(ranks)]
    found = torch.cat([whitened(v, m, Ranks(parts, i).total) for i, (v, m) in enumerate(parts)])
    torch.testing.assert_close(found[MASK], expected[MASK].float(), rtol=1e-5, atol=1e-6)
    assert not found[~MASK].any()


class Ranks:
    """Replaces the sums over all ranks for rank `me`: of counts and values first, then of squares."""

    def __init__(self, parts: list[tuple[Tensor, Tensor]], me: int) -> None:
        self.parts, self.me, self.calls = parts, me, 0

    def total(self, own: Tensor) -> Tensor:
        real = [v[m].double() for v, m in self.parts]
        self.calls += 1
        if self.calls == 1:
            sums = torch.stack([torch.stack([r.new_tensor(float(len(r))), r.sum()]) for r in real])
        else:
            mean = torch.cat(real).mean()
            sums = torch.stack([((r - mean) ** 2).sum()[None] for r in real])
        torch.testing.assert_close(own, sums[self.me])
        return sums.sum(0)


def test_nothing_to_whiten() -> None:
    nothing = torch.zeros(2, 3).bool()
    assert moments(normal(2, 3), nothing, alone) == (0.0, 0.0)
    assert torch.equal(whitened(normal(2, 3), nothing, alone), torch.zeros(2, 3))


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss(clip: float | None) -> None:
    values = normal(5, 5, seed=1).requires_grad_()
    old, returns = normal(5, 5, seed=2), normal(5, 5, seed=3)
    loss, metrics = value_loss(values, old, returns, clip=clip)
    stats = reduced(metrics, MASK)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    cut = 0
    for i, t in MASK.nonzero().tolist():
        v, v_old, r = (x[i, t].item() for x in (values, old, returns))
        limited = v if clip is None else min(max(v, v_old - clip), v_old + clip)
        assert loss[i, t].item() == pytest.approx(0.5 * max((v - r) ** 2, (limited - r) ** 2), rel=1e-5)
        stopped = (limited - r) ** 2 > (v - r) ** 2
        assert gradient[i, t].item() == pytest.approx(0.0 if stopped else v - r, abs=1e-5)
        cut += stopped
    assert stats["vf_clipfrac"] == pytest.approx(cut / int(MASK.sum()))
    assert (cut > 0) == (clip is not None)
    assert stats["vf_loss"] == pytest.approx(loss[MASK].mean().item(), rel=1e-5)


def scored(**others: Tensor) -> Scored:
    reference = normal(5, 5, seed=5)
    return Scored(
        torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]), normal(5, 5, seed=4), MASK, {"reference": reference}, **others
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_credit_of_ppo(kind: str) -> None:
    """The KL is subtracted at each token; the last token has the reward; advantages are whitened, returns are not."""
    given = scored(values=normal(5, 5, seed=6))
    algorithm = ppo.Algorithm(ppo.Config(gamma=0.9, lam=0.8, kl_reward_coef=0.1, kl_reward_type=kind))
    found = algorithm.credit(given, alone)
    assert algorithm.references == ("reference",)
    kl = kl_estimate(given.log_prob, given.reference_outputs["reference"], kind)
    reward = at_last(given.advantage, MASK) - 0.1 * kl
    assert given.values is not None
    advantage, returns = gae(reward, given.values, MASK, gamma=0.9, lam=0.8)
    assert torch.equal(found.returns, returns)
    assert found.advantage[MASK].mean().item() == pytest.approx(0, abs=1e-6)
    assert found.advantage[MASK].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    order = advantage[MASK].argsort()
    assert torch.equal(found.advantage[MASK].argsort(), order)
    assert found.metrics["reward/kl_mean"] == pytest.approx(kl[MASK].mean().item(), rel=1e-5)


def test_the_credit_of_reinforce_plus_plus() -> None:
    """A token's return is the reward minus the KL of this and all later tokens, normalised over all tokens."""
    given = scored()
    config = reinforce_plus_plus.Config(kl_reward_coef=0.1)
    found = reinforce_plus_plus.Algorithm(config).credit(given, alone)
    kl = given.log_prob - given.reference_outputs["reference"]
    returns = torch.zeros(5, 5)
    for i, t in MASK.nonzero().tolist():
        returns[i, t] = given.advantage[i] - 0.1 * kl[i, t:][MASK[i, t:]].sum()
    torch.testing.assert_close(found.returns, returns)
    std = math.sqrt(returns[MASK].var(correction=0) + 1e-8)
    torch.testing.assert_close(found.advantage[MASK], (returns[MASK] - returns[MASK].mean()) / std)


@pytest.mark.parametrize("module", [ppo, reinforce_plus_plus])
def test_the_credit_of_turns(module: Any) -> None:
    """The reward of a turn is not part of the returns of later tokens."""
    earned = torch.zeros(5, 5)
    earned[0, 1], earned[3, 0] = 0.75, -0.25
    given = scored(values=torch.zeros(5, 5), action_reward=earned)
    found = module.Algorithm(module.Config()).credit(given, alone)
    assert found.returns[0].tolist() == [1.0, 1.0, 0.25, 0.25, 0.25]
    assert found.returns[3].tolist() == [0.0, 0.25, 0.0, 0.25, 0.0]
    assert found.returns[1].tolist() == [0.0] * 5
    returns = found.returns[MASK]
    std = math.sqrt(returns.var(correction=0) + 1e-8)
    torch.testing.assert_close(found.advantage[MASK], (returns - returns.mean()) / std)


def test_the_baseline_of_reinforce_plus_plus() -> None:
    """The group's mean is subtracted; samples of groups with equal rewards are still trained."""
    reward, group = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    plain = reinforce_plus_plus.Algorithm(reinforce_plus_plus.Config())
    baseline = reinforce_plus_plus.Algorithm(reinforce_plus_plus.Config(group_baseline=True))
    assert torch.equal(plain.advantage(reward, group), reward)
    torch.testing.assert_close(baseline.advantage(reward, group), torch.tensor([2 / 3, -1 / 3, -1 / 3, 0, 0, 0]))
    assert baseline.sample_mask(reward, group).all()
    assert (plain.config.needs_groups, baseline.config.needs_groups) == (False, True)
