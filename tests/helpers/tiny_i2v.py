"""Tiny folders of Wan image to video, with diffusers' real classes, and data for them."""

from pathlib import Path
from typing import Any

import diffusers
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.helpers.tiny import HEADS, drawn_by, jittered, load_pipeline, save, tiny_wan


def wan_transformer(seed: int, **keys: Any) -> diffusers.WanTransformer3DModel:
    """The transformer of `tiny_wan` with other settings."""
    sizes = {"text_dim": 64, "freq_dim": 32, "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32, "out_channels": 4}
    with drawn_by(seed):
        transformer = diffusers.WanTransformer3DModel(**sizes | HEADS | keys)
        jittered(transformer, seed + 1, std=0.1)
    return transformer


def tiny_wan_i2v(folder: Path, *, sees: bool = True, two: bool = False, multistep: bool = False, seed: int = 0) -> Path:
    """Save a tiny WanImageToVideoPipeline: as `tiny_wan`, with 4 + 4 channels for a mask and the first frame's latents.
    `sees`: with CLIP's features of the image, as Wan 2.1. `two`: with a transformer_2 below level 0.8, as Wan 2.2 A14B.
    """
    base = load_pipeline(tiny_wan(folder.with_name(f"{folder.name}_base"), multistep=multistep, seed=seed))
    seen: dict[str, Any] = {"image_dim": 32, "added_kv_proj_dim": 64} if sees else {}
    parts = {name: base.components[name] for name in ("vae", "text_encoder", "tokenizer", "scheduler")}
    parts["transformer"] = wan_transformer(seed + 10, in_channels=12, **seen)
    if sees:
        config = transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
            hidden_act="gelu",
        )
        with drawn_by(seed + 11):
            parts["image_encoder"] = jittered(transformers.CLIPVisionModel(config), seed + 12)
        parts["image_processor"] = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    if two:
        parts |= {"transformer_2": wan_transformer(seed + 20, in_channels=12), "boundary_ratio": 0.8}
    save(diffusers.WanImageToVideoPipeline(**parts), folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"CLIPImageProcessorPil"', '"CLIPImageProcessor"'))
    return folder


def tiny_wan_a14b(folder: Path, *, multistep: bool = False, boundary: float = 0.8, seed: int = 0) -> Path:
    """Save a tiny WanPipeline like Wan 2.2 A14B's: as `tiny_wan`, with a transformer_2 for levels below `boundary`."""
    base = load_pipeline(tiny_wan(folder.with_name(f"{folder.name}_base"), multistep=multistep, seed=seed))
    second = wan_transformer(seed + 20, in_channels=4)
    parts = {name: base.components[name] for name in ("vae", "text_encoder", "tokenizer", "scheduler", "transformer")}
    return save(diffusers.WanPipeline(**parts, transformer_2=second, boundary_ratio=boundary), folder)


def load_i2v_pipeline(folder: Path) -> Any:
    """Load a folder with stock diffusers' image-to-video pipeline, in float32 and without torchvision."""
    processor = None
    if (folder / "image_processor").is_dir():
        processor = CLIPImageProcessorPil.from_pretrained(folder, subfolder="image_processor")
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(folder, image_processor=processor)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
