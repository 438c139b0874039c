"""Sampling in the very modules that are trained: no second copy of the weights, and exact log-probabilities."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.schema import RolloutConfig
from phalanx.distributed.collectives import agree, reduce_int
from phalanx.distributed.mesh import World
from phalanx.functional.window import sde_window, trained_steps
from phalanx.rollout._denoise import Generated, Job, Schedule, generate
from phalanx.types import FlowTrace, JobError, Policy, Prompt, Sampler, Samples, TextToImage
from phalanx.videos import can_write

Each = Callable[[Tensor, list[Prompt]], None]


class PolicyRollout:
    """See phalanx.types.Rollout."""

    exact = True

    def __init__(
        self, policy: Policy, config: RolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
    ) -> None:
        """`window` False: nothing but the images and their final latents is wanted of a training sample."""
        self.policy, self.config, self.world, self.window = policy, config, world, window
        self.micro_batch_size = micro_batch_size
        self._last: Job  # that of the last `sample`
        self.sampler = train_sampler(config, policy.model)
        self.val_sampler = val_sampler(config, policy.model)
        for sampler in (self.sampler, self.val_sampler):
            policy.model.sample_shape(sampler.height, sampler.width, sampler.num_frames)

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
        window = self.stochastic_steps(seed, step)
        trained = trained_steps(window, step, fraction=c.timestep_fraction, seed=seed)
        index, rows, embeds = self.share(prompts)
        groups = (index // c.n).tolist()
        schedule = self.schedule(sampler)
        names = [(seed, step, group, int(number) % c.n) for group, number in zip(groups, index, strict=True)]
        job = Job(sampler, schedule, embeds, rows, names, window, c.vae_batch_size, trained, c.init_same_noise)
        mine = [prompts[g] for g in groups]
        drawn = self.draw(job, mine, each)
        trace = FlowTrace(
            sampler=sampler,
            latents=drawn.latents,
            means=drawn.means,
            clean=drawn.clean,
            sigmas=schedule.sigmas[window.start : window.stop + 1],
            timesteps=schedule.timesteps[window.start : window.stop],
            sigma_max=schedule.levels[1],
            trained=torch.tensor(trained, dtype=torch.long, device=self.world.device) - window.start,
            embeds=embeds,
            prompt_index=rows,
            evaluations=len(job.levels()) - 1,
        )
        self._last = job
        return Samples(mine, drawn.images, drawn.log_prob, trace, index)

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """The last `sample`'s samples, those of this rank that `stale` [N] names (of the world's) drawn anew.

        Their noise is that of images attempt x n and up of their group. All ranks take part and draw equally many: what
        is lacking is filled up with further images of the first sample, which are dropped. Returns the samples, and the
        numbers [D] of the images that `each` saw, -1 for those that are dropped.
        """
        size, n, job = self.micro_batch_size, self.config.n, self._last
        own = stale[samples.index].nonzero().flatten()
        places = torch.zeros(size * reduce_int(-(-len(own) // size), "max"), dtype=torch.long)
        places[: len(own)] = own
        names = [(*job.names[j][:3], job.names[j][3] + attempt * n) for j in places.tolist()]
        again = replace(job, rows=job.rows[places], names=names)
        drawn = self.draw(again, [samples.prompts[j] for j in places.tolist()], each)
        trace, real = samples.trace, slice(len(own))
        assert samples.log_prob is not None
        trace = replace(
            trace,
            latents=trace.latents.index_copy(0, own.to(trace.latents.device), drawn.latents[real]),
            means=trace.means.index_copy(0, own.to(trace.means.device), drawn.means[real]),
            clean=trace.clean.index_copy(0, own.to(trace.clean.device), drawn.clean[real]),
        )
        numbers = torch.full((len(places),), -1)
        numbers[real] = samples.index[own]
        log_prob = samples.log_prob.index_copy(0, own.to(samples.log_prob.device), drawn.log_prob[real])
        outputs = samples.outputs.index_copy(0, own, drawn.images[real])
        return replace(samples, outputs=outputs, log_prob=log_prob, trace=trace), numbers

    def draw(self, job: Job, prompts: list[Prompt], each: Each) -> Generated:
        """All images of a job, a micro-batch after the other, each handed to `each` with its prompts."""
        parts = []
        for part in torch.arange(len(job.names)).split(self.micro_batch_size):
            micro = replace(job, rows=job.rows[part], names=[job.names[j] for j in part.tolist()])
            parts.append(self.generate(micro))
            each(parts[-1].images, [prompts[j] for j in part.tolist()])
        return Generated(*(torch.cat(tensors) for tensors in zip(*(vars(p).values() for p in parts), strict=True)))

    def share(self, prompts: list[Prompt]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Of this rank's samples: their numbers [B] in the world's step, each one's row [B] in the embeddings of the
        prompts that they show, and these embeddings.
        """
        n, share = self.config.n, len(prompts) * self.config.n // self.world.size
        index = torch.arange(self.world.rank * share, (self.world.rank + 1) * share)
        used, rows = torch.unique(index // n, return_inverse=True)
        embeds = self.collate([prompts[g] for g in used.tolist()], negatives=self.sampler.guided)
        return index, rows.to(self.world.device), embeds

    def stochastic_steps(self, seed: int, step: int) -> range:
        """The stochastic steps of training step `step`, from which the trained ones are taken."""
        c = self.config
        if not self.window:
            return range(0)
        return sde_window(
            step,
            num_inference_steps=c.num_inference_steps,
            size=c.sde_window_size,
            window_range=c.sde_window_range,
            schedule=c.window_schedule,
            iters=c.window_iters,
            stride=c.window_stride,
            seed=seed,
        )

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """rollout.val.n images of each prompt, one prompt's after the other, with the validation's sampler.

        The noise is a function of (rollout.val.seed, the prompt's group_id, image). All ranks must come with the same
        number of prompts. The last micro-batch is filled up with repetitions, so that all have one shape.
        """
        sampler, n = self.val_sampler, self.config.val.n
        embeds, schedule = self.collate(prompts, sampler.guided, sampler), self.schedule(sampler)
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

    def encode(self, batches: list[list[Prompt]]) -> int:
        """Encode this rank's share of the prompts of several steps at once; `sample` finds them in the cache. Returns
        how many steps like these it has room for, on the rank where they are fewest.
        """
        mine, n, size = [], self.config.n, self.world.size
        for prompts in batches:
            share = len(prompts) * n // size
            mine += prompts[self.world.rank * share // n : ((self.world.rank + 1) * share - 1) // n + 1]
        self.embed(mine, self.sampler.guided, self.sampler)
        entries = len(mine) * (2 if self.sampler.guided else 1)
        return -reduce_int(-(self.policy.room() * len(batches) // entries), "max")

    def embed(self, prompts: list[Prompt], negatives: bool, sampler: Sampler) -> list[dict[str, Tensor]]:
        """See Policy.embed. Raises JobError, on all ranks, where an image of one of them cannot be read."""
        size = (sampler.height, sampler.width)
        if self.policy.model.image_column is None:
            return self.policy.embed(prompts, negatives, size)
        problem, embeds = None, []
        try:
            embeds = self.policy.embed(prompts, negatives, size)
        except ValueError as error:
            problem = str(error)
        message, _ = agree(problem, 0)
        if message is not None:
            raise JobError(message)
        return embeds

    def collate(
        self, prompts: list[Prompt], negatives: bool = True, sampler: Sampler | None = None
    ) -> dict[str, Tensor]:
        """Embeddings [P, ...], or [2 P, ...] with the negatives, on the device; `sampler`: None for that of training.

        They are padded to the longest of all ranks: shapes show in the last bits.
        """
        embeds = self.embed(prompts, negatives, sampler or self.sampler)
        lengths = [e["prompt_embeds"].shape[0] for e in embeds]
        longest, shortest = reduce_int(max(lengths), "max"), -reduce_int(-min(lengths), "max")
        batch = self.policy.model.collate(embeds, longest, padded=longest != shortest)
        return {name: value.to(self.world.device) for name, value in batch.items()}


def train_sampler(c: RolloutConfig, model: TextToImage | type[TextToImage]) -> Sampler:
    """How training images are sampled. Raises ValueError for a guidance that the model does not obey, or videos."""
    check_guidance(c, model, "rollout.")
    check_frames(c, model, "rollout.")
    embedded = None if model.embedded_guidance_key is None else vars(c)[model.embedded_guidance_key]
    guidance = vars(c)[model.guidance_key]
    return Sampler(
        num_inference_steps=c.num_inference_steps,
        height=c.height,
        width=c.width,
        guidance=guidance,
        noise_level=c.noise_level,
        sde_type=c.sde_type,
        embedded_guidance=embedded,
        solver=c.solver,
        compression=c.ode_compression,
        num_frames=c.num_frames,
    )


def val_sampler(c: RolloutConfig, model: TextToImage | type[TextToImage]) -> Sampler:
    """How validation images are sampled: the training's sampler with what rollout.val changes, and all steps taken."""
    v, train = c.val, train_sampler(c, model)
    check_guidance(v, model, "rollout.val.")
    check_frames(v, model, "rollout.val.")
    guidance = vars(v)[model.guidance_key]
    embedded = None if model.embedded_guidance_key is None else vars(v)[model.embedded_guidance_key]
    solver = c.solver if v.solver is None else v.solver
    if solver != "euler" and v.noise_level > 0:
        raise ValueError(
            f"rollout.val.solver: {solver} takes steps without noise; set rollout.val.noise_level=0, or "
            "rollout.val.solver=euler"
        )
    return Sampler(
        num_inference_steps=v.num_inference_steps or train.num_inference_steps,
        height=v.height or train.height,
        width=v.width or train.width,
        guidance=train.guidance if guidance is None else guidance,
        noise_level=v.noise_level,
        sde_type=c.sde_type,
        embedded_guidance=train.embedded_guidance if embedded is None else embedded,
        solver=solver,
        num_frames=v.num_frames or train.num_frames,
    )


def check_frames(section: Any, model: TextToImage | type[TextToImage], prefix: str = "") -> None:
    """Raise ValueError where `section` asks for videos that the model, or its family, does not make, or that could not
    be written.
    """
    frames = section.num_frames
    if frames is None or frames == 1:
        return
    if not model.makes_videos:
        raise ValueError(f"{prefix}num_frames: {frames}: {model.pipeline_class} makes images, not videos; set it to 1")
    if not can_write():
        raise ValueError(f"{prefix}num_frames: {frames}: PyAV with libx264 writes videos; pip install 'phalanx[video]'")


def check_guidance(section: Any, model: TextToImage | type[TextToImage], prefix: str = "") -> None:
    """Raise ValueError where `section` asks for a guidance that the model, or its family, does not obey."""
    for key in ("guidance_scale", "true_cfg_scale"):
        value = vars(section)[key]
        if key not in (model.guidance_key, model.embedded_guidance_key) and value is not None and value > 1:
            raise ValueError(
                f"{prefix}{key}: {value:g} has no effect on this model; its guidance is {prefix}{model.guidance_key}"
            )
