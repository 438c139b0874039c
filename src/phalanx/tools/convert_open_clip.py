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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.exit import show_mistake
from phalanx.zoo.rewards.image._clip import load_part
from phalanx.zoo.rewards.image.aesthetic import read_published

BASE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

# Matrices that open_clip stores as [in, out], because it multiplies by them from the right.
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
# Parts of other names, which are replaced one after the other.
_RENAMED = {
    "token_embedding": "embeddings.token_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "class_embedding": "embeddings.class_embedding",
    "conv1": "embeddings.patch_embedding",
    "ln_final": "final_layer_norm",
    "ln_pre": "pre_layrnorm",
    "ln_post": "post_layernorm",
    "transformer.resblocks": "encoder.layers",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    ".attn.": ".self_attn.",
    "c_fc": "fc1",
    "c_proj": "fc2",
}


def convert(source: str | Path, target: str | Path, base: str = BASE) -> Path:
    """Write the folder `target`; raises ValueError if `source` does not have the architecture of `base`."""
    from safetensors.torch import save
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, CLIPModel

    folder = Path(target).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give another DST")
    weights = read_published(str(source), str(source))
    config = load_part(AutoConfig, base, "--base")
    if config.model_type != "clip":
        raise ValueError(f"--base {base} is a model of type {config.model_type}; expected clip")
    with torch.device("meta"):
        expected = CLIPModel(config).state_dict()
    try:
        state = _clip_weights(weights, expected)
    except ValueError as error:
        raise ValueError(
            f"{source} {error}; expected open_clip's weights of the architecture of --base {base}"
        ) from None
    parts = [config, load_part(AutoTokenizer, base, "--base"), load_part(AutoImageProcessor, base, "--base")]
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        part.save_pretrained(folder)
    # not by save_file, whose files only their owner can read
    (folder / "model.safetensors").write_bytes(save(state, {"format": "pt"}))
    return folder


def _clip_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of CLIPModel; raises ValueError unless they are the expected ones."""
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        for ours, part in _parts(name, value):
            if ours not in expected:
                raise ValueError(f"has {name}")
            if part.shape != expected[ours].shape:
                raise ValueError(f"has {name} of {list(part.shape)} rather than {list(expected[ours].shape)}")
            state[ours] = part
    for missing in sorted(expected.keys() - state.keys()):
        raise ValueError(f"has nothing for {missing}")
    return state


def _parts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights of CLIPModel, with their names, that are in one of open_clip's."""
    if name in _TRANSPOSED:
        yield _TRANSPOSED[name], value.T.contiguous()
        return
    tower, inner = "vision_model" if name.startswith("visual.") else "text_model", name.removeprefix("visual.")
    for theirs, ours in _RENAMED.items():
        inner = inner.replace(theirs, ours)
    fused = re.fullmatch(r"(.+\.)in_proj_(weight|bias)", inner)
    if fused is None:
        yield name if name == "logit_scale" else f"{tower}.{inner}", value
        return
    for part, weight in zip("qkv", value.chunk(3), strict=True):
        yield f"{tower}.{fused[1]}{part}_proj.{fused[2]}", weight.clone()


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
        return show_mistake(error)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
