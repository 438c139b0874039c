"""Files of a family of flow-matching models: base models, LoRAs, and exports that stock diffusers loads."""

import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.folder import base_folder, dtype_on_disk, how_to_load, model_index, read_lora
from phalanx.models.flow.pipeline_headers import component_names
from phalanx.models.lora import Layers, lora_key


class ModelFiles:
    """The base class of FlowModel for its files. They are class methods, which do not need a loaded model."""

    pipeline_class: str  # name of diffusers' pipeline class, by which a folder is recognised
    lora_pipeline: str | None = None  # pipeline class that reads and writes its LoRAs, if its own does not
    lora_bias: str = "lora_B.bias"  # what a LoRA's bias of a layer is called in a file with the model's own names

    stores_alpha = False  # whether a LoRA's file has its alpha
    how_to_load = staticmethod(how_to_load)

    @classmethod
    def check_base(cls, config: FlowModelConfig) -> None:
        """Do nothing: a LoRA's export needs no base."""

    @classmethod
    def stock_pipeline(cls) -> Any:
        """diffusers' class of the pipeline."""
        return getattr(diffusers, cls.pipeline_class)

    @classmethod
    def parts(cls, transformer: Any) -> dict[str, Any]:
        """diffusers' transformers that make up `transformer`, by the names of their folders."""
        return {"transformer": transformer}

    @classmethod
    def trained_part(cls, transformer: Any, config: FlowModelConfig) -> nn.Module:
        """The part of the transformer that is trained; raises ValueError for unknown `model.target_components`."""
        parts, chosen = cls.parts(transformer), config.target_components
        if chosen is None or sorted(chosen) == sorted(parts):
            return transformer
        if len(chosen) != 1 or chosen[0] not in parts:
            raise ValueError(f"model.target_components: {chosen}; the transformers of this model: {', '.join(parts)}")
        return parts[chosen[0]]

    @classmethod
    def load_base(cls, config: FlowModelConfig, dtype: torch.dtype | None, names: Collection[str] = ()) -> nn.Module:
        """Load the base folder's transformer, on the CPU; `dtype` None: in the dtype of its files."""
        return cls.load_part(config, dtype, "transformer")

    @classmethod
    def load_part(cls, config: FlowModelConfig, dtype: torch.dtype | None, name: str) -> nn.Module:
        """As `load_base`, for the transformer in the folder `name`."""
        base = base_folder(config)
        dtype = dtype or dtype_on_disk(base / name)
        return diffusers.AutoModel.from_pretrained(str(base), subfolder=name, dtype=dtype, trust_remote_code=False)

    @classmethod
    def read_lora(cls, path: str, config: FlowModelConfig | None = None, names: Iterable[str] = ()) -> Layers:
        """See phalanx.models.flow.folder.read_lora; `config` is that of the model that the LoRA is for."""
        return read_lora(path, getattr(diffusers, cls.lora_pipeline or cls.pipeline_class), key=lora_key(config))

    @classmethod
    def lora_names(cls, layers: Sequence[str]) -> dict[str, str]:
        """Names of a LoRA's layers in its file, by their names in the transformer."""
        return {layer: f"transformer.{layer}" for layer in layers}

    @classmethod
    def export_lora(
        cls,
        folder: Path,
        config: FlowModelConfig,
        layers: dict[str, Tensor],
        rank: int,
        alpha: float,
        file: str | None = None,
    ) -> None:
        """Write a LoRA in the stock pipeline's format; `layers` have peft's names without the adapter's name."""
        names = cls.lora_names(sorted({name.partition(".lora_")[0] for name in layers}))
        metadata: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": list(names)}
        tensors = {}
        for name, tensor in layers.items():
            layer = name.partition(".lora_")[0]
            part = name.removeprefix(f"{layer}.")
            if part == "lora_B.bias":
                metadata["lora_bias"] = True
                part = part if names[layer].startswith("transformer.") else cls.lora_bias
            tensors[f"{names[layer]}.{part}"] = tensor
        getattr(diffusers, cls.lora_pipeline or cls.pipeline_class).write_lora_layers(
            tensors,
            folder,
            is_main_process=True,
            weight_name=file,
            save_function=None,
            safe_serialization=True,
            lora_adapter_metadata={f"transformer.{key}": value for key, value in metadata.items()},
        )

    @classmethod
    def export_model(cls, folder: Path, config: FlowModelConfig, transformer: Any) -> None:
        """Write a diffusers folder: a copy of the base folder with the trained transformer."""
        base, parts = base_folder(config), cls.parts(transformer)
        shutil.copyfile(base / "model_index.json", folder / "model_index.json")
        for name in component_names(model_index(str(base))):
            if name not in parts:
                shutil.copytree(base / name, folder / name, copy_function=shutil.copyfile)
        for name, part in parts.items():
            part.register_to_config(_name_or_path=Path(config.path).name)  # and not where it is on this machine
            part.save_pretrained(folder / name)
