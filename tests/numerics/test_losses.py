"""phalanx.functional.losses compared with the formula, one number at a time in float64, and with numbers by hand."""

import math
from typing import Any

import pytest
import torch

from phalanx.functional.losses import clipped_surrogate
from tests.helpers.checks import normal, reduced


def loss_of(new: float, old: float, a: float, clip: float, limit: float) -> float:
    """PPO's loss by cases: the ratio counts until the objective has gained more than the clip allows."""
    a = math.copysign(min(abs(a), limit), a)
    ratio = math.exp(new - old)
    if a > 0:
        return -a * min(ratio, 1 + clip)
    return -a * max(ratio, 1 - clip)


def slope_of(new: float, old: float, a: float, clip: float, limit: float) -> float:
    """d loss / d new."""
    a = math.copysign(min(abs(a), limit), a)
    ratio = math.exp(new - old)
    clipped = ratio > 1 + clip if a > 0 else ratio < 1 - clip
    return 0.0 if clipped else -a * ratio


def test_by_hand() -> None:
    # ratios 2, 1, 1/2 with A = 3 (clamped to 2) and -1, clip .25:
    # A = 2:  -2 min(ratio, 1.25)           = -2.5, -2, -1
    # A = -1: max(ratio, .75)               = 2, 1, .75
    old = torch.zeros(2, 3)
    new = torch.tensor([[math.log(2), 0.0, -math.log(2)]] * 2)
    loss, stats = clipped_surrogate(new, old, torch.tensor([2.0, -1.0]), clip_ratio=0.25)
    torch.testing.assert_close(loss, torch.tensor([[-2.5, -2.0, -1.0], [2.0, 1.0, 0.75]]), rtol=1e-6, atol=0)
    # ratios 2, 1, .5: mean 3.5 / 3, variance (4 + 1 + .25) / 3 - (3.5 / 3)^2 = 1.75 - 1.36111 = .38889
    # k3: (2 - 1 - ln 2 + 0 + .5 - 1 + ln 2) / 3 = .5 / 3
    expected = {
        "ratio_mean": 3.5 / 3,
        "ratio_std": math.sqrt(1.75 - (3.5 / 3) ** 2),
        "first_ratio_error": 1.0,
        "approx_kl": 0.5 / 3,
        "clipfrac": 2 / 3,
        "clipfrac_higher": 1 / 3,
        "clipfrac_lower": 1 / 3,
    }
    assert reduced(stats, torch.ones(2, 3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(6,), (6, 2), (3, 2, 4)])
@pytest.mark.parametrize(("spread", "clip", "limit"), [(0.5, 0.2, 1.0), (1e-3, 1e-4, 5.0), (3.0, 0.3, 100.0)])
def test_loss_and_gradient(shape: tuple[int, ...], spread: float, clip: float, limit: float) -> None:
    """Advantages per sample and per element, compared with the rule by cases."""
    old = normal(*shape, seed=0)
    new = (old + spread * normal(*shape, seed=1)).requires_grad_()
    for a in (2 * normal(shape[0], seed=2), 2 * normal(*shape, seed=3)):
        new.grad = None
        loss, _ = clipped_surrogate(new, old, a.clamp(-limit, limit), clip_ratio=clip)
        loss.sum().backward()
        wide = a.reshape(*a.shape, *[1] * (len(shape) - a.dim())).expand(shape)
        triples = list(zip(new.flatten().tolist(), old.flatten().tolist(), wide.flatten().tolist(), strict=True))
        expected = torch.tensor([loss_of(*t, clip, limit) for t in triples], dtype=torch.float64).view(shape)
        slopes = torch.tensor([slope_of(*t, clip, limit) for t in triples], dtype=torch.float64).view(shape)
        assert loss.dtype == torch.float32 and loss.shape == shape
        torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(new.grad.double(), slopes, rtol=1e-5, atol=1e-6)


def test_at_equal_log_probs_it_is_the_policy_gradient() -> None:
    log_prob = normal(4, 3, seed=0).requires_grad_()
    a = torch.tensor([1.0, -2.0, 0.0, 5.0])
    loss, stats = clipped_surrogate(log_prob, log_prob.detach(), a, clip_ratio=1e-5)
    loss.sum().backward()
    assert torch.equal(loss, -a[:, None].expand(4, 3))
    assert torch.equal(log_prob.grad, -a[:, None].expand(4, 3))
    exact = {"ratio_mean": 1.0, "ratio_std": 0.0, "first_ratio_error": 0.0, "approx_kl": 0.0}
    exact |= {"clipfrac": 0.0, "clipfrac_higher": 0.0, "clipfrac_lower": 0.0}
    assert reduced(stats, torch.ones(4, 3)) == exact


def test_only_the_new_log_prob_learns() -> None:
    new, old, a = (normal(5, seed=k).requires_grad_() for k in range(3))
    loss, _ = clipped_surrogate(new, old, a, clip_ratio=0.2)
    loss.sum().backward()
    assert old.grad is None and a.grad is None and new.grad is not None


def test_statistics() -> None:
    """Compared with float64 at the small log-ratios of real runs: 1e-4 around 1 is a thousand float32 steps."""
    old = normal(64, 4, seed=0) * 0.1
    new = old + 1e-4 * normal(64, 4, seed=1)
    stats = reduced(clipped_surrogate(new, old, normal(64, seed=2), clip_ratio=1e-4)[1], torch.ones(64, 4))
    log_ratio = (new - old).double()
    ratio = log_ratio.exp()
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_std": (ratio**2).mean().sub(ratio.mean() ** 2).sqrt(),
        "first_ratio_error": (ratio - 1).abs().max(),
        "approx_kl": (log_ratio**2 / 2 + log_ratio**3 / 6).mean(),
        "clipfrac_higher": (log_ratio > math.log1p(1e-4)).double().mean(),
        "clipfrac_lower": (log_ratio < math.log1p(-1e-4)).double().mean(),
    }
    tolerance = {"ratio_mean": 1e-7, "ratio_std": 2e-3, "first_ratio_error": 1e-3, "approx_kl": 1e-3}
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value.item(), rel=tolerance.get(name, 1e-2)), name
    assert stats["clipfrac"] == pytest.approx(stats["clipfrac_higher"] + stats["clipfrac_lower"])
    assert 0.1 < stats["clipfrac_higher"] < 0.3 and 0.1 < stats["clipfrac_lower"] < 0.3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    new, old = normal(6, 2, seed=0).to(dtype), normal(6, 2, seed=1).to(dtype)
    options: dict[str, Any] = {"clip_ratio": 0.2}
    whole = torch.tensor([1, -2, 3, 0, 9, -9])
    loss, _ = clipped_surrogate(new, old, whole, **options)
    same, _ = clipped_surrogate(new.float(), old.float(), whole.float(), **options)
    assert loss.dtype == torch.float32 and torch.equal(loss, same)
