"""Losses on the forward process compared with numbers by hand and with the papers' formulas in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from phalanx.algorithms import awm, diffusion_nft, rwr, sft
from phalanx.algorithms._forward import mean_square
from phalanx.functional.advantage import group_advantage, group_weights
from phalanx.functional.flow import FlowTrace, Noised
from phalanx.functional.losses import negative_aware, optimality
from phalanx.types import Batch
from tests.helpers.checks import normal, reduced

SHAPE = (3, 2, 4, 5)  # B, W, and the shape of a latent


class Fixed:
    """A policy with given velocities, for which gradients can be computed."""

    def __init__(self, velocity: Tensor) -> None:
        self.velocity = velocity.clone().requires_grad_()

    def predict(self, trace: FlowTrace, noised: Noised) -> Tensor:
        return self.velocity


def batch_of(clean: Tensor, noised: Noised, advantage: Tensor, **views: Tensor) -> Batch:
    """The batch of a forward-process algorithm, without sampled transitions, which it must not need."""
    count = len(clean)
    trace = cast(FlowTrace, SimpleNamespace(clean=clean))
    weight = torch.ones(count, noised.levels.shape[1])
    return Batch(trace, clean.new_zeros(count, 0), weight.bool(), advantage, weight, views, noised)


def random_batch(advantage: Tensor, **views: Tensor) -> tuple[Batch, Tensor]:
    """A batch of SHAPE, and its u = noise - x_0 in float64."""
    clean, noise = normal(SHAPE[0], *SHAPE[2:], seed=10), normal(*SHAPE, seed=11)
    levels = torch.rand(SHAPE[:2], generator=torch.Generator().manual_seed(12))
    return batch_of(clean, Noised(noise, levels), advantage, **views), noise.double() - clean.double()[:, None]


def loss_of(rule: Any, policy: Fixed, batch: Batch) -> tuple[Tensor, dict[str, float], Tensor]:
    """An algorithm's loss [B, W], its metrics, and the gradient of the loss's sum by the velocity."""
    loss, metrics = rule.loss(policy, batch)
    assert loss.shape == batch.weight.shape and loss.dtype == torch.float32
    (grad,) = torch.autograd.grad(loss.sum(), policy.velocity)
    return loss.detach(), reduced(metrics, batch.weight), grad


def assert_slope(grad: Tensor, wanted: Tensor, at: Tensor) -> None:
    """Check that the gradient is that of the sum of `wanted`, which was computed from `at` in float64."""
    (slope,) = torch.autograd.grad(wanted.sum(), at)
    torch.testing.assert_close(grad.double(), slope, rtol=1e-4, atol=1e-6)


def test_noised_images_by_hand() -> None:
    noised = Noised(torch.tensor([[[4.0, 0.0], [8.0, 1.0]]]), torch.tensor([[0.25, 1.0]]))
    clean = torch.tensor([[0.0, 4.0]])
    assert noised.latents(clean).tolist() == [[[1.0, 3.0], [8.0, 1.0]]]  # 3/4 x_0 + 1/4 noise, and pure noise
    assert noised.target(clean).tolist() == [[[4.0, -4.0], [8.0, -3.0]]]


# --- DiffusionNFT


def test_optimality_by_hand() -> None:
    # clip(A, -4, 4) / 8 + 1/2
    advantage = torch.tensor([0.0, 1.0, -1.0, 4.0, -4.0, 9.0, -9.0])
    assert optimality(advantage, 4.0).tolist() == [0.5, 0.625, 0.375, 1.0, 0.0, 1.0, 0.0]


def test_negative_aware_by_hand() -> None:
    # t = beta = 1/2, v = (4, 2), v_old = (1, 1), u = (0, -1)
    # v+ = (2.5, 1.5), off in x_0 by (1.25, 1.25): squares 1.5625, over their mean size 1.25: 1.25
    # v- = (-.5, .5), off by (-.25, .75): mean square (.0625 + .5625) / 2 = .3125, over the mean size .5: .625
    # r = 3/4: (.75 x 1.25 + .25 x .625) / .5 = 2.1875
    velocity = torch.tensor([[[4.0, 2.0]]], requires_grad=True)
    old, target = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[0.0, -1.0]]])
    levels, good = torch.tensor([[0.5]]), torch.tensor([0.75])
    loss, positive, negative = negative_aware(velocity, old, target, levels, good, beta=0.5)
    assert (loss.item(), positive.item(), negative.item()) == (2.1875, 1.25, 0.625)
    # d l+ / dv = 2 (1.25, 1.25) x t beta / 2 dims / 1.25 = (.25, .25): the denominator has no gradient
    # d l- / dv = 2 (-.25, .75) x -t beta / 2 dims / .5 = (.125, -.375)
    # (.75 d l+ + .25 d l-) / .5 = (.4375, .1875)
    loss.sum().backward()
    assert velocity.grad.tolist() == [[[0.4375, 0.1875]]]


@pytest.mark.parametrize(("good", "branch"), [(1.0, 1.25), (0.0, 0.625)])
def test_each_branch_alone(good: float, branch: float) -> None:
    """The best image trains only v+ and the worst only v-: as above, with r = 1 and r = 0, over beta = 1/2."""
    args = [torch.tensor([[x]]) for x in ([4.0, 2.0], [1.0, 1.0], [0.0, -1.0])]
    loss, _, _ = negative_aware(*args, torch.tensor([[0.5]]), torch.tensor([good]), beta=0.5)
    assert loss.item() == 2 * branch


def paper_loss(v: Tensor, old: Tensor, batch: Batch, r: Tensor, beta: float, weights: Any) -> tuple[Tensor, Any]:
    """Algorithm 1 literally, with x_t and x_0, in the dtype of `v`; `weights` None: computed, and returned."""
    clean, noised = batch.trace.clean.to(v.dtype)[:, None], batch.corrupted
    t = noised.t.to(v.dtype)
    x_t = (1 - t) * clean + t * noised.noise.to(v.dtype)
    images = [x_t - t * (beta * v + (1 - beta) * old), x_t - t * ((1 + beta) * old - beta * v)]
    if weights is None:
        weights = [(x - clean).abs().flatten(2).mean(2).clamp(min=1e-5).detach() for x in images]
    positive, negative = (((x - clean) ** 2).flatten(2).mean(2) / w for x, w in zip(images, weights, strict=True))
    return (r[:, None] * positive + (1 - r[:, None]) * negative) / beta, weights


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_diffusion_nft(beta: float, penalty: float) -> None:
    """Value and gradient compared with the paper in float64; the gradient also with central differences."""
    advantage = torch.tensor([1.5, -0.7, 0.2])
    old, ref, v = normal(*SHAPE, seed=1), normal(*SHAPE, seed=2), normal(*SHAPE, seed=3)
    views = {"old": old} | ({"reference": ref} if penalty else {})
    batch, _ = random_batch(advantage, **views)
    rule = diffusion_nft.Algorithm(diffusion_nft.Config(beta=beta, adv_clip_max=2.0, kl_loss_coef=penalty))
    assert rule.references == tuple(views) and rule.behaviour == "old" and rule.averages == ("old",)
    loss, stats, grad = loss_of(rule, Fixed(v), batch)

    r = advantage.double() / 4 + 0.5
    w = v.double().requires_grad_()
    values, weights = paper_loss(w, old.double(), batch, r, beta, None)
    expected = 2.0 * values + penalty * ((w - ref.double()) ** 2).flatten(2).mean(2)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert_slope(grad, expected, w)
    for at in [(0, 0, 0, 0), (1, 1, 2, 3), (2, 0, 3, 4)]:
        ends = []
        for h in (1e-6, -1e-6):
            moved = v.double().clone()
            moved[at] += h
            value, _ = paper_loss(moved, old.double(), batch, r, beta, weights)
            ends.append((2.0 * value + penalty * ((moved - ref.double()) ** 2).flatten(2).mean(2)).sum().item())
        assert grad[at].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-7)

    distance = {"old_distance": ((v - old) ** 2).mean()} | ({"kl_ref": ((v - ref) ** 2).mean()} if penalty else {})
    for name, value in distance.items():
        assert stats[name] == pytest.approx(value.item(), rel=1e-5)
    assert ("kl_ref" in stats) == (penalty > 0)


def test_diffusion_nft_begins_as_advantage_weighted_matching() -> None:
    """At v = v_old both branches are one, and the gradient is that of A mean (x_0 error)^2 / mean |x_0 error|, whatever
    beta and the limit are.
    """
    advantage = torch.tensor([1.0, -2.0, 0.0])
    old = normal(*SHAPE, seed=1)
    batch, u = random_batch(advantage, old=old)
    w = old.double().requires_grad_()
    e = batch.corrupted.t.double() * (w - u)
    wanted = advantage[:, None] * (e**2).flatten(2).mean(2) / e.detach().abs().flatten(2).mean(2)
    (slope,) = torch.autograd.grad(wanted.sum(), w)
    for beta, limit in [(0.1, 5.0), (1.0, 2.0), (2.0, 10.0)]:
        rule = diffusion_nft.Algorithm(diffusion_nft.Config(beta=beta, adv_clip_max=limit))
        _, stats, grad = loss_of(rule, Fixed(old), batch)
        torch.testing.assert_close(grad.double(), slope, rtol=1e-3, atol=1e-6)
        assert stats["loss_positive"] == pytest.approx(stats["loss_negative"], rel=1e-5)
        assert stats["old_distance"] == 0


def test_a_perfect_prediction_has_a_finite_loss() -> None:
    """The adaptive weight's denominator is bounded: without an error there is no loss and no gradient."""
    batch, u = random_batch(torch.ones(3), old=normal(*SHAPE, seed=1))
    v = u.float()
    batch = replace(batch, reference_outputs={"old": v})
    loss, _, grad = loss_of(diffusion_nft.Algorithm(diffusion_nft.Config()), Fixed(v), batch)
    assert loss.abs().max() < 1e-5 and grad.isfinite().all()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {1: 0.001, 100: 0.1, 500: 0.5, 501: 0.5, 9000: 0.5}),
        ({"old_decay": "zero"}, {1: 0.0, 500: 0.0}),
        ({"old_decay": "late"}, {1: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 900: 0.999}),
        ({"old_decay": "late", "old_decay_flat": 2}, {2: 0.0, 3: 0.0075, 4: 0.015, 300: 0.999}),
        ({"old_decay_rate": 0.25, "old_decay_limit": 0.9}, {1: 0.25, 2: 0.5, 3: 0.75, 4: 0.9}),
        ({"old_decay_limit": 0.0}, {1: 0.0, 500: 0.0}),
    ],
)
def test_decay_of_the_old_policy(keys: dict[str, Any], expected: dict[int, float]) -> None:
    rule = diffusion_nft.Algorithm(diffusion_nft.Config(**keys))
    assert {step: rule.decay("old", step) for step in expected} == pytest.approx(expected, rel=1e-12)


# --- advantage weighted matching


def test_awm_by_hand() -> None:
    # one dim, x_0 = 0 and noise 1, so u = 1; v_old = 2, an error of 1
    # v = 1: error 0, rho = e; v = 2: rho = 1; v = 3: error 4, rho = e^-3
    # eps .5 clips rho to .5 .. 1.5: A = 2: -2 min(rho, 1.5) = -3, -2, -2 e^-3; A = -1: max(rho, .5) = e, 1, .5
    noised = Noised(torch.ones(2, 3, 1), torch.full((2, 3), 0.3))
    batch = batch_of(torch.zeros(2, 1), noised, torch.tensor([2.0, -1.0]), policy=torch.full((2, 3, 1), 2.0))
    policy = Fixed(torch.tensor([[1.0, 2.0, 3.0]] * 2)[..., None])
    rule = awm.Algorithm(awm.Config(clip_ratio=0.5))
    assert rule.references == ("policy",) and rule.behaviour is None and rule.averages == ()
    loss, stats, grad = loss_of(rule, policy, batch)
    low = math.exp(-3)
    expected = torch.tensor([[-3.0, -2.0, -2 * low], [math.e, 1.0, 0.5]])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    # d rho / dv = -2 (v - 1) rho; clipped: 0
    slopes = torch.tensor([[0.0, 4.0, 8 * low], [0.0, -2.0, 0.0]])
    torch.testing.assert_close(grad[..., 0], slopes, rtol=1e-6, atol=1e-9)
    assert stats["first_ratio_error"] == pytest.approx(math.e - 1, rel=1e-6)
    assert stats["flow_loss"] == pytest.approx(5 / 3)


def test_awm_begins_with_the_policy_gradient() -> None:
    advantage = torch.tensor([1.0, -2.0, 0.5])
    v, ref = normal(*SHAPE, seed=1), normal(*SHAPE, seed=2)
    batch, u = random_batch(advantage, policy=v.clone(), reference=ref)
    rule = awm.Algorithm(awm.Config(kl_loss_coef=0.25))
    assert rule.references == ("policy", "reference")
    loss, stats, grad = loss_of(rule, Fixed(v), batch)
    w = v.double().requires_grad_()
    kl = ((w - ref.double()) ** 2).flatten(2).mean(2)
    matching = advantage[:, None] * ((w - u) ** 2).flatten(2).mean(2)
    assert_slope(grad, matching + 0.25 * kl, w)
    torch.testing.assert_close(loss.double(), -advantage.double()[:, None] + 0.25 * kl.detach(), rtol=1e-5, atol=1e-6)
    assert stats["first_ratio_error"] == 0 and stats["clipfrac"] == 0
    assert stats["kl_ref"] == pytest.approx(kl.mean().item(), rel=1e-5)


# --- supervised baselines


def test_group_weights_by_hand() -> None:
    # group 3: exp 0, ln 2, ln 3 = 1, 2, 3, with mean 2; group 8: ln 5 and one that is not kept; group 9: none is kept
    value = torch.tensor([0.0, math.log(2), math.log(5), 700.0, math.log(3), 1.0])
    group = torch.tensor([3, 3, 8, 8, 3, 9])
    keep = torch.tensor([True, True, True, False, True, False])
    assert group_weights(value, group, keep).tolist() == pytest.approx([0.5, 1.0, 1.0, 0.0, 1.5, 0.0])


def test_group_weights_do_not_overflow() -> None:
    value, group = torch.tensor([5e4, 5e4, -5e4, -5e4]), torch.tensor([0, 0, 0, 1])
    assert group_weights(value, group, torch.ones(4, dtype=torch.bool)).tolist() == [1.5, 1.5, 0.0, 1.0]


REWARD = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.5, 0.25, 1.0, 1.0])
GROUP = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("temperature", [0.25, 1.0, 100.0])
def test_rwr_weights(temperature: float) -> None:
    """The weights are a softmax of the advantages over a prompt's images; 0 for the group of equal rewards."""
    rule = rwr.Algorithm(rwr.Config(temperature=temperature))
    counts = rule.sample_mask(REWARD, GROUP)
    assert counts.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    weights = rule.advantage(REWARD, GROUP)
    a = group_advantage(REWARD, GROUP).double()
    for rows in (slice(0, 3), slice(5, 8)):
        expected = 3 * torch.softmax(a[rows] / temperature, 0)
        torch.testing.assert_close(weights[rows].double(), expected, rtol=1e-6, atol=1e-9)
    assert weights[3:5].tolist() == [0.0, 0.0]


def test_rwr_weights_under_a_filter() -> None:
    """The mean over the trained samples is 1: over the best and the worst of the first group."""
    rule = rwr.Algorithm(rwr.Config(group_filter="top_bottom", group_filter_k=1))
    weights = rule.advantage(REWARD, GROUP)
    assert (weights > 0).tolist() == rule.sample_mask(REWARD, GROUP).tolist()
    assert (weights > 0).tolist()[:3] == [True, True, False]
    assert weights[:3].sum().item() == pytest.approx(2)


def test_sft_counts() -> None:
    counts = [sft.Algorithm(sft.Config(best=k)).sample_mask(REWARD, GROUP).tolist() for k in (1, 2, 9)]
    assert counts[0] == [False, True, False, False, False, False, True, False]  # the first of equal ones
    assert counts[1] == [False, True, True, False, False, False, True, True]
    assert counts[2] == [True] * 3 + [False] * 2 + [True] * 3  # no more than there are


@pytest.mark.parametrize(
    "rule", [rwr.Algorithm(rwr.Config(kl_loss_coef=0.5)), sft.Algorithm(sft.Config(kl_loss_coef=0.5))]
)
def test_weighted_flow_matching(rule: Any) -> None:
    """Batch.advantage is the weight in rwr, and unused in sft."""
    weight = torch.tensor([0.5, 0.0, 2.5])
    v, ref = normal(*SHAPE, seed=1), normal(*SHAPE, seed=2)
    batch, u = random_batch(weight, reference=ref)
    assert rule.references == ("reference",)
    loss, stats, grad = loss_of(rule, Fixed(v), batch)
    factor = weight.double()[:, None] if isinstance(rule, rwr.Algorithm) else torch.ones(3, 1, dtype=torch.float64)
    w = v.double().requires_grad_()
    expected = factor * ((w - u) ** 2).flatten(2).mean(2) + 0.5 * ((w - ref.double()) ** 2).flatten(2).mean(2)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert_slope(grad, expected, w)
    assert stats["flow_loss"] == pytest.approx(((v.double() - u) ** 2).mean().item(), rel=1e-5)


def test_mean_square_is_float32() -> None:
    difference = normal(2, 3, 4, 5, seed=0).bfloat16()
    out = mean_square(difference)
    assert out.dtype == torch.float32 and out.shape == (2, 3)
    torch.testing.assert_close(out.double(), (difference.double() ** 2).flatten(2).mean(2), rtol=1e-6, atol=0)
