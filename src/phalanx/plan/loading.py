"""What models take of the host's memory while they are loaded: whose files are mapped, and what each rank copies."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from phalanx.models.flow.folder import dtype_on_disk
from phalanx.plan.ledger import nbytes


@dataclass(frozen=True)
class Loading:
    """Bytes in the host's memory: each rank's `own`, and those of mapped files, `shared` by the ranks of a node.

    `either` is one or the other: the files that would tell are not here.
    """

    own: int = 0
    shared: int = 0
    either: int = 0

    def __add__(self, other: "Loading") -> "Loading":
        return Loading(self.own + other.own, self.shared + other.shared, self.either + other.either)

    def of_a_node(self, ranks: int, *, cast: bool) -> int:
        """Bytes of so many ranks; `cast`: what is not known is each rank's own."""
        return (self.own + self.either) * ranks + self.shared if cast else self.own * ranks + self.shared + self.either


def loading(folder: Path, size: int, dtype: torch.dtype) -> Loading:
    """Of `size` bytes in `dtype` that are read from a folder's *.safetensors.

    Tensors are views of the mapped file as long as their dtype is the file's; a cast makes a copy.
    """
    if not any(folder.glob("*.safetensors")):
        return Loading(either=size)
    return Loading(shared=size) if dtype_on_disk(folder) is dtype else Loading(own=size)


def loading_of_module(folder: Path, module: nn.Module) -> Loading:
    """As `loading`, of a part of a pipeline."""
    return loading(folder, nbytes(module), next(module.parameters()).dtype)
