"""Sampling in the very modules that are trained: no second copy, exact log-probabilities."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.config.engines import EngineFacts
from phalanx.config.flow import FlowRolloutConfig
from phalanx.distributed.collectives import on_all_ranks, reduce_int
from phalanx.distributed.mesh import World
from phalanx.functional.flow import FlowTrace, Sampler
from phalanx.functional.sde import typical_std
from phalanx.functional.window import sde_window, trained_steps, window_reach
from phalanx.models.flow.context import check_tokens
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.ahead import EncodeAhead
from phalanx.rollout.flow.denoise import Generated, Job, Schedule, generate
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.types import Each, Prompt, Samples

T = TypeVar("T")


def _call(read: Callable[[], T]) -> T:
    return read()


class PolicyRollout:
    """See phalanx.types.Rollout."""

    facts = EngineFacts()
    noun = "images"
    last_steps = 0  # of a training sample without a window, whose states are kept as well; see phalanx.types.Algorithm

    def __init__(
        self, policy: FlowPolicy, config: FlowRolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
    ) -> None:
        """`window` False: of a training sample only images and final latents are wanted."""
        self.policy, self.config, self.world, self.window = policy, config, world, window
        self.micro_batch_size = micro_batch_size
        self._last: Job  # that of the last `sample`, for `resample`
        self.sampler = train_sampler(config, policy.model)
        self.val_sampler = val_sampler(config, policy.model)
        self.fps = policy.model.fps
        self.ahead = EncodeAhead(self.encode)
        # refuses sizes that the model cannot make now, and not hours later in the first validation
        for sampler in (self.sampler, self.val_sampler):
            policy.model.sample_shape(sampler.height, sampler.width, sampler.num_frames)
            check_tokens(policy.model, sampler, policy.longest, policy.world.context_size)
        if window:
            self.check_steps(window_reach(config.num_inference_steps, config.sde_window_range))

    def check_steps(self, steps: range) -> None:
        """Warn where a part of the model learns nothing from `steps`, those that are trained."""
        timesteps = self.schedule(self.sampler).timesteps[steps.start : steps.stop]
        self.policy.model.check_window(timesteps, self.policy.config.target_components)

    @property
    def exact(self) -> bool:
        """See phalanx.types.Rollout."""
        return self.facts.exact

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Encode the prompts of step `step`, and of those after it as many as the cache can hold."""
        self.ahead.reach(batches, step, end)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Gather the weights for as long as the rollout lasts."""
        with torch.no_grad(), self.policy.unsharded():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Sample this rank's share of `n` images per prompt; `prompts` are those of all ranks.

        `each(images, prompts)` is called after every micro-batch. Noise of image i of group g at training step k is a
        function of (seed, k, g, i), so the share is the same images whatever the number of ranks.
        """
        c, sampler = self.config, self.sampler
        window = self.stochastic_steps(seed, step)
        trained = trained_steps(window, step, fraction=c.timestep_fraction, seed=seed) if self.window else []
        index, rows, embeds = self.share(prompts)
        schedule = self.schedule(sampler)
        # Names, not the state of a generator, seed the noise: which rank draws an image, and what
        # it has drawn before, has no part in it.
        local, names = [], []
        for i in index.tolist():
            local.append(prompts[i // c.n])
            names.append((seed, step, local[-1].group_id, i % c.n))
        job = Job(
            sampler=sampler,
            schedule=schedule,
            embeds=embeds,
            rows=rows,
            names=names,
            window=window,
            vae_batch_size=c.vae_batch_size,
            trained=trained,
            same_init=c.init_same_noise,
            branching=c.branching,
        )
        drawn = self.draw(job, local, each)
        # a replay needs only the latents of the window; those of all steps would fill the memory
        first = window.start
        trace = FlowTrace(
            sampler=sampler,
            latents=drawn.latents,
            means=drawn.means,
            clean=drawn.clean,
            sigmas=schedule.sigmas[first : window.stop + 1],
            timesteps=schedule.timesteps[first : window.stop],
            sigma_max=schedule.levels[1],
            typical_std=self.typical_std(schedule),
            trained=torch.tensor(trained, dtype=torch.long, device=self.world.device) - first,
            embeds=embeds,
            prompt_index=rows,
            evaluations=len(job.levels()) - 1 - (round(first * (1 - 1 / c.n)) if c.branching else 0),
        )
        self._last = job
        mask = torch.ones_like(drawn.log_prob, dtype=torch.bool)  # all have the same number of steps
        return Samples(local, drawn.images, drawn.log_prob, mask, trace, index)

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        """The samples of the last `sample` with the embeddings of other prompts, for `resample` to draw from."""
        index, rows, embeds = self.share(prompts)
        before = samples.trace.embeds
        # a longer text among them pads those of all prompts, and kernels round differently at another length
        same = all(embeds[name].shape == value.shape for name, value in before.items())
        self._last = replace(self._last, embeds=embeds, rows=rows)
        return replace(
            samples,
            prompts=[prompts[i // self.config.n] for i in index.tolist()],
            trace=replace(samples.trace, embeds=embeds, prompt_index=rows),
            exact=samples.exact and same,
        )

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """The samples of the last `sample`, those that `stale` [N] names among all ranks' drawn anew.

        Their noise is that of images attempt x n and up of their group. All ranks take part and draw equally many: what
        is lacking is filled up with further images of the first sample, which are dropped. Returns the samples, and the
        numbers [D] of the images that `each` saw, -1 for those that are dropped.
        """
        size, n, job = self.micro_batch_size, self.config.n, self._last
        local = stale[samples.index].nonzero().flatten()
        # Where weights are sharded, each pass of the transformer is a collective: the rank with
        # most stale samples says how many micro-batches all of them make.
        micro_batches = reduce_int(-(-len(local) // size), "max")
        places = torch.zeros(size * micro_batches, dtype=torch.long)
        places[: len(local)] = local
        # image numbers that no other attempt has, so the noise is new and still has a name
        names = [(*job.names[j][:3], job.names[j][3] + attempt * n) for j in places.tolist()]
        again = replace(job, rows=job.rows[places], names=names)
        drawn = self.draw(again, [samples.prompts[j] for j in places.tolist()], each)
        real = slice(len(local))

        def renewed(old: Tensor, new: Tensor) -> Tensor:
            return old.index_copy(0, local.to(old.device), new[real])

        trace: FlowTrace = samples.trace
        trace = replace(
            trace,
            latents=renewed(trace.latents, drawn.latents),
            means=renewed(trace.means, drawn.means),
            clean=renewed(trace.clean, drawn.clean),
        )
        numbers = torch.full((len(places),), -1)
        numbers[real] = samples.index[local]
        assert isinstance(samples.outputs, Tensor)
        outputs = renewed(samples.outputs, drawn.images)
        log_prob = renewed(samples.log_prob, drawn.log_prob)
        return replace(samples, outputs=outputs, log_prob=log_prob, trace=trace), numbers

    def draw(self, job: Job, prompts: list[Prompt], each: Each) -> Generated:
        """All images of a job, one micro-batch after the other; each is handed to `each` when it is done."""
        parts = []
        for part in torch.arange(len(job.names)).split(self.micro_batch_size):
            micro = replace(job, rows=job.rows[part], names=[job.names[j] for j in part.tolist()])
            parts.append(self.generate(micro))
            # at once: rewards on other threads score it while the next one is sampled
            each(parts[-1].images, [prompts[j] for j in part.tolist()])
        return Generated(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def share(self, prompts: list[Prompt]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """This rank's samples: their numbers [B] among all ranks', their rows [B] in the embeddings
        of the prompts that they show, and these embeddings.
        """
        # Consecutive numbers, so that a rank has few prompts. At its borders it may have only some
        # of a prompt's samples: groups are put together where rewards are gathered.
        n, share = self.config.n, len(prompts) * self.config.n // self.world.data_size
        index = torch.arange(self.world.data_rank * share, (self.world.data_rank + 1) * share)
        used, rows = torch.unique(index // n, return_inverse=True)
        embeds = self.collate([prompts[g] for g in used.tolist()], negatives=self.sampler.guided)
        return index, rows.to(self.world.device), embeds

    def stochastic_steps(self, seed: int, step: int) -> range:
        """The stochastic steps of training step `step`, from which the trained ones are taken."""
        c = self.config
        if not self.window:
            end = c.num_inference_steps if self.last_steps else 0
            return range(end - self.last_steps, end)
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

    def close(self) -> None:
        """Do nothing: nothing runs beside the job."""

    def typical_std(self, schedule: Schedule) -> float:
        """See FlowTrace."""
        c = self.config
        if not self.window:
            return 0.0
        reach = window_reach(c.num_inference_steps, c.sde_window_range)
        return typical_std(schedule.levels, reach, noise_level=c.noise_level, sde_type=c.sde_type)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """rollout.val.n images per prompt, one prompt's after the other, with `val_sampler`.

        The noise is a function of (rollout.val.seed, the prompt's group_id, image). All ranks must
        come with the same number of prompts.
        """
        sampler, n, size = self.val_sampler, self.config.val.n, self.micro_batch_size
        embeds = self.collate(prompts, sampler.guided, sampler)
        schedule = self.schedule(sampler)
        total = len(prompts) * n
        for start in range(0, total, size):
            # The last micro-batch is filled up with repetitions: kernels would round differently in a smaller one.
            part = [min(start + j, total - 1) for j in range(size)]
            rows = torch.tensor([j // n for j in part], device=self.world.device)
            # no training step in the name: the noise is the same at each validation
            names = [(self.config.val.seed, 0, prompts[j // n].group_id, j % n) for j in part]
            job = Job(
                sampler=sampler,
                schedule=schedule,
                embeds=embeds,
                rows=rows,
                names=names,
                window=range(0),
                vae_batch_size=self.config.vae_batch_size,
            )
            images = self.generate(job).images
            real = min(size, total - start)
            each(images[:real], [prompts[j // n] for j in part[:real]])

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """There are no metrics beside the rewards: all images have one size."""
        return {}

    def generate(self, job: Job) -> Generated:
        """Denoise and decode one micro-batch."""
        return generate(self.policy, job)

    def schedule(self, sampler: Sampler) -> Schedule:
        """The model's schedule, on the device."""
        model, device = self.policy.model, self.world.device
        size = (sampler.height, sampler.width, sampler.num_frames)
        sigmas, timesteps = model.schedule_of_video(sampler.num_inference_steps, *size)
        return Schedule(sigmas.to(device), timesteps.to(device), sigmas.tolist())

    def encode(self, batches: list[list[Prompt]]) -> int:
        """Encode this rank's share of the prompts of several steps at once, for `sample` to find; a prompt of several
        ranks of the node is encoded by one of them.

        Returns the number of steps like these that the cache has room for, on the rank where they are fewest.
        """
        node, sampler = self.policy.node, self.sampler
        shown = [self._shown(batches, rank) for rank in node.ranks]
        local = shown[node.place]
        # a text without an image can always be encoded
        agreed = on_all_ranks if self.policy.model.image_column is not None else _call
        self.policy.embed_in_turns(shown, sampler.guided, (sampler.height, sampler.width, sampler.num_frames), agreed)
        entries = len(local) * (2 if self.sampler.guided else 1)
        room = self.policy.room() * len(batches) // entries
        # the fewest, as all ranks must encode at the same steps
        return -reduce_int(-room, "max")

    def _shown(self, batches: list[list[Prompt]], rank: int) -> list[Prompt]:
        """The prompts of a rank's samples; see `share`."""
        n, place, shown = self.config.n, rank // self.world.context_size, list[Prompt]()
        for prompts in batches:
            share = len(prompts) * n // self.world.data_size
            last = (place + 1) * share - 1
            shown += prompts[place * share // n : last // n + 1]
        return shown

    def embed(self, prompts: list[Prompt], negatives: bool, sampler: Sampler) -> list[dict[str, Tensor]]:
        """See FlowPolicy.embed. Raises JobError, on all ranks, where a prompt's image is unreadable."""
        size = (sampler.height, sampler.width, sampler.num_frames)
        if self.policy.model.image_column is None:
            return self.policy.embed(prompts, negatives, size)
        return on_all_ranks(lambda: self.policy.embed(prompts, negatives, size))

    def collate(
        self, prompts: list[Prompt], negatives: bool = True, sampler: Sampler | None = None
    ) -> dict[str, Tensor]:
        """Embeddings [P, ...], or [2 P, ...] with the negatives, on the device.

        `sampler`: None for that of training.
        """
        sampler = sampler or self.sampler
        embeds = self.embed(prompts, negatives, sampler)
        lengths = [e["prompt_embeds"].shape[0] for e in embeds]
        # Padded to the longest of all ranks, and masked where any rank has a shorter one: kernels round differently at
        # another length or with a mask, so with the local length results would depend on the layout.
        longest = reduce_int(max(lengths), "max")
        shortest = -reduce_int(-min(lengths), "max")
        length = self.policy.text_length(longest, (sampler.height, sampler.width))
        batch = self.policy.model.collate(embeds, length, padded=length != shortest)
        return {name: value.to(self.world.device) for name, value in batch.items()}
