"""Convert an open_clip CLIP model to a CLIPModel of transformers.

    python -m phalanx.tools.convert_open_clip SRC DST [--base MODEL]

SRC is a `.safetensors` file with open_clip's names, such as the weights of HPS v2.1. `--base` is the folder or hub id
of a CLIP with the same architecture: DST gets its configuration, tokenizer and preprocessing, and the weights of SRC in
their own dtype. DST can then be loaded as any CLIPModel. A base with a different activation (gelu or quick_gelu) would
silently change the embeddings: open_clip's ViT-H-14 uses gelu, and so does the default base.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BASE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

_TO_SAFETENSORS = (
    "python -c \"import torch, safetensors.torch as s; d = torch.load('{name}', weights_only=True); "
    "s.save_file({{k: v.clone() for k, v in d.get('state_dict', d).items()}}, '{stem}.safetensors')\""
)
# Matrices that open_clip stores as [in, out], because it multiplies by them from the right.
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_TOP = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)(weight|bias)")
_IN_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}


def convert(source: str | Path, target: str | Path, base: str = BASE) -> Path:
    """Write the folder `target`; raises ValueError if `source` does not have the architecture of `base`."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, CLIPModel

    folder = Path(target).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give another DST")
    state = translate(_read_weights(Path(source).expanduser()), str(source))
    config = _load_base(AutoConfig, base)
    if config.model_type != "clip":
        raise ValueError(f"--base {base} is a model of type {config.model_type}; expected clip")
    parts = [config, _load_base(AutoTokenizer, base), _load_base(AutoImageProcessor, base)]
    with torch.device("meta"):
        difference = _first_difference(state, CLIPModel(config).state_dict())
    if difference is not None:
        raise ValueError(
            f"{source} is another CLIP than --base {base}: {difference}; give the base of its architecture"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        part.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def translate(state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Translate weights from open_clip's names to those of CLIPModel; raises ValueError for an unknown name."""
    translated: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in _TOP:
            translated[_TOP[name]] = value
            continue
        if name in _TRANSPOSED:
            translated[_TRANSPOSED[name]] = value.T.contiguous()
            continue
        block = _BLOCK.fullmatch(name)
        if block is None or block[3] not in ("attn.in_proj_", *_IN_BLOCK):
            raise ValueError(f"{source} has {name}, which is not a weight of open_clip's CLIP")
        tower = "vision_model" if block[1] else "text_model"
        layer = f"{tower}.encoder.layers.{block[2]}"
        if block[3] == "attn.in_proj_":
            for part, weight in zip("qkv", value.chunk(3), strict=True):
                translated[f"{layer}.self_attn.{part}_proj.{block[4]}"] = weight.clone()
        else:
            translated[f"{layer}.{_IN_BLOCK[block[3]]}{block[4]}"] = value
    return translated


def _load_base(cls: Any, base: str) -> Any:
    path = Path(base).expanduser()
    try:
        return cls.from_pretrained(str(path) if path.is_dir() else base, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--base {base} does not load: {reason}") from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        command = _TO_SAFETENSORS.format(name=path, stem=path.with_suffix(""))
        raise ValueError(f"{path} is a pickle, which can run code; convert it once: {command}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected a .safetensors file with the weights of open_clip's CLIP")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _first_difference(state: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """The first difference from the expected weights, None if there is none."""
    for name in sorted(expected.keys() - state.keys()):
        return f"no weights for {name}"
    for name in sorted(state.keys() - expected.keys()):
        return f"weights for {name}, which it does not have"
    for name, value in state.items():
        if value.shape != expected[name].shape:
            return f"{name} is {list(value.shape)} rather than {list(expected[name].shape)}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for a wrong source, base or target)."""
    parser = argparse.ArgumentParser(
        prog="python -m phalanx.tools.convert_open_clip",
        description="Convert an open_clip CLIP model to a transformers folder.",
    )
    parser.add_argument("source", metavar="SRC", help="a .safetensors file with open_clip's names")
    parser.add_argument("target", metavar="DST", help="the folder to write")
    parser.add_argument(
        "--base", default=BASE, metavar="MODEL", help=f"folder or hub id of a CLIP of that architecture ({BASE})"
    )
    arguments = parser.parse_args(argv)
    try:
        folder = convert(arguments.source, arguments.target, arguments.base)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
