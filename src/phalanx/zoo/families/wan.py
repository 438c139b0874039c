"""Wan 2.1, Wan 2.2 TI2V-5B and A14B (arXiv 2503.20314), text to video, with a causal video VAE."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.config.flow import FlowDataConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.collectives import reduce_sum
from phalanx.functional.flow import Sampler
from phalanx.models.flow.embeds import padded_texts
from phalanx.models.flow.family import Embeds, FlowModel, check_size, latent_frames
from phalanx.models.flow.folder import base_folder, check_channels, load_transformer, model_index
from phalanx.models.flow.pipeline_headers import component_names
from phalanx.models.lora import WEIGHTS, Layers

MULTISTEP = "UniPCMultistepScheduler"  # the scheduler in the folders; only its noise levels are used, not its solver
FIRST, SECOND = "transformer", "transformer_2"  # Wan 2.2 A14B's, for high and for low noise levels
SECOND_LORA = "pytorch_lora_weights_2.safetensors"  # file of the second transformer's LoRA, next to that of the first
TIMESTEPS = 1000  # timestep of noise level 1
TRAINED_LENGTH = 512  # tokens of a text, including padding
FPS, FPS_PER_TOKEN = 16, 24  # frame rates of the videos that Wan 2.1 and TI2V-5B were trained on
# original names of layers, by diffusers' names: within a block, and outside of the blocks
NATIVE = {
    "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k", "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1", "proj_out": "head.head",
    # in models that condition on an image
    "attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
}  # fmt: skip

log = logging.getLogger(__name__)


class Model(FlowModel):
    """Wan: latents [N, C, (F - 1) / 4 + 1, H/8, W/8] (TI2V-5B: H/16) of videos [N, F, 3, H, W].

    Latents with one frame are images [N, 3, H, W]. Guidance by `rollout.guidance_scale`.
    """

    pipeline_class = "WanPipeline"
    transformer_class = WanTransformer3DModel
    second_guidance = True  # `__init__` sets False for a folder with one transformer
    makes_videos = True
    lora_bias = "diff_b"
    vae_dtype = torch.float32  # as in the model cards and in Flow-GRPO
    # the layers of Flow-GRPO's Wan script: self-attention and cross-attention to the text
    lora_targets = (
        "attn1.to_k", "attn1.to_out.0", "attn1.to_q", "attn1.to_v",
        "attn2.to_k", "attn2.to_out.0", "attn2.to_q", "attn2.to_v",
    )  # fmt: skip

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        ratio, second = self.pipeline.config.boundary_ratio, self.pipeline.transformer_2
        if second is not None:
            check_channels(config.path, second.config, self.transformer.config.in_channels, ", as the first has")
        if self.transformer.config.pos_embed_seq_len is not None:
            raise ValueError(
                f"model.path: the transformer of {config.path!r} takes a first and a last frame (pos_embed_seq_len), "
                "and a last frame is not supported"
            )
        if (ratio is None) != (second is None):
            raise ValueError(
                f"model.path: {config.path!r} should have both a transformer_2 and a boundary_ratio, or neither"
            )
        c = self.pipeline.scheduler.config
        if type(self.pipeline.scheduler).__name__ == MULTISTEP and not c.use_flow_sigmas:
            raise ValueError(f"model.path: the scheduler of {config.path!r} should have use_flow_sigmas: true")
        if c.use_dynamic_shifting:
            raise ValueError(f"model.path: the scheduler of {config.path!r} should have use_dynamic_shifting: false")
        # TI2V-5B's pipeline passes a timestep per token. In text to video, those of a sample are all equal: one per
        # sample is the same computation without a modulation per token.
        self.fps = FPS_PER_TOKEN if self.pipeline.config.expand_timesteps else FPS
        for part in (self.transformer, second):
            if part is not None:  # rebuilt, because its angles, which are not in the files, were cast to weights_dtype
                rope = part.rope
                part.rope = WanRotaryPosEmbed(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
        self.second_guidance = second is not None
        if second is not None:
            self.transformer = Experts(self.transformer, second, ratio * TIMESTEPS)

    def load(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().load(config, dtype, weights_dtype)
        path = str(base_folder(config))
        if SECOND in component_names(model_index(path)):
            stored = config.lora_rank == 0
            second = load_transformer(self.transformer_class, path, SECOND, weights_dtype, stored=stored)
            self.pipeline.register_modules(transformer_2=second)

    @classmethod
    def parts(cls, transformer: Any) -> dict[str, Any]:
        if not isinstance(transformer, Experts):
            return super().parts(transformer)
        return {FIRST: transformer.transformer, SECOND: transformer.transformer_2}

    @classmethod
    def load_base(cls, config: FlowModelConfig, dtype: torch.dtype | None, names: Collection[str] = ()) -> nn.Module:
        first, index = super().load_base(config, dtype, names), model_index(str(base_folder(config)))
        if SECOND not in component_names(index):
            return first
        return Experts(first, cls.load_part(config, dtype, SECOND), index["boundary_ratio"] * TIMESTEPS)

    @classmethod
    def read_lora(cls, path: str, config: FlowModelConfig | None = None, names: Iterable[str] = ()) -> Layers:
        """As for other families; for a model with two transformers, the LoRAs of those whose files the folder has."""
        folder = Path(path).expanduser()
        if config is None or SECOND not in component_names(model_index(str(base_folder(config)))):
            if (folder / SECOND_LORA).is_file():
                raise ValueError(
                    f"model.lora_path: {path!r} has {SECOND_LORA}, but the model has no second transformer"
                )
            return super().read_lora(path, config)
        layers: Layers = {}
        for part, file in ((FIRST, WEIGHTS), (SECOND, SECOND_LORA)):
            if (folder / file).is_file():
                read = super().read_lora(str(folder / file), config)
                layers |= {f"{part}.{name}": pair for name, pair in read.items()}
        if not layers:
            raise ValueError(
                f"model.lora_path: {path!r} should be a folder with {WEIGHTS} for the first of the model's two "
                f"transformers, {SECOND_LORA} for the second, or both"
            )
        return layers

    @classmethod
    def export_lora(
        cls,
        folder: Path,
        config: FlowModelConfig,
        layers: dict[str, Tensor],
        rank: int,
        alpha: float,
        file: str | None = None,
    ) -> None:
        """As for other families; for a model with two transformers, each has its own file."""
        for part, target in ((FIRST, WEIGHTS), (SECOND, SECOND_LORA)):
            some = {name.removeprefix(f"{part}."): t for name, t in layers.items() if name.startswith(f"{part}.")}
            if some:
                super().export_lora(folder, config, some, rank, alpha, target)
                layers = {name: t for name, t in layers.items() if not name.startswith(f"{part}.")}
        if layers:
            super().export_lora(folder, config, layers, rank, alpha, file)

    @classmethod
    def lora_names(cls, layers: Sequence[str]) -> dict[str, str]:
        """The original names if a block is among the layers: ComfyUI reads only these, and diffusers reads them too."""
        names = super().lora_names(layers)
        if any(layer.startswith("blocks.") for layer in layers):
            for layer in layers:
                block = re.sub(r"(blocks\.\d+\.)?.*", r"\1", layer)
                names[layer] = f"diffusion_model.{block}{NATIVE[layer.removeprefix(block)]}"
        return names

    def components(self, path: str) -> dict[str, Any]:
        """None for a second transformer, because `load` loads it."""
        return {SECOND: None} if SECOND in component_names(model_index(path)) else {}

    def blocks(self) -> list[nn.Module]:
        # interleaved, so that checkpointing a fraction of them covers the same fraction of each transformer
        blocks: list[nn.Module] = []
        for pair in zip(*[part.blocks for part in self.parts(self.transformer).values()], strict=True):
            blocks += pair
        return blocks

    def check_length(self, data: FlowDataConfig) -> None:
        if data.max_prompt_length != TRAINED_LENGTH:
            log.warning(
                "%s: %d: Wan was trained with texts padded to %d tokens, and attends to the padding; set it to %d (for "
                "tasks/sample.py: max_prompt_length)",
                f"{data:max_prompt_length}",
                data.max_prompt_length,
                TRAINED_LENGTH,
                TRAINED_LENGTH,
            )

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the texts after the pipeline's cleaning."""
        return super().text_tokens([prompt_clean(text) for text in texts], max_length)

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """`prompt_embeds` [L, D] without their padding of zeros, and `padded_length` [], their length with it.

        `collate` restores the padding: the model was trained with it, and attends to it.
        """
        # by the base pipeline's method, because that of the image-to-video pipeline needs ftfy, which is optional here
        embeds = WanPipeline._get_t5_prompt_embeds(self.pipeline, texts, max_sequence_length=max_length, device=device)
        result = []
        for text in embeds.to(self.dtype).cpu():
            padding = int((~text.any(1)).flip(0).cumprod(0).sum())  # rows of zeros at the end
            kept = text[: max_length - padding].clone()
            result.append({"prompt_embeds": kept, "padded_length": torch.tensor(max_length)})
        return result

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        """`prompt_embeds` [N, max_length, D], independent of `length`."""
        return {"prompt_embeds": padded_texts(embeds, int(embeds[0]["padded_length"]))}

    def schedule(self, num_inference_steps: int, height: int, width: int, frames: int = 1) -> tuple[Tensor, Tensor]:
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(num_inference_steps)
        sigmas = scheduler.sigmas.float().cpu()
        sigmas[0] = 1.0  # the multistep solver keeps 1e-6 below 1, for its logarithms
        return sigmas, scheduler.timesteps.float().cpu()

    def shift(self, num_inference_steps: int, height: int, width: int, frames: int = 1) -> float:
        c = self.pipeline.scheduler.config
        return float(c.flow_shift if type(self.pipeline.scheduler).__name__ == MULTISTEP else c.shift)

    @property
    def patch(self) -> int:
        return self.transformer.config.patch_size[1]

    def context_plan(self) -> dict[str, Any]:
        # without the entry for timesteps per token, which are not used here: see __init__
        plan = {layer: plan for layer, plan in super().context_plan().items() if layer != ""}
        if not isinstance(self.transformer, Experts):
            return plan
        return {f"{part}.{layer}": split for part in (FIRST, SECOND) for layer, split in plan.items()}

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        latents = self.latent_shape(height, width, frames)[1] // self.transformer.config.patch_size[0]
        return {f"a video of {frames} x {height} x {width}": latents * self.tokens(height, width)}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        c = self.transformer.config
        factor, step = self.pipeline.vae_scale_factor_spatial, self.vae.config.scale_factor_temporal
        patches = c.patch_size
        unit = factor * patches[1]
        check_size(height, width, unit, c.rope_max_seq_len * unit)
        count = latent_frames(frames, step)
        most = (c.rope_max_seq_len * patches[0] - 1) * step + 1
        if frames > most:
            raise ValueError(f"rollout.num_frames: {frames} is more than the model's {most} frames")
        return (c.out_channels, count, height // factor, width // factor)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds["prompt_embeds"],
            return_dict=False,
        )[0]

    def guidance(self, sampler: Sampler, timesteps: Tensor) -> Any:
        if sampler.guidance_2 is None:
            return sampler.guidance
        rows = timesteps.view(-1, 1, 1, 1, 1)
        return torch.where(rows >= self.transformer.boundary, sampler.guidance, sampler.guidance_2)

    def check_window(self, timesteps: Tensor, config: FlowModelConfig) -> None:
        if not isinstance(self.transformer, Experts) or timesteps.is_meta:
            return
        high = timesteps >= self.transformer.boundary
        for name, steps in ((FIRST, high), (SECOND, ~high)):
            if name in (config.target_components or (FIRST, SECOND)) and not steps.any():
                log.warning(
                    "%s: no step of %s, or of %s, is one of %s, so it learns nothing; its steps are those whose "
                    "timestep is %s %g",
                    f"{config:target_components}",
                    f"{config:.rollout.sde_window_range}",
                    f"{config:.algorithm.last_steps}",
                    name,
                    "at least" if name == FIRST else "below",
                    self.transformer.boundary,
                )

    @contextmanager
    def computed_as_sampled(self) -> Iterator[None]:
        experts = self.transformer if isinstance(self.transformer, Experts) else None
        if experts is not None:
            experts.whole = True
        try:
            yield
        finally:
            if experts is not None:
                experts.whole = False

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        mean, std = self.latent_statistics(latents.device)
        return self.decode_frames(latents * std + mean)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.frame_latents(images, generator)

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        text = torch.empty(length, self.transformer.config.text_dim, dtype=self.dtype)
        return {"prompt_embeds": text, "padded_length": torch.tensor(length, device="cpu")}  # `collate` reads it


class Experts(nn.Module):
    """Two of diffusers' transformers, with the interface of one.

    `transformer` computes rows at timesteps of at least `boundary`, and `transformer_2` those below. With `whole`, each
    computes all rows if both have some, because kernels round equally only at the same batch size. If weights are
    sharded, a transformer runs on all ranks or on none.
    """

    transformer: Any
    transformer_2: Any

    def __init__(self, transformer: Any, transformer_2: Any, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary, self.whole = transformer, transformer_2, boundary, False
        self.config = transformer.config

    def forward(self, timestep: Tensor, **inputs: Any) -> tuple[Tensor]:
        """timestep [N] and tensors among `inputs` [N, ...] -> ([N, ...],), as with return_dict=False."""
        rows = {"timestep": timestep, **inputs}
        high = timestep >= self.boundary
        # meta tensors have no values: count a batch of one level or, with `whole`, of both
        levels = [True] * len(high) if high.is_meta else high.tolist()
        needed = [any(levels), not all(levels) or (high.is_meta and self.whole)]
        experts = [self.transformer, self.transformer_2]
        for number, runs in enumerate(self._needed_experts(needed)):
            if not runs:
                return experts[1 - number](**rows)
        if self.whole:
            first, second = (expert(**rows)[0] for expert in experts)
            return (torch.where(high.view(-1, *[1] * (first.dim() - 1)), first, second),)
        parts, order = [], []
        for expert, level in zip(experts, (True, False), strict=True):
            chosen = [i for i, is_high in enumerate(levels) if is_high == level]
            # without rows, compute one and drop its result, because other ranks wait for this one in collectives
            index = torch.tensor(chosen or [0], device=high.device)
            part = {name: value[index] if isinstance(value, Tensor) else value for name, value in rows.items()}
            parts.append(expert(**part)[0][: len(chosen)])
            order += chosen
        return (torch.cat(parts)[torch.tensor(order, device=high.device).argsort()],)

    def _needed_experts(self, needed: list[bool]) -> list[bool]:
        """Which transformers run: those that any rank needs, and with gradients at least one that is trained."""
        if isinstance(self, FSDPModule):
            needed = (reduce_sum(torch.tensor(needed, dtype=torch.long, device="cpu")) > 0).tolist()
        if torch.is_grad_enabled():
            experts = (self.transformer, self.transformer_2)
            learns = [any(p.requires_grad for p in expert.parameters()) for expert in experts]
            if any(learns) and not (needed[0] and learns[0]) and not (needed[1] and learns[1]):
                needed = [True, True]
        return needed

    def enable_gradient_checkpointing(self, function: Any) -> None:
        """See diffusers' ModelMixin."""
        for expert in (self.transformer, self.transformer_2):
            expert.enable_gradient_checkpointing(function)

    def set_attention_backend(self, backend: str) -> None:
        """See diffusers' ModelMixin."""
        for expert in (self.transformer, self.transformer_2):
            expert.set_attention_backend(backend)
