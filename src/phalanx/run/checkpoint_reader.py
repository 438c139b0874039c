"""A reader for torch.distributed.checkpoint (DCP) that never runs code from a checkpoint.

DCP stores the names and places of a checkpoint's tensors in `.metadata`, a pickle, and a pickle may call any function.
This reader accepts only the classes that DCP writes there. The tensors themselves are read with `weights_only`.
"""

import pickle
import warnings
from collections import Counter
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future
from torch.serialization import _get_layout

from phalanx.config.files import kind

MOST_METADATA = 1 << 30  # bytes
FRAME = 1 << 20  # bytes beside its numbers that a part of a tensor may take


def _enum_member(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """The only permitted call of getattr: some Python versions, such as 3.11.2, pickle enum members this way."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it calls getattr on an object that is not a memory format")
    return _MEM_FORMAT_ENCODING[name]


_CLASSES = (
    *(ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata),
    *(_MEM_FORMAT_ENCODING, _StorageInfo, _get_layout),
)
_KNOWN: dict[tuple[str, str], Any] = {(kind.__module__, kind.__name__): kind for kind in _CLASSES}
_KNOWN |= {("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_KNOWN["builtins", "getattr"] = _enum_member
_KNOWN["torch", "Size"] = torch.Size
_KNOWN["pathlib", "PosixPath"] = _KNOWN["pathlib._local", "PosixPath"] = PosixPath  # the second by Python 3.13


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint contains")


class Reader(FileSystemReader):
    """The storage reader for `dcp.load` of an untrusted checkpoint folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The names, sizes and places of the tensors; ValueError if the file contains anything else."""
        metadata = _load_metadata(Path(self.path) / ".metadata")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, *args: Any, **kwargs: Any) -> Future[None]:
        """Load the tensors; ValueError for bytes that are not tensors."""
        try:
            return super().read_data(*args, **kwargs)
        except (EOFError, pickle.UnpicklingError) as error:  # torch's message suggests loading the file unsafely
            raise ValueError(f"a file is damaged, or contains no tensors ({type(error).__name__})") from error


def tensor_entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name. Raises ValueError for a damaged one."""
    entries: Any = Reader(folder).read_metadata().state_dict_metadata
    return dict(entries)


def load_tensors(folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Load a checkpoint's tensors into `state`, in place, by the ranks of a group together; None: by this one alone.
    Raises CheckpointException.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=Reader(folder), process_group=group, no_dist=group is None)


def _load_metadata(file: Path) -> Metadata:
    try:
        if kind(file) == "file" and file.stat().st_size > MOST_METADATA:
            raise ValueError(f"it is larger than {MOST_METADATA} bytes")
        with file.open("rb") as content:  # not read at once, since it may claim any size
            metadata = _DataOnly(content).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        stored, ends = Counter[str](), dict[str, int]()
        for index, place in metadata.storage_data.items():
            stored[index.fqn] += place.length
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name in ends:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file of this folder")
            if kind(file.with_name(name)) == "folder":  # OSError for a pipe, which torch would wait for
                raise ValueError(f"{name!r} is a folder")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # DCP would unpickle it when loading it
                raise TypeError(f"{name} is not a tensor")
            size = entry.size.numel() * entry.properties.dtype.itemsize
            if not size <= stored[name] <= size + FRAME * len(entry.chunks):
                raise ValueError(f"{name} of {size} bytes takes {stored[name]}")
        for name, end in ends.items():
            if file.with_name(name).stat().st_size > end:
                raise ValueError(f"{name!r} goes on behind its tensors")
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{file} is damaged, or not a checkpoint's: {error}") from error
    return metadata
