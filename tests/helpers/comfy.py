"""A reader of LoRA files with ComfyUI's rules: a layer's prefix, lora_B lora_A, and alpha / rank if alpha is set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def diffusers_name(layer: str) -> str:
    """The prefix that ComfyUI expects for models whose diffusers names it supports: SD3, FLUX, Qwen-Image."""
    return f"transformer.{layer}"


def wan_name(layer: str) -> str:
    """The prefix of an attention layer of Wan, for which ComfyUI supports only the model's own names."""
    for name, native in (("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_out.0", "o"), ("to_", "")):
        layer = layer.replace(name, native)
    return f"diffusion_model.{layer}"


def ltx2_name(layer: str) -> str:
    """The prefix of a layer of LTX-2, for which ComfyUI supports only the model's own names."""
    native = {
        "proj_in": "patchify_proj",
        "audio_proj_in": "audio_patchify_proj",
        "time_embed": "adaln_single",
        "audio_time_embed": "audio_adaln_single",
        "prompt_adaln": "prompt_adaln_single",
        "audio_prompt_adaln": "audio_prompt_adaln_single",
        "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
        "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
        "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
        "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    }
    head, *rest = layer.split(".")
    return ".".join(["diffusion_model", native.get(head, head), *rest])


@torch.no_grad()
def add_as_comfy(
    transformer: Any, folder: Path, prefix: Callable[[str], str], file: str = "pytorch_lora_weights.safetensors"
) -> None:
    """Add a LoRA to the weights of diffusers' transformer; raises KeyError for a key that ComfyUI would not load."""
    tensors = load_file(folder / file)
    layers = {prefix(name): part for name, part in transformer.named_modules() if isinstance(part, torch.nn.Linear)}
    for key in {name.partition(".lora_")[0] for name in tensors}:
        down, up = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
        scale = float(tensors[f"{key}.alpha"]) / len(down) if f"{key}.alpha" in tensors else 1.0
        layers[key].weight += scale * (up.float() @ down.float())
