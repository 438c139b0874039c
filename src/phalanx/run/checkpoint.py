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
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from phalanx.distributed.collectives import all_gather_object, broadcast_object, from_first
from phalanx.distributed.mesh import World
from phalanx.models.lora import ADAPTER, WEIGHTS
from phalanx.run.checkpoint_folder import (
    IN_FLIGHT,
    JUDGED,
    best_checkpoint,
    complete,
    damaged,
    file_checksum,
    find,
    named_folder,
    no_folder,
    read_meta,
)
from phalanx.run.checkpoint_reader import load_tensors
from phalanx.run.checkpoint_writer import METADATA, Layout, ShareWriter
from phalanx.training.checkpoint_contents import share
from phalanx.training.progress import Progress

log = logging.getLogger(__name__)
# signature entries that older checkpoints do not have
ADDED = ("chat_template_date", "chat_template_kwargs", "cpu_linear", "lora_alpha", "lora_init", "quantization")
FULL = 2**20  # a disk with fewer free bytes counts as full


def _staged_state(state: dict[str, Any]) -> dict[str, Any]:
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
        self._failure: RuntimeError | ValueError | None = None
        # the step of this run's newest complete checkpoint; valid after `wait`
        self.saved_step = 0
        self.published: Callable[[Path], None] | None = None  # called on rank 0 for each new checkpoint, in its thread

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
            folder = named_folder(resume)
            problem = complete(folder) if folder.is_dir() else no_folder(folder)
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
        progress = Progress(**read_meta(folder)["progress"])
        self.saved_step = progress.step
        return progress

    def continues(self, step: int) -> None:
        """A job goes on after `step` steps without a checkpoint: find out whether it has one. All ranks call this
        together.
        """
        newest = self.newest()
        self.saved_step = step if newest is not None and newest.name == f"step_{step:06d}" else 0

    def save(
        self,
        state: dict[str, Any],
        progress: Progress,
        in_flight: Tensor | None = None,
        judged: dict[str, Any] | None = None,
    ) -> None:
        """Copy the state to the CPU and write it in the background, once the previous checkpoint is written. in_flight:
        bytes [K] of samples of this rank that later steps will train. judged: see phalanx.run.keep_best.judgement.
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
        # asdict and _staged_state copy, since training goes on and changes the originals before they are written
        meta = {"progress": asdict(progress), "signature": self.signature}
        if judged is not None:
            meta[JUDGED] = judged
        copied = _staged_state(share(state, self.world))
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
            checksums = {f.name: file_checksum(f) for f in part.glob(f"__{self.world.rank}_*")}
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
        except (RuntimeError, ValueError) as error:  # a rank is lost, or the group aborted; `wait` raises it
            self._failure = error
        self._writer.end(done[0])
        if done[0]:
            self.saved_step = meta["progress"]["step"]
            if self.world.rank == 0 and self.published is not None:
                self.published(final)

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
            # if each node wrote to a local disk, each has only a part, which otherwise only a resume would reveal
            for name in checksums:
                if problem is None and not (part / name).exists():
                    problem = (
                        f"rank 0 cannot see {name}: trainer.output_dir must be on a file system that all nodes share"
                    )
            if problem is None:
                self._writer.write_metadata(part, layouts)
                self._publish_folder(part, final, meta, checksums | {METADATA: file_checksum(part / METADATA)})
        except Exception as error:  # see _finish_save
            problem = _root_cause(error)
        if problem is not None:
            log.warning("checkpoint %s was not written: %s", final, problem)
            shutil.rmtree(part, ignore_errors=True)
        return problem is None

    def _publish_folder(self, part: Path, final: Path, meta: dict[str, Any], checksums: dict[str, int]) -> None:
        """Make a written checkpoint visible, and remove the oldest complete ones except the best."""
        meta["files"] = {}
        for name, checksum in checksums.items():
            meta["files"][name] = ((part / name).stat().st_size, checksum)
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        # the rename publishes it atomically; older ones are removed only afterwards
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        finished = [f for f in sorted(self.root.glob("step_*")) if complete(f) is None]
        best = best_checkpoint(self.root)
        if best == final:
            log.info("%s is the best checkpoint: %s is %.4g", final, *itemgetter("metric", "value")(meta[JUDGED]))
        for old in finished[: -self.max_checkpoints]:
            if old not in (final, best):
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
                log.info("checkpoint %s was there before: it is kept as %s", folder, aside.name)

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
