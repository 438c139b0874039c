"""Checkpoints for use elsewhere: opening a run's checkpoints, and writing them in the formats of stock libraries.

A LoRA of a flow-matching model becomes `pytorch_lora_weights.safetensors` for the stock pipeline's `load_lora_weights`;
a full model, or with `merge_lora` a base model with the LoRA merged into it, becomes a diffusers folder. A LoRA of a
language model becomes a peft adapter, and a full model a transformers folder.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.config.messages import ConfigError
from phalanx.config.run import RunConfig
from phalanx.config.tasks import ExportConfig, read_run
from phalanx.config.trust import Use
from phalanx.distributed.launch_env import Launch
from phalanx.models.flow.policy import DTYPES
from phalanx.models.lora import Layers, add_lora, joined, lora_alpha, merge_lora, plain_layers, start_from_lora
from phalanx.models.trained import TrainedModel
from phalanx.run.checkpoint_folder import complete, damaged, find, named_folder, no_folder, read_meta
from phalanx.run.checkpoint_reader import load_tensors, tensor_entries
from phalanx.run.kind import kind_of, known_schemas
from phalanx.tools.outputs import check_place, place_in_run, writing
from phalanx.types import JobError

# -- opening ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A complete checkpoint and the configuration of its run.

    `weights` is "model" or "ema"; `entries` describes its tensors by parameter name. `policy` names one policy of a
    joint run's checkpoint, and is "" for other runs.
    """

    folder: Path
    run: RunConfig
    weights: str
    entries: dict[str, TensorStorageMetadata]
    policy: str = ""

    def check_command(self, command: str) -> None:
        """Raise ConfigError if another task samples from this kind of model."""
        kind = kind_of(self.run)
        if kind.command != command:
            raise ConfigError(f"checkpoint: {self.folder} is of {kind.words}; use {kind.command or 'its own task'}")

    def check_fits(self, parameters: Mapping[str, Tensor], path: str) -> None:
        """Raise ValueError if the trained parameters of the model at `path` are not those of the checkpoint."""
        for name in sorted(self.entries.keys() | parameters.keys()):
            saved = list(self.entries[name].size) if name in self.entries else "nothing"
            expected = list(parameters[name].shape) if name in parameters else "nothing"
            if saved != expected:
                raise ValueError(
                    f"checkpoint: {self.folder} does not fit the model {path!r}: for {name} it contains {saved}, the "
                    f"model has {expected}; give the base model that the run was trained from"
                )

    def read_into(self, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Load the checkpoint into tensors of any dtype and layout, by name; without a `group`, only in this process.

        Raises JobError if the files cannot be read.
        """
        part = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        problem = damaged(self.folder, *part)
        if problem is not None:
            raise JobError(f"checkpoint: {self.folder} is damaged ({problem}); use another one of the run")
        state: dict[str, Any] = {self.weights: tensors}
        if self.policy:
            state = {self.policy: state}
        try:
            load_tensors(self.folder, state, group)
        except CheckpointException as error:
            reason = type(next(iter(error.failures.values()))[0]).__name__  # torch's message has a whole traceback
            raise JobError(f"checkpoint: {self.folder} is damaged ({reason}); use another one of the run") from error

    def load(self, model: TrainedModel, group: dist.ProcessGroup | None) -> None:
        """Load the trained weights of a model on all ranks of a group; raises JobError like `read_into`."""
        self.read_into({name: p.detach() for name, p in model.parameters.items()}, group)
        model.sharded.copy_to_module()


def open_checkpoint(checkpoint: str, weights: str, use: Use, policy: str | None = None) -> Trained:
    """Open the checkpoint given by the task's key `checkpoint`; `weights` is auto, model or ema, `use` what the task
    takes from its run, and `policy` one of a joint run's.

    Raises ValueError if the checkpoint does not exist, is incomplete, or lacks these weights, or needs trust.
    """
    folder = _locate(checkpoint)
    run = read_run(folder.parent.parent / "config.yaml", *known_schemas(), policy=policy, use=use)
    signature = read_meta(folder)["signature"]
    # in a joint run, all names that belong to a policy begin with the policy's name
    policy = policy if policy is not None and "trained policies" in signature else ""
    before = f"{policy}: " if policy else ""
    if not signature:
        raise ValueError(f"checkpoint: {folder} cannot be used: its meta.json has no signature")
    if f"{before}lora_rank" not in signature:
        raise ValueError(f"policy: {policy} was not trained in this run; it is {run.model.path} unchanged")
    data, date = vars(run.data), "chat_template_date"
    if date in data:
        data[date] = data[date] or signature.get(date)
    lora_rank = signature[f"{before}lora_rank"]
    if lora_rank != run.model.lora_rank:
        raise ValueError(
            f"checkpoint: {folder} was trained with lora_rank {lora_rank}, but the config.yaml of its run says "
            f"{run.model.lora_rank}; put the checkpoint back into its own run"
        )
    if lora_rank == 0:
        run.model.lora_path = None  # a full checkpoint already contains the LoRA from which the run started
    tensors = tensor_entries(folder)
    within = f"{policy}." if policy else ""
    has_average = any(name.startswith(f"{within}ema.") for name in tensors)
    if weights == "ema" and not has_average:
        raise ValueError(f"weights: ema: {folder} contains no moving average; use weights=model")
    if weights == "auto":
        weights = "ema" if has_average else "model"
    prefix = f"{within}{weights}."
    chosen = {name.removeprefix(prefix): entry for name, entry in tensors.items() if name.startswith(prefix)}
    return Trained(folder, run, weights, chosen, policy)


def _locate(given: str) -> Path:
    """The folder of the checkpoint given by the key: a step_NNNNNN folder, or the newest or the best one of a run."""
    folder = named_folder(given)
    if not folder.is_dir():
        raise ValueError(f"checkpoint: {given!r}: {no_folder(folder)}")
    if (folder / "checkpoints").is_dir():
        newest = find(folder / "checkpoints")
        if newest is None:
            raise ValueError(f"checkpoint: {given!r} has no complete checkpoint in its folder checkpoints")
        return newest.resolve()
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
    """The job: `Export(cfg)` checks everything (a ValueError is the user's mistake), `run()` writes; on rank 0 only.

    The model's `family`, with the methods of phalanx.models.flow.model_files.ModelFiles, handles the file formats; this
    class contains what they have in common.
    """

    def __init__(self, cfg: ExportConfig) -> None:
        self.cfg, self.idle = cfg, Launch.from_env().rank != 0
        if self.idle:
            return
        use = Use(cfg.trust_run, ("model",), {} if cfg.model_path is None else {"model": {"path": cfg.model_path}})
        self.trained = open_checkpoint(cfg.checkpoint, cfg.weights, use, cfg.policy)
        if cfg.policy is not None and not self.trained.policy:
            raise ValueError(f"policy: {cfg.checkpoint!r} is not from a joint run; leave policy={cfg.policy} out")
        folder, model = self.trained.folder, self.trained.run.model
        self.model = model if cfg.model_path is None else replace(model, path=cfg.model_path, revision=None)
        self.family = kind_of(self.trained.run).files(self.model)
        path = self.model.lora_path
        self.start: Layers = {} if path is None else self.family.read_lora(path, self.model, self.trained.entries)
        if self.model.lora_rank > 0 and not cfg.merge_lora:
            self.family.check_base(self.model)
        place = cfg.output_dir or place_in_run(folder, "export", self.trained.policy)
        self.output_dir = Path(place).expanduser()
        if self.output_dir.exists():
            raise ValueError(f"output_dir: {str(self.output_dir)!r} exists; give a new folder")
        check_place(self.output_dir, "output_dir")
        self.dtype: torch.dtype | None = None if cfg.dtype is None else getattr(torch, cfg.dtype)
        # such a LoRA is exported without loading the base model
        plain_lora = self.model.lora_rank > 0 and self.model.lora_init != "pissa" and not cfg.merge_lora
        self.base: nn.Module | None = None if plain_lora else self._base()
        if cfg.push_to_hub is not None:
            make_repository(cfg.push_to_hub)

    def _base(self) -> nn.Module:
        """The trained module with the base model's weights and, if any, the LoRA with which the run started."""
        lora = self.model.lora_rank > 0
        dtype = DTYPES[self.model.dtype] if lora else self.dtype
        base = self.family.load_base(self.model, dtype, self.trained.entries.keys())
        if self.model.lora_path is not None:
            read = partial(self.family.read_lora, config=self.model, names=self.trained.entries)
            start_from_lora(base, self.model.lora_path, read)
        if lora:
            add_lora(
                self.family.trained_part(base, self.model),
                self.model,
                self.family.lora_targets,
                self.trained.run.trainer.seed,
            )
            for p in base.parameters():
                p.data = p.data.float() if p.requires_grad else p.data  # sums of both LoRAs are exact
        self.trained.check_fits(_trained_parameters(base), self.model.path)
        return base

    def run(self) -> None:
        """Write the export, upload it if requested, and print its location. The folder appears only when complete."""
        if self.idle:
            return
        with writing(self.output_dir, "output_dir"):
            self._write()
        what = "the moving average" if self.trained.weights == "ema" else "the weights"
        print(f"{what} of {self.trained.folder} -> {self.output_dir}", flush=True)
        if self.model.lora_rank == 0:
            call = self.family.how_to_load(self.output_dir)
            if call is not None:
                print(f"the folder lacks components, as its base does; load it with {call}", flush=True)
        if self.cfg.push_to_hub is not None:
            print(f"uploaded: {upload(self.output_dir, self.cfg.push_to_hub, self.trained.folder.name)}", flush=True)

    def _write(self) -> None:
        part = self.output_dir.with_name(self.output_dir.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if self.model.lora_rank > 0 and not self.cfg.merge_lora:
            self._write_lora(part)
        else:
            assert self.base is not None
            self.trained.read_into(_trained_parameters(self.base))
            if self.model.lora_rank > 0:
                merge_lora(self.base, self.dtype)
                nn.Module.to(self.base, dtype=self.dtype)  # diffusers' method warns about tensors it would not cast
            self.family.export_model(part, self.model, self.base)
        part.rename(self.output_dir)

    def _write_lora(self, folder: Path) -> None:
        """Write the LoRA in `dtype` (None: as trained), combined with the LoRA from which the run started, if any."""
        entries, rank, alpha = self.trained.entries, self.model.lora_rank, lora_alpha(self.model)
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        dtype = self.dtype or next(iter(tensors.values())).dtype
        self.trained.read_into(tensors)
        if self.base is not None:
            tensors = _without_start(tensors, _trained_parameters(self.base))
            rank, alpha = 2 * rank, 2 * alpha
        if self.base is not None or self.start:
            dtype = self.dtype or torch.float32
        layers = {name.replace(".default.", "."): t for name, t in tensors.items()}
        if self.start or not self.family.stores_alpha:
            # alpha is multiplied into B, because ComfyUI ignores an alpha that is not stored as a tensor
            rank, layers = joined(self.start, plain_layers(layers, {"lora_alpha": alpha}))
            alpha = rank
        layers = {name: t.to(dtype) for name, t in layers.items()}
        self.family.export_lora(folder, self.model, layers, rank, alpha)


def _trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _without_start(tensors: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, Tensor]:
    """A LoRA of twice the rank whose product is B A - B0 A0.

    PiSSA moves B0 A0 from the base weights into the LoRA; the result applies to the original base weights.
    """
    both = {}
    for name, t in tensors.items():
        if ".lora_A." in name:
            both[name] = torch.cat([t.float(), start[name]], 0)
        else:
            both[name] = torch.cat([t.float(), -start[name]], 1)
    return both


# -- the hub ----------------------------------------------------------------------------------------------------------


def make_repository(repo: str) -> None:
    """Create the hub repository before any work is done; raises ValueError if that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        HfApi().create_repo(repo, exist_ok=True)
    except (HFValidationError, HTTPError, OSError) as error:
        raise ValueError(
            f"push_to_hub: the repository {repo!r} cannot be created: {_first_line(error)}; expected access to the hub "
            "and a token in HF_TOKEN, or leave push_to_hub out"
        ) from error


def upload(folder: Path, repo: str, name: str) -> str:
    """Upload a finished export and return its URL; raises JobError if that fails."""
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
