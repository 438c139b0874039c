"""Algorithms on tokens against the formulas of their papers, token by token, with responses of different lengths."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.algorithms import TokenAlgorithm, awm, cispo, distillation, flow_grpo, grpo, raft, rloo, sapo
from phalanx.functional.advantage import leave_one_out
from phalanx.functional.losses import LARGEST, gated_tokens, weighted_tokens
from phalanx.functional.tokens import TokenReplay
from phalanx.types import Batch, Policy
from phalanx.zoo.rewards.text.overlong import Overlong
from tests.helpers.checks import reduced

ADVANTAGE = (1.5, -2.0, 0.5)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
OLD = torch.tensor([[-1.0, -0.5, -2.0, 0.0], [-0.1, -3.0, -1.0, -0.7], [-1.2, 0.0, 0.0, 0.0]])
# some ratios are 1, and some lie on either side of each clip border
RATIO = torch.tensor([[1.0, 0.5, 1.9, 1.0], [0.79, 1.0, 1.31, 30.0], [1.21, 1.0, 1.0, 1.0]])
TEACHER = torch.tensor([[-0.5, -1.5, -2.0, 0.0], [-0.1, -1.0, -4.0, -0.2], [-0.3, 0.0, 0.0, 0.0]])


class Given(Policy):
    """A policy with given log-probabilities."""

    def __init__(self, log_prob: Tensor) -> None:
        self.log_prob = log_prob

    def replay(self, trace: None) -> TokenReplay:
        return TokenReplay(self.log_prob, torch.ones_like(self.log_prob), torch.zeros_like(self.log_prob))


def computed(algorithm: TokenAlgorithm) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss, the gradient of its sum over real tokens by log pi, and the metrics."""
    log_prob = (OLD + RATIO.log()).requires_grad_()
    batch = Batch(None, OLD, MASK, torch.tensor(ADVANTAGE), MASK.float(), {"teacher": TEACHER})
    loss, metrics = algorithm.loss(Given(log_prob), batch)
    (loss * MASK).sum().backward()
    assert log_prob.grad is not None
    return loss.detach(), log_prob.grad, reduced(metrics, batch.weight)


def by_hand(expected: Callable[[float, float, float, float, float], tuple[float, float]], found: tuple) -> None:
    """Check token by token: `expected(log pi, rho, A, old, teacher)` is the loss and its derivative by log pi."""
    for i, t in MASK.nonzero().tolist():
        rho, old = float(RATIO[i, t]), float(OLD[i, t])
        loss, slope = expected(old + math.log(rho), rho, ADVANTAGE[i], old, float(TEACHER[i, t]))
        assert found[0][i, t].item() == pytest.approx(loss, rel=1e-5, abs=1e-6), (i, t)
        assert found[1][i, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-6), (i, t)
    assert not found[1][~MASK].any()


@pytest.mark.parametrize("low", [None, 0.2])
def test_cispo(low: float | None) -> None:
    """Every token has a gradient: that of log pi, times a bounded weight."""

    def expected(log_prob: float, rho: float, a: float, old: float, teacher: float) -> tuple[float, float]:
        weight = min(max(rho, 0.0 if low is None else 1 - low), 1.3)
        return -weight * a * log_prob, -weight * a

    found = computed(cispo.Algorithm(cispo.Config(clip_ratio_low=low, clip_ratio_high=0.3)))
    by_hand(expected, found)
    assert found[2]["clipfrac_higher"] == pytest.approx(3 / 8)
    assert found[2]["clipfrac_lower"] == pytest.approx(0.0 if low is None else 2 / 8)
    assert found[2]["clipfrac"] == pytest.approx((3 if low is None else 5) / 8)


def test_sapo() -> None:
    def expected(log_prob: float, rho: float, a: float, old: float, teacher: float) -> tuple[float, float]:
        tau = 2.0 if a > 0 else 3.0
        gate = 1 / (1 + math.exp(-tau * (rho - 1)))
        return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * rho

    found = computed(sapo.Algorithm(sapo.Config(tau_pos=2.0, tau_neg=3.0)))
    by_hand(expected, found)
    assert found[1][0, 0].item() == pytest.approx(-1.5)  # at a ratio of 1 the plain policy gradient
    assert 0 < found[2]["gate"] < 1


def test_raft_is_the_likelihood() -> None:
    found = computed(raft.Algorithm(raft.Config()))
    by_hand(lambda log_prob, rho, a, old, teacher: (-log_prob, -1.0), found)


@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
def test_a_ratio_out_of_bounds_is_finite(log_ratio: float) -> None:
    x = torch.full((1, 1), log_ratio, requires_grad=True)
    one = torch.ones(1)
    weighted, _ = weighted_tokens(x, x, one, low=None, high=5.0)
    gated, _ = gated_tokens(x, one, tau_pos=1.0, tau_neg=1.0)
    (weighted + gated).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and LARGEST < 200


# --- grpo's options: GSPO's single ratio, Dr.GRPO's advantages


def test_gspo_has_one_ratio_a_response() -> None:
    """The loss of each token is that of the sequence, and with one advantage its gradient equals GSPO's."""
    loss, gradient, _ = computed(grpo.Algorithm(grpo.Config(importance="sequence", clip_ratio=0.4, clip_ratio_c=None)))
    for i, length in enumerate(MASK.sum(1).tolist()):
        a = ADVANTAGE[i]
        s = math.exp(sum(math.log(r) for r in RATIO[i, :length].tolist()) / length)
        clipped = min(max(s, 0.6), 1.4)
        assert loss[i, :length].tolist() == pytest.approx([max(-a * s, -a * clipped)] * length)
        # d(-A s)/d log pi_t = -A s / length for a response's single loss, and so for the mean of its tokens' losses
        slope = 0.0 if -a * clipped > -a * s else -a * s
        assert gradient[i, :length].tolist() == pytest.approx([slope] * length)


def test_the_gradient_at_the_borders_of_the_clip() -> None:
    """It is cut above 1 + high only for A > 0, below 1 - low only for A < 0, and beyond the dual clip for A < 0."""
    _, gradient, stats = computed(grpo.Algorithm(grpo.Config(clip_ratio_high=0.28, clip_ratio_c=3.0)))
    cut = (gradient == 0) & MASK
    assert cut.tolist() == [[False, False, True, False], [True, False, False, True], [False] * 4]
    assert stats["clipfrac"] == pytest.approx(2 / 8)  # without the dual clip


def test_dr_grpo_divides_by_nothing() -> None:
    reward, group_id = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4)
    advantage = grpo.Algorithm(grpo.Config(norm_adv_by_std_in_grpo=False)).advantage(reward, group_id)
    assert advantage.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_only_normalised_advantages_are_clamped() -> None:
    """Other advantages are in units of the reward: rewards of 0 to 100 keep their differences."""
    reward, group_id = torch.tensor([0.0, 100.0, 50.0, 50.0]), torch.zeros(4)
    dr_grpo = grpo.Algorithm(grpo.Config(norm_adv_by_std_in_grpo=False))
    assert dr_grpo.advantage(reward, group_id).tolist() == [-50, 50, 0, 0]
    assert rloo.Algorithm(rloo.Config()).advantage(reward, group_id).tolist() == pytest.approx(
        [-200 / 3, 200 / 3, 0, 0]
    )
    for algorithm in (flow_grpo, awm):
        values = algorithm.Algorithm(algorithm.Config(norm_adv_by_std_in_grpo=False)).advantage(reward, group_id)
        assert values.tolist() == [-50, 50, 0, 0]
    rare, one_group = torch.tensor([1.0] + [0.0] * 99), torch.zeros(100)  # 9.9 standard deviations
    assert grpo.Algorithm(grpo.Config()).advantage(rare, one_group)[0] == 5


# --- RLOO


def test_rloo_compares_with_the_others() -> None:
    torch.manual_seed(0)
    reward, group_id = torch.rand(11), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0])
    found = rloo.Algorithm(rloo.Config()).advantage(reward, group_id)
    for i in range(11):
        others = [float(reward[j]) for j in range(11) if j != i and group_id[j] == group_id[i]]
        expected = float(reward[i]) - sum(others) / len(others) if others else 0.0
        assert found[i].item() == pytest.approx(expected, abs=1e-6)
    assert leave_one_out(torch.full((3,), 0.1), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_rloo_in_the_first_update_is_reinforce() -> None:
    """Its gradient is that of -A log pi as long as the policy is the one that sampled."""
    log_prob = OLD.clone().requires_grad_()
    batch = Batch(None, OLD, MASK, torch.tensor(ADVANTAGE), MASK.float(), {})
    loss, _ = rloo.Algorithm(rloo.Config()).loss(Given(log_prob), batch)
    (loss * MASK).sum().backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, -torch.tensor(ADVANTAGE)[:, None] * MASK)


# --- distillation


def configured(**keys: object) -> distillation.Algorithm:
    return distillation.Algorithm(distillation.Config(teacher_path="x", distillation_loss_coef=0.5, **keys))


def test_distillation_by_its_advantage() -> None:
    """k1: the reward's advantage minus the log-ratio to the teacher, clipped as in grpo."""

    def expected(log_prob: float, rho: float, a: float, old: float, teacher: float) -> tuple[float, float]:
        own = a - 0.5 * (old - teacher)
        plain, clipped = -own * rho, -own * min(max(rho, 0.8), 1.2)
        return max(plain, clipped), -own * rho if plain >= clipped else 0.0

    found = computed(configured(clip_ratio_c=None))
    by_hand(expected, found)
    kl = (OLD + RATIO.log() - TEACHER)[MASK].mean().item()
    assert found[2]["teacher_kl"] == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_distillation_by_its_loss(kind: str) -> None:
    def expected(log_prob: float, rho: float, a: float, old: float, teacher: float) -> tuple[float, float]:
        plain, clipped = -a * rho, -a * min(max(rho, 0.8), 1.2)
        d = teacher - log_prob
        kl, slope = (d * d / 2, -d) if kind == "k2" else (math.exp(d) - 1 - d, 1 - math.exp(d))
        return max(plain, clipped) + 0.5 * kl, (-a * rho if plain >= clipped else 0.0) + 0.5 * slope

    by_hand(expected, computed(configured(loss_type=kind, clip_ratio_c=None)))


def test_distillation_without_rewards() -> None:
    reward, group_id = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mixed, alone = configured(), configured(use_task_rewards=False)
    assert not mixed.needs_reward and mixed.references == ("teacher",)
    assert mixed.advantage(reward, group_id).tolist() == pytest.approx([-1, 1, 0, 0], abs=1e-3)
    assert not alone.advantage(reward, group_id).any()
    assert mixed.sample_mask(reward, group_id).all() and alone.sample_mask(reward, group_id).all()


def test_k2_has_the_gradient_of_k1_at_first() -> None:
    """As long as the policy is the one that sampled, without rewards."""
    gradients = []
    for kind in ("k1", "k2"):
        log_prob = OLD.clone().requires_grad_()
        batch = Batch(None, OLD, MASK, torch.zeros(3), MASK.float(), {"teacher": TEACHER})
        loss, _ = configured(loss_type=kind).loss(Given(log_prob), batch)
        (loss * MASK).sum().backward()
        assert log_prob.grad is not None
        gradients.append(log_prob.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("options", [{}, {"loss_type": "k2"}, {"loss_type": "k3"}])
def test_a_correction_weighs_the_policys_term(options: dict[str, str]) -> None:
    """A rejected token keeps its entropy and its KL to reference and teacher, as in verl, TRL and NeMo-RL."""
    factors = torch.tensor([[0.0, 1.0, 2.0, 1.0], [0.5, 0.0, 1.0, 2.0], [0.0, 1.0, 1.0, 1.0]])
    outputs = {"reference": TEACHER - 0.3, "teacher": TEACHER}
    batch = Batch(None, OLD, MASK, torch.tensor(ADVANTAGE), MASK.float(), outputs)
    policy, terms = Given(OLD + RATIO.log()), {"kl_loss_coef": 0.3, "entropy_coeff": 0.2}
    for algorithm in (configured(**options, **terms), sapo.Algorithm(sapo.Config(**terms))):
        surrogate, _ = algorithm.surrogate(policy.replay(None), batch)
        loss, _ = algorithm.loss(policy, batch)
        corrected, _ = algorithm.loss(policy, replace(batch, correction=factors))
        torch.testing.assert_close(corrected, factors * surrogate + (loss - surrogate))
        assert (corrected - factors * loss).abs()[MASK].max() > 0.1


def test_raft_takes_the_best() -> None:
    reward, group_id = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.7, 0.1]), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    found = raft.Algorithm(raft.Config(best=2)).sample_mask(reward, group_id)
    assert found.tolist() == [False, True, True, False, False, True, True, False]


# --- overlong shaping


def test_overlong_at_its_borders() -> None:
    """DAPO's equation 13 with L_max = 20 and L_cache = 8."""
    lengths = [1, 12, 13, 16, 19, 20]
    meta = [{"response_length": length, "max_response_length": 20} for length in lengths]
    assert Overlong(8)([""] * 6, [""] * 6, meta) == [0.0, 0.0, -1 / 8, -0.5, -7 / 8, -1.0]


def test_overlong_tells_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="overlong needs the response_length"):
        Overlong(8)(["a"], ["b"], [{}])
