"""A tiny HunyuanVideo 1.5 folder of diffusers' real classes."""

from pathlib import Path
from typing import Any

import diffusers
import transformers
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.helpers.tiny import HEADS, drawn_by, jittered, save
from tests.helpers.tiny_edit import tokenizer

PREFIX_TOKENS = 108  # tokens of the template's prefix, which the pipeline drops
MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATE = "{% for m in messages %}" + MESSAGE + "{% endfor %}<|im_start|>assistant\n"


def text_encoder(words: Any, seed: int) -> Any:
    """Four layers, 64 wide; the pipeline uses the output of the second one."""
    config = transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=words.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        bos_token_id=words.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=words.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=words.pad_token_id,
    )
    return jittered(transformers.Qwen2_5_VLTextModel(config), seed)


def byt5_encoder(words: transformers.ByT5Tokenizer, seed: int) -> Any:
    """Two layers, 32 wide."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=len(words), feed_forward_proj="gated-gelu", pad_token_id=0, **sizes)
    return jittered(transformers.T5EncoderModel(config), seed)


def tiny_hunyuan_video_15(folder: str | Path, seed: int = 0, use_meanflow: bool = False, images: bool = False) -> Path:
    """Save a tiny HunyuanVideo15Pipeline, or (`images`) the image-to-video one: 4 px per token, latents
    [4, (f - 1) / 4 + 1, h / 4, w / 4], 2 blocks of 4 heads x 16.
    """
    with drawn_by(seed):
        transformer = diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=64,
            text_embed_2_dim=32,
            image_embed_dim=32,
            rope_axes_dim=(4, 6, 6),
            target_size=32,
            task_type="t2v",
            use_meanflow=use_meanflow,
            **HEADS,
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        )
        jittered(vae, seed + 2)
        empty = diffusers.HunyuanVideo15Pipeline(*(None,) * 2, transformer, vae, *(None,) * 4)
        prefix = f"<|im_start|>system\n{empty.system_message}<|im_end|>\n<|im_start|>user\n"
        words, glyphs = tokenizer(prefix, PREFIX_TOKENS), transformers.ByT5Tokenizer()
        words.chat_template = TEMPLATE
        encoders = text_encoder(words, seed + 3), byt5_encoder(glyphs, seed + 4)
    kind, extra = diffusers.HunyuanVideo15Pipeline, {}
    if images:
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.SiglipVisionConfig(image_size=16, patch_size=8, **vision)
        kind = diffusers.HunyuanVideo15ImageToVideoPipeline
        with drawn_by(seed + 5):
            extra["image_encoder"] = jittered(transformers.SiglipVisionModel(config), seed + 5)
        extra["feature_extractor"] = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    pipeline = kind(
        **extra,
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder=encoders[0],
        tokenizer=words,
        text_encoder_2=encoders[1],
        tokenizer_2=glyphs,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )
    index = save(pipeline, folder) / "model_index.json"
    index.write_text(index.read_text().replace("SiglipImageProcessorPil", "SiglipImageProcessor"))
    return Path(folder)
