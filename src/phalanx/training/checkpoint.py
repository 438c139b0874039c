"""Checkpoints: sharded (torch.distributed.checkpoint), written beside the training, and atomic.

A checkpoint is the folder `checkpoints/step_000010`. It is written as `step_000010.tmp` and renamed once every rank is
done; its `meta.json`, written last, lists all files with sizes and checksums. Only what is trained is saved: weights,
the optimizer's state, the moving average, and the run's counters. Nothing in it depends on the number of ranks.
"""

import errno
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Collection
from dataclasses import InitVar, asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from phalanx.config.files import parse_json
from phalanx.distributed.collectives import all_gather_object, broadcast_object, from_first
from phalanx.distributed.fsdp import as_part_of
from phalanx.distributed.mesh import World
from phalanx.models.lora import ADAPTER, WEIGHTS
from phalanx.training.checkpoint_reader import Reader

log = logging.getLogger(__name__)
# to signatures, since checkpoints were first written
ADDED = ("chat_template_date", "chat_template_kwargs", "cpu_linear", "lora_alpha", "lora_init", "quantization")
MOST = 10**15  # of any count
FULL = 2**20  # bytes of space that are none to a checkpoint
IN_FLIGHT = "in_flight.safetensors"  # behind the rank, in the names of files


@dataclass
class Progress:
    """The run's counters: training steps done, samples drawn, optimizer steps, and the ids that loggers gave the run.

    `updates_beside` are the optimizer steps of models that are trained beside the policy.
    `rescoring`: log-probs of rollout and replay were seen to differ, so that the policy computes the old ones again.
    `unfinished` is the row of metrics of the last step where the run was stopped in its validation.
    """

    step: int = 0
    samples_seen: int = 0
    updates: int = 0
    wandb_id: InitVar[str | None] = None  # of older checkpoints, in place of logger_ids
    unfinished: dict[str, float] | None = None
    rescoring: bool = False
    updates_beside: dict[str, int] = field(default_factory=dict)
    logger_ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self, wandb_id: str | None) -> None:
        if wandb_id is not None:
            self.logger_ids = {"wandb": wandb_id}

    def check(self) -> None:
        """Raise ValueError for what no run counts."""
        counts = [self.step, self.samples_seen, self.updates, *self.updates_beside.values()]
        for count in counts:
            if type(count) is not int or not 0 <= count < MOST:
                raise ValueError(f"the counts {counts}; expected integers from 0")
        for value in self.logger_ids.values():
            if not isinstance(value, str):
                raise ValueError("logger_ids of another type")
        row = {} if self.unfinished is None else self.unfinished
        if not isinstance(self.rescoring, bool) or not all(isinstance(value, int | float) for value in row.values()):
            raise ValueError("rescoring or unfinished of another type")


def trained_state(
    parameters: dict[str, Tensor], optimizer: dict[str, dict[str, Tensor]], averages: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """The contents of a checkpoint, as tensors of the mesh: to save, or to load into.

    `averages`: other weights by name.
    """
    # Moments and averages are local tensors. As parts of DTensors they are saved once each, and can be loaded into any
    # other layout. AdamW's count of steps is one number, the same for all parts.
    moments: dict[str, dict[str, Tensor]] = {}
    for name, p in parameters.items():
        moments[name] = {}
        for key, value in optimizer[name].items():
            moments[name][key] = value if value.dim() == 0 else as_part_of(value, p)
    state: dict[str, Any] = {"model": {name: p.detach() for name, p in parameters.items()}, "optim": moments}
    for average, values in averages.items():
        state[average] = {name: as_part_of(value, parameters[name]) for name, value in values.items()}
    return state


def complete(folder: Path) -> str | None:
    """The problem with a checkpoint folder, None if it is complete. For contents see `damaged`."""
    try:
        meta = read_meta(folder)
        for name, (size, _) in meta["files"].items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a file of this folder")
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
    """The problem with the contents of a complete checkpoint, by their checksums; None if none.

    Every `parts`-th file from number `part` on is read, so that ranks can share the work.
    """
    try:
        Reader(folder).read_metadata()
    except ValueError as error:
        return str(error)
    files = sorted(read_meta(folder)["files"].items())
    for name, (_, checksum) in files[part::parts]:
        try:
            value = _checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if value != checksum:
            return f"{name} is not what was written: its checksum differs"
    return None


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def find(root: Path, without: Collection[Path] = ()) -> Path | None:
    """The newest complete checkpoint below `root`, except those of `without`.

    Incomplete ones are skipped with a message.
    """
    for folder in sorted(root.glob("step_*"), reverse=True):
        if not folder.is_dir() or folder in without:
            continue
        problem = "it was never finished" if folder.suffix == ".tmp" else complete(folder)
        if problem is None:
            return folder
        log.warning("checkpoint %s is passed over: %s", folder, problem)
    return None


def saved_choice(root: Path, resume: str, key: str) -> Any:
    """The value of `key` in the signature of the checkpoint that trainer.resume will take; None if there is none.

    For choices that come before models are built; what is wrong with the checkpoint is told by `locate`.
    """
    folder = Path(resume).expanduser() if resume not in ("auto", "never") else None
    if resume == "auto":
        folder = next((f for f in sorted(root.glob("step_*"), reverse=True) if complete(f) is None), None)
    if folder is None or complete(folder) is not None:
        return None
    return read_meta(folder)["signature"].get(key)


def kept_in_flight(folder: Path) -> list[Tensor]:
    """The bytes [K] of samples in flight that each rank kept in a checkpoint, in the order of ranks."""
    files = sorted(folder.glob(f"__*_{IN_FLIGHT}"), key=lambda file: int(file.name.split("_")[2]))
    return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint."""
    return dict(parse_json((folder / "meta.json").read_text()))


def _unseen(folder: Path) -> str | None:
    """The problem where files that other ranks wrote are not seen here; None if all are."""
    # Where each node writes to a local disk, each holds a part, and only the resume would show it.
    stored = Reader(folder).read_metadata().storage_data.values()
    for entry in stored:
        if not (folder / entry.relative_path).exists():
            name = entry.relative_path
            return f"{name} is not seen by rank 0: trainer.output_dir must be on a file system that all nodes share"
    return None


def _cause(error: BaseException) -> str:
    """The root cause of an error in one line: torch's own text begins with the frames of each rank."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))  # of the ranks' failures
    return " ".join(str(error).split())[:300]


def _first(problems: list[str | None]) -> str | None:
    return next(filter(None, problems), None)


class Checkpointer:
    """The checkpoints of one run: saved, found and loaded."""

    def __init__(self, output_dir: Path, world: World, signature: dict[str, Any], max_checkpoints: int) -> None:
        self.root, self.world, self.signature = output_dir / "checkpoints", world, signature
        self.max_checkpoints = max_checkpoints
        self._pending: threading.Thread | None = None
        self._failure: RuntimeError | None = None
        # of this run's newest checkpoint that is complete, as of the last `wait`
        self.saved_step = -1

    def locate(self, resume: str) -> Path | None:
        """The checkpoint that `trainer.resume` means; raises ValueError if it cannot be used."""
        passed: list[Path] = []
        while True:
            # Rank 0 looks and tells the others: a network's disk may show them another state.
            folder = from_first(partial(self._locate, resume, passed))
            if folder is None:
                return None
            # checksums want every byte read, which the ranks share
            problem = _first(all_gather_object(damaged(folder, self.world.rank, self.world.size)))
            if problem is None:
                return folder
            if resume != "auto":
                raise ValueError(f"trainer.resume: {resume!r} cannot be used: {problem}")
            log.warning("checkpoint %s is passed over: %s", folder, problem)
            passed.append(folder)

    def _locate(self, resume: str, passed: Collection[Path]) -> Path | None:
        """On rank 0: as `locate`, by sizes and signatures only, without those of `passed`."""
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
                problem = f"it holds a LoRA, and no checkpoint; model.lora_path={resume} starts a run from it"
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
        """Fill `state` in place, whatever the number of ranks that saved it.

        Raises ValueError if that fails: the state must not be used then.
        """
        try:
            dcp.load(state, storage_reader=Reader(folder), process_group=self.world.checkpoint_group)
        except CheckpointException as error:
            raise ValueError(f"trainer.resume: {folder} cannot be loaded: {_cause(error)}") from error
        return Progress(**read_meta(folder)["progress"])

    def save(self, state: dict[str, Any], progress: Progress, in_flight: Tensor | None = None) -> None:
        """Copy the state to the CPU and write it in the background, after the previous one. `in_flight`: bytes of
        samples of this rank that are to be trained next.
        """
        self.wait()  # two copies at once might not fit into the memory
        final = self.root / f"step_{progress.step:06d}"
        part = final.with_suffix(".tmp")
        problem = None
        if self.world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir(parents=True)
            except OSError as error:  # a full disk, say: training goes on
                problem = str(error)
                log.warning("checkpoint %s was not written: %s", final, problem)
        if broadcast_object(problem) is not None:
            return
        # copies: training goes on and changes them before they are written
        meta = {"progress": asdict(progress), "signature": self.signature}
        response: Any = dcp.async_save(state, checkpoint_id=str(part), process_group=self.world.checkpoint_group)
        # a daemon, since a rank that fails must not wait for a disk: what is half-written is passed over
        self._pending = threading.Thread(
            target=self._finish, args=(response, part, final, meta, in_flight), daemon=True
        )
        self._pending.start()

    def _finish(self, response: Any, part: Path, final: Path, meta: dict[str, Any], in_flight: Tensor | None) -> None:
        """On every rank, in the background: publish once all ranks have written."""
        problem, checksums = None, {}
        try:
            if in_flight is not None:
                (part / f"__{self.world.rank}_{IN_FLIGHT}").write_bytes(in_flight.numpy().tobytes())
            response.result()
            checksums = {f.name: _checksum(f) for f in part.glob(f"__{self.world.rank}_*")}
        except (CheckpointException, OSError, RuntimeError) as error:
            problem, full = _cause(error), os.strerror(errno.ENOSPC)
            # torch says only that its file is too short, and the system's error does not reach other ranks
            if full not in problem and part.is_dir() and shutil.disk_usage(part).free < FULL:
                problem = f"{full} ({problem})"
        # a rank that failed takes part too: the others would wait for it until the time limit
        per_rank: list[Any] = [None] * self.world.size
        done = [False]
        try:
            dist.all_gather_object(per_rank, (problem, checksums), group=self.world.checkpoint_group)
            if self.world.rank == 0:
                done = [self._publish_or_drop(per_rank, part, final, meta)]
            # a rank that ends must not take the renaming with it, so all wait for it
            dist.broadcast_object_list(done, src=0, group=self.world.checkpoint_group)
        except RuntimeError as error:  # a rank is lost; the main thread hears of it in `wait`
            self._failure = error
        if done[0]:
            self.saved_step = meta["progress"]["step"]

    def _publish_or_drop(
        self, per_rank: list[tuple[str | None, dict[str, int]]], part: Path, final: Path, meta: dict[str, Any]
    ) -> bool:
        """On rank 0: publish a checkpoint that all ranks have written; True if it is there."""
        problem = _first([failure for failure, _ in per_rank])
        checksums: dict[str, int] = {}
        for _, written in per_rank:
            checksums |= written
        try:
            problem = problem or _unseen(part)
            if problem is None:
                self._publish(part, final, meta, checksums)
        except OSError as error:
            problem = str(error)
        if problem is not None:
            log.warning("checkpoint %s was not written: %s", final, problem)
            shutil.rmtree(part, ignore_errors=True)
        return problem is None

    def _publish(self, part: Path, final: Path, meta: dict[str, Any], checksums: dict[str, int]) -> None:
        """Make a written checkpoint visible, and remove the oldest complete ones."""
        meta["files"] = {}
        for file in part.iterdir():
            # the ranks have summed up their own files; what is left is the small .metadata
            checksum = checksums[file.name] if file.name in checksums else _checksum(file)
            meta["files"][file.name] = (file.stat().st_size, checksum)
        (part / "meta.json").write_text(json.dumps(meta, indent=1))
        # the rename makes it complete, all at once; older ones go only after it
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        finished = [f for f in sorted(self.root.glob("step_*")) if f.suffix != ".tmp" and complete(f) is None]
        for old in finished[: -self.max_checkpoints]:
            if old != final:
                shutil.rmtree(old)

    def set_aside(self, step: int) -> None:
        """On rank 0, at a run's start: rename checkpoints of later steps, and remove unfinished ones.

        Another run or a damaged one left them. As `old_step_...` they stay on disk, and are neither
        resumed nor counted.
        """
        for folder in sorted(self.root.glob("step_*")):
            if folder.suffix == ".tmp":
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.name > f"step_{step:06d}":
                aside = folder.with_name(f"old_{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                log.warning("checkpoint %s is of another run, or damaged: it is now %s", folder, aside.name)

    def wait(self) -> None:
        """Wait until the checkpoint in flight is complete.

        Raises RuntimeError where the ranks lost one another over it.
        """
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._failure is not None:
            raise self._failure
