"""Checkpoints: sharded (torch.distributed.checkpoint), asynchronous and atomic.

A checkpoint is the folder `checkpoints/step_000010`. It is written as `step_000010.tmp` and renamed once every rank is
done; `meta.json`, written last, lists all files with sizes and checksums. A checkpoint contains the trained weights,
the optimizer's state, moving averages, and the run's counters, and can be loaded on any number of ranks.
"""

import errno
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from phalanx.config.files import kind, parse_json, read_bytes
from phalanx.distributed.collectives import all_gather_object, broadcast_object, from_first
from phalanx.distributed.mesh import World
from phalanx.models.lora import ADAPTER, WEIGHTS
from phalanx.run.checkpoint_reader import Reader, load_tensors
from phalanx.run.checkpoint_writer import METADATA, Layout, ShareWriter
from phalanx.training.checkpoint_contents import share
from phalanx.training.progress import Progress

log = logging.getLogger(__name__)
# signature entries that older checkpoints do not have
ADDED = ("chat_template_date", "chat_template_kwargs", "cpu_linear", "lora_alpha", "lora_init", "quantization")
MOST_META = 1 << 26  # bytes of a meta.json
FULL = 2**20  # a disk with fewer free bytes counts as full
IN_FLIGHT = "in_flight.safetensors"  # end of the file name, after the rank


def complete(folder: Path) -> str | None:
    """Describe what is wrong with a checkpoint folder, without reading the tensors (see `damaged`); None if nothing."""
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
        Progress(**meta["progress"]).check()
        if not isinstance(meta["signature"], dict):
            raise ValueError("a signature of another type")
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
    except (KeyError, TypeError, ValueError, AttributeError):  # JSON's errors are ValueErrors
        return "meta.json is damaged, or of another program"
    return None


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
            value = _file_checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if value != checksum:
            return f"the checksum of {name} differs"
    return None


def _file_checksum(path: Path) -> int:
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
        problem = "it was never finished" if folder.suffix == ".tmp" else complete(folder)
        if problem is None:
            return folder
        log.warning("checkpoint %s is skipped: %s", folder, problem)
    return None


def saved_choice(root: Path, resume: str, key: str) -> Any:
    """The value of `key` in the signature of the checkpoint that trainer.resume selects; None if there is none.

    For choices made before models are built. Problems with the checkpoint are reported later, by `locate`.
    """
    folders = {"auto": sorted(root.glob("step_*"), reverse=True), "never": []}.get(resume, [Path(resume).expanduser()])
    folder = next((folder for folder in folders if complete(folder) is None), None)
    return None if folder is None else read_meta(folder)["signature"].get(key)


def kept_in_flight(folder: Path) -> list[Tensor]:
    """The bytes [K] of samples in flight in a checkpoint, one entry per rank that saved some, in the order of ranks."""
    files = sorted(folder.glob(f"__*_{IN_FLIGHT}"), key=lambda file: int(file.name.split("_")[2]))
    return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the meta.json of a checkpoint. Raises OSError if there is none, ValueError or TypeError if it is damaged."""
    return dict(parse_json(read_bytes(folder / "meta.json", MOST_META).decode()))


def _unseen_file(folder: Path, names: Iterable[str]) -> str | None:
    """Describe a file of another rank that is not visible here; None if all are."""
    # If each node wrote to a local disk, each would have only a part, which otherwise only a resume would reveal.
    for name in names:
        if not (folder / name).exists():
            return f"rank 0 cannot see {name}: trainer.output_dir must be on a file system that all nodes share"
    return None


def _staged(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint's contents in CPU memory."""
    stager = DefaultStager(StagingOptions(*[False] * 4))
    try:
        copied: Any = stager.stage(state)  # a future only with the asynchronous option
        return dict(copied)
    finally:
        stager.close()


def _root_cause(error: BaseException) -> str:
    """The root cause of an error in one line; torch's own message begins with each rank's stack trace."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))  # the first rank's failure
    return " ".join(str(error).split())[:300]


def _first_problem(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


class Checkpointer:
    """Saves, finds and loads the checkpoints of one run."""

    def __init__(
        self, output_dir: Path, world: World, signature: dict[str, Any], max_checkpoints: int, patience_s: float = 600.0
    ) -> None:
        """patience_s: seconds of waiting for the file system until a warning."""
        self.patience_s = patience_s
        self.root, self.world, self.signature = output_dir / "checkpoints", world, signature
        self.max_checkpoints = max_checkpoints
        self._writer = ShareWriter()
        self._pending: threading.Thread | None = None
        self._begun = 0.0  # when it began, by time.monotonic
        self._failure: RuntimeError | None = None
        # the step of this run's newest complete checkpoint; valid after `wait`
        self.saved_step = -1

    def locate(self, resume: str) -> Path | None:
        """The checkpoint that trainer.resume selects; ValueError if it cannot be used."""
        passed: list[Path] = []
        while True:
            # only rank 0 looks, since a network file system may show other ranks another state
            folder = from_first(partial(self._locate_folder, resume, passed), self.world.checkpoint_group)
            if folder is None:
                return None
            # the ranks share the work of computing checksums of all files
            problem = _first_problem(
                all_gather_object(damaged(folder, self.world.rank, self.world.size), self.world.checkpoint_group)
            )
            if problem is None:
                return folder
            if resume != "auto":
                raise ValueError(f"trainer.resume: {resume!r} cannot be used: {problem}")
            log.warning("checkpoint %s is skipped: %s", folder, problem)
            passed.append(folder)

    def _locate_folder(self, resume: str, passed: Collection[Path]) -> Path | None:
        """On rank 0: like `locate`, but without checksums, and skipping the folders `passed`."""
        if resume == "never":
            return None
        if resume == "auto":
            folder = find(self.root, passed)
            if folder is None:
                return None
        else:
            folder = Path(resume).expanduser()
            problem = complete(folder) if folder.is_dir() else "no such folder"
            if problem is not None and any((folder / name).is_file() for name in (ADAPTER, WEIGHTS)):
                problem = f"it is a LoRA, not a checkpoint; model.lora_path={resume} starts a run from it"
            if problem is not None:
                raise ValueError(f"trainer.resume: {resume!r} cannot be used: {problem}")
        saved = read_meta(folder)["signature"]
        for key, value in self.signature.items():
            if saved.get(key) != value and (key in saved or key.rpartition(": ")[2] not in ADDED):
                raise ValueError(
                    f"trainer.resume: {folder} holds {key} {saved.get(key)}, this run has {value}; "
                    "give another trainer.output_dir, or trainer.resume=never"
                )
        return folder

    def load(self, folder: Path, state: dict[str, Any]) -> Progress:
        """Load a checkpoint into `state` in place; any number of ranks may have saved it.

        Raises ValueError on failure; the state must then not be used.
        """
        problem = None
        try:
            # each rank plans what it reads; together, rank 0 would unpickle the plans of all
            load_tensors(folder, state)
        except CheckpointException as error:
            problem = _root_cause(error)
        problem = _first_problem(all_gather_object(problem, self.world.checkpoint_group))
        if problem is not None:
            raise ValueError(f"trainer.resume: {folder} cannot be loaded: {problem}")
        return Progress(**read_meta(folder)["progress"])

    def save(self, state: dict[str, Any], progress: Progress, in_flight: Tensor | None = None) -> None:
        """Copy the state to the CPU and write it in the background, once the previous checkpoint is written. in_flight:
        bytes [K] of samples of this rank that later steps will train.
        """
        self.wait()  # two copies at a time might not fit into memory
        final = self.root / f"step_{progress.step:06d}"
        part = final.with_suffix(".tmp")
        problem = None
        if self.world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir(parents=True)
            except OSError as error:  # for example a full disk; training goes on
                problem = str(error)
                log.warning("checkpoint %s was not written: %s", final, problem)
        if broadcast_object(problem, group=self.world.checkpoint_group) is not None:
            return
        # asdict and _staged copy, since training goes on and changes the originals before they are written
        meta = {"progress": asdict(progress), "signature": self.signature}
        copied = _staged(share(state, self.world))
        # a daemon thread, since a failing rank must not wait for the disk; half-written checkpoints are skipped
        self._pending = threading.Thread(
            target=self._finish_save, args=(copied, part, final, meta, in_flight), daemon=True
        )
        self._pending.start()
        self._begun = time.monotonic()

    def _finish_save(
        self, copied: dict[str, Any], part: Path, final: Path, meta: dict[str, Any], in_flight: Tensor | None
    ) -> None:
        """On every rank, in the background: write this rank's share, and publish once all ranks have written theirs."""
        problem, checksums = None, {}
        try:
            if in_flight is not None:
                (part / f"__{self.world.rank}_{IN_FLIGHT}").write_bytes(in_flight.numpy().tobytes())
            self._writer.write(part, self.world.rank, copied)
            copied.clear()
            checksums = {f.name: _file_checksum(f) for f in part.glob(f"__{self.world.rank}_*")}
        except Exception as error:  # whatever torch raises, the other ranks wait for this one
            problem, full = _root_cause(error), os.strerror(errno.ENOSPC)
            # on a full disk torch only reports a file that is too short, and other ranks do not get the system's error
            if full not in problem and part.is_dir() and shutil.disk_usage(part).free < FULL:
                problem = f"{full} ({problem})"
        # a rank that failed joins the collective, too; otherwise the others would wait for it until the time limit
        per_rank: list[Any] | None = [None] * self.world.size if self.world.rank == 0 else None
        done = [False]
        try:
            written = problem, checksums, self._writer.new_layout(self.world.checkpoint_group)
            dist.gather_object(written, per_rank, group=self.world.checkpoint_group)
            if per_rank is not None:
                done = [self._publish_or_drop(per_rank, part, final, meta)]
            # all ranks wait for the rename, so that no rank ends the job before it
            dist.broadcast_object_list(done, src=0, group=self.world.checkpoint_group)
        except RuntimeError as error:  # a rank is lost; `wait` raises this in the main thread
            self._failure = error
        self._writer.end(done[0])
        if done[0]:
            self.saved_step = meta["progress"]["step"]

    def _publish_or_drop(
        self,
        per_rank: list[tuple[str | None, dict[str, int], Layout | None]],
        part: Path,
        final: Path,
        meta: dict[str, Any],
    ) -> bool:
        """On rank 0: publish a checkpoint if all ranks have written their parts. Returns whether it is complete."""
        problems, parts, layouts = zip(*per_rank, strict=True)
        problem = _first_problem(problems)
        checksums: dict[str, int] = {}
        for written in parts:
            checksums |= written
        try:
            problem = problem or _unseen_file(part, checksums)
            if problem is None:
                self._writer.write_metadata(part, layouts)
                self._publish_folder(part, final, meta, checksums | {METADATA: _file_checksum(part / METADATA)})
        except Exception as error:  # see _finish_save
            problem = _root_cause(error)
        if problem is not None:
            log.warning("checkpoint %s was not written: %s", final, problem)
            shutil.rmtree(part, ignore_errors=True)
        return problem is None

    def _publish_folder(self, part: Path, final: Path, meta: dict[str, Any], checksums: dict[str, int]) -> None:
        """Make a written checkpoint visible, and remove the oldest complete ones."""
        meta["files"] = {}
        for name, checksum in checksums.items():
            meta["files"][name] = ((part / name).stat().st_size, checksum)
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        # the rename publishes it atomically; older ones are removed only afterwards
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        finished = [f for f in sorted(self.root.glob("step_*")) if f.suffix != ".tmp" and complete(f) is None]
        for old in finished[: -self.max_checkpoints]:
            if old != final:
                shutil.rmtree(old)

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run. All ranks call this together, and only rank 0 looks."""
        return from_first(partial(find, self.root), self.world.checkpoint_group)

    def set_aside(self, step: int) -> None:
        """When a run starts: rename checkpoints of later steps to old_step_..., and remove unfinished ones. All ranks
        call this together, and rank 0 does it.

        They were left by another run, or are damaged. The renamed ones stay on disk, but are neither resumed from nor
        counted by trainer.max_checkpoints.
        """
        from_first(partial(self._set_folders_aside, step), self.world.checkpoint_group)

    def _set_folders_aside(self, step: int) -> None:
        for folder in sorted(self.root.glob("step_*")):
            if folder.suffix == ".tmp":
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.name > f"step_{step:06d}":
                aside = folder.with_name(f"old_{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                log.warning("checkpoint %s is from another run, or damaged: renamed to %s", folder, aside.name)

    def wait(self) -> None:
        """Wait until the pending checkpoint is written. Raises RuntimeError if a rank was lost meanwhile."""
        if self._pending is not None:
            self._pending.join(self.patience_s)
            if self._pending.is_alive() and self.world.rank == 0:
                log.warning(
                    "the last checkpoint has not been written after %.0f s: training waits; look at the file system of "
                    "trainer.output_dir",
                    time.monotonic() - self._begun,
                )
            self._pending.join()
            self._pending = None
        if self._failure is not None:
            raise self._failure
