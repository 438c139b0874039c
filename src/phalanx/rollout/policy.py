"""Sampling in the very modules that are trained: no second copy of the weights, and exact log-probabilities."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.config.schema import RolloutConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.mesh import World
from phalanx.functional.window import sde_window
from phalanx.rollout._denoise import Generated, Job, Schedule, generate
from phalanx.types import FlowTrace, Policy, Prompt, Sampler, Samples

Each = Callable[[Tensor, list[Prompt]], None]


class PolicyRollout:
    """See phalanx.types.Rollout."""

    exact = True

    def __init__(self, policy: Policy, config: RolloutConfig, world: World, micro_batch_size: int) -> None:
        self.policy, self.config, self.world = policy, config, world
        self.micro_batch_size = micro_batch_size
        self.sampler = train_sampler(config, policy.model.guidance_key)
        self.val_sampler = val_sampler(config, policy.model.guidance_key)
        for sampler in (self.sampler, self.val_sampler):
            policy.model.latent_shape(sampler.height, sampler.width)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Weights gathered for as long as the rollout lasts."""
        with torch.no_grad(), self.policy.unsharded():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Sample this rank's share of `n` images a prompt; `prompts` are those of the world's step.

        `each(images, prompts)` is called after every micro-batch. Noise of image i of group g at training step k is a
        function of (seed, k, g, i), so the share is the same images whatever the number of ranks.
        """
        c, sampler = self.config, self.sampler
        window = sde_window(
            step,
            num_inference_steps=c.num_inference_steps,
            size=c.sde_window_size,
            window_range=c.sde_window_range,
            schedule=c.window_schedule,
            iters=c.window_iters,
            seed=seed,
        )
        share = len(prompts) * c.n // self.world.size
        index = torch.arange(self.world.rank * share, (self.world.rank + 1) * share)
        groups = (index // c.n).tolist()
        used = sorted(set(groups))
        mine = [prompts[g] for g in used]
        rows = torch.tensor([used.index(g) for g in groups], device=self.world.device)
        embeds = self.collate(mine, negatives=sampler.guidance > 1)

        schedule = self.schedule(sampler)
        latents, log_probs, images = [], [], []
        for part in torch.arange(share).split(self.micro_batch_size):
            names = [(seed, step, groups[j], int(index[j]) % c.n) for j in part.tolist()]
            generated = self.generate(Job(sampler, schedule, embeds, rows[part], names, window, c.vae_batch_size))
            each(generated.images, [prompts[groups[j]] for j in part.tolist()])
            latents.append(generated.latents)
            log_probs.append(generated.log_prob)
            images.append(generated.images)
        trace = FlowTrace(
            sampler=sampler,
            latents=torch.cat(latents),
            sigmas=schedule.sigmas[window.start : window.stop + 1],
            timesteps=schedule.timesteps[window.start : window.stop],
            sigma_max=schedule.levels[1],
            embeds=embeds,
            prompt_index=rows,
        )
        return Samples([prompts[g] for g in groups], torch.cat(images), torch.cat(log_probs), trace, index)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """rollout.val.n images of each prompt, one prompt's after the other, with the validation's sampler.

        The noise is a function of (rollout.val.seed, the prompt's group_id, image). All ranks must come with the same
        number of prompts. The last micro-batch is filled up with repetitions, so that all have one shape.
        """
        sampler, n = self.val_sampler, self.config.val.n
        embeds, schedule = self.collate(prompts, negatives=sampler.guidance > 1), self.schedule(sampler)
        total = len(prompts) * n
        for start in range(0, total, self.micro_batch_size):
            part = [min(start + j, total - 1) for j in range(self.micro_batch_size)]
            rows = torch.tensor([j // n for j in part], device=self.world.device)
            names = [(self.config.val.seed, 0, prompts[j // n].group_id, j % n) for j in part]
            job = Job(sampler, schedule, embeds, rows, names, range(0), self.config.vae_batch_size)
            images = self.generate(job).images
            real = min(self.micro_batch_size, total - start)
            each(images[:real], [prompts[j // n] for j in part[:real]])

    def generate(self, job: Job) -> Generated:
        """Denoise and decode one micro-batch."""
        return generate(self.policy, job)

    def schedule(self, sampler: Sampler) -> Schedule:
        """The model's schedule, on the device."""
        sigmas, timesteps = self.policy.model.schedule(sampler.num_inference_steps, sampler.height, sampler.width)
        device = self.world.device
        return Schedule(sigmas.to(device), timesteps.to(device), sigmas.tolist())

    def encode(self, batches: list[list[Prompt]]) -> None:
        """Encode this rank's share of the prompts of several steps at once; `sample` finds them in the cache."""
        mine, n, size = [], self.config.n, self.world.size
        for prompts in batches:
            share = len(prompts) * n // size
            mine += prompts[self.world.rank * share // n : ((self.world.rank + 1) * share - 1) // n + 1]
        self.policy.embed(mine, negatives=self.sampler.guidance > 1)

    def collate(self, prompts: list[Prompt], negatives: bool = True) -> dict[str, Tensor]:
        """Embeddings [P, ...], or [2 P, ...] with the negatives, on the device.

        They are padded to the longest of all ranks: shapes show in the last bits.
        """
        embeds = self.policy.embed(prompts, negatives)
        lengths = [e["prompt_embeds"].shape[0] for e in embeds]
        longest, shortest = reduce_int(max(lengths), "max"), -reduce_int(-min(lengths), "max")
        batch = self.policy.model.collate(embeds, longest, padded=longest != shortest)
        return {name: value.to(self.world.device) for name, value in batch.items()}


def train_sampler(c: RolloutConfig, guidance_key: str) -> Sampler:
    """How training images are sampled; `guidance_key` is the one that the model's family obeys."""
    guidance = {"guidance_scale": c.guidance_scale, "true_cfg_scale": c.true_cfg_scale}
    for key, value in guidance.items():
        if key != guidance_key and value > 1:
            raise ValueError(
                f"rollout.{key}: {value:g} has no effect on this model; its guidance is rollout.{guidance_key}"
            )
    return Sampler(c.num_inference_steps, c.height, c.width, guidance[guidance_key], c.noise_level, c.sde_type)


def val_sampler(c: RolloutConfig, guidance_key: str) -> Sampler:
    """How validation images are sampled: the training's sampler with what rollout.val changes."""
    v, train = c.val, train_sampler(c, guidance_key)
    for key in ("guidance_scale", "true_cfg_scale"):
        value = vars(v)[key]
        if key != guidance_key and value is not None and value > 1:
            raise ValueError(
                f"rollout.val.{key}: {value:g} has no effect on this model; its guidance is rollout.val.{guidance_key}"
            )
    guidance = {"guidance_scale": v.guidance_scale, "true_cfg_scale": v.true_cfg_scale}[guidance_key]
    return Sampler(
        num_inference_steps=v.num_inference_steps or train.num_inference_steps,
        height=v.height or train.height,
        width=v.width or train.width,
        guidance=train.guidance if guidance is None else guidance,
        noise_level=v.noise_level,
        sde_type=c.sde_type,
    )
