"""A tiny Qwen-Image 2.1 folder of diffusers' real classes."""

from pathlib import Path
from typing import Any

import diffusers
import transformers

from tests.helpers.tiny import HEADS, drawn_by, jittered, load_pipeline, save
from tests.helpers.tiny_edit import tokenizer
from tests.helpers.tiny_vision import QWEN_CHAT

SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
SYSTEM_TOKENS = 12  # tokens of SYSTEM, which the pipeline drops; a word is one token here
LATENT = 4  # channels of the latents


def text_encoder(words: Any, seed: int) -> Any:
    """Two layers, 64 wide, and a vision tower of one layer; the final norm, which is not used, is not 1."""
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": words.model_max_length,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": words.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": words.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=len(words) + 1,  # no video ever enters the encoder
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )
    return jittered(transformers.Qwen3VLForConditionalGeneration(config), seed)


def tiny_qwen_image_21(folder: str | Path, seed: int = 0) -> Path:
    """Save a tiny QwenImage21Pipeline: 16 px per token, latents with 4 channels, 2 blocks of 4 heads x 16."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from phalanx.zoo.families.qwen_image_21 import PromptProcessor  # older diffusers do not have the model

    words = tokenizer(SYSTEM, SYSTEM_TOKENS)
    with drawn_by(seed):
        transformer = diffusers.QwenImage21Transformer2DModel(
            in_channels=LATENT, out_channels=LATENT, num_layers=2, context_in_dim=64, axes_dims_rope=(4, 6, 6), **HEADS
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=8,
            z_dim=LATENT,
            dim_mult=[1, 1, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=[-0.2, 0.1, 0.3, -0.1],
            latents_std=[1.5, 0.8, 1.2, 2.0],
        )
        jittered(vae, seed + 2)
        encoder = text_encoder(words, seed + 3)
    pixels = Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64})
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02, use_dynamic_shifting=True
    )
    pipeline = diffusers.QwenImage21Pipeline(
        transformer=transformer,
        vae=vae,
        scheduler=scheduler,
        text_encoder=encoder,
        processor=PromptProcessor(pixels, words, chat_template=QWEN_CHAT),
    )
    return save(pipeline, folder)


def load_21_pipeline(folder: Path) -> Any:
    """Load a folder with stock diffusers in float32."""
    from phalanx.zoo.families.qwen_image_21 import PromptProcessor

    return load_pipeline(folder, processor=PromptProcessor.from_pretrained(folder, subfolder="processor"))
