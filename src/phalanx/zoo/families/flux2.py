"""FLUX.2 dev: hidden states of Mistral as text embeddings, and a shift by image size and number of steps."""

from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.attention import JOINT_ATTENTION
from phalanx.models.flow.family import Embeds, Instruction, PackedModel, to_pixels
from phalanx.models.flow.folder import base_folder, check_tokenizers
from phalanx.models.flow.references import References


class Model(PackedModel):
    """FLUX.2: latents [N, 128, H/16, W/16], a token per position; they are packed as channels, not as a sequence.

    `rollout.guidance_scale` is an input of dev, which has no classifier-free guidance. With an `image_column` (see
    flux2_edit.py), the latents of the image to edit, `embeds["reference"]` [N, 128, h, w], follow those of the sampled
    image in every forward pass, without noise.
    """

    pipeline_class = "Flux2Pipeline"
    transformer_class = Flux2Transformer2DModel
    guidance_key = "true_cfg_scale"
    embedded_guidance_key: str | None = "guidance_scale"
    distilled = True
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    # the layers of Flow-Factory's recipes: attention and the MLPs of both streams; in single-stream blocks, the fused
    # projection of attention and MLP
    lora_targets = (
        *JOINT_ATTENTION, "attn.to_qkv_mlp_proj",
        "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out",
    )  # fmt: skip

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        self.references = References(config.reference_size, self.pipeline.vae_scale_factor * 2)

    def components(self, path: str) -> dict[str, Any]:
        """None for the folder's processor, whose image processor requires torchvision; see `load`."""
        return {"tokenizer": None}

    def load(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().load(config, dtype, weights_dtype)
        if self.pipeline.tokenizer is None:  # texts only need the processor's tokenizer
            path = str(base_folder(config))
            tokenizer = AutoTokenizer.from_pretrained(path, subfolder="tokenizer", trust_remote_code=False)
            self.pipeline.register_modules(tokenizer=tokenizer)
            check_tokenizers(path, self.pipeline.components)

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the chat template with the text and the system message."""
        # imported here, because a job imports all families, and this module takes a twentieth of the total import time
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        tokenizer, chats = self.pipeline.tokenizer, format_input(texts, self.pipeline.system_message)
        return tokenizer, tokenizer.apply_chat_template(chats, return_dict=True)["input_ids"], max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        # the padding stays, because the transformer attends to it, as in the stock pipeline
        embeds, _ = self.pipeline.encode_prompt(texts, device=device, max_sequence_length=max_length)
        # cloned: a view would keep the whole batch in memory
        return [{"prompt_embeds": text.clone()} for text in embeds.cpu()]

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """`prompt_embeds` of the text without the image, and `reference` [C, h, w], shared by texts about an image."""

        def encode_image(image: Image.Image, height: int, width: int) -> Tensor:
            pixels = self.pipeline.image_processor.preprocess(image, height, width, resize_mode="crop")
            return self.pipeline._encode_vae_image(pixels.to(device, self.dtype), None)[0].cpu()

        (embeds,) = self.encode([instruction.text], device, max_length)
        return embeds | {"reference": self.references.latents(instruction, encode_image)}

    def dynamic_shift(self, tokens: int, num_inference_steps: int) -> float:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(tokens, num_inference_steps)

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        count = self.tokens(height, width)
        if self.image_column is not None:
            count += self.tokens(*self.references.size(height, width))
        return {f"an image of {height} x {width}": count, "data.max_prompt_length": max_length}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        if self.image_column is not None:
            self.references.size(height, width)
        return (self.transformer.config.in_channels, *self.grid(height, width))

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        text, tokens = embeds["prompt_embeds"], latents.to(self.dtype).flatten(2).mT
        count = tokens.shape[1]
        with latents.device:  # created there, because a copy from the host would wait for the device
            image_ids = self.pipeline._prepare_latent_ids(latents[:1])
            text_ids = self.pipeline._prepare_text_ids(text[:1])
            if self.image_column is not None:
                reference = embeds["reference"]
                tokens = torch.cat([tokens, reference.flatten(2).mT], 1)
                image_ids = torch.cat([image_ids, self.pipeline._prepare_image_ids([reference[:1]])], 1)
        out = self.transformer(
            hidden_states=tokens,
            timestep=timesteps.to(self.dtype) / 1000,  # in this order, for the same rounding as in the pipeline
            guidance=embeds["guidance"] if self.embedded_guidance_key is not None else None,
            encoder_hidden_states=text,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return out[:, :count].mT.unflatten(2, latents.shape[2:])

    def latent_statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [C, 1, 1] of the VAE's patchified latents."""
        bn = self.vae.bn
        std = torch.sqrt(bn.running_var + self.vae.config.batch_norm_eps)
        return bn.running_mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        mean, std = self.latent_statistics(latents.device)
        unscaled = self.pipeline._unpatchify_latents(latents * std + mean).to(self.vae.dtype)
        return to_pixels(self.vae.decode(unscaled, return_dict=False)[0])

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, std = self.latent_statistics(images.device)
        return (self.pipeline._patchify_latents(self.posterior(images, generator)) - mean) / std

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        c = self.transformer.config
        shapes: dict[str, tuple[int, ...]] = {"prompt_embeds": (length, c.joint_attention_dim)}
        if self.image_column is not None:
            shapes["reference"] = (c.in_channels, *self.grid(*self.references.size(height, width)))
        return {name: torch.empty(shape, dtype=self.dtype) for name, shape in shapes.items()}
