"""Language models with random weights: the shapes of hub ids, or a tiny one, without any download.

The language-model twin of shapes.py: `folder_of("Qwen/Qwen2.5-7B-Instruct")` writes a folder with the configuration
that `--plan` has of it, and the quickstart's tokenizer and word problems; within `random_weights()` a model is not read
from its folder but made on this rank's device, in the dtype that it is loaded in. `<shape>/<layers>` has another number
of layers. Responses seldom end before their limit.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import save_file

from phalanx.config.trained_model import LMModelConfig
from phalanx.models.lm import load_folder
from phalanx.tools.plan.blueprint import fetch

WORDS = Path(__file__).resolve().parents[1] / "assets" / "words"
TINY = "tiny_lm"


def is_shape(name: str) -> bool:
    """Whether `name` is a language model's shape rather than one of shapes.py: a hub id or tiny_lm."""
    kind, _ = _split(name)
    return kind == TINY or kind.count("/") == 1


def _split(name: str) -> tuple[str, int]:
    """The shape without `/<layers>`, and their number, or 0."""
    kind, _, layers = name.rpartition("/")
    return (kind, int(layers)) if layers.isdecimal() else (name, 0)


def folder_of(name: str, folder: Path) -> Path:
    """Write the folder of a shape, without weights. Raises ValueError for a hub id whose configuration is unknown."""
    kind, layers = _split(name)
    shutil.copytree(WORDS / "base", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    if kind != TINY:
        ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        settings = json.loads(Path(fetch(kind), "config.json").read_text()) | ends
    if layers:
        settings["num_hidden_layers"] = layers
        if settings.get("layer_types"):
            settings["layer_types"] = settings["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(settings))
    # a folder without weights would be refused; nothing of this file is read
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def random_weights() -> Iterator[None]:
    """Within this context, language models are made with random weights instead of being read."""
    with patch.object(load_folder, "load_class", _loaded):
        yield


def made(kind: Any, path: str, dtype: torch.dtype, attention: str) -> Any:
    """A model of the auto class `kind` and a folder's configuration with transformers' initial weights, the same on
    every rank, on this rank's device.
    """
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = kind.from_config(transformers.AutoConfig.from_pretrained(path), attn_implementation=attention, dtype=dtype)
    return lm.eval()


def _loaded(kind: Any, config: LMModelConfig, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """As phalanx.models.lm.load_folder.load_class."""
    found: dict[str, Any] = {"missing_keys": (), "mismatched_keys": (), "unexpected_keys": ()}
    return made(kind, config.path, dtype, config.attn_implementation), found


def random_reward(completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Rewards in 0..1 that look random, a function of each response."""
    return [sum(map(ord, text)) % 97 / 96 for text in completions]
