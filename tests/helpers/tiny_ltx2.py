"""A tiny LTX-2 folder of diffusers' real classes."""

from pathlib import Path
from typing import Any

import diffusers
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from tokenizers.processors import TemplateProcessing

from tests.helpers.tiny import drawn_by, jittered, save

REGISTERS = 16  # learned tokens that texts are padded with
TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LAYERS = 2


def gemma_tokenizer() -> Any:
    """A token per printable ASCII character, after a token for the beginning."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", *(chr(c) for c in range(33, 127))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = transformers.GemmaTokenizer(vocab=vocab, merges=[], model_max_length=1024)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def gemma3(tokenizer: Any, seed: int) -> Any:
    """Two layers, whose hidden states the pipeline all uses, and a vision tower of one layer."""
    ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    text = {"vocab_size": len(tokenizer), "num_hidden_layers": LAYERS, "max_position_embeddings": 1024, **TEXT, **ids}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=len(tokenizer) - 1,  # no image ever enters the encoder
    )
    return jittered(transformers.Gemma3ForConditionalGeneration(config), seed)


def video_vae(seed: int, noise: bool) -> Any:
    """Latents with 8 channels, a fourth of the sides and half of the frames."""
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(16,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(16,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(noise, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(True,),
        upsample_factor=(2,),
        patch_size=2,
    )
    jittered(vae, seed)
    vae.latents_mean.copy_(vae.latents_mean + 0.1)
    vae.latents_std.copy_(vae.latents_std * 1.5)
    return vae


def tiny_ltx2(folder: str | Path, seed: int = 0, newer: bool = True, noise: bool = False) -> Path:
    """Save a tiny LTX2Pipeline: 4 px per token, (f - 1) / 2 + 1 latent frames of 8 channels, 25 tokens of sound for 24
    frames, 2 blocks of 4 heads x 16. `newer`: as LTX-2.3, whose connectors project the text, otherwise as LTX-2.
    `noise`: the VAE's decoder injects noise.
    """
    with drawn_by(seed):
        transformer = diffusers.LTX2VideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=16,
            cross_attention_dim=64,
            vae_scale_factors=(2, 4, 4),
            base_height=64,
            base_width=64,
            audio_in_channels=8,
            audio_out_channels=8,
            audio_num_attention_heads=4,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=32,
            num_layers=2,
            caption_channels=32,
            rope_type="split",
            use_prompt_embeddings=not newer,
            **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), newer),
        )
        jittered(transformer, seed + 1, std=0.1)
        heads = {
            "video_connector_num_attention_heads": 4 if newer else 2,
            "video_connector_attention_head_dim": 16,
            "audio_connector_num_attention_heads": 2,
            "audio_connector_attention_head_dim": 16,
        }
        connectors = LTX2TextConnectors(
            caption_channels=32,
            text_proj_in_factor=LAYERS + 1,
            video_connector_num_layers=1,
            audio_connector_num_layers=1,
            video_connector_num_learnable_registers=REGISTERS,
            audio_connector_num_learnable_registers=REGISTERS,
            per_modality_projections=newer,
            video_hidden_dim=64,
            audio_hidden_dim=32,
            rope_type="split",
            **heads,
        )
        jittered(connectors, seed + 2)
        audio_vae = diffusers.AutoencoderKLLTX2Audio(
            base_channels=8, ch_mult=(1, 2, 2), num_res_blocks=1, resolution=16, latent_channels=2, mel_bins=16
        )
        vocoder = LTX2Vocoder(in_channels=32, hidden_channels=8, upsample_kernel_sizes=[4], upsample_factors=[2])
        tokenizer = gemma_tokenizer()
        parts = {"tokenizer": tokenizer, "text_encoder": gemma3(tokenizer, seed + 3), "vae": video_vae(seed + 4, noise)}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    sound = {"audio_vae": jittered(audio_vae, seed + 5), "vocoder": jittered(vocoder, seed + 6)}
    return save(
        diffusers.LTX2Pipeline(transformer=transformer, connectors=connectors, scheduler=scheduler, **parts, **sound),
        folder,
    )
