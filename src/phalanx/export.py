"""What a run leaves behind, for use elsewhere: opening its checkpoints, and writing them for stock diffusers.

A LoRA becomes `pytorch_lora_weights.safetensors`, which `load_lora_weights` of the stock pipeline reads; its metadata
holds rank and alpha. A fully trained transformer becomes a whole diffusers folder.
"""

import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.checkpoint import complete, damaged, find, read_meta
from phalanx.config.schema import ModelConfig, RunConfig
from phalanx.config.tasks import ExportConfig, read_run
from phalanx.distributed.mesh import Launch
from phalanx.models.family import model_index
from phalanx.models.flow import DTYPES, family_of
from phalanx.models.lora import add_lora
from phalanx.types import JobError

EXPORT_DTYPES = {**DTYPES, "float16": torch.float16}
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# -- opening ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A complete checkpoint, and the configuration of its run.

    `weights` is "model" or "ema"; `sizes` and `dtypes` describe its tensors by the names of the transformer's
    parameters.
    """

    folder: Path
    run: RunConfig
    weights: str
    sizes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]

    def check_fits(self, sizes: Mapping[str, torch.Size], path: str) -> None:
        """Raise ValueError where the trained parameters of the model at `path` are not those of the checkpoint."""
        for name in sorted(self.sizes.keys() | sizes.keys()):
            held = list(self.sizes[name]) if name in self.sizes else "nothing"
            wanted = list(sizes[name]) if name in sizes else "nothing"
            if held != wanted:
                raise ValueError(
                    f"checkpoint: {self.folder} does not fit the model {path!r}: for {name} it holds {held}, the model "
                    f"has {wanted}; give the base model that the run was trained from"
                )

    def read_into(self, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Fill tensors of any dtype and layout, by name; without a `group`, in this process alone.

        Raises JobError where the files cannot be read.
        """
        part = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        problem = damaged(self.folder, *part)
        if problem is not None:
            raise JobError(f"checkpoint: {self.folder} is damaged ({problem}); use another one of the run")
        state = {self.weights: tensors}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(state, checkpoint_id=str(self.folder), process_group=group, no_dist=group is None)
        except CheckpointException as error:
            reason = type(next(iter(error.failures.values()))[0]).__name__  # torch's text speaks to programmers
            raise JobError(f"checkpoint: {self.folder} is damaged ({reason}); use another one of the run") from error

    def read(self) -> dict[str, Tensor]:
        """All tensors, on the CPU."""
        tensors = {name: torch.empty(size, dtype=self.dtypes[name]) for name, size in self.sizes.items()}
        self.read_into(tensors)
        return tensors


def open_checkpoint(checkpoint: str, weights: str) -> Trained:
    """The checkpoint that the task's key `checkpoint` means; `weights` is auto, model or ema.

    Raises ValueError where there is none, it is incomplete, or it has no such weights.
    """
    folder = _locate(Path(checkpoint).expanduser(), checkpoint)
    run = read_run(folder.parent.parent / "config.yaml")
    held_rank = read_meta(folder)["signature"]["lora_rank"]
    if held_rank != run.model.lora_rank:
        raise ValueError(
            f"checkpoint: {folder} was trained with lora_rank {held_rank}, but the config.yaml of its run says "
            f"{run.model.lora_rank}; put the checkpoint back into its own run"
        )
    entries = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found: dict[str, dict[str, TensorStorageMetadata]] = {"model": {}, "ema": {}}
    for key, entry in entries.items():
        kind, _, name = key.partition(".")
        if kind in found and isinstance(entry, TensorStorageMetadata):
            found[kind][name] = entry
    if weights == "ema" and not found["ema"]:
        raise ValueError(f"weights: ema: {folder} holds no moving average; right is weights=model")
    if weights == "auto":
        weights = "ema" if found["ema"] else "model"
    chosen = found[weights]
    return Trained(
        folder,
        run,
        weights,
        sizes={name: entry.size for name, entry in chosen.items()},
        dtypes={name: entry.properties.dtype for name, entry in chosen.items()},
    )


def _locate(folder: Path, given: str) -> Path:
    if not folder.is_dir():
        raise ValueError(f"checkpoint: {given!r}: no such folder")
    if (folder / "checkpoints").is_dir():
        found = find(folder / "checkpoints")
        if found is None:
            raise ValueError(f"checkpoint: {given!r} has no complete checkpoint in its folder checkpoints")
        return found.resolve()
    if not folder.name.startswith("step_"):
        raise ValueError(
            f"checkpoint: {given!r} is neither a run's output_dir, with a folder checkpoints in it, nor a checkpoint, "
            "a folder step_NNNNNN"
        )
    problem = "it was never finished" if folder.suffix == ".tmp" else complete(folder)
    if problem is not None:
        raise ValueError(f"checkpoint: {given!r} cannot be used: {problem}")
    return folder.resolve()


# -- exporting --------------------------------------------------------------------------------------------------------


class Export:
    """`Export(cfg)` checks everything (a ValueError is the user's mistake), `run()` writes. Only rank 0 works."""

    def __init__(self, cfg: ExportConfig) -> None:
        self.cfg, self.idle = cfg, Launch.from_env().rank != 0
        if self.idle:
            return
        self.trained = open_checkpoint(cfg.checkpoint, cfg.weights)
        folder, model = self.trained.folder, self.trained.run.model
        self.model = model if cfg.model_path is None else replace(model, path=cfg.model_path)
        self.family = family_of(self.model)
        self.output_dir = Path(cfg.output_dir or folder.parent.parent / "export" / folder.name).expanduser()
        if self.output_dir.exists():
            raise ValueError(f"output_dir: {str(self.output_dir)!r} exists; give a new folder")
        self.dtype = None if cfg.dtype is None else EXPORT_DTYPES[cfg.dtype]
        plain_lora = self.model.lora_rank > 0 and self.model.lora_init != "pissa"  # needs nothing of the base
        self.transformer: Any = None if plain_lora else self._transformer()
        if cfg.push_to_hub is not None:
            make_repository(cfg.push_to_hub)

    def _transformer(self) -> Any:
        """The base model's transformer, with the LoRA that the run began with where it trained one."""
        from diffusers import AutoModel

        base = _base(self.model)
        lora = self.model.lora_rank > 0
        dtype = DTYPES[self.model.dtype] if lora else self.dtype or _dtype_on_disk(base / "transformer")
        transformer = AutoModel.from_pretrained(str(base), subfolder="transformer", torch_dtype=dtype)
        if lora:
            exact = replace(self.model, lora_dtype="float32")
            add_lora(transformer, exact, self.family.lora_targets, self.trained.run.trainer.seed)
        sizes = {name: p.shape for name, p in _trained_parameters(transformer).items()}
        self.trained.check_fits(sizes, self.model.path)
        return transformer

    def run(self) -> None:
        """Write the export, upload it where asked, and say where it is. The folder appears at once, complete."""
        if self.idle:
            return
        part = self.output_dir.with_name(self.output_dir.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if self.model.lora_rank > 0:
            self._write_lora(part)
        else:
            self._write_pipeline(part)
        part.rename(self.output_dir)
        what = "the moving average" if self.trained.weights == "ema" else "the weights"
        print(f"{what} of {self.trained.folder} -> {self.output_dir}", flush=True)
        if self.cfg.push_to_hub is not None:
            print(f"uploaded: {upload(self.output_dir, self.cfg.push_to_hub, self.trained.folder.name)}", flush=True)

    def _write_lora(self, folder: Path) -> None:
        """Write the file that the stock pipeline's `save_lora_weights` writes, in `dtype` or as it was trained."""
        import diffusers

        tensors, rank = self.trained.read(), self.model.lora_rank
        alpha = self.model.lora_alpha if self.model.lora_alpha is not None else 2.0 * rank
        if self.transformer is not None:
            tensors = _without_start(tensors, _trained_parameters(self.transformer))
            rank, alpha = 2 * rank, 2 * alpha
        layers = {name.replace(".default.", "."): t.to(self.dtype or t.dtype) for name, t in tensors.items()}
        metadata: dict[str, Any] = {
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "target_modules": sorted({name.partition(".lora_")[0] for name in layers}),
        }
        getattr(diffusers, self.family.pipeline_class).save_lora_weights(
            folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata
        )

    def _write_pipeline(self, folder: Path) -> None:
        """Write a diffusers folder: the base's, file by file, with the trained transformer."""
        self.trained.read_into(_trained_parameters(self.transformer))
        base = _base(self.model)
        shutil.copyfile(base / "model_index.json", folder / "model_index.json")
        for name in _components(model_index(self.model.path)):
            if name != "transformer":
                shutil.copytree(base / name, folder / name, copy_function=shutil.copyfile)
        self.transformer.save_pretrained(folder / "transformer")


def _trained_parameters(transformer: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in transformer.named_parameters() if p.requires_grad}


def _without_start(tensors: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, Tensor]:
    """A LoRA of twice the rank whose product is B A - B0 A0.

    PiSSA moves B0 A0 from the base weights into the LoRA; this one goes on the base weights as they are in the folder.
    """
    both = {}
    for name, t in tensors.items():
        if ".lora_A." in name:
            both[name] = torch.cat([t.float(), start[name]], 0)
        else:
            both[name] = torch.cat([t.float(), -start[name]], 1)
    return both


def _components(index: dict[str, Any]) -> list[str]:
    """Folders that a model_index.json names."""
    return [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]


def _base(model: ModelConfig) -> Path:
    """The base model's folder, from the hub's cache where it is a hub id."""
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    wanted = ["model_index.json", *(f"{name}/*" for name in _components(model_index(model.path)))]
    return Path(snapshot_download(model.path, allow_patterns=wanted))


def _dtype_on_disk(folder: Path) -> torch.dtype:
    """The dtype that most of a component's tensors are stored in; float32 where its files are no safetensors."""
    names: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118
    found = [name for name, _ in names.most_common(1) if name in _SAFETENSORS_DTYPES]
    return _SAFETENSORS_DTYPES[found[0]] if found else torch.float32


# -- the hub ----------------------------------------------------------------------------------------------------------


def make_repository(repo: str) -> None:
    """Make the hub repository, before any work is done for it; raises ValueError where that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        HfApi().create_repo(repo, exist_ok=True)
    except (HFValidationError, HTTPError, OSError) as error:
        raise ValueError(
            f"push_to_hub: the repository {repo!r} cannot be made: {_first_line(error)}; it needs the hub within reach "
            "and a token in HF_TOKEN, or leave push_to_hub out"
        ) from error


def upload(folder: Path, repo: str, name: str) -> str:
    """Upload a finished export and return its address; raises JobError where that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return str(HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{name} of a Phalanx run"))
    except (HTTPError, OSError) as error:
        raise JobError(
            f"push_to_hub: the upload to {repo!r} failed: {_first_line(error)}; the export itself is in {folder}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
