"""The sampling loop, once, for every engine: from noise to images, stochastic in a window of steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.distributed.seed import fold_in, normal
from phalanx.functional.sde import sde_step
from phalanx.types import Policy, Sampler


@dataclass(frozen=True)
class Schedule:
    """sigmas [N + 1] and timesteps [N] on the device; `levels` the sigmas as numbers."""

    sigmas: Tensor
    timesteps: Tensor
    levels: list[float]


@dataclass(frozen=True)
class Job:
    """A micro-batch of R images: sample r has the prompt rows[r] of `embeds` and the noise that names[r] stands for,
    (seed, step, group, image). `window` holds the stochastic steps whose log-probabilities are wanted; the VAE decodes
    `vae_batch_size` images at once (None: all).
    """

    sampler: Sampler
    schedule: Schedule
    embeds: dict[str, Tensor]
    rows: Tensor
    names: list[tuple[int, int, int, int]]
    window: range
    vae_batch_size: int | None = None


@dataclass(frozen=True)
class Generated:
    """images [R, 3, H, W] in 0..1 on the CPU; latents [R, W + 1, ...], before each step of the window and after its
    last; log_prob [R, W]; float32.
    """

    images: Tensor
    latents: Tensor
    log_prob: Tensor


def generate(policy: Policy, job: Job) -> Generated:
    """Denoise a micro-batch and decode it.

    Stochastic in the window; in validation with noise, which has none, everywhere but in the last step.
    """
    sampler, schedule, window = job.sampler, job.schedule, job.window
    shape, device = policy.model.latent_shape(sampler.height, sampler.width), schedule.sigmas.device
    noisy = window if window or sampler.noise_level == 0 else range(sampler.num_inference_steps - 1)
    x = torch.stack([normal(shape, fold_in(*name, "init"), device) for name in job.names])
    states, log_probs = [x], []
    for i in range(sampler.num_inference_steps):
        velocity = policy.velocity(x, schedule.timesteps[i].expand(len(x)), job.embeds, job.rows, sampler)
        noise = None
        if i in noisy:
            noise = torch.stack([normal(shape, fold_in(*name, "step", i), device) for name in job.names])
        step = sde_step(
            x,
            velocity,
            schedule.levels[i],
            schedule.levels[i + 1],
            noise_level=sampler.noise_level if i in noisy else 0.0,
            sde_type=sampler.sde_type,
            sigma_max=schedule.levels[1],
            noise=noise,
        )
        x = step.prev_sample
        states.append(x)
        if i in window:
            assert step.log_prob is not None
            log_probs.append(step.log_prob)
    latents = torch.stack(states[window.start : window.stop + 1], 1)
    log_prob = torch.stack(log_probs, 1) if log_probs else x.new_zeros(len(x), 0)
    return Generated(policy.decode(x, sampler, job.vae_batch_size), latents, log_prob)
