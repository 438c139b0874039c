"""The policy: a flow-matching model over the mesh, its replay, and the other weights that it can take."""

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx.config.load import known_modules, resolve_registry
from phalanx.config.schema import DataConfig, ModelConfig, ParallelConfig
from phalanx.distributed.fsdp import Sharded, local
from phalanx.distributed.mesh import World
from phalanx.functional.sde import sde_step
from phalanx.models.attention import set_backend
from phalanx.models.embeds import EmbedsCache
from phalanx.models.family import Embeds, FlowModel, Instruction, model_index
from phalanx.models.linear import prefers_onednn, use_onednn
from phalanx.models.lora import add_lora, lora_off, merged_weights
from phalanx.types import FlowTrace, Noised, Prompt, Replay, Sampler

NUM_TRAIN_TIMESTEPS = 1000  # of diffusers' flow-matching schedulers: timestep = level x 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def family_of(config: ModelConfig) -> type[FlowModel]:
    """The class `Model` of the model's family; raises ValueError where no family knows the folder's pipeline."""
    name = known_family(config.path, model_index(config.path)) if config.family is None else config.family
    found = resolve_registry("phalanx.models", name, "model.family")
    if "Model" not in vars(found):
        raise ValueError(f"model.family: {name!r} has no class Model")
    return vars(found)["Model"]


def known_family(path: str, index: dict[str, Any]) -> str:
    """The module of phalanx.models for the pipeline of a folder's model_index.json; raises ValueError without one."""
    name, known = index["_class_name"], {}
    for module in known_modules("phalanx.models"):
        found = vars(resolve_registry("phalanx.models", module, "model.family"))
        if "Model" in found:
            known[found["Model"].pipeline_class] = module
    if name not in known:
        raise ValueError(f"model.path: {path!r} is a {name}; supported: {', '.join(sorted(known))}")
    return known[name]


def image_columns(config: ModelConfig) -> tuple[str, ...]:
    """Columns of the data in which the model finds images; raises ValueError as `family_of` does."""
    column = family_of(config).image_column
    return () if column is None else (column,)


class FlowPolicy:
    """See phalanx.types.Policy. `parameters` maps names to the tensors that the optimizer owns."""

    def __init__(
        self,
        model: FlowModel,
        world: World,
        config: ModelConfig,
        parallel: ParallelConfig,
        data: DataConfig,
        *,
        seed: int,
        detach_uncond: bool = False,
        frozen: bool = False,
    ) -> None:
        """`frozen`: nothing of it is trained. Raises ValueError where the model refuses what the sections ask of it."""
        self.model, self.world, self.config = model, world, config
        self.detach_uncond = detach_uncond
        self.lora = config.lora_rank > 0
        model.check_length(data.max_prompt_length)
        _freeze_and_adapt(model, config, seed, world.device, frozen)
        self.sharded = Sharded(model.transformer, model.blocks(), world, parallel, model.dtype)
        self.parameters = self.sharded.parameters
        self._weights: dict[str, dict[str, Tensor]] = {}
        identity = f"{config.path} {config.family} {config.dtype} {data.max_prompt_length}"
        if model.image_column is not None:
            identity += f" {config.reference_size}"
        self._max_length = data.max_prompt_length
        self._embeds = EmbedsCache(self._encode, identity, data.embeds_cache_dir)

    # -- text -----------------------------------------------------------------------------------------------------

    def embed(self, prompts: list[Prompt], negatives: bool = True, size: tuple[int, int] | None = None) -> list[Embeds]:
        """Embeddings of the prompts, then (with `negatives`) of their negatives, on the CPU; see FlowModel.encode.

        A model that sees an image sees that of the prompt's meta, with the negative too; `size` (height, width) is that
        of the images to be made. Raises ValueError for an image that cannot be read.
        """
        texts = [p.text for p in prompts]
        if negatives:
            default = self.model.default_negative
            texts += [default if p.negative is None else p.negative for p in prompts]
        column = self.model.image_column
        if column is None:
            return self._embeds(texts)
        assert size is not None
        shown = prompts * 2 if negatives else prompts
        return self._embeds([Instruction(text, p.meta[column], size) for text, p in zip(texts, shown, strict=True)])

    def room(self) -> int:
        """How many embeddings, of prompts and negatives like those embedded so far, stay in memory."""
        return self._embeds.room()

    @torch.no_grad()
    def _encode(self, wanted: Sequence[Hashable]) -> list[Embeds]:
        """One prompt at a time: a batch's shape would show in the last bits. Encoders visit the device and leave."""
        device = self.world.device
        for encoder in self.model.text_encoders:
            encoder.to(device)
        try:
            return [self._encode_one(one, device) for one in wanted]
        finally:
            for encoder in self.model.text_encoders:
                encoder.to("cpu")

    def _encode_one(self, wanted: Hashable, device: torch.device) -> Embeds:
        if isinstance(wanted, Instruction):
            return self.model.encode_instruction(wanted, device, self._max_length)
        assert isinstance(wanted, str)
        return self.model.encode([wanted], device, self._max_length)[0]

    def share(self, other: "FlowPolicy", *, text: bool) -> None:
        """Use the VAE of another policy of this family and, with `text`, its text encoders and the embeddings that it
        has: equal ones of its own are let go.
        """
        shared = [other.model.vae, *(other.model.text_encoders if text else ())]
        for name, part in other.model.pipeline.components.items():
            if any(part is module for module in shared):
                self.model.pipeline.register_modules(**{name: part})
        self.model.vae = other.model.vae
        if text:
            self.model.text_encoders, self._embeds = other.model.text_encoders, other._embeds

    # -- sampling and replay --------------------------------------------------------------------------------------

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, rows: Tensor, sampler: Sampler) -> Tensor:
        """Guided velocity [N, ...] float32 of latents [N, ...] at timesteps [N]; `rows` [N] index into `embeds`,
        which holds P prompts and, under guidance, their P negatives.

        Both branches of guidance go through one forward pass, unless the unconditional one is to be detached.
        """
        size = (sampler.height, sampler.width)
        if not sampler.guided:
            return self.model.velocity(latents, timesteps, _take(embeds, rows, sampler), *size).float()
        negative_rows = rows + next(iter(embeds.values())).shape[0] // 2
        if self.detach_uncond:
            with torch.no_grad():
                negative = self.model.velocity(latents, timesteps, _take(embeds, negative_rows, sampler), *size).float()
            positive = self.model.velocity(latents, timesteps, _take(embeds, rows, sampler), *size).float()
        else:
            both = _take(embeds, torch.cat([negative_rows, rows]), sampler)
            out = self.model.velocity(torch.cat([latents, latents]), timesteps.repeat(2), both, *size).float()
            negative, positive = out.chunk(2)
        return self.model.guide(negative, positive, sampler.guidance)

    def replay(self, trace: FlowTrace) -> Replay:
        """Every sample's trained steps in one forward pass of B x W rows."""
        b, chosen = trace.latents.shape[0], trace.trained
        w = len(chosen)
        before, after = trace.latents[:, chosen].flatten(0, 1), trace.latents[:, chosen + 1].flatten(0, 1)
        rows = trace.prompt_index.repeat_interleave(w)
        velocity = self.velocity(before, trace.timesteps[chosen].repeat(b), trace.embeds, rows, trace.sampler)
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
        return Replay(step.log_prob.view(b, w), step.mean.view(shape), step.std[:w], velocity.view(shape))

    def predict(self, trace: FlowTrace, noised: Noised) -> Tensor:
        """Guided velocity [B, W, ...] float32 of freshly noised final latents, in one forward pass of B x W rows."""
        x = noised.latents(trace.clean)
        rows = trace.prompt_index.repeat_interleave(x.shape[1])
        levels = noised.levels.flatten()
        velocity = self.velocity(x.flatten(0, 1), levels * NUM_TRAIN_TIMESTEPS, trace.embeds, rows, trace.sampler)
        return velocity.view_as(x)

    @torch.no_grad()
    def decode(self, latents: Tensor, sampler: Sampler, slice_size: int | None) -> Tensor:
        """Images [N, 3, H, W] or videos [N, F, 3, H, W] in 0..1 on the CPU, `slice_size` at a time."""
        parts = latents.split(slice_size or len(latents))
        return torch.cat([self.model.decode(part, sampler.height, sampler.width).cpu() for part in parts])

    def through(self, transformer: Any) -> "FlowPolicy":
        """This policy computing with another engine's transformer, which is called as diffusers' is."""
        other = copy.copy(self)
        other.model = copy.copy(self.model)
        other.model.transformer = transformer
        return other

    # -- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the transformer, LoRA merged, for an engine with a copy of its own; see merged_weights."""
        yield from merged_weights(self.model.transformer.state_dict(), self.config)

    def unsharded(self) -> Any:
        """A context in which all weights are gathered, for forward passes without gradients."""
        return self.sharded.unsharded()

    def add_weights(self, name: str, values: dict[str, Tensor]) -> None:
        """Make `using(name)` possible: `values` are laid out as `parameters`."""
        self._weights[name] = values

    def keep_reference(self) -> None:
        """Remember the weights as they are now as the reference: nothing with LoRA, else a copy on the CPU.

        PiSSA takes its start out of the base, which is the reference no longer without it.
        """
        if not self.lora or self.config.lora_init == "pissa":
            copies = {name: local(p).detach().cpu().clone() for name, p in self.parameters.items()}
            self.add_weights("reference", copies)

    @contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Other weights for a while: "reference", or what `add_weights` named; not within `unsharded`."""
        if weights == "reference" and self.lora and weights not in self._weights:
            with lora_off(self.model.transformer):
                yield
            return
        kept = {name: local(p).detach().clone() for name, p in self.parameters.items()}
        self._write(self._weights[weights])
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        self.sharded.reshard()
        for name, p in self.parameters.items():
            local(p).copy_(local(values[name]))
        self.sharded.publish()


def build_policy(
    config: ModelConfig,
    parallel: ParallelConfig,
    data: DataConfig,
    world: World,
    *,
    seed: int,
    detach_uncond: bool,
    frozen: bool = False,
) -> FlowPolicy:
    """Load the model folder and lay it out over the mesh; the VAE goes to the device, text encoders stay on the CPU.

    Raises ValueError, with one line that begins with `model.path`, for a folder that cannot be used.
    """
    _hide_progress_bars()
    dtype = DTYPES[config.dtype]
    # full fine-tuning keeps float32 weights; a frozen base is kept in the dtype that it computes in
    weights_dtype = dtype if config.lora_rank > 0 or frozen else torch.float32
    family = family_of(config)
    try:
        model = family(config, dtype, weights_dtype)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).removeprefix("model.path: ")
        raise ValueError(f"model.path: {reason}") from error
    model.vae.to(world.device)
    return FlowPolicy(model, world, config, parallel, data, seed=seed, detach_uncond=detach_uncond, frozen=frozen)


def _hide_progress_bars() -> None:
    """Every rank would draw its own while it loads."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _freeze_and_adapt(model: FlowModel, config: ModelConfig, seed: int, device: torch.device, frozen: bool) -> None:
    for module in (model.vae, *model.text_encoders):
        module.requires_grad_(False).eval()
    transformer = model.transformer.eval()
    if config.lora_rank > 0:
        add_lora(transformer, config, model.lora_targets, seed)
    else:
        transformer.requires_grad_(not frozen)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if config.attn_backend is not None:
        set_backend(model, config.attn_backend, device)
    if config.compile:
        for block in model.blocks():
            block.compile(fullgraph=True)
    elif device.type == "cpu" and prefers_onednn():
        use_onednn(transformer)


def _take(embeds: Embeds, rows: Tensor, sampler: Sampler) -> Embeds:
    """The inputs of each row [N, ...]; `guidance` [N] float32 is one of them where the model takes it as such."""
    taken = {name: value[rows] for name, value in embeds.items()}
    if sampler.embedded_guidance is not None:
        taken["guidance"] = torch.full(rows.shape, sampler.embedded_guidance, dtype=torch.float32, device=rows.device)
    return taken
