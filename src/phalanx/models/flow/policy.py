"""The policy: a flow-matching model sharded over the mesh, and the replay of its samples."""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from phalanx.config.flow import FlowDataConfig
from phalanx.config.messages import reason
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.mesh import Node, World
from phalanx.distributed.seed import fold_in, normal
from phalanx.engines.loading import FOREIGN, needs_code
from phalanx.functional.flow import FlowReplay, FlowTrace, Noised, Sampler, noise_levels
from phalanx.functional.sde import sde_step
from phalanx.models.compiling import where_it_works
from phalanx.models.flow.attention import set_backend
from phalanx.models.flow.context import share_tokens
from phalanx.models.flow.embeds import EmbedsCache, moved
from phalanx.models.flow.family import Embeds, FlowModel, Instruction
from phalanx.models.flow.registry import family_of
from phalanx.models.lora import start_from_lora
from phalanx.models.recompute import recompute
from phalanx.models.trained import TrainedModel
from phalanx.telemetry.step_metrics import step_flops
from phalanx.types import Prompt, Samples

log = logging.getLogger(__name__)
NUM_TRAIN_TIMESTEPS = 1000  # of diffusers' flow-matching schedulers: timestep = level x 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FlowPolicy:
    """See phalanx.types.Policy. `trained` has the trained weights, `model` the whole pipeline."""

    trace_type: type = FlowTrace

    def __init__(
        self,
        model: FlowModel,
        world: World,
        config: FlowModelConfig,
        parallel: ParallelConfig,
        data: FlowDataConfig,
        *,
        seed: int,
        detach_uncond: bool = False,
        frozen: bool = False,
        kept: torch.dtype | None = None,
    ) -> None:
        """`frozen`: nothing is trained; `kept`: see Sharded. Raises ValueError for unsupported settings."""
        config = where_it_works(config, world)
        self.model, self.world, self.config, self.detach_uncond = model, world, config, detach_uncond
        model.check_length(data)
        quantized = model.blocks() if config.quantization is not None else ()
        start_from_lora(model.transformer, config.lora_path, partial(model.read_lora, config=config), kept, quantized)
        for module in (model.vae, *model.text_encoders):
            module.requires_grad_(False).eval()
        if config.gradient_checkpointing:
            blocks = model.blocks()
            model.transformer.enable_gradient_checkpointing(recompute(blocks[: config.recomputed(len(blocks))]))
        if config.compile:
            model.prepare_compiling()
        if config.attn_backend is not None:
            set_backend(model, config.attn_backend, world.device)
        if world.context is not None:
            share_tokens(model, world)
        self.trained = TrainedModel(
            model.transformer,
            model.blocks(),
            world,
            config,
            parallel,
            model.dtype,
            lora_targets=model.lora_targets,
            seed=seed,
            frozen=frozen,
            kept=kept,
            part=model.trained_part(model.transformer, config),
        )
        # everything that an embedding depends on, except its text: runs share the cache on disk
        parts: list[Any] = [config.path, config.family, config.dtype, data.max_prompt_length]
        parts += [] if config.revision is None else [config.revision]
        parts += [config.reference_size] * (model.image_column is not None)
        self.longest, self._multiple = data.max_prompt_length, data.text_length_multiple
        self._forward_flops: int | None = None
        self.embeds = EmbedsCache(self._encode_missing, " ".join(map(str, parts)), data.embeds_cache_dir)
        self.node = Node(world, parallel.timeout_s)

    # -- text -------------------------------------------------------------------------------------

    def embed(self, prompts: list[Prompt], negatives: bool = True, size: tuple[int, ...] | None = None) -> list[Embeds]:
        """Embeddings of the prompts, then (with `negatives`) of their negative prompts, on the CPU.

        A model that conditions on an image gets the one in the prompt's meta, also with the negative prompt. `size` is
        (height, width) of the samples, or (height, width, frames) of videos. Raises ValueError for an image that cannot
        be read.
        """
        return self.embeds(self.cache_keys(prompts, negatives, size))

    def cache_keys(self, prompts: list[Prompt], negatives: bool, size: tuple[int, ...] | None) -> list[Any]:
        """Keys of the prompts in the cache `embeds`, then keys of their negative prompts; see `embed`."""
        texts = [p.text for p in prompts]
        if negatives:
            default = self.model.default_negative
            texts += [default if p.negative is None else p.negative for p in prompts]
        column = self.model.image_column
        if column is None:
            return list(texts)
        assert size is not None
        height, width, *frames = size
        pairs = zip(texts, prompts * 2 if negatives else prompts, strict=True)
        return [Instruction(text, p.meta[column], (height, width), *frames) for text, p in pairs]

    def text_length(self, longest: int, size: tuple[int, int]) -> int:
        """Number of tokens to pad texts of at most `longest` tokens to, for images of `size` (height, width)."""
        # few different lengths, because for each new one a kernel is chosen or compiled
        rounded = longest + -longest % self._multiple
        length = max(longest, min(rounded, self.model.most_tokens(self.longest, *size)))
        return length + -length % self.world.context_size

    @torch.no_grad()
    def _encode_missing(self, keys: list[str | Instruction]) -> list[Embeds]:
        """Embeddings that the cache lacks; the text encoders are moved to the device for them."""
        # They are often larger than this rank's shards of the transformer and are needed only now, so they are on the
        # device only for this call; EncodeAhead makes such calls rare.
        device = self.world.device
        with moved(self.model.text_encoders, device):
            # One prompt at a time: kernels round differently at another batch size, and the other prompts that would be
            # in the batch depend on the cache and on the number of ranks.
            embeds = []
            for key in keys:
                if isinstance(key, Instruction):
                    embeds.append(self.model.encode_instruction(key, device, self.longest))
                else:
                    embeds += self.model.encode([key], device, self.longest)
            return embeds

    def share(self, other: "FlowPolicy", *, text: bool) -> None:
        """Use the VAE of another policy of this family instead of an equal one.

        text: also use its text encoders and its cache of embeddings.
        """
        shared = [other.model.vae]
        if text:
            shared += other.model.text_encoders
        # the pipeline refers to the modules as well, so their memory would not be freed
        for name, part in other.model.pipeline.components.items():
            if any(part is module for module in shared):
                self.model.pipeline.register_modules(**{name: part})
        self.model.vae = other.model.vae
        if text:
            self.model.text_encoders, self.embeds = other.model.text_encoders, other.embeds

    # -- sampling and replay ----------------------------------------------------------------------

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, rows: Tensor, sampler: Sampler) -> Tensor:
        """Guided velocity [N, ...] float32 of latents [N, ...] at timesteps [N].

        `rows` [N] index into `embeds`, which has P prompts and, with guidance, their P negative prompts after them.
        Both branches of guidance go through one forward pass, unless the unconditional one is detached.
        """

        def unguided(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
            inputs = _rows_of(embeds, rows, sampler)
            size = sampler.height, sampler.width
            return self.trained.run(self.model.velocity, latents, timesteps, inputs, *size).float()

        if not sampler.guided:
            return unguided(latents, timesteps, rows)
        negative_rows = rows + next(iter(embeds.values())).shape[0] // 2
        if self.detach_uncond:
            # in a separate pass, because in one pass autograd would keep the activations of both
            with torch.no_grad():
                negative = unguided(latents, timesteps, negative_rows)
            positive = unguided(latents, timesteps, rows)
        else:
            # one pass of twice the rows: better use of a GPU, and each sharded block is gathered once
            both = unguided(torch.cat([latents, latents]), timesteps.repeat(2), torch.cat([negative_rows, rows]))
            negative, positive = both.chunk(2)
        return self.model.guide(negative, positive, self.model.guidance(sampler, timesteps))

    def replay(self, trace: FlowTrace) -> FlowReplay:
        """Compute the trained steps of all samples in one forward pass of B x W rows."""
        # The rows are ordered sample by sample. If a rollout's micro-batch has as many rows, both passes have the same
        # shape, and the log-probabilities agree to the last bit.
        b, chosen = trace.latents.shape[0], trace.trained
        w = len(chosen)
        before = trace.latents[:, chosen].flatten(0, 1)
        after = trace.latents[:, chosen + 1].flatten(0, 1)
        rows = trace.prompt_index.repeat_interleave(w)
        timesteps = trace.timesteps[chosen].repeat(b)
        with self.model.computed_as_sampled() if w > 1 else nullcontext():
            velocity = self.velocity(before, timesteps, trace.embeds, rows, trace.sampler)
        step = sde_step(
            before,
            velocity,
            trace.sigmas[chosen].repeat(b),
            trace.sigmas[chosen + 1].repeat(b),
            noise_level=trace.sampler.noise_level,
            sde_type=trace.sampler.sde_type,
            sigma_max=trace.sigma_max,
            prev_sample=after,
        )
        assert step.log_prob is not None
        shape = (b, w, *before.shape[1:])
        return FlowReplay(
            log_prob=step.log_prob.view(b, w),
            mean=step.mean.view(shape),
            std=step.std[:w],  # of the first sample: it is the same for all samples
            velocity=velocity.view(shape),
        )

    def predict(self, trace: FlowTrace, noised: Noised) -> Tensor:
        """Guided velocity [B, W, ...] float32 at noised final latents, in one pass of B x W rows."""
        x = noised.latents(trace.clean)
        rows = trace.prompt_index.repeat_interleave(x.shape[1])
        timesteps = noised.levels.flatten() * NUM_TRAIN_TIMESTEPS
        velocity = self.velocity(x.flatten(0, 1), timesteps, trace.embeds, rows, trace.sampler)
        return velocity.view_as(x)

    def corrupt(self, samples: Samples, seeds: Sequence[int], *, levels: int, distribution: str) -> Noised:
        """Draw noise for the final latents of `samples`, at `levels` noise levels each; `seeds` has one per sample.

        distribution: "schedule", "uniform" or "logit_normal"; see phalanx.functional.flow.
        """
        trace: FlowTrace = samples.trace
        device, sampler = trace.clean.device, trace.sampler
        noise = torch.stack([normal((levels, *trace.clean.shape[1:]), seed, device) for seed in seeds])
        size = (sampler.num_inference_steps, sampler.height, sampler.width, sampler.num_frames)
        sigmas, _ = self.model.schedule(*size)
        schedule = sigmas[:-1]  # at the last level, 0, there is no noise to predict
        # each sample has its own stream, so that its levels do not depend on its rank; "schedule" shuffles the whole
        # schedule, and needs a number for each of its levels
        count = max(len(schedule), levels)
        streams = [torch.Generator().manual_seed(fold_in(seed, "level")) for seed in seeds]
        uniform = torch.stack([torch.rand(count, generator=stream) for stream in streams])
        shift = 1.0 if distribution == "schedule" else self.level_shift(*size)
        drawn = noise_levels(uniform, levels, schedule, distribution=distribution, shift=shift)
        return Noised(noise, drawn.to(device))

    def level_shift(self, num_inference_steps: int, height: int, width: int, frames: int) -> float:
        """The shift of noise levels that are drawn at random; see FlowModel.shift."""
        config = self.model.pipeline.scheduler.config
        names = [f"use_{kind}_sigmas" for kind in ("karras", "exponential", "beta")]
        ignored = [name for name in (*names, "shift_terminal") if config.get(name)]
        if ignored:
            _say_ignored(f"{self.config:path}: {self.config.path!r}", ", ".join(ignored))
        return self.model.shift(num_inference_steps, height, width, frames)

    @torch.no_grad()
    def decode(self, latents: Tensor, sampler: Sampler, slice_size: int | None) -> Tensor:
        """Images [N, 3, H, W] or videos [N, F, 3, H, W] in 0..1 on the CPU, decoded `slice_size` at a time."""
        decoded = []
        for part in latents.split(slice_size or len(latents)):
            # rewards, logs and files use images on the CPU, and all images of a training step do not fit on a GPU
            decoded.append(self.model.decode(part, sampler.height, sampler.width).cpu())
        return torch.cat(decoded)

    def through(self, transformer: Any) -> "FlowPolicy":
        """A copy of this policy with an engine's transformer, which has the interface of diffusers' transformer."""
        # shallow: everything except the transformer is shared, including the embeddings and the VAE
        other = copy.copy(self)
        other.model = copy.copy(self.model)
        other.model.transformer = transformer
        return other

    # -- cost -------------------------------------------------------------------------------------

    def forward_flops(self, trace: FlowTrace) -> int:
        """FLOPs of one forward pass of one sample, for one branch of guidance."""
        if self._forward_flops is None:  # all texts count with the length in the first trace
            s, length = trace.sampler, trace.embeds["prompt_embeds"].shape[1]
            self._forward_flops = self.model.flops(s.height, s.width, length, s.num_frames)
        return self._forward_flops

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        """See phalanx.training.components.TrainedPolicy."""
        trace: FlowTrace = samples.trace
        return step_flops(
            self.forward_flops(trace),
            samples=count,
            steps=trace.evaluations,
            window=actions,
            cfg=trace.sampler.guided,
            updates_per_sample=updates,
            lora=self.trained.lora,
            checkpointing=recomputed * self.trained.recomputed,
            references=references,
            detach_uncond=self.detach_uncond,
        )

    # -- weights ----------------------------------------------------------------------------------

    def unsharded(self) -> AbstractContextManager[None]:
        """See TrainedModel.unsharded."""
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """See TrainedModel.using."""
        return self.trained.using(weights)


def build_policy(
    config: FlowModelConfig,
    parallel: ParallelConfig,
    data: FlowDataConfig,
    world: World,
    *,
    seed: int,
    detach_uncond: bool,
    frozen: bool = False,
    family: type[FlowModel] | None = None,
    make: Callable[..., FlowPolicy] = FlowPolicy,
) -> FlowPolicy:
    """Load the model folder and shard it over the mesh; text encoders stay on the CPU.

    family: class to use instead of the one that the folder names. make: class of the policy.

    Raises ValueError, with one line that begins with `model.path`, for a folder that cannot be used.
    """
    dtype = DTYPES[config.dtype]
    # full fine-tuning keeps float32 weights; a frozen base is kept in its compute dtype
    weights_dtype = dtype if config.lora_rank > 0 or frozen else torch.float32
    family = family_of(config) if family is None else family
    log.info("loading the model %s", config.path)
    model = load_family(family, config, dtype, weights_dtype)
    weights = sum(p.numel() for p in model.transformer.parameters())
    log.info("laying out %s, %.2f M weights", type(model.transformer).__name__, weights / 1e6)
    model.vae.to(world.device)  # small, and needed after each micro-batch, so it stays there
    kept = weights_dtype if config.lora_rank == 0 else None
    return make(model, world, config, parallel, data, seed=seed, detach_uncond=detach_uncond, frozen=frozen, kept=kept)


def load_family(
    family: type[FlowModel], config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype
) -> FlowModel:
    """The model of a folder; raises ValueError, with one line that begins with `model.path`, if it cannot be used."""
    try:
        return family(config, dtype, weights_dtype)
    except Exception as error:  # on malformed files the libraries raise any type
        ours = isinstance(error, ValueError) and str(error).startswith("model.path: ")
        cause = FOREIGN if needs_code(error) else reason(error)
        message = str(error).removeprefix("model.path: ") if ours else f"{config.path!r} does not load: {cause}"
        raise ValueError(f"model.path: {message}") from error


@cache  # once
def _say_ignored(what: str, names: str) -> None:
    log.warning("%s: noise levels that are drawn at random do not follow the scheduler's %s", what, names)


def _rows_of(embeds: Embeds, rows: Tensor, sampler: Sampler) -> Embeds:
    """The embeddings of each row [N, ...], with `guidance` [N] float32 if the model takes it as an input."""
    inputs = {name: value[rows] for name, value in embeds.items()}
    scale = sampler.embedded_guidance
    if scale is not None:
        inputs["guidance"] = torch.full(rows.shape, scale, dtype=torch.float32, device=rows.device)
    return inputs
