"""Sampling with the trained modules themselves: no second copy of the weights, and exact log-probabilities."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.flow import FlowRolloutConfig
from phalanx.distributed.collectives import local_numbers, on_all_ranks, reduce_int
from phalanx.distributed.mesh import World
from phalanx.functional.flow import FlowTrace, Sampler
from phalanx.functional.sde import typical_std
from phalanx.functional.window import sde_window, trained_steps, window_reach
from phalanx.models.flow.context import check_tokens
from phalanx.models.flow.embeds import EncodeAhead
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.denoise import Generated, Job, Schedule, generate
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.types import Each, Prompt, Samples


class PolicyRollout:
    """See phalanx.types.Rollout."""

    facts = EngineFacts()
    noun = "images"
    last_steps = 0  # without a window, the final steps whose states are kept as well; see phalanx.types.Algorithm

    def __init__(
        self, policy: FlowPolicy, config: FlowRolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
    ) -> None:
        """`window`: keep a window of stochastic steps to train on; False keeps only images and final latents."""
        self.policy, self.config, self.world, self.window = policy, config, world, window
        self.micro_batch_size = micro_batch_size
        self._last: Job  # of the last call of `sample`, for `resample`
        self.sampler = train_sampler(config, policy.model)
        self.val_sampler = val_sampler(config, policy.model)
        self.fps = policy.model.fps
        self.ahead = EncodeAhead(self.encode)
        # sizes that the model does not support are rejected now, not hours later in the first validation
        for sampler in (self.sampler, self.val_sampler):
            policy.model.latent_shape(sampler.height, sampler.width, sampler.num_frames)
            check_tokens(policy.model, sampler, policy.longest, policy.world.context_size)
        if window:
            self.check_steps(window_reach(config.num_inference_steps, config.sde_window_range))

    def check_steps(self, steps: range) -> None:
        """Warn if a component of the model learns nothing from `steps`, the trained denoising steps."""
        timesteps = self.schedule(self.sampler).timesteps[steps.start : steps.stop]
        self.policy.model.check_window(timesteps, self.policy.config)

    @property
    def exact(self) -> bool:
        """See phalanx.types.Rollout."""
        return self.facts.exact

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Encode the prompts of step `step` and of as many later steps as fit into the cache."""
        self.ahead.reach(batches, step, end)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the weights gathered for the duration of the rollout, unless its samples are of the data."""
        with torch.no_grad(), nullcontext() if self.facts.weights == "none" else self.policy.unsharded():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Sample this rank's share of `n` images per prompt; `prompts` are the prompts of all ranks.

        `each(images, prompts)` is called after every micro-batch. The noise of image i of group g at training step k
        is a function of (seed, k, g, i), so the images do not depend on the number of ranks.
        """
        c, sampler = self.config, self.sampler
        window = self.stochastic_steps(seed, step)
        trained = trained_steps(window, step, fraction=c.timestep_fraction, seed=seed) if self.window else []
        index, rows, embeds = self.share(prompts)
        schedule = self.schedule(sampler)
        # The noise is seeded by each image's name, not by the state of a generator, so it does not depend on the rank
        # that draws the image or on what that rank has drawn before.
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
        std = 0.0
        if self.window:
            reach = window_reach(c.num_inference_steps, c.sde_window_range)
            std = typical_std(schedule.levels, reach, noise_level=c.noise_level, sde_type=c.sde_type)
        # a replay needs only the latents of the window; keeping those of all steps would fill the memory
        first = window.start
        trace = FlowTrace(
            sampler=sampler,
            latents=drawn.latents,
            means=drawn.means,
            clean=drawn.clean,
            sigmas=schedule.sigmas[first : window.stop + 1],
            timesteps=schedule.timesteps[first : window.stop],
            sigma_max=schedule.levels[1],
            typical_std=std,
            trained=torch.tensor(trained, dtype=torch.long, device=self.world.device) - first,
            embeds=embeds,
            prompt_index=rows,
            evaluations=len(job.levels()) - 1 - (round(first * (1 - 1 / c.n)) if c.branching else 0),
        )
        self._last = job
        mask = torch.ones_like(drawn.log_prob, dtype=torch.bool)  # all images have the same number of steps
        return Samples(local, drawn.images, drawn.log_prob, mask, trace, index)

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        """Replace the prompts of the samples of the last `sample`, and their embeddings, before `resample`."""
        index, rows, embeds = self.share(prompts)
        before = samples.trace.embeds
        # a longer text among the new prompts changes the padding of all; kernels round differently at another length
        same = all(embeds[name].shape == value.shape for name, value in before.items())
        self._last = replace(self._last, embeds=embeds, rows=rows)
        return replace(
            samples,
            prompts=[prompts[i // self.config.n] for i in index.tolist()],
            trace=replace(samples.trace, embeds=embeds, prompt_index=rows),
            exact=samples.exact and same,
        )

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """Draw the samples of the last `sample` that are marked in `stale` [N] (bool, of all ranks) again.

        They get the noise of images attempt x n and up of their group. All ranks draw equally many images: a rank with
        fewer stale ones draws further images of its first sample and drops them. Returns the samples, and the numbers
        [D] of the images passed to `each`, -1 for the dropped ones.
        """
        size, n, job = self.micro_batch_size, self.config.n, self._last
        local = stale[samples.index].nonzero().flatten()
        # With sharded weights, each pass of the transformer is a collective, so all ranks run as many micro-batches as
        # the rank with the most stale samples.
        micro_batches = reduce_int(-(-len(local) // size), "max")
        places = torch.zeros(size * micro_batches, dtype=torch.long)
        places[: len(local)] = local
        # no other attempt uses these image numbers, so the noise is new and still a function of its name
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
        """Generate all images of a job in micro-batches, and pass each finished micro-batch to `each`."""
        parts = []
        for part in torch.arange(len(job.names)).split(self.micro_batch_size):
            micro = replace(job, rows=job.rows[part], names=[job.names[j] for j in part.tolist()])
            parts.append(self.generate(micro))
            # rewards on other threads score this micro-batch while the next one is sampled
            each(parts[-1].images, [prompts[j] for j in part.tolist()])
        return Generated(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def share(self, prompts: list[Prompt]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """This rank's samples: their numbers [B] in the step, their rows [B] in the embeddings, and the embeddings of
        their prompts.
        """
        # The numbers are consecutive, so that a rank has few prompts. Neighboring ranks may have other samples of its
        # first and last prompt: groups are assembled where rewards are gathered.
        index = local_numbers(len(prompts) * self.config.n, self.world.data_rank, self.world.data_size)
        used, rows = torch.unique(index // self.config.n, return_inverse=True)
        embeds = self.collate([prompts[g] for g in used.tolist()], negatives=self.sampler.guided)
        return index, rows.to(self.world.device), embeds

    def stochastic_steps(self, seed: int, step: int) -> range:
        """The stochastic denoising steps of training step `step`; the trained ones are chosen among them."""
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
        """Do nothing: this rollout runs nothing in the background."""

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """Sample rollout.val.n images per prompt, prompt by prompt, with `val_sampler`.

        The noise is a function of (rollout.val.seed, the prompt's group_id, image). All ranks must pass the same number
        of prompts.
        """
        sampler, n, size = self.val_sampler, self.config.val.n, self.micro_batch_size
        embeds = self.collate(prompts, sampler.guided, sampler)
        schedule = self.schedule(sampler)
        total = len(prompts) * n
        for start in range(0, total, size):
            # the last micro-batch is padded with repetitions, because kernels would round differently in a smaller one
            part = [min(start + j, total - 1) for j in range(size)]
            rows = torch.tensor([j // n for j in part], device=self.world.device)
            # the name has no training step, so the noise is the same in every validation
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
        """Return no metrics: all images have the same size."""
        return {}

    def generate(self, job: Job) -> Generated:
        """Denoise and decode one micro-batch."""
        return generate(self.policy, job)

    def schedule(self, sampler: Sampler) -> Schedule:
        """The model's noise schedule for the sampler's number of steps and size, on the device."""
        model, device = self.policy.model, self.world.device
        size = (sampler.height, sampler.width, sampler.num_frames)
        sigmas, timesteps = model.schedule(sampler.num_inference_steps, *size)
        return Schedule(sigmas.to(device), timesteps.to(device), sigmas.tolist())

    def encode(self, batches: list[list[Prompt]]) -> int:
        """Encode this rank's share of the prompts of several steps at once, ahead of `sample`. A prompt that several
        ranks of a node share is encoded by one of them.

        Returns the number of such steps that fit into the cache, the minimum over all ranks.
        """
        node, sampler = self.policy.node, self.sampler
        size, keys = (sampler.height, sampler.width, sampler.num_frames), []
        for rank in node.ranks:
            keys.append(self.policy.cache_keys(self._rank_prompts(batches, rank), sampler.guided, size))
        self.policy.embeds.share(keys, node, self._encode_together)
        room = self.policy.embeds.room() * len(batches) // len(keys[node.place])
        # the minimum, because all ranks must encode at the same steps
        return -reduce_int(-room, "max")

    def _rank_prompts(self, batches: list[list[Prompt]], rank: int) -> list[Prompt]:
        """The prompts of a rank's samples, in each of the batches; see `share`."""
        n, place, shown = self.config.n, rank // self.world.context_size, list[Prompt]()
        for prompts in batches:
            share = len(prompts) * n // self.world.data_size
            last = (place + 1) * share - 1
            shown += prompts[place * share // n : last // n + 1]
        return shown

    def _encode_together(self, encode: Callable[[], list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
        """Call `encode`, with an exchange of errors between the ranks only if prompts have images: texts never fail."""
        return encode() if self.policy.model.image_column is None else on_all_ranks(encode)

    def collate(
        self, prompts: list[Prompt], negatives: bool = True, sampler: Sampler | None = None
    ) -> dict[str, Tensor]:
        """Embeddings [P, ...], or [2 P, ...] with the negatives, on the device; `sampler` None: that of training.
        Raises JobError, on all ranks, if a prompt's image is unreadable.
        """
        sampler = sampler or self.sampler
        size = (sampler.height, sampler.width, sampler.num_frames)
        embeds = self._encode_together(lambda: self.policy.embed(prompts, negatives, size))
        lengths = [e["prompt_embeds"].shape[0] for e in embeds]
        # Padded to the longest text of all ranks, and masked if any rank has a shorter one: kernels round differently
        # at another length or with a mask, so with local lengths results would depend on the layout.
        longest = reduce_int(max(lengths), "max")
        shortest = -reduce_int(-min(lengths), "max")
        length = self.policy.text_length(longest, size[:2])
        batch = self.policy.model.collate(embeds, length, padded=length != shortest)
        return {name: value.to(self.world.device) for name, value in batch.items()}
