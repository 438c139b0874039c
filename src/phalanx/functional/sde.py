"""One denoising step of flow matching, deterministic or stochastic, and its log-probability.

Notation: sigma is the noise level of `sample` x, sigma_next < sigma the next one, delta = sigma_next - sigma < 0, v the
predicted velocity (v ~ noise - data, so x0 = x - sigma v), and eta the sampler's noise level. All values are float32.

Sources: `sde` Flow-GRPO (arXiv 2505.05470), `cps` Flow-CPS (arXiv 2509.05952), `dance_sde`
DanceGRPO (arXiv 2505.07818).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.config.ranges import SDE_TYPES


class SdeStep(NamedTuple):
    """The result of a step: prev_sample and mean [B, ...], std [B] of the transition, log_prob [B].

    For `sde` and `dance_sde`, log_prob is the mean (not the sum) over the latent's dims of the Gaussian log-density;
    for `cps` it is the mean of -(x' - mean)^2. Without noise (noise_level 0) it is None, and std is 0.
    """

    prev_sample: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor | None


def sde_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    noise_level: float,
    sde_type: str,
    sigma_max: float | Tensor,
    prev_sample: Tensor | None = None,
    noise: Tensor | None = None,
) -> SdeStep:
    """Take, or replay, the step from `sigma` to `sigma_next`.

    Args:
        sample, velocity: [B, ...].
        sigma, sigma_next: a number, or [B].
        noise_level: eta, at most 1 for cps; with 0, every type is the Euler step of the ODE.
        sde_type: "sde", "cps" or "dance_sde".
        sigma_max: the schedule's second entry, used in place of sigma = 1 by `sde`.
        prev_sample: [B, ...], the sample that was drawn, for a replay; detached in the log-probability.
        noise: [B, ...], standard normal, for sampling.

    Raises:
        ValueError: for an unknown type, a stochastic step with neither or both of `prev_sample` and `noise`, or a `cps`
            step to sigma_next = 0, whose transition has no density.
    """
    if sde_type not in SDE_TYPES:
        raise ValueError(f"sde_step: sde_type {sde_type!r} should be one of {', '.join(SDE_TYPES)}")
    x, v = sample.float(), velocity.float()
    s, s_next, s_max = (_per_sample(value, x) for value in (sigma, sigma_next, sigma_max))
    delta = s_next - s  # < 0: time runs from noise, sigma = 1, to data, sigma = 0
    if noise_level == 0:
        # Euler step of the probability-flow ODE dx = v dsigma: x' [B, ...]
        mean = x + v * delta
        prev = mean if prev_sample is None else prev_sample.float()
        return SdeStep(prev, mean, torch.zeros_like(delta).flatten().expand(len(x)), None)
    if (prev_sample is None) == (noise is None):
        raise ValueError("sde_step: a stochastic step takes either noise (to sample) or prev_sample (to replay)")

    if sde_type == "sde":
        # Flow-GRPO: sigma_t = eta sqrt(t / (1 - t)), which diverges at t = 1
        scale = noise_level * torch.sqrt(s / (1 - torch.where(s == 1, s_max, s)))
        # x' = x + [v + sigma_t^2 / 2t (x + (1 - t) v)] dt + sigma_t sqrt(dt) eps, with terms collected by x and v
        drift = scale**2 / (2 * s)
        mean = x * (1 + drift * delta) + v * (1 + drift * (1 - s)) * delta
        std = scale * torch.sqrt(-delta)
    elif sde_type == "cps":
        if noise_level > 1:
            raise ValueError(f"sde_step: the noise level {noise_level:g} of cps should be at most 1")
        if _holds_zero(sigma_next):
            raise ValueError(
                "sde_step: the last step (sigma_next = 0) of cps is deterministic and has no log-probability; "
                "leave it out of the SDE window"
            )
        # predicted data x0 and noise x1 [B, ...]: x = (1 - s) x0 + s x1
        x0, x1 = x - s * v, x + (1 - s) * v
        # fresh noise (variance std^2) and the remaining part of x1 (s'^2 - std^2) add up to the variance s'^2
        std = s_next * math.sin(noise_level * math.pi / 2)
        mean = (1 - s_next) * x0 + torch.sqrt(s_next**2 - std**2) * x1
    else:
        x0 = x - s * v
        # score grad log p(x) of x ~ N((1 - s) x0, s^2); DanceGRPO's SDE has a constant diffusion eta
        score = -(x - (1 - s) * x0) / s**2
        mean = x + delta * v - 0.5 * noise_level**2 * score * delta
        std = noise_level * torch.sqrt(-delta)

    if prev_sample is None:
        assert noise is not None
        prev = mean + std * noise.float()
    else:
        prev = prev_sample.float()
    # the drawn sample is the action, so the gradient flows only through the mean [B, ...]
    squared = (prev.detach() - mean) ** 2
    if sde_type == "cps":
        # Flow-CPS omits the factor 1 / 2 std^2, which diverges as std goes to 0
        log_prob = -squared
    else:
        log_prob = -squared / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return SdeStep(prev, mean, std.flatten().expand(len(x)), _mean_of_dims(log_prob))


def typical_std(levels: list[float], steps: range, *, noise_level: float, sde_type: str) -> float:
    """The mean std of the transitions of these steps. levels: [N + 1], the noise levels of the whole schedule."""
    before, after = (torch.tensor(levels[steps.start + k : steps.stop + k]) for k in (0, 1))
    zero = torch.zeros(len(steps))  # the std does not depend on the samples
    step = sde_step(
        zero, zero, before, after, noise_level=noise_level, sde_type=sde_type, sigma_max=levels[1], noise=zero
    )
    return float(step.std.mean())


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """KL [B] of two Gaussian transitions with equal `std` [B]: the mean over dims of (m - m')^2 / 2 std^2."""
    squared = _mean_of_dims((mean.float() - other_mean.float()) ** 2)
    return squared / (2 * std.float() ** 2)


def _per_sample(value: float | Tensor, like: Tensor) -> Tensor:
    """A number, or [B], as a float32 tensor that broadcasts over [B, ...]."""
    if isinstance(value, Tensor):
        tensor = value.to(like.device, torch.float32)
    else:  # created on the device, since a copy from the host would wait for it
        tensor = torch.full((1,), value, dtype=torch.float32, device=like.device)
    return tensor.reshape(-1, *[1] * (like.dim() - 1))


def _mean_of_dims(values: Tensor) -> Tensor:
    """[B, ...] -> [B], or [B] unchanged."""
    return values.unsqueeze(-1).flatten(1).mean(1)


def _holds_zero(value: float | Tensor) -> bool:
    """Whether any noise level is 0; False for tensors on a device, since reading them would wait for it."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and bool((value == 0).any())
    return value == 0
