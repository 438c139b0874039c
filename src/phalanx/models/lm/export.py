"""Export of a trained language model: a folder for transformers and vLLM, or an adapter for peft."""

import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from phalanx.config.lm import LMModelConfig
from phalanx.engines.loading import loading
from phalanx.models.headers import read_json
from phalanx.models.lm.blocks import load_blocks, mask_tokenizer
from phalanx.models.lm.model import (
    DTYPES,
    OF_WHOLE,
    CausalLM,
    decoder_of,
    load_class,
    load_model,
    name_in_whole,
    places_of,
    read_lora,
    text_part,
)
from phalanx.models.lm.policy import LORA_TARGETS
from phalanx.models.lora import ALL_LINEAR, adapter_config

__all__ = [
    "export_lora",
    "export_model",
    "load_base",
    "lora_targets",
    "read_lora",
    "reads_images",
]  # of a Family, see jobs/export.py

lora_targets = LORA_TARGETS
# files of the base folder that training does not change
_KEPT = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",  # of pictures and videos, in composite models
    "*.py",  # code that auto_map in config.json names; it is not run here
)


def reads_images(names: Collection[str]) -> bool:
    """Whether the names of trained tensors are those of a whole composite model, not those of its text part."""
    return any(OF_WHOLE.match(name) for name in names)


def load_base(config: LMModelConfig, dtype: torch.dtype | None, names: Collection[str]) -> CausalLM:
    """The base folder's model, on the CPU; `dtype` None: in the dtype that training computes in. `names`: those of the
    trained tensors, by which it reads images or not.
    """
    if config.block_size is not None:
        return load_blocks(config, dtype or DTYPES[config.dtype], chunk=1, add_mask=True)[0]
    images = reads_images(names)
    model = load_model(config, dtype or DTYPES[config.dtype], chunk=1, images=images)
    for part in model.vision.parts() if images and model.vision.frozen else ():
        part.requires_grad_(False)
    return model


def export_model(folder: Path, config: LMModelConfig, model: CausalLM) -> None:
    """Write a folder of transformers: the base's, with the trained weights. The parts of a composite model that were
    not trained are as they were.
    """
    lm = model.lm
    if model.places:
        with loading(f"model.path: {config.path!r} does not load"):
            lm, _ = load_class(transformers.AutoModelForImageTextToText, config, model.lm.dtype)
        for inner, outer in model.places.items():
            lm.get_submodule(outer).load_state_dict(model.lm.get_submodule(inner).state_dict())
    lm.generation_config = transformers.GenerationConfig()  # the base's may not pass the check before it is saved
    lm.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # Its own config.json, too: this transformers writes keys that older ones do not read, and they would take their
    # defaults in silence.
    base = _base_folder(config)
    settings = read_json(base / "config.json")
    settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = str(lm.dtype).removeprefix("torch.")
    if config.block_size is not None:
        settings["vocab_size"] = lm.config.vocab_size  # the mask token may have been added
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    _copy_kept(base, folder)
    if config.block_size is not None:
        mask_tokenizer(config, add_mask=True).save_pretrained(folder)


def export_lora(folder: Path, config: LMModelConfig, layers: dict[str, Tensor], rank: int, alpha: float) -> None:
    """Write peft's folder of a LoRA, with the tokenizer; `layers` have peft's names without an adapter."""
    base, tensors = _base_folder(config), {}
    places = _places(base)
    for name, t in layers.items():
        name = name.removeprefix("lm.")
        # that of a model that reads images is whole already
        place = name if OF_WHOLE.match(name) else name_in_whole(name, places)
        tensors[f"base_model.model.{place}"] = t.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    leaves = {name.partition(".lora_")[0].rpartition(".")[2] for name in layers}
    named = config.target_modules
    targets: Sequence[str] | str = named or ()
    if named is None or ALL_LINEAR in named or config.lora_path is not None:  # whose layers may be others
        targets = sorted(leaves)
    if places:  # the vision tower may have layers of the same names
        inside = "|".join(re.escape(name) for name in places.values())
        targets = rf"({inside})\.(.*\.)?({'|'.join(re.escape(target) for target in targets)})"
    adapter_config(rank, alpha, targets, config.path, config.revision).save_pretrained(folder)
    _copy_kept(base, folder)


def _places(base: Path) -> dict[str, str]:
    """Those of the folder's language model in the composite model that has it; see places_of."""
    settings = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    text = text_part(settings)
    if text is None:
        return {}
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(settings)
        if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # trained as a whole
            [place] = [name for name, module in whole.named_modules() if module is decoder_of(whole)]
            return {place: place}
        return places_of(whole, transformers.AutoModelForCausalLM.from_config(text))


def _base_folder(config: LMModelConfig) -> Path:
    """The base model's folder; of a hub id its small files, from the hub or its cache."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    with loading(f"model.path: {config.path!r} does not load"):
        patterns = ["config.json", *_KEPT]
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=patterns))


def _copy_kept(base: Path, folder: Path) -> None:
    for pattern in _KEPT:
        for file in base.glob(pattern):
            shutil.copyfile(file, folder / file.name)
