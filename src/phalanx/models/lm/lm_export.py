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

from phalanx.config.trained_model import LMModelConfig
from phalanx.engines.loading import loading
from phalanx.models.headers import read_json
from phalanx.models.lm.blocks import adds_mask, load_blocks, mask_tokenizer
from phalanx.models.lm.composite import OF_WHOLE, name_in_whole, text_part
from phalanx.models.lm.lm_policy import LORA_TARGETS
from phalanx.models.lm.load_folder import load_class, load_model, read_lora
from phalanx.models.lm.model import DTYPES, CausalLM, decoder_of, places_of
from phalanx.models.lora import ALL_LINEAR, adapter_config

# the interface of phalanx.models.flow.model_files.ModelFiles
__all__ = ["export_lora", "export_model", "load_base", "lora_targets", "read_lora", "reads_images"]

lora_targets, stores_alpha = LORA_TARGETS, True
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
    "*processor_config.json",  # image and video processors of composite models
    "*.py",  # code that auto_map in config.json refers to; it is not run here
)


def reads_images(names: Collection[str]) -> bool:
    """Whether the names of trained tensors are those of a composite model, and not of its text part only."""
    return any(OF_WHOLE.match(name) for name in names)


def load_base(config: LMModelConfig, dtype: torch.dtype | None, names: Collection[str]) -> CausalLM:
    """Load the base folder's model, on the CPU.

    dtype: None for the dtype that training computes in. names: names of the trained tensors, see reads_images.
    """
    if config.block_size is not None:
        return load_blocks(config, dtype or DTYPES[config.dtype], chunk=1, add_mask=True)[0]
    images = reads_images(names)
    model = load_model(config, dtype or DTYPES[config.dtype], chunk=1, images=images)
    for part in model.vision.parts() if images and model.vision.frozen else ():
        part.requires_grad_(False)
    return model


def export_model(folder: Path, config: LMModelConfig, model: CausalLM) -> None:
    """Write a transformers folder: the base folder with the trained weights.

    Parts of a composite model that were not trained are those of the base.
    """
    lm = model.lm
    if model.places:
        with loading(f"model.path: {config.path!r} does not load"):
            lm, _ = load_class(transformers.AutoModelForImageTextToText, config, model.lm.dtype)
        for inner, outer in model.places.items():
            lm.get_submodule(outer).load_state_dict(model.lm.get_submodule(inner).state_dict())
    lm.generation_config = transformers.GenerationConfig()  # saving validates it, which the base's may not pass
    lm.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # The base's config.json as well: this version of transformers writes keys that older versions do not read, and they
    # would silently use their defaults.
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
    """Write a LoRA as a peft folder, with the tokenizer; `layers` have peft's names without the adapter's name."""
    base, tensors = _base_folder(config), {}
    places = _composite_names(base)
    for name, t in layers.items():
        name = name.removeprefix("lm.")
        # the names of a model that reads images are already those of the composite model
        place = name if OF_WHOLE.match(name) else name_in_whole(name, places)
        tensors[f"base_model.model.{place}"] = t.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    leaves = {name.partition(".lora_")[0].rpartition(".")[2] for name in layers}
    named = config.target_modules
    targets: Sequence[str] | str = named or ()
    if named is None or ALL_LINEAR in named or config.lora_path is not None:  # which may have other layers
        targets = sorted(leaves)
    if places:  # the vision tower may have layers with the same names
        inside = "|".join(re.escape(name) for name in places.values())
        targets = rf"({inside})\.(.*\.)?({'|'.join(re.escape(target) for target in targets)})"
    bias = any(name.endswith(".lora_B.bias") for name in layers)
    adapter_config(rank, alpha, targets, config.path, config.revision, bias=bias).save_pretrained(folder)
    _copy_kept(base, folder)


def check_base(config: LMModelConfig) -> None:
    """Raise ValueError, in one line, if a LoRA cannot be exported: the run added a mask token, or its base is gone."""
    if config.block_size is not None and adds_mask(config):
        raise ValueError(
            "merge_lora: false would omit the mask token that the run added to the model, which is not part of its "
            "LoRA; set it to true"
        )
    base = _base_folder(config)
    with loading(f"model.path: {config.path!r} does not load"):
        transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)


def trained_part(base: CausalLM, config: LMModelConfig) -> CausalLM:
    """All of the model."""
    return base


def how_to_load(folder: Path) -> None:
    """None: an export is complete."""


def _composite_names(base: Path) -> dict[str, str]:
    """Names of the folder's language model in its composite model (see places_of), empty for a plain one."""
    settings = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    text = text_part(settings)
    if text is None:
        return {}
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(settings, trust_remote_code=False)
        if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # all of it is trained
            [place] = [name for name, module in whole.named_modules() if module is decoder_of(whole)]
            return {place: place}
        return places_of(whole, transformers.AutoModelForCausalLM.from_config(text, trust_remote_code=False))


def _base_folder(config: LMModelConfig) -> Path:
    """The base model's folder; for a hub id, a snapshot of its small files, from the hub or its cache."""
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
