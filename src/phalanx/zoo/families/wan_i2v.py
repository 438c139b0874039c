"""Wan 2.1 and 2.2, image to video: a video from a text and its first frame.

For Wan 2.2 TI2V-5B, whose folder names the text-to-video pipeline, set `model.family: wan_i2v`.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from phalanx.config.flow import FlowDataConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import Embeds, Instruction
from phalanx.models.flow.folder import check_channels, load_text_encoder, model_index
from phalanx.models.flow.pipeline_headers import component_names
from phalanx.models.flow.references import to_ratio
from phalanx.zoo.families import wan


class Model(wan.Model):
    """As Wan; `embeds["condition"]` has the latents of the first frame, center-cropped to the video's aspect ratio.

    The condition [N, C, F, h, w], encoded from the frame followed by gray ones, is concatenated to the noisy latents
    along channels; the transformer of Wan 2.1 also takes CLIP's features `image_embeds` [N, L, D]. TI2V-5B's condition
    [N, C, 1, h, w] replaces the first latent frame, whose tokens are at noise level 0.
    """

    pipeline_class = "WanImageToVideoPipeline"
    image_column = "image"
    input_channels = None  # see __init__

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        c = self.transformer.config
        self.keeps_frame = self.pipeline.config.expand_timesteps
        extra = 0 if self.keeps_frame else self.vae.config.scale_factor_temporal + c.out_channels
        check_channels(config.path, c, c.out_channels + extra, ", as of an image-to-video model")
        self.sees = c.image_dim is not None
        if self.sees:
            if self.pipeline.image_encoder is None:
                raise ValueError(f"model.path: {config.path!r} has no image_encoder, which its transformer needs")
            self.text_encoders.append(self.pipeline.image_encoder)
        # by embedding name, image digest, video size and frames, as long as some embeddings refer to it
        self._seen = WeakValueDictionary[tuple[str, str, tuple[int, int], int], Tensor]()

    def components(self, path: str) -> dict[str, Any]:
        """The image encoder, in float32 as in the model card, and its processor, in the version without torchvision."""
        parts, names = super().components(path), component_names(model_index(path))
        if "image_encoder" in names:
            parts["image_encoder"] = load_text_encoder(path, "image_encoder", "CLIPVisionModel", torch.float32)
        if "image_processor" in names:
            parts["image_processor"] = CLIPImageProcessorPil.from_pretrained(
                path, subfolder="image_processor", trust_remote_code=False
            )
        return parts

    def check_length(self, data: FlowDataConfig) -> None:
        if self.sees and data.max_prompt_length != wan.TRAINED_LENGTH:
            raise ValueError(
                f"data.max_prompt_length: {data.max_prompt_length}: expected {wan.TRAINED_LENGTH}, since the "
                f"transformer takes the last {wan.TRAINED_LENGTH} tokens for the text and those before for the image"
            )
        super().check_length(data)

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """As `encode`, with `condition` and, if the transformer takes them, `image_embeds`.

        All texts about an image share these tensors.
        """
        [embeds] = self.encode([instruction.text], device, max_length)
        makers = {"condition": self.condition} | ({"image_embeds": self.image_embeds} if self.sees else {})
        for name, make in makers.items():
            key = (name, instruction.picture.digest, instruction.size, instruction.frames)
            value = self._seen.get(key)
            if value is None:
                self._seen[key] = value = make(instruction, device).cpu()
            embeds[name] = value
        return embeds

    def condition(self, instruction: Instruction, device: torch.device) -> Tensor:
        """Latents of the first frame [C, F, h, w] or [C, 1, h, w] float32."""
        image = to_ratio(instruction.picture.pil(), *instruction.size)
        first = self.pipeline.video_processor.preprocess(image, *instruction.size)[:, :, None].float()
        later = 0 if self.keeps_frame else instruction.frames - 1
        frames = torch.cat([first, first.new_zeros(*first.shape[:2], later, *first.shape[3:])], 2)
        latents = self.vae.encode(frames.to(device, self.vae.dtype)).latent_dist.mode().float()
        mean, std = self.latent_statistics(device)
        return ((latents - mean) / std)[0]

    def image_embeds(self, instruction: Instruction, device: torch.device) -> Tensor:
        """CLIP's features [L, D] of the first frame."""
        image = to_ratio(instruction.picture.pil(), *instruction.size)
        return self.pipeline.encode_image(image, device)[0].to(self.dtype)

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        batch = super().collate(embeds, length, padded)
        for name in ("condition", "image_embeds")[: 1 + self.sees]:
            batch[name] = torch.stack([e[name] for e in embeds])
        return batch

    def context_plan(self) -> dict[str, Any]:
        # including the entry for timesteps per token
        return self.transformer_class._cp_plan if self.keeps_frame else super().context_plan()

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        inputs = {
            "encoder_hidden_states": embeds["prompt_embeds"],
            "encoder_hidden_states_image": embeds["image_embeds"] if self.sees else None,
            "return_dict": False,
        }
        condition = embeds["condition"]
        if not self.keeps_frame:
            n, _, *sizes = latents.shape
            mask = latents.new_zeros(n, self.vae.config.scale_factor_temporal, *sizes)
            mask[:, :, 0] = 1
            x = torch.cat([latents, mask, condition], 1).to(self.dtype)
            return self.transformer(hidden_states=x, timestep=timesteps, **inputs)[0]
        x = torch.cat([condition, latents[:, :, 1:]], 2).to(self.dtype)
        tokens = self.tokens(height, width)
        count = latents.shape[2] // self.transformer.config.patch_size[0] * tokens
        of_tokens = timesteps[:, None].repeat(1, count)
        of_tokens[:, :tokens] = 0
        rest = self.transformer(hidden_states=x, timestep=of_tokens, **inputs)[0][:, :, 1:]
        # the velocity of the straight line to the known frame: all samplers end there, and it depends on no weight
        known = (latents[:, :, :1] - condition) / (timesteps.view(-1, 1, 1, 1, 1) / wan.TIMESTEPS)
        return torch.cat([known, rest.float()], 2)

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        channels, of_latent, *sides = self.latent_shape(height, width, frames)
        embeds = super().embeds_like(length, height, width)
        embeds["condition"] = torch.empty(channels, 1 if self.keeps_frame else of_latent, *sides)
        if self.sees:
            c = self.pipeline.image_encoder.config
            seen = (c.image_size // c.patch_size) ** 2 + 1
            embeds["image_embeds"] = torch.empty(seen, c.hidden_size, dtype=self.dtype)
        return embeds
