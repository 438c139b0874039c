"""Memory of the host while models are loaded: files that ranks map together, and copies that each rank makes."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from phalanx.models.flow.folder import dtype_on_disk
from phalanx.plan.ledger import nbytes


@dataclass(frozen=True)
class Loading:
    """Bytes in the host's memory: those `copied` by each rank, and those of mapped files, `shared` by the ranks of a
    node. `either` is one or the other: the files that would tell are not here.
    """

    copied: int = 0
    shared: int = 0
    either: int = 0

    def __add__(self, other: "Loading") -> "Loading":
        return Loading(self.copied + other.copied, self.shared + other.shared, self.either + other.either)

    def of_a_node(self, ranks: int, *, cast: bool) -> int:
        """Bytes of `ranks` ranks; `cast`: the bytes that may be either are copied by each rank."""
        copied, shared = (self.copied + self.either, self.shared) if cast else (self.copied, self.shared + self.either)
        return copied * ranks + shared


def loading(folder: Path, size: int, dtype: torch.dtype) -> Loading:
    """Loading `size` bytes in `dtype` from a folder's *.safetensors.

    Tensors are views of the mapped file as long as their dtype is the file's; a cast makes a copy.
    """
    if not any(folder.glob("*.safetensors")):
        return Loading(either=size)
    return Loading(shared=size) if dtype_on_disk(folder) is dtype else Loading(copied=size)


def loading_of_module(folder: Path, module: nn.Module) -> Loading:
    """As `loading`, of a part of a pipeline."""
    return loading(folder, nbytes(module), next(module.parameters()).dtype)
