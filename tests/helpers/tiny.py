"""Tiny diffusers folders of real classes with seeded random weights, which tests train, sample from and export.

Each folder loads with `from_pretrained` of stock diffusers, and generates an image on one CPU thread in about a second.
Noise is added to zero-initialized layers, so that no output, gradient or text embedding is trivially zero.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

QWEN_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
QWEN_PREFIX_TOKENS = 34
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# a VAE for videos: latents with 4 channels and a fourth of the image's sides
VIDEO_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [-0.2, 0.1, 0.3, -0.1],
    "latents_std": [1.5, 0.8, 1.2, 2.0],
}
HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}


def jitter(module: nn.Module, seed: int, std: float = 0.05) -> None:
    """Add seeded noise to every parameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)


def jittered(module: Any, seed: int, std: float = 0.05) -> Any:
    """The module in evaluation mode, with noise in every parameter."""
    jitter(module.eval(), seed, std)
    return module


@contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """Seed the weights of modules that are created in the block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def save(pipeline: Any, folder: str | Path) -> Path:
    """Save a pipeline, and return its folder."""
    pipeline.save_pretrained(folder)
    return Path(folder)


def byte_alphabet() -> list[str]:
    """The 256 characters that represent bytes in the vocabularies of GPT-2, CLIP and Qwen, in a fixed order."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """One token per character, and texts of up to 77 tokens as with the real tokenizer."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def clip_text_encoder(tokenizer: transformers.CLIPTokenizer, hidden: int, seed: int) -> Any:
    """Two layers; embeddings and the pooled projection are `hidden` wide."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return jittered(transformers.CLIPTextModelWithProjection(config), seed)


def clip_text_model(tokenizer: transformers.CLIPTokenizer, hidden: int, seed: int) -> Any:
    """As `clip_text_encoder`, without the projection."""
    return jittered(transformers.CLIPTextModel(clip_text_encoder(tokenizer, hidden, seed).config), seed)


def t5_tokenizer() -> transformers.T5Tokenizer:
    """One token per printable ASCII character."""
    characters = ["▁", *(chr(c) for c in range(33, 127))]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -2.0) for c in characters)]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def t5_encoder(tokenizer: transformers.T5Tokenizer, hidden: int, seed: int) -> Any:
    """Two layers, `hidden` wide."""
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=hidden,
        d_kv=16,
        d_ff=2 * hidden,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return jittered(transformers.T5EncoderModel(config), seed)


def umt5_encoder(tokenizer: transformers.T5Tokenizer, hidden: int, seed: int) -> Any:
    """As `t5_encoder`, with separate position biases in each layer."""
    config = transformers.UMT5Config(**t5_encoder(tokenizer, hidden, seed).config.to_diff_dict())
    return jittered(transformers.UMT5EncoderModel(config), seed)


def byte_tokenizer(merges: list[tuple[str, str]], specials: list[str], length: int = 2048) -> Any:
    """One token per byte, the tokens of `merges`, and `specials`, of which the first is the padding token."""
    tokens = [*byte_alphabet(), *(left + right for left, right in merges), *specials]
    return transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        extra_special_tokens=specials[1:],
        model_max_length=length,
    )


def chat_tokenizer() -> Any:
    """One token per byte, and a chat template like Qwen3's: a user's message, and the beginning of the answer."""
    tokenizer = byte_tokenizer([], CHAT_TOKENS)
    message = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}<|im_start|>assistant\n"
    return tokenizer


def qwen_tokenizer() -> Any:
    """Bytes, and merges for the words of the prompt template, whose prefix has 34 tokens as with the real tokenizer."""
    prefix = QWEN_PREFIX.replace("<|im_start|>", "\n").replace("<|im_end|>", "\n").replace(",", "").replace(":", "")
    words = [line.replace(" ", " \u0120").split(" ") for line in prefix.split("\n") if line]
    merges: list[tuple[str, str]] = []
    for word in [w for line in words for w in line] + ["assistant"]:
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    tokenizer = byte_tokenizer(list(dict.fromkeys(merges)), CHAT_TOKENS)
    assert len(tokenizer(QWEN_PREFIX).input_ids) == QWEN_PREFIX_TOKENS
    return tokenizer


def qwen_encoder(tokenizer: Any, seed: int, **ids: int) -> Any:
    """Two layers, 64 wide, and a vision tower of one layer; `ids` are the tokens of images and videos."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": tokenizer.model_max_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        **ids,
    )
    return jittered(transformers.Qwen2_5_VLForConditionalGeneration(config), seed)


def kl_vae(seed: int) -> Any:
    """Latents with 4 channels and a fourth of the image's sides."""
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return jittered(vae, seed)


def tiny_sd3(folder: str | Path, t5: bool = False, seed: int = 0) -> Path:
    """Save a tiny StableDiffusion3Pipeline: 32 px by default, latents [4, 8, 8], 2 blocks of 4 heads x 16."""
    with drawn_by(seed):
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=64,
            caption_projection_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
            **HEADS,
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = kl_vae(seed + 2)
        tokenizers = clip_tokenizer(), clip_tokenizer()
        encoders = [clip_text_encoder(t, hidden=32, seed=seed + 3 + i) for i, t in enumerate(tokenizers)]
        tokenizer_3 = t5_tokenizer() if t5 else None
        encoder_3 = t5_encoder(tokenizer_3, hidden=64, seed=seed + 5) if tokenizer_3 is not None else None
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=encoder_3,
        tokenizer_3=tokenizer_3,
    )
    return save(pipeline, folder)


def tiny_flux(folder: str | Path, guidance_embeds: bool = True, kontext: bool = False, seed: int = 0) -> Path:
    """Save a tiny FluxPipeline like FLUX.1-dev or (no `guidance_embeds`) schnell, or (`kontext`) FluxKontextPipeline:
    8 px per packed token, latents [4, h / 4, w / 4], 2 blocks of two streams and 2 of one, of 4 heads x 16.
    """
    with drawn_by(seed):
        transformer = diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=(4, 6, 6),
            **HEADS,
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = kl_vae(seed + 2)
        tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
        encoder = clip_text_model(tokenizer, hidden=32, seed=seed + 3)
        encoder_2 = t5_encoder(tokenizer_2, hidden=64, seed=seed + 4)
    # FLUX.1-dev's; schnell's is not shifted
    shift = {"shift": 3.0, "use_dynamic_shifting": True} if guidance_embeds else {"shift": 1.0}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        max_image_seq_len=4096, max_shift=1.15, base_shift=0.5, **shift
    )
    kind = diffusers.FluxKontextPipeline if kontext else diffusers.FluxPipeline
    pipeline = kind(
        transformer=transformer,
        scheduler=scheduler,
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer_2,
    )
    return save(pipeline, folder)


def tiny_z_image(folder: str | Path, seed: int = 0) -> Path:
    """Save a tiny ZImagePipeline: 8 px per token, latents [4, h / 4, w / 4], 2 + 1 + 1 blocks of 4 heads x 16."""
    tokenizer = chat_tokenizer()
    with drawn_by(seed):
        transformer = diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=32,
            axes_dims=[4, 6, 6],
            axes_lens=[128, 32, 32],
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = kl_vae(seed + 2)
        config = transformers.Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.pad_token_id,
        )
        encoder = jittered(transformers.Qwen3Model(config), seed + 3)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = {"vae": vae, "text_encoder": encoder, "tokenizer": tokenizer}
    return save(diffusers.ZImagePipeline(transformer=transformer, scheduler=scheduler, **parts), folder)


def tiny_wan(folder: str | Path, multistep: bool = True, per_token: bool = False, seed: int = 0) -> Path:
    """Save a tiny WanPipeline: 8 px per token, latents [4, (f - 1) / 4 + 1, h / 4, w / 4], 2 blocks of 4 heads x 16.

    `multistep`: with the scheduler of the published folders. `per_token`: like Wan 2.2 TI2V-5B, whose VAE patchifies:
    16 px per token, latents [4, (f - 1) / 4 + 1, h / 8, w / 8].
    """
    tokenizer = t5_tokenizer()
    with drawn_by(seed):
        transformer = diffusers.WanTransformer3DModel(
            in_channels=4,
            out_channels=4,
            text_dim=64,
            freq_dim=32,
            ffn_dim=96,
            num_layers=2,
            rope_max_seq_len=32,
            **HEADS,
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = diffusers.AutoencoderKLWan(
            **VIDEO_VAE,
            temperal_downsample=[True, True],
            scale_factor_temporal=4,
            scale_factor_spatial=8 if per_token else 4,
            **({"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12} if per_token else {}),
        )
        jittered(vae, seed + 2)
        encoder = umt5_encoder(tokenizer, hidden=64, seed=seed + 3)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    if multistep:
        scheduler = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
        )
    parts = {"vae": vae, "text_encoder": encoder, "tokenizer": tokenizer, "expand_timesteps": per_token}
    return save(diffusers.WanPipeline(transformer=transformer, scheduler=scheduler, **parts), folder)


def tiny_qwen_image(folder: str | Path, seed: int = 0) -> Path:
    """Save a tiny QwenImagePipeline: 8 px per packed token, latents [4, h / 4, w / 4], 2 blocks of 4 heads x 16."""
    tokenizer = qwen_tokenizer()
    with drawn_by(seed):
        transformer = diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=64,
            axes_dims_rope=(4, 6, 6),
            **HEADS,
        )
        jittered(transformer, seed + 1, std=0.1)
        vae = diffusers.AutoencoderKLQwenImage(**VIDEO_VAE, temperal_downsample=[False, True])
        jittered(vae, seed + 2)
        # ids beyond the vocabulary, because no image ever enters the encoder
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        encoder = qwen_encoder(tokenizer, seed + 3, **{name: len(tokenizer) + 1 + i for i, name in enumerate(names)})
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )
    parts = {"vae": vae, "text_encoder": encoder, "tokenizer": tokenizer}
    return save(diffusers.QwenImagePipeline(transformer=transformer, scheduler=scheduler, **parts), folder)


def load_pipeline(folder: str | Path, **parts: Any) -> Any:
    """Load a folder with stock diffusers in float32, without a progress bar; `parts` replace components.

    SD3 folders without T5 list it as null, but diffusers needs it as an argument again. FLUX.2's processor would need
    torchvision.
    """
    index = json.loads((Path(folder) / "model_index.json").read_text())
    absent = {name: None for name in ("text_encoder_3", "tokenizer_3") if index.get(name) == [None, None]}
    processor = index.get("tokenizer") == ["transformers", "PixtralProcessor"]
    absent |= {"tokenizer": None} if processor else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **absent, **parts)
    if processor:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
        pipeline.register_modules(tokenizer=tokenizer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def halved(folder: Path, to: Path) -> Path:
    """A copy of a model folder with all tensors in bfloat16."""
    shutil.copytree(folder, to)
    for file in to.rglob("*.safetensors"):
        save_file({name: t.to(torch.bfloat16) for name, t in load_file(file).items()}, file, {"format": "pt"})
    return to
