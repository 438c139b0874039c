"""The losses of algorithms on transitions: values and gradients computed by hand, in float64."""

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.algorithms import cps, dance_grpo, flow_dppo, flow_grpo, grpo_guard, mix_grpo
from phalanx.functional.flow import FlowReplay, FlowTrace, Sampler
from phalanx.functional.losses import clipped_ratio, guarded_log_ratio, masked_ratio, noise_weight
from phalanx.types import Batch
from tests.helpers.checks import normal, reduced

B, DIMS = 5, (3, 4)
SIGMAS = [1.0, 0.8, 0.5, 0.4, 0.1]
TRAINED = [0, 1, 3]  # of 4 stochastic steps
STD = [0.9, 0.5, 0.2]  # of the trained steps
TYPICAL_STD = 0.6  # over all steps that a window may contain
D2 = [0.2, 0.3, 0.3]  # sigma - sigma' of the trained steps
ADVANTAGE = [1.5, -0.5, 0.25, 0.0, -2.0]


@dataclass
class Shift:
    """A policy with one weight, theta: its means are those of the policy that sampled, plus theta * way."""

    theta: Tensor
    way: Tensor

    def replay(self, trace: FlowTrace) -> FlowReplay:
        std = torch.tensor(STD)
        mean = trace.means + self.theta * self.way
        after = trace.latents[:, trace.trained + 1]
        z = (after - mean) / std[:, None, None]
        log_prob = (-(z**2) / 2).flatten(2).mean(2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return FlowReplay(log_prob, mean, std, velocity=self.theta * self.way)


def scene(theta: float) -> tuple[Any, Batch, Tensor, Tensor]:
    """A policy, a batch for its replay, and the noise eps and way [B, W, ...] of the steps in float64."""
    w = len(TRAINED)
    eps, way, means = (normal(B, w, *DIMS, seed=k) for k in range(3))
    latents = normal(B, len(SIGMAS), *DIMS, seed=3)
    latents[:, [i + 1 for i in TRAINED]] = means + torch.tensor(STD)[:, None, None] * eps
    trace = FlowTrace(
        sampler=Sampler(5, 8, 8, 1.0, 0.7, "sde"),
        latents=latents,
        means=means,
        clean=latents[:, -1],
        sigmas=torch.tensor(SIGMAS),
        timesteps=1000 * torch.tensor(SIGMAS[:-1]),
        sigma_max=SIGMAS[1],
        typical_std=TYPICAL_STD,
        trained=torch.tensor(TRAINED),
        embeds={},
        prompt_index=torch.zeros(B, dtype=torch.long),
        evaluations=5,
    )
    old = Shift(torch.tensor(0.0), way).replay(trace).log_prob
    policy = Shift(torch.tensor(theta, requires_grad=True), way)
    batch = Batch(trace, old, torch.ones(B, w).bool(), torch.tensor(ADVANTAGE), torch.ones(B, w), {})
    return policy, batch, eps.double(), way.double()


def dim_mean(values: Tensor) -> Tensor:
    return values.flatten(2).mean(2)


def clip_rule(log_ratio: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """PPO's loss by cases, and its derivative by the log-ratio: [B, W] float64."""
    a = torch.tensor(ADVANTAGE, dtype=torch.float64)[:, None]
    ratio = log_ratio.exp()
    stopped = ((a > 0) & (ratio > 1 + clip)) | ((a < 0) & (ratio < 1 - clip))
    bound = torch.where(a > 0, 1 + clip, 1 - clip)
    return torch.where(stopped, -a * bound, -a * ratio), torch.where(stopped, 0.0, -a * ratio)


def check(module: ModuleType, options: dict[str, Any], theta: float, loss: Tensor, slope: Tensor) -> dict[str, float]:
    """Check the algorithm's loss [B, W], and d loss / d theta summed with uneven weights; returns its metrics."""
    policy, batch, _, _ = scene(theta)
    ours, metrics = module.Algorithm(module.Config(**options)).loss(policy, batch)
    weights = torch.rand(B, len(TRAINED), generator=torch.Generator().manual_seed(9))
    (gradient,) = torch.autograd.grad((ours * weights).sum(), policy.theta)
    assert ours.shape == (B, len(TRAINED)) and ours.dtype == torch.float32
    torch.testing.assert_close(ours.detach().double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), (slope * weights).sum(), rtol=2e-5, atol=1e-6)
    return reduced(metrics, torch.ones_like(ours))


def ratios(theta: float) -> tuple[Tensor, Tensor, Tensor]:
    """ln rho, d ln rho / d theta and D [B, W] in float64: x' = mu_old + c eps, mu = mu_old + theta way."""
    _, _, eps, way = scene(theta)
    c = torch.tensor(STD, dtype=torch.float64)
    divergence = theta**2 * dim_mean(way**2) / (2 * c**2)
    slope = dim_mean(way * eps) / c - theta * dim_mean(way**2) / c**2
    return theta * dim_mean(way * eps) / c - divergence, slope, divergence


@pytest.mark.parametrize("theta", [0.0, 0.02, -0.3])
@pytest.mark.parametrize("module", [flow_grpo, dance_grpo, mix_grpo, cps])
def test_clipped(module: ModuleType, theta: float) -> None:
    log_ratio, slope, _ = ratios(theta)
    loss, factor = clip_rule(log_ratio, 0.05)
    stats = check(module, {"clip_ratio": 0.05}, theta, loss, factor * slope)
    assert (stats["clipfrac"] > 0) == (theta != 0)


@pytest.mark.parametrize("theta", [0.0, 0.02, -0.3])
def test_guard(theta: float) -> None:
    """The regulated ln rho is theta mean(way eps), whatever the step's std."""
    _, _, eps, way = scene(theta)
    slope = dim_mean(way * eps)
    loss, factor = clip_rule(theta * slope, 0.005)
    d2 = torch.tensor(D2, dtype=torch.float64)
    stats = check(grpo_guard, {"clip_ratio": 0.005}, theta, loss / d2, factor * slope / d2)
    assert stats["ratio_bias"] == pytest.approx(ratios(theta)[2].mean().item(), rel=1e-5)
    assert (stats["clipfrac"] > 0) == (theta != 0)


@pytest.mark.parametrize("theta", [0.0, 0.02, -0.3])
@pytest.mark.parametrize("threshold", [1e-9, 0.1, 1e3])
def test_masked(theta: float, threshold: float) -> None:
    log_ratio, slope, divergence = ratios(theta)
    a = torch.tensor(ADVANTAGE, dtype=torch.float64)[:, None]
    dropped = (divergence >= threshold) & (((a > 0) & (log_ratio > 0)) | ((a < 0) & (log_ratio < 0)))
    loss = torch.where(dropped, 0.0, -a * log_ratio.exp())
    stats = check(flow_dppo, {"threshold": threshold}, theta, loss, loss * slope)
    assert stats["maskfrac"] == pytest.approx(dropped.double().mean().item())
    assert stats["divergence"] == pytest.approx(divergence.mean().item(), rel=1e-4, abs=1e-12)
    if theta != 0 and threshold == 1e-9:
        assert 0.1 < stats["maskfrac"] < 0.9  # steps that lead back are kept


@pytest.mark.parametrize("module", [flow_grpo, dance_grpo, mix_grpo, cps, grpo_guard, flow_dppo])
@pytest.mark.parametrize("importance", ["step", "sequence"])
def test_all_are_the_policy_gradient_before_the_first_update(module: ModuleType, importance: str) -> None:
    policy, batch, _, _ = scene(0.0)
    loss, metrics = module.Algorithm(module.Config(importance=importance)).loss(policy, batch)
    stats = reduced(metrics, torch.ones_like(loss))
    expected = -torch.tensor(ADVANTAGE)[:, None].expand(-1, 3)
    assert torch.equal(loss, expected / -batch.trace.delta if module is grpo_guard else expected)
    assert stats["first_ratio_error"] == 0 and stats["ratio_mean"] == 1 and stats["approx_kl"] == 0


@pytest.mark.parametrize("theta", [0.0, 0.05])
def test_one_ratio_for_a_sample(theta: float) -> None:
    """exp of the mean of its steps' log-ratios, with a gradient for all of them (GSPO)."""
    log_ratio, slope, divergence = ratios(theta)
    mean, mean_slope = (x.mean(1, keepdim=True).expand(-1, 3) for x in (log_ratio, slope))
    loss, factor = clip_rule(mean, 0.02)
    check(flow_grpo, {"clip_ratio": 0.02, "importance": "sequence"}, theta, loss, factor * mean_slope)

    a = torch.tensor(ADVANTAGE, dtype=torch.float64)[:, None]
    dropped = (divergence.mean(1, keepdim=True) >= 2e-3) & (a * mean > 0)
    loss = torch.where(dropped, 0.0, -a * mean.exp())
    check(flow_dppo, {"threshold": 2e-3, "importance": "sequence"}, theta, loss, loss * mean_slope)

    _, _, eps, way = scene(theta)
    regulated = dim_mean(way * eps).mean(1, keepdim=True).expand(-1, 3)
    loss, factor = clip_rule(theta * regulated, 0.005)
    d2 = torch.tensor(D2, dtype=torch.float64)
    options = {"clip_ratio": 0.005, "importance": "sequence"}
    check(grpo_guard, options, theta, loss / d2, factor * regulated / d2)


def test_steps_weighted_by_their_noise() -> None:
    # std .9, .5, .2 divided by the schedule's .6, not by the mean of these three
    weights = torch.tensor([1.5, 5 / 6, 1 / 3], dtype=torch.float64)
    assert noise_weight(torch.tensor(STD), TYPICAL_STD).tolist() == pytest.approx(weights.tolist(), rel=1e-6)
    log_ratio, slope, _ = ratios(0.02)
    loss, factor = clip_rule(log_ratio, 0.05)
    options = {"clip_ratio": 0.05, "timestep_weight": "noise"}
    check(flow_grpo, options, 0.02, loss * weights, factor * slope * weights)


def test_the_kl_is_not_weighted() -> None:
    """Each convention divides by its own variance."""
    policy, batch, _, way = scene(0.02)
    views = {"reference": batch.trace.means - 0.1 * batch.trace.means.new_ones(())}
    batch = replace(batch, reference_outputs=views, advantage=torch.zeros(B))
    shift = dim_mean((0.02 * way + 0.1) ** 2)
    c, d2 = torch.tensor(STD, dtype=torch.float64), torch.tensor(D2, dtype=torch.float64)
    for convention, variance in (("exact", c**2), ("flow_grpo", c**2 / d2)):
        options = {"kl_loss_coef": 0.5, "kl_convention": convention, "timestep_weight": "noise"}
        loss, metrics = flow_grpo.Algorithm(flow_grpo.Config(**options)).loss(policy, batch)
        stats = reduced(metrics, torch.ones_like(loss))
        kl = shift / (2 * variance)
        torch.testing.assert_close(loss.detach().double(), 0.5 * kl, rtol=1e-5, atol=0)
        assert stats["kl_ref"] == pytest.approx(kl.mean().item(), rel=1e-5)


def test_masked_by_hand() -> None:
    # ln rho = ln 2, 0, -ln 2 with D = 1, 1, 1 and threshold 1, then with D just below it
    log_ratio = torch.tensor([[math.log(2), 0.0, -math.log(2)]] * 3, requires_grad=True)
    a = torch.tensor([3.0, -1.0, 0.0])
    loss, metrics = masked_ratio(log_ratio, torch.ones(3, 3), a, threshold=1.0)
    assert loss.tolist() == [[0.0, -3.0, -1.5], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert reduced(metrics, torch.ones(3, 3))["maskfrac"] == pytest.approx(2 / 9)
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [[0.0, -3.0, -1.5], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    loss, metrics = masked_ratio(log_ratio, torch.full((3, 3), 0.999), a, threshold=1.0)
    stats = reduced(metrics, torch.ones(3, 3))
    assert loss.tolist() == [[-6.0, -3.0, -1.5], [2.0, 1.0, 0.5], [0.0, 0.0, 0.0]]
    assert stats["maskfrac"] == 0 and stats["divergence"] == pytest.approx(0.999)


def test_guarded_by_hand() -> None:
    # (ln rho + b) c: (-.3 + .1) .5 = -.1, (.2 + 0) 2 = .4
    out = guarded_log_ratio(torch.tensor([[-0.3, 0.2]]), torch.tensor([[0.1, 0.0]]), torch.tensor([0.5, 2.0]))
    assert out.tolist() == [pytest.approx([-0.1, 0.4])]


def test_the_guard_has_no_bias() -> None:
    """Under the old policy, ln rho has the mean -D, and the regulated one has the mean 0."""
    n, c, shift = 200_000, 0.3, 0.02
    eps = normal(n, seed=0).double()
    log_ratio = (shift * eps / c - shift**2 / (2 * c**2))[:, None]
    left = guarded_log_ratio(log_ratio, torch.full((n, 1), shift**2 / (2 * c**2)), torch.tensor([c]))
    assert log_ratio.mean().item() == pytest.approx(-(shift**2) / (2 * c**2), abs=4 * shift / c / math.sqrt(n))
    assert left.mean().item() == pytest.approx(0, abs=4 * shift / math.sqrt(n))
    assert left.std().item() == pytest.approx(shift, rel=1e-2)


@pytest.mark.parametrize("module", [flow_grpo, grpo_guard, flow_dppo])
def test_a_correction_weighs_the_policys_term(module: ModuleType) -> None:
    """A rejected step keeps its KL to the reference."""
    policy, batch, _, way = scene(0.02)
    factors = torch.tensor([[0.0, 1.0, 2.0]] * B)
    batch = replace(batch, reference_outputs={"reference": batch.trace.means - way.float()})
    algorithm = module.Algorithm(module.Config(kl_loss_coef=0.3))
    surrogate, _ = algorithm.surrogate(policy.replay(batch.trace), batch)
    loss, _ = algorithm.loss(policy, batch)
    corrected, _ = algorithm.loss(policy, replace(batch, correction=factors))
    torch.testing.assert_close(corrected, factors * surrogate + (loss - surrogate))
    assert (loss - surrogate).min() > 0.01


def test_advantages_of_each_element() -> None:
    a = torch.tensor([[1.0, -1.0], [2.0, 0.0]], requires_grad=True)
    log_ratio = torch.zeros(2, 2, requires_grad=True)
    for loss in (
        clipped_ratio(log_ratio, a, clip_ratio=0.1)[0],
        masked_ratio(log_ratio, torch.zeros(2, 2), a, threshold=0.1)[0],
    ):
        assert torch.equal(loss, -a)
        assert torch.autograd.grad(loss.sum(), [log_ratio, a], allow_unused=True)[1] is None
