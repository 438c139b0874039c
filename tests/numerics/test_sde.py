"""phalanx.functional.sde compared with scalar formulas in float64, one number at a time, and with numbers by hand."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.functional.sde import SdeStep, gaussian_kl, sde_step, typical_std
from tests.helpers.checks import normal, refused

TYPES = ("sde", "cps", "dance_sde")
GAUSSIAN = ("sde", "dance_sde")
SHAPES = [(), (5,), (4, 6, 8), (3, 2, 5, 7)]

# SD3's static shift of 3 over 10 steps: 3 t / (1 + 2 t) for t = 1, 0.9, ... 0.
SCHEDULE = [3 * t / (1 + 2 * t) for t in (1 - i / 10 for i in range(11))]


def transition(
    x: float, v: float, sigma: float, sigma_next: float, eta: float, kind: str, top: float
) -> tuple[float, float]:
    """Mean and std of a scalar transition, in the order in which the papers derive them.

    sde: the reverse-time SDE  dx = [v + s^2 / 2 sigma (x + (1 - sigma) v)] dt + s dw  (Flow-GRPO, eq. 9), one Euler step.
    cps: the point between the predicted data and the predicted noise, whose noise is partly new (Flow-CPS).
    dance_sde: the probability flow, plus eta^2 / 2 times the score of N((1 - sigma) x0, sigma^2) (DanceGRPO).
    """
    dt = sigma_next - sigma
    data, noise = x - sigma * v, x + (1 - sigma) * v
    if kind == "sde":
        s = eta * math.sqrt(sigma / (1 - (top if sigma == 1 else sigma)))
        return x + (v + s * s / (2 * sigma) * noise) * dt, s * math.sqrt(-dt)
    if kind == "cps":
        std = sigma_next * math.sin(eta * math.pi / 2)
        return (1 - sigma_next) * data + math.sqrt(sigma_next**2 - std**2) * noise, std
    score = -(x - (1 - sigma) * data) / sigma**2
    return x + dt * v - 0.5 * eta**2 * score * dt, eta * math.sqrt(-dt)


def log_density(prev: float, mean: float, std: float, kind: str) -> float:
    if kind == "cps":
        return -((prev - mean) ** 2)
    return math.log(math.exp(-((prev - mean) ** 2) / (2 * std * std)) / (std * math.sqrt(2 * math.pi)))


def take(kind: str, x: Tensor, v: Tensor, sigma: Any = 0.6, sigma_next: Any = 0.4, **options: Any) -> SdeStep:
    """A step from .6 to .4 with eta .7, unless `options` change that."""
    settings = {"noise_level": 0.7, "sigma_max": 0.9} | options
    return sde_step(x, v, sigma, sigma_next, sde_type=kind, **settings)


def close(actual: Tensor, expected: Any, rtol: float = 3e-6, atol: float = 3e-6) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol)


# --- numbers worked out by hand


def test_sde_by_hand() -> None:
    # sigma .5 -> .25, so delta = -.25; eta .5: s = .5 sqrt(.5 / .5) = .5, s^2 = .25
    # mean = 2 (1 + .25 (-.25) / 1) + 1 (1 + .25 * .5 / 1) (-.25) = 2 * .9375 - 1.125 * .25 = 1.875 - .28125 = 1.59375
    # std  = .5 sqrt(.25) = .25
    # prev = mean + .25 * 2 = 2.09375; log-prob = -2^2 / 2 - ln .25 - ln(2 pi) / 2 = -2 + 1.3862944 - .9189385
    x, v = torch.full((1, 1), 2.0), torch.ones(1, 1)
    step = sde_step(x, v, 0.5, 0.25, noise_level=0.5, sde_type="sde", sigma_max=0.9, noise=torch.full((1, 1), 2.0))
    assert step.mean.tolist() == [[1.59375]]
    assert step.std.tolist() == [0.25]
    assert step.prev_sample.tolist() == [[2.09375]]
    close(step.log_prob, [-1.5326441], rtol=1e-6)


def test_sde_at_sigma_one_by_hand() -> None:
    # sigma 1 -> .75: 1 - sigma is 0, so sigma_max .75 replaces sigma: s = 1 sqrt(1 / .25) = 2, s^2 = 4
    # mean = 1 (1 + 4 (-.25) / 2) + 3 (1 + 4 * 0 / 2) (-.25) = .5 - .75 = -.25; std = 2 sqrt(.25) = 1
    # noise 1: prev = .75; log-prob = -1/2 - ln 1 - .9189385
    x, v, noise = torch.ones(1, 1), torch.full((1, 1), 3.0), torch.ones(1, 1)
    step = sde_step(x, v, 1.0, 0.75, noise_level=1.0, sde_type="sde", sigma_max=0.75, noise=noise)
    assert (step.mean.item(), step.std.item(), step.prev_sample.item()) == (-0.25, 1.0, 0.75)
    close(step.log_prob, [-1.4189385], rtol=1e-6)


def test_cps_by_hand() -> None:
    # eta 1/3: sin(pi / 6) = .5. sigma .5 -> .25: std = .25 * .5 = .125
    # x = 2, v = 1: data = 2 - .5 = 1.5, noise = 2 + .5 = 2.5
    # mean = .75 * 1.5 + sqrt(.0625 - .015625) * 2.5 = 1.125 + .21650635 * 2.5 = 1.125 + .54126588 = 1.66626588
    # new noise -2: prev = mean - .25; log-prob = -(.25)^2 = -.0625, without the Gaussian's constants
    x, v, noise = torch.full((1, 1), 2.0), torch.ones(1, 1), torch.full((1, 1), -2.0)
    step = sde_step(x, v, 0.5, 0.25, noise_level=1 / 3, sde_type="cps", sigma_max=0.9, noise=noise)
    close(step.mean, [[1.66626588]], rtol=1e-7)
    close(step.std, [0.125], rtol=1e-7)
    close(step.prev_sample, [[1.41626588]], rtol=1e-7)
    close(step.log_prob, [-0.0625], rtol=1e-6)


def test_dance_sde_by_hand() -> None:
    # sigma .5 -> .25, eta .5; x = 2, v = 1: data = 1.5, score = -(2 - .5 * 1.5) / .25 = -5
    # mean = 2 - .25 - .5 * .25 * (-5) * (-.25) = 1.75 - .15625 = 1.59375; std = .5 sqrt(.25) = .25
    # (equal to `sde` here: at sigma = .5 the two have the same s)
    # at sigma .8 -> .55: data = 2 - .8 = 1.2, score = -(2 - .2 * 1.2) / .64 = -2.75,
    # mean = 2 - .25 - .5 * .25 * (-2.75) * (-.25) = 1.75 - .0859375 = 1.6640625; noise -1: prev = 1.4140625
    # log-prob = -1/2 - ln .25 - .9189385 = -.5 + 1.3862944 - .9189385
    x, v, noise = torch.full((2, 1), 2.0), torch.ones(2, 1), torch.full((2, 1), -1.0)
    sigma, sigma_next = torch.tensor([0.5, 0.8]), torch.tensor([0.25, 0.55])
    step = sde_step(x, v, sigma, sigma_next, noise_level=0.5, sde_type="dance_sde", sigma_max=0.9, noise=noise)
    close(step.mean, [[1.59375], [1.6640625]], rtol=2e-7)
    close(step.std, [0.25, 0.25], rtol=2e-7)
    close(step.prev_sample, [[1.34375], [1.4140625]], rtol=2e-7)
    close(step.log_prob, [-0.0326441, -0.0326441], rtol=1e-5)


def test_log_prob_is_the_mean_over_dims_by_hand() -> None:
    # std .25 as in the first example; distances from the mean 0, .25, .5, .25: mean of squares / 2 std^2 =
    # (0 + 1 + 4 + 1) / 4 / 2 = .75; log-prob = -.75 + 1.3862944 - .9189385
    x, v = torch.full((1, 2, 2), 2.0), torch.ones(1, 2, 2)
    prev = 1.59375 + torch.tensor([[[0.0, 0.25], [-0.5, -0.25]]])
    step = sde_step(x, v, 0.5, 0.25, noise_level=0.5, sde_type="sde", sigma_max=0.9, prev_sample=prev)
    close(step.log_prob, [-0.2826441], rtol=1e-6)


def test_typical_std_of_sd3s_ten_steps() -> None:
    """In float64 from shift 3, and the weights that it gives: 1.58 at the first step, 0.51 at the last trained one."""
    shifted = 3 * (even := np.linspace(1, 1 / 1000, 10)) / (1 + 2 * even)
    levels = [*shifted, 0.0]
    pole = np.where(shifted[:9] == 1, shifted[1], shifted[:9])
    std = 0.7 * np.sqrt(shifted[:9] / (1 - pole)) * np.sqrt(shifted[:9] - shifted[1:])
    typical = typical_std(levels, range(9), noise_level=0.7, sde_type="sde")
    assert typical == pytest.approx(std.mean(), rel=1e-5)
    assert (std / typical)[[0, 8]].tolist() == pytest.approx([1.58, 0.51], abs=5e-3)
    assert typical_std(levels, range(2, 4), noise_level=0.7, sde_type="sde") == pytest.approx(std[2:4].mean(), rel=1e-5)
    for kind, own in (("dance_sde", 0.3 * np.sqrt(-np.diff(levels))), ("cps", shifted[1:] * math.sin(0.15 * math.pi))):
        found = typical_std(levels, range(5), noise_level=0.3, sde_type=kind)
        assert found == pytest.approx(own[:5].mean(), rel=1e-5)


def test_gaussian_kl_by_hand() -> None:
    # differences 1, 3 and std .5: (1 + 9) / 2 / (2 * .25) = 10; std 2: 5 / 8
    mean, other = torch.zeros(2, 2), torch.tensor([[1.0, -3.0], [1.0, 3.0]])
    assert gaussian_kl(mean, other, torch.tensor([0.5, 2.0])).tolist() == [10.0, 0.625]


# --- against float64


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("eta", [0.1, 0.7, 1.0, 1.2])
def test_every_step_of_a_schedule(kind: str, eta: float) -> None:
    for i, (sigma, sigma_next) in enumerate(itertools.pairwise(SCHEDULE)):
        if kind == "cps" and (sigma_next == 0 or eta > 1):
            continue
        x, v, noise = (normal(2, 3, 4, seed=10 * i + k) for k in range(3))
        step = sde_step(x, v, sigma, sigma_next, noise_level=eta, sde_type=kind, sigma_max=SCHEDULE[1], noise=noise)
        pairs = [
            transition(a, b, sigma, sigma_next, eta, kind, SCHEDULE[1])
            for a, b in zip(x.flatten().tolist(), v.flatten().tolist(), strict=True)
        ]
        mean = torch.tensor([m for m, _ in pairs], dtype=torch.float64).view(x.shape)
        std = pairs[0][1]
        prev = mean + std * noise.double()
        close(step.mean, mean, rtol=1e-5, atol=2e-5)
        close(step.std, [std] * 2)
        close(step.prev_sample, prev, rtol=1e-5, atol=2e-5)
        # relative to the distance that the step drew: in float32, mean and prev_sample are each rounded
        drawn = step.prev_sample.double().flatten().tolist()
        each = [log_density(p, m, std, kind) for p, m in zip(drawn, step.mean.double().flatten().tolist(), strict=True)]
        close(step.log_prob, torch.tensor(each, dtype=torch.float64).view(2, -1).mean(1), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_gradient_with_respect_to_the_velocity(kind: str) -> None:
    """d log-prob / d velocity in float32, compared with autograd through float64 formulas."""
    sigma, sigma_next, eta = 0.7, 0.5, 0.8
    x, v, noise = (normal(3, 2, 4, seed=k) for k in range(3))
    leaf = v.clone().requires_grad_()
    step = sde_step(x, leaf, sigma, sigma_next, noise_level=eta, sde_type=kind, sigma_max=0.9, noise=noise)
    (step.log_prob * torch.tensor([1.0, -2.0, 0.5])).sum().backward()

    # mean = c_x x + c_v v, and the coefficients are those of the scalar formula
    c_v = transition(0.0, 1.0, sigma, sigma_next, eta, kind, 0.9)[0]
    c_x, std = transition(1.0, 0.0, sigma, sigma_next, eta, kind, 0.9)
    exact = v.double().requires_grad_()
    squared = (step.prev_sample.detach().double() - (c_x * x.double() + c_v * exact)) ** 2
    density = -squared if kind == "cps" else -squared / (2 * std**2)
    (density.flatten(1).mean(1) * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).sum().backward()
    close(leaf.grad, exact.grad, rtol=1e-5, atol=1e-6)
    assert leaf.grad.abs().min() > 1e-4


# --- properties


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_noise_it_is_the_euler_step(kind: str, shape: tuple[int, ...]) -> None:
    x, v = normal(4, *shape, seed=0), normal(4, *shape, seed=1)
    for sigma, sigma_next in itertools.pairwise(SCHEDULE):  # the last one, to 0, included
        step = sde_step(x, v, sigma, sigma_next, noise_level=0.0, sde_type=kind, sigma_max=SCHEDULE[1])
        delta = torch.tensor(sigma_next, dtype=torch.float32) - torch.tensor(sigma, dtype=torch.float32)
        assert torch.equal(step.mean, x + v * delta)
        assert torch.equal(step.prev_sample, step.mean)
        assert step.std.tolist() == [0.0] * 4
        assert step.log_prob is None


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sampling_and_replaying_give_the_same_bits(kind: str, shape: tuple[int, ...]) -> None:
    x, v, noise = (normal(4, *shape, seed=k) for k in range(3))
    for sigma, sigma_next in itertools.pairwise(SCHEDULE[:-1]):
        drawn = take(kind, x, v, sigma, sigma_next, sigma_max=SCHEDULE[1], noise=noise)
        assert drawn.prev_sample.shape == drawn.mean.shape == x.shape
        assert drawn.std.shape == drawn.log_prob.shape == (4,)
        assert drawn.log_prob.isfinite().all()
        again = take(kind, x, v, sigma, sigma_next, sigma_max=SCHEDULE[1], prev_sample=drawn.prev_sample)
        for one, other in zip(drawn, again, strict=True):
            assert torch.equal(one, other)


FORMS: dict[str, Callable[[float], Any]] = {
    "[B]": lambda s: torch.full((5,), s),
    "[B] float64": lambda s: torch.full((5,), s, dtype=torch.float64),
    "[B, 1, 1]": lambda s: torch.full((5, 1, 1), s),
    "[1]": lambda s: torch.tensor([s]),
    "0-dim": lambda s: torch.tensor(s),
    "0-dim float64": lambda s: torch.tensor(s, dtype=torch.float64),
    "numpy float64": np.float64,
    "numpy 0-dim": lambda s: np.array(s, dtype=np.float32)[()],
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("form", list(FORMS))
def test_a_sigma_per_sample_equals_one_number(kind: str, form: str) -> None:
    make = FORMS[form]
    x, v, noise = (normal(5, 3, 7, seed=k) for k in range(3))
    for sigma, sigma_next in itertools.pairwise(SCHEDULE[:-1]):
        one = take(kind, x, v, sigma, sigma_next, sigma_max=SCHEDULE[1], noise=noise)
        other = take(kind, x, v, make(sigma), make(sigma_next), sigma_max=make(SCHEDULE[1]), noise=noise)
        mixed = take(kind, x, v, make(sigma), sigma_next, sigma_max=SCHEDULE[1], noise=noise)
        for a, b, c in zip(one, other, mixed, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)
    euler = take(kind, x, v, make(0.5), make(0.25), noise_level=0.0, sigma_max=make(0.9))
    assert euler.std.tolist() == [0.0] * 5


@pytest.mark.parametrize("kind", TYPES)
def test_rows_do_not_mix(kind: str) -> None:
    """A batch with different noise levels gives the same as its rows one by one: windows are replayed as B x W rows."""
    sigma, sigma_next = torch.tensor(SCHEDULE[:-2]), torch.tensor(SCHEDULE[1:-1])
    x, v, noise = (normal(len(sigma), 3, 8, seed=k) for k in range(3))
    batch = take(kind, x, v, sigma, sigma_next, sigma_max=SCHEDULE[1], noise=noise)
    for i in range(len(sigma)):
        part = slice(i, i + 1)
        levels = SCHEDULE[i], SCHEDULE[i + 1]
        row = take(kind, x[part], v[part], *levels, sigma_max=SCHEDULE[1], noise=noise[part])
        for whole, one in zip(batch, row, strict=True):
            assert torch.equal(whole[part], one)


def test_whole_numbers_are_noise_levels() -> None:
    x, v, noise = (normal(2, 3, seed=k) for k in range(3))
    one = sde_step(x, v, 1, 0, noise_level=1, sde_type="dance_sde", sigma_max=1, noise=noise)
    other = sde_step(x, v, 1.0, 0.0, noise_level=1.0, sde_type="dance_sde", sigma_max=1.0, noise=noise)
    assert torch.equal(one.prev_sample, other.prev_sample)
    assert torch.equal(sde_step(x, v, 1, 0, noise_level=0, sde_type="cps", sigma_max=1).mean, x - v)


def test_sigma_max_stands_for_sigma_only_at_one_and_only_in_sde() -> None:
    x, v, noise = (normal(2, 3, seed=k) for k in range(3))

    def std(kind: str, sigma: float, sigma_max: float) -> float:
        step = take(kind, x, v, sigma, 0.5, sigma_max=sigma_max, noise=noise)
        assert step.log_prob.isfinite().all()
        return step.std[0].item()

    assert std("sde", 1.0, 0.9) == pytest.approx(0.7 * math.sqrt(1 / 0.1) * math.sqrt(0.5), rel=1e-5)
    assert std("sde", 1.0, 0.8) == pytest.approx(0.7 * math.sqrt(1 / 0.2) * math.sqrt(0.5), rel=1e-5)
    assert std("sde", 0.95, 0.9) == std("sde", 0.95, 0.8)
    for kind in ("cps", "dance_sde"):
        assert std(kind, 1.0, 0.9) == std(kind, 1.0, 0.8)


@pytest.mark.parametrize("kind", TYPES)
def test_the_sample_that_was_drawn_has_no_gradient(kind: str) -> None:
    x, v = normal(2, 3, seed=0), normal(2, 3, seed=1).requires_grad_()
    prev = normal(2, 3, seed=2).requires_grad_()
    take(kind, x, v, prev_sample=prev).log_prob.sum().backward()
    assert prev.grad is None
    replayed, v.grad = v.grad.clone(), None
    # in sampling, prev_sample = mean + std noise depends on v too, and must count as a constant
    drawn = take(kind, x, v, prev_sample=prev.detach())
    noise = (prev.detach() - drawn.mean.detach()) / drawn.std[:, None]
    take(kind, x, v, noise=noise).log_prob.sum().backward()
    close(v.grad, replayed, rtol=1e-5, atol=1e-5)
    assert replayed.abs().min() > 1e-4


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_all_dtypes_are_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    x, v, noise = (normal(2, 3, 4, seed=k).to(dtype) for k in range(3))
    other = take(kind, x, v, noise=noise)
    full = take(kind, x.float(), v.float(), noise=noise.float())
    for a, b in zip(other, full, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    euler = take(kind, x, v, noise_level=0.0)
    assert euler.prev_sample.dtype == euler.std.dtype == torch.float32
    leaf = v.detach().clone().requires_grad_()
    take(kind, x, leaf, prev_sample=full.prev_sample.to(torch.float64)).log_prob.sum().backward()
    assert leaf.grad.dtype == dtype and leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", TYPES)
def test_arguments_stay_as_they_were(kind: str) -> None:
    x, v, noise = (normal(2, 3, seed=k) for k in range(3))
    kept = [t.clone() for t in (x, v, noise)]
    take(kind, x, v, noise=noise)
    take(kind, x, v, noise_level=0.0)
    assert all(torch.equal(a, b) for a, b in zip((x, v, noise), kept, strict=True))


def test_noise_of_the_transition_has_the_std_that_is_returned() -> None:
    x, v, noise = torch.zeros(2, 50_000), torch.zeros(2, 50_000), normal(2, 50_000, seed=0)
    sigma, sigma_next = torch.tensor([0.8, 0.3]), torch.tensor([0.6, 0.2])
    for kind in TYPES:
        step = take(kind, x, v, sigma, sigma_next, noise=noise)
        torch.testing.assert_close((step.prev_sample - step.mean).std(1), step.std, rtol=0.02, atol=0)


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_densities_sum_to_one(kind: str) -> None:
    """exp(log_prob) of scalars, summed over a fine grid."""
    grid = torch.linspace(-20, 20, 40_001)
    x, v = torch.full_like(grid, 0.3), torch.full_like(grid, -0.8)
    step = take(kind, x, v, prev_sample=grid)
    assert step.log_prob.double().exp().sum().item() * 0.001 == pytest.approx(1, abs=1e-5)


# --- the last step, and wrong arguments


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_the_last_step_has_a_density(kind: str) -> None:
    x, v, noise = (normal(2, 3, seed=k) for k in range(3))
    sigma = SCHEDULE[-2]
    step = sde_step(x, v, sigma, 0.0, noise_level=0.7, sde_type=kind, sigma_max=SCHEDULE[1], noise=noise)
    mean, std = transition(x[0, 0].item(), v[0, 0].item(), sigma, 0.0, 0.7, kind, SCHEDULE[1])
    assert std > 0.05 and step.std[0].item() == pytest.approx(std, rel=1e-5)
    assert step.mean[0, 0].item() == pytest.approx(mean, rel=1e-4)
    assert step.log_prob.isfinite().all()


@pytest.mark.parametrize("sigma_next", [0, 0.0, torch.tensor(0.0), torch.tensor([0.2, 0.0])])
def test_the_last_step_of_cps_is_refused(sigma_next: Any) -> None:
    x, v, noise = (normal(2, 3, seed=k) for k in range(3))
    for given in ({"noise": noise}, {"prev_sample": noise}):
        with refused(
            "sde_step: the last step (sigma_next = 0) of cps is deterministic and has no log-probability; "
            "leave it out of the SDE window"
        ):
            sde_step(x, v, 0.25, sigma_next, noise_level=0.7, sde_type="cps", sigma_max=0.9, **given)


@pytest.mark.parametrize("noise_level", [1.01, 2.0, 2.5])
def test_a_noise_level_of_cps_is_at_most_1(noise_level: float) -> None:
    """Above it the std sin(eta pi / 2) decreases again: it is 0 at 2, and negative beyond."""
    x, v, noise = (normal(2, 3, seed=k) for k in range(3))
    with refused(f"sde_step: the noise level {noise_level:g} of cps should be at most 1"):
        sde_step(x, v, 0.5, 0.25, noise_level=noise_level, sde_type="cps", sigma_max=0.9, noise=noise)
    step = sde_step(x, v, 0.5, 0.25, noise_level=1.0, sde_type="cps", sigma_max=0.9, noise=noise)
    assert step.std.tolist() == [0.25, 0.25] and step.prev_sample.isfinite().all()


@pytest.mark.parametrize("noise_level", [0.0, 0.7])
def test_an_unknown_type_is_refused(noise_level: float) -> None:
    x = torch.zeros(1, 2)
    with refused("sde_step: sde_type 'ode' should be one of sde, cps, dance_sde"):
        sde_step(x, x, 0.5, 0.25, noise_level=noise_level, sde_type="ode", sigma_max=0.9, noise=x)


@pytest.mark.parametrize("kind", TYPES)
def test_a_stochastic_step_draws_or_replays(kind: str) -> None:
    x = torch.zeros(1, 2)
    for given in ({}, {"noise": x, "prev_sample": x}):
        with refused("sde_step: a stochastic step takes either noise (to sample) or prev_sample (to replay)"):
            sde_step(x, x, 0.5, 0.25, noise_level=0.7, sde_type=kind, sigma_max=0.9, **given)
