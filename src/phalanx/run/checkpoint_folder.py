"""Folders of checkpoints: which are complete, which is the newest or the best, and what their meta.json says."""

import logging
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from phalanx.config.files import kind, parse_json, read_bytes
from phalanx.run.checkpoint_reader import Reader
from phalanx.training.progress import Progress

log = logging.getLogger(__name__)
MOST_META = 1 << 26  # bytes of a meta.json
IN_FLIGHT = "in_flight.safetensors"  # end of the file name, after the rank
BEST = "best"  # name in a run's folder, or in its folder checkpoints, that stands for the best checkpoint
_PROGRESS = TypeAdapter(Progress)
JUDGED = "keep_best"  # key of a meta.json: the metric and mode of trainer.keep_best, and the metric's value


def complete(folder: Path) -> str | None:
    """Describe what is wrong with a checkpoint folder, without reading the tensors (see `damaged`); None if nothing."""
    if folder.suffix == ".tmp":  # its name until it is whole
        return "it was never finished"
    try:
        meta = read_meta(folder)
        for name, (size, _) in meta["files"].items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file of this folder")
            if kind(folder / name) == "folder":
                return f"{name} is a folder"
            written = (folder / name).stat().st_size
            if written != size:
                return f"{name} has {written} bytes of {size}"
        _PROGRESS.validate_python(meta["progress"])
        judged = meta.get(JUDGED)
        if not isinstance(meta["signature"], dict) or not (judged is None or _sound_judgement(**judged)):
            raise ValueError("a signature or a judgement of another type")
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
    except (KeyError, TypeError, ValueError, AttributeError):  # JSON's errors are ValueErrors
        return "meta.json is damaged, or of another program"
    return None


def _sound_judgement(metric: str, mode: str, value: float | None) -> bool:
    """Whether a judgement has the types that a run writes."""
    return isinstance(metric, str) and mode in ("max", "min") and isinstance(value, float | None)


def damaged(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Describe what is wrong with the contents of a complete checkpoint, by their checksums; None if nothing.

    Only every `parts`-th file is read, starting with number `part`, so that ranks can share the work; part 0 checks the
    list of the tensors, too.
    """
    try:
        if part == 0:  # a second of CPU for 40,000 parts of tensors
            Reader(folder).read_metadata()
    except ValueError as error:
        return str(error)
    files = sorted(read_meta(folder)["files"].items())
    for name, (_, checksum) in files[part::parts]:
        try:
            value = file_checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if value != checksum:
            return f"the checksum of {name} differs"
    return None


def file_checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def find(root: Path, without: Collection[Path] = ()) -> Path | None:
    """The newest complete checkpoint below `root` that is not in `without`; warns of incomplete ones."""
    for folder in sorted(root.glob("step_*"), reverse=True):
        if not folder.is_dir() or folder in without:
            continue
        problem = complete(folder)
        if problem is None:
            return folder
        log.warning("checkpoint %s is skipped: %s", folder, problem)
    return None


def best_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint below `root` with the best value of the metric by which the newest is judged, the oldest
    of several; None if there is none.
    """
    by, best, chosen = None, 0.0, None
    for folder in sorted(root.glob("step_*"), reverse=True):
        if complete(folder) is not None:
            continue
        try:
            judged = dict(read_meta(folder).get(JUDGED) or {})
        except FileNotFoundError:  # a run that goes on has just deleted it
            continue
        value = judged.pop("value", None)
        by = judged if by is None else by
        if value is None or judged != by:
            continue
        if chosen is None or (value <= best if judged["mode"] == "min" else value >= best):
            best, chosen = value, folder
    return chosen


def named_folder(given: str) -> Path:
    """The folder that a path names; `best` in a run's folder, or in its folder checkpoints, is the best checkpoint, if
    there is one.
    """
    folder = Path(given).expanduser()
    if folder.name != BEST or folder.exists():
        return folder
    root = folder.parent if folder.parent.name == "checkpoints" else folder.parent / "checkpoints"
    return best_checkpoint(root) or folder


def no_folder(folder: Path) -> str:
    """The problem of a path that names no folder."""
    if folder.name != BEST:
        return "no such folder"
    return f"no checkpoint of {folder.parent} has a value of the metric of trainer.keep_best"


def saved_choice(root: Path, resume: str, key: str) -> Any:
    """The value of `key` in the signature of the checkpoint that trainer.resume selects; None if there is none.

    For choices made before models are built. Problems with the checkpoint are reported later, by `locate`.
    """
    folders = {"auto": sorted(root.glob("step_*"), reverse=True), "never": []}.get(resume, [named_folder(resume)])
    folder = next((folder for folder in folders if complete(folder) is None), None)
    return None if folder is None else read_meta(folder)["signature"].get(key)


def kept_in_flight(folder: Path) -> list[Tensor]:
    """The bytes [K] of samples in flight in a checkpoint, one entry per rank that saved some, in the order of ranks."""
    files = sorted(folder.glob(f"__*_{IN_FLIGHT}"), key=lambda file: int(file.name.split("_")[2]))
    return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the meta.json of a checkpoint. Raises OSError if there is none, ValueError or TypeError if it is damaged."""
    return dict(parse_json(read_bytes(folder / "meta.json", MOST_META).decode()))
