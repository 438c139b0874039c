"""A checkpoint and the configuration of its run, and its export in the formats of stock libraries.

A LoRA of a flow-matching model becomes `pytorch_lora_weights.safetensors` for the stock pipeline's `load_lora_weights`;
a full model, or with `merge_lora` a base model with the LoRA merged into it, becomes a diffusers folder. A LoRA of a
language model becomes a peft adapter, and a full model a transformers folder.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.config.run import RunConfig, TrainerConfig
from phalanx.config.trained_model import ModelConfig
from phalanx.models.flow.policy import DTYPES
from phalanx.models.lora import Layers, add_lora, joined, lora_alpha, merge_lora, plain_layers, start_from_lora
from phalanx.models.trained import TrainedModel
from phalanx.run.checkpoint_folder import damaged, read_meta
from phalanx.run.checkpoint_reader import load_tensors, tensor_entries
from phalanx.run.outputs import place_in_run
from phalanx.types import JobError

log = logging.getLogger(__name__)


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


def opened(folder: Path, run: RunConfig, weights: str, policy: str | None = None) -> Trained:
    """As `open_checkpoint`, a complete checkpoint whose run's configuration is known."""
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


class Exporter:
    """Writes a checkpoint for `model`, the section of its run with the base model to use. ValueErrors of `__init__` are
    the user's mistakes. dtype: of the export, see phalanx.config.tasks.ExportConfig.

    The model's `family`, with the methods of phalanx.models.flow.model_files.ModelFiles, handles the file formats; this
    class contains what they have in common.
    """

    def __init__(
        self,
        trained: Trained,
        model: ModelConfig,
        family: Any,
        *,
        merge_lora: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.trained, self.model, self.family = trained, model, family
        self.merge, self.dtype = merge_lora, dtype
        path = model.lora_path
        self.start: Layers = {} if path is None else self.family.read_lora(path, model, trained.entries)
        if model.lora_rank > 0 and not merge_lora:
            self.family.check_base(model)
        self.base: nn.Module | None = None

    def load_base(self) -> None:
        """Load the base model if this export needs it: all but plain LoRAs do. ValueErrors are the user's mistakes."""
        if self.model.lora_rank == 0 or self.model.lora_init == "pissa" or self.merge:
            self.base = self._load_module()

    def _load_module(self) -> nn.Module:
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

    def write(self, folder: Path, describe: Callable[[Path], None] | None = None) -> None:
        """Write the new folder, which appears only when complete. describe: adds files to it before. Raises OSError,
        SafetensorError, or JobError for a damaged checkpoint.
        """
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if self.model.lora_rank > 0 and not self.merge:
            self._write_lora(part)
        else:
            assert self.base is not None
            self.trained.read_into(_trained_parameters(self.base))
            if self.model.lora_rank > 0:
                merge_lora(self.base, self.dtype)
                nn.Module.to(self.base, dtype=self.dtype)  # diffusers' method warns about tensors it would not cast
            self.family.export_model(part, self.model, self.base)
        if describe is not None:
            describe(part)
        for file in part.rglob("*.safetensors"):  # safetensors 0.8 lets only their owner read them
            file.chmod(part.stat().st_mode & 0o666)
        part.rename(folder)

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


def exports_of(trainer: TrainerConfig, kinds: Mapping[str, Any]) -> Callable[[Path], None] | None:
    """The export of each policy that a job trains from a new checkpoint; None without trainer.export_each_save. kinds:
    a phalanx.run.kind.PolicyKind by the policy's name, which is "" for a single one. Raises ValueError for a LoRA that
    cannot be exported.
    """
    if not trainer.export_each_save:
        return None
    for kind in kinds.values():
        kind.files(kind.cfg.model).check_base(kind.cfg.model)
    return partial(_export_policies, kinds)


def _export_policies(kinds: Mapping[str, Any], checkpoint: Path) -> None:
    """Export the LoRA of each policy, in place of an earlier export of the same step. A failure is a warning, since
    training goes on.
    """
    for policy, kind in kinds.items():
        try:
            trained = opened(checkpoint, kind.cfg, "auto", policy or None)
            place = place_in_run(checkpoint, "export", policy)
            shutil.rmtree(place, ignore_errors=True)
            Exporter(trained, kind.cfg.model, kind.files(kind.cfg.model)).write(place)
        except (JobError, OSError, SafetensorError, ValueError) as error:
            log.warning("trainer.export_each_save: %s was not exported: %s", checkpoint, error)
