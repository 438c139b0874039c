"""The sampling loop of every engine: from noise to images, with a window of stochastic steps."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.distributed.seed import fold_in, normal
from phalanx.functional.flow import Sampler
from phalanx.functional.sde import sde_step
from phalanx.functional.window import visited_levels
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.solver import multistep_solver


@dataclass(frozen=True)
class Schedule:
    """sigmas [N + 1] and timesteps [N] on the device; `levels` are the sigmas as Python floats."""

    sigmas: Tensor
    timesteps: Tensor
    levels: list[float]


@dataclass(frozen=True)
class Job:
    """A micro-batch of R images.

    Sample r has the prompt rows[r] of `embeds`, and its noise is a function of names[r]: (seed, step, group, image).
    `window`: the stochastic steps. `trained`: those of them whose log-probabilities are computed. The VAE decodes
    `vae_batch_size` images at once (None: all). With `same_init` all images of a group begin with the same noise; with
    `branching` they share one trajectory until the window.
    """

    sampler: Sampler
    schedule: Schedule
    embeds: dict[str, Tensor]
    rows: Tensor
    names: list[tuple[int, int, int, int]]
    window: range
    vae_batch_size: int | None = None
    trained: list[int] = field(default_factory=list)
    same_init: bool = False
    branching: bool = False

    def levels(self) -> list[int]:
        """Indices of the noise levels in the schedule that the images pass, from first to last."""
        steps = self.sampler.num_inference_steps
        return visited_levels(steps, self.window.stop, self.sampler.compression)

    def noise(self, shape: tuple[int, ...], step: int | None = None) -> Tensor:
        """Noise [R, *shape] of a step; None: to start from."""
        of_step = ("init",) if step is None else ("step", step)
        # without the image's number, all names of a group are equal
        shared = self.same_init and step is None
        device, noise = self.schedule.sigmas.device, []
        for name in self.names:
            # in a single draw for all samples, the noise of one would depend on its place in the batch
            noise.append(normal(shape, fold_in(*(name[:3] if shared else name), *of_step), device))
        return torch.stack(noise)

    def trunks(self) -> tuple[Tensor, Tensor]:
        """The index [T] of each group's first image, and for each image [R] the index of its group among these."""
        groups = [name[2] for name in self.names]
        distinct = list(dict.fromkeys(groups))
        first, trunk = [groups.index(group) for group in distinct], [distinct.index(group) for group in groups]
        return torch.tensor(first, device=self.rows.device), torch.tensor(trunk, device=self.rows.device)


class Generated(NamedTuple):
    """A micro-batch of samples, float32.

    images: [R, 3, H, W], or videos [R, F, 3, H, W], in 0..1 on the CPU. latents: [R, S + 1, ...] before each of the
    window's S steps and after the last one. means and log_prob: [R, W, ...] and [R, W] of the W trained steps. clean:
    [R, ...] final latents.
    """

    images: Tensor
    latents: Tensor
    means: Tensor
    log_prob: Tensor
    clean: Tensor


def generate(policy: FlowPolicy, job: Job) -> Generated:
    """Denoise a micro-batch and decode it.

    Steps in the window are stochastic; with noise but without a window, as in validation, all steps but the last are.
    """
    sampler, schedule, window = job.sampler, job.schedule, job.window
    shape = policy.model.latent_shape(sampler.height, sampler.width, sampler.num_frames)
    noisy = window if sampler.noise_level > 0 else range(0)
    if not window and sampler.noise_level > 0:
        noisy = range(sampler.num_inference_steps - 1)  # noise of the last step would remain in the image
    x, levels = job.noise(shape), job.levels()  # x [R, ...] ~ N(0, 1), at sigma = 1
    # The solver starts after the window, without a history: a multistep method assumes that earlier velocities belong
    # to one smooth path, which noise breaks.
    solve = None
    if sampler.solver != "euler" and window.stop < sampler.num_inference_steps:
        solve = multistep_solver([schedule.levels[i] for i in levels if i >= window.stop])
    rows, trunk = job.rows, None
    if job.branching and window.start > 0:  # the images of a group share one trajectory until the window
        first, trunk = job.trunks()
        x, rows = x[first], rows[first]
    states, means, log_probs = [x], [], []
    for i, after in pairwise(levels):
        if trunk is not None and i == window.start:
            x, rows = x[trunk], job.rows
            states[-1] = x
        timesteps = schedule.timesteps[i].expand(len(x))
        # v(x, t, prompt) [R, ...], with classifier-free guidance if the sampler uses it
        velocity = policy.velocity(x, timesteps, job.embeds, rows, sampler)
        if solve is not None and i >= window.stop:
            x = solve(velocity, x)
            continue
        noise = job.noise(shape, i) if i in noisy else None
        # the policy's replay calls this same function; without noise it is an Euler step
        step = sde_step(
            x,
            velocity,
            schedule.levels[i],
            schedule.levels[after],
            noise_level=sampler.noise_level if i in noisy else 0.0,
            sde_type=sampler.sde_type,
            sigma_max=schedule.levels[1],
            noise=noise,
        )
        x = step.prev_sample
        states.append(x)  # S + 1 states for the S steps of the window
        if i in job.trained:  # log p(x' | x) [R] of the action, and its mean, for exact KL divergences
            assert step.log_prob is not None
            log_probs.append(step.log_prob)
            means.append(step.mean)
    return Generated(
        images=policy.decode(x, sampler, job.vae_batch_size),
        latents=torch.stack(states[window.start : window.stop + 1], 1),
        means=torch.stack(means, 1) if means else x.new_zeros(len(x), 0, *shape),
        log_prob=torch.stack(log_probs, 1) if log_probs else x.new_zeros(len(x), 0),
        clean=x,
    )
