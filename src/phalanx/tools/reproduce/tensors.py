"""The tensors of a checkpoint, read one at a time."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.run.checkpoint_reader import Reader


def model_order(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """A key that sorts weights before their averages and moments, and layer 2 before layer 10."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
    kinds = name.split(".")[:2]  # a joint run's names begin with the policy
    return 2 if "optim" in kinds else int("model" not in kinds), parts


def tensor_entries(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name. Raises ValueError for a damaged one."""
    entries = Reader(checkpoint).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensor(checkpoint: Path, name: str, entry: TensorStorageMetadata) -> Tensor:
    """One tensor of a checkpoint, whole."""
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=Reader(checkpoint), no_dist=True)
    return state[name]


def tensor_distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference of two tensors, relative to the larger of both norms; 0.0 only if they are equal."""
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    pair = one.double(), other.double()
    norm = max(float(pair[0].norm()), float(pair[1].norm()), 1e-30)
    return max(float((pair[0] - pair[1]).norm()) / norm, 1e-30)
