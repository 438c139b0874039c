"""The tensors of a checkpoint, read one at a time."""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.run.checkpoint_reader import load_tensors

LEAST = 1e-30  # a distance of what differs in more than its size, such as in its dtype


def model_order(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """A key that sorts weights before their averages and moments, and layer 2 before layer 10."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
    kinds = name.split(".")[:2]  # a joint run's names begin with the policy
    return 2 if "optim" in kinds else int("model" not in kinds), parts


def read_tensor(checkpoint: Path, name: str, entry: TensorStorageMetadata) -> Tensor:
    """One tensor of a checkpoint, whole."""
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    load_tensors(checkpoint, state)
    return state[name]


def tensor_distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference of two tensors, relative to the larger of both norms; 0.0 only if they are equal, and
    infinite if a weight is not finite in one of them alone.
    """
    alike = one.dtype == other.dtype
    if alike and torch.equal(one, other):
        return 0.0
    pair = one.double(), other.double()
    if alike and torch.allclose(*pair, rtol=0, atol=0, equal_nan=True):
        return 0.0
    norm = max(float(pair[0].norm()), float(pair[1].norm()), 1e-30)
    distance = float((pair[0] - pair[1]).norm()) / norm
    return max(distance, LEAST) if math.isfinite(distance) else math.inf
