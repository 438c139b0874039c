"""Tiny FLUX.2 folders of real classes: dev and Klein."""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from tests.helpers.tiny import CHAT_TOKENS, HEADS, byte_tokenizer, chat_tokenizer, drawn_by, jittered, save

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
SHIFT = {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15, "shift": 3.0}


def message_tokenizer() -> Any:
    """One token per byte, and one per word of the system message, with which a chat begins as in Mistral's template."""
    words = dict.fromkeys(re.findall(r"[A-Za-z]+", SYSTEM_MESSAGE))
    merges = []
    for word in words:
        spaced = word if word == "You" else f"\u0120{word}"
        merges += [(spaced[:i], spaced[i]) for i in range(1, len(spaced))]
    tokenizer = byte_tokenizer(list(dict.fromkeys(merges)), CHAT_TOKENS)
    texts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>" + texts + "<|im_end|>{% endfor %}"
    return tokenizer


def mistral(tokenizer: Any, seed: int) -> Any:
    """30 layers, of which the pipeline uses three, and a vision tower of one layer."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 30, **TEXT, **ids},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
        },
        image_token_index=len(tokenizer) - 1,  # no image ever enters the encoder
    )
    return jittered(transformers.Mistral3ForConditionalGeneration(config), seed)


def qwen3(tokenizer: Any, seed: int) -> Any:
    """27 layers, of which the pipeline uses three."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=27, **TEXT, **ids)
    return jittered(transformers.Qwen3ForCausalLM(config), seed)


def patch_vae(seed: int) -> Any:
    """Latents with 4 channels and a fourth of the image's sides, and statistics of their patches of 2 x 2."""
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    generator = torch.Generator().manual_seed(seed)
    vae.bn.running_mean.copy_(torch.randn(16, generator=generator) * 0.3)
    vae.bn.running_var.copy_(0.5 + torch.rand(16, generator=generator))
    return jittered(vae, seed)


def tiny_flux2(folder: Path, klein: bool = False, distilled: bool = False, seed: int = 0) -> Path:
    """Save a tiny Flux2Pipeline or (`klein`) Flux2KleinPipeline: 8 px per token, latents [16, h / 8, w / 8], 2 blocks
    of two streams and 2 of one, of 4 heads x 16.
    """
    tokenizer = chat_tokenizer() if klein else message_tokenizer()
    with drawn_by(seed):
        transformer = diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            joint_attention_dim=48,
            timestep_guidance_channels=32,
            mlp_ratio=2.0,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
            **HEADS,
        )
        jittered(transformer, seed + 1, std=0.1)
        encoder = (qwen3 if klein else mistral)(tokenizer, seed + 3)
    parts = {
        "transformer": transformer,
        "vae": patch_vae(seed + 2),
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **SHIFT),
    }
    if klein:
        return save(diffusers.Flux2KleinPipeline(**parts, is_distilled=distilled), folder)
    save(diffusers.Flux2Pipeline(**parts), folder)
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    # as published; without torchvision there is no processor to save
    file.write_text(json.dumps(index | {"tokenizer": ["transformers", "PixtralProcessor"]}))
    return folder


def tiny_flux2_klein(folder: Path, distilled: bool = False) -> Path:
    """Save a tiny FLUX.2 Klein base, or (`distilled`) Klein."""
    return tiny_flux2(folder, klein=True, distilled=distilled)
