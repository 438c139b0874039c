"""What every training job is made of: optimizer, checkpoints, validation, logs, around the parts that it is handed."""

import logging
import resource
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import save
from phalanx.config.run import EmaConfig, RunConfig
from phalanx.config.secrets import public
from phalanx.distributed import mesh
from phalanx.distributed.collectives import agree
from phalanx.exit import Stopped
from phalanx.telemetry.metrics import METRICS_FILE, RunLogger, read_metrics
from phalanx.telemetry.report import write_report
from phalanx.training import folder_lock
from phalanx.training.checkpoint import Checkpointer, Progress, find, kept_in_flight
from phalanx.training.learner import Learner
from phalanx.training.parts import Parts
from phalanx.training.scoring import Scoring
from phalanx.types import JobError

log = logging.getLogger(__name__)


class Run(Scoring):
    """One run of a training job. Subclasses bring the loop, `fit`."""

    def __init__(self, cfg: RunConfig, parts: Parts) -> None:
        """Take the parts, which are made already on all ranks."""
        super().__init__(cfg, parts)
        self.output_dir = Path(cfg.trainer.output_dir)

    def prepare(
        self,
        total_steps: int,
        total_updates: int,
        ema: EmaConfig,
        averages: Sequence[str] = (),
        beside: Mapping[str, Learner] | None = None,
    ) -> None:
        """Make the optimizer and the averages (`ema`, and those that the job asks for by name), resume where a
        checkpoint is, and open the logs. `beside`: what is trained beside the policy, by name, such as a critic.
        """
        cfg = self.cfg
        self.total_steps = total_steps
        self.learner = self.make_learner(total_updates, ema, averages)
        self.beside = dict(beside or {})
        self.checkpointer = Checkpointer(self.output_dir, self.world, self._signature(), cfg.trainer.max_checkpoints)
        self.progress = self._resume()
        problem = self._not_finite()
        if problem is not None:
            raise ValueError(f"model.path: {problem}; a base or a checkpoint of such weights cannot be trained")
        self.checkpointer.saved_step = self.progress.step
        self._good = replace(self.progress)  # as after the last step that was not a bad one
        self.bad_steps = self._applied = self._non_finite = 0
        try:
            self._open_files()
        except OSError as error:  # such as a disk without inodes
            raise ValueError(f"trainer.output_dir: {error.filename or self.output_dir}: {error.strerror}") from error

    def _open_files(self) -> None:
        """Make the output folder what a run from here on needs, and open the logs. Raises OSError."""
        cfg, first = self.cfg, self.world.rank == 0
        if first:
            self.checkpointer.set_aside(self.progress.step)
            self.output_dir.mkdir(parents=True, exist_ok=True)
            save(cfg, self.output_dir / "config.yaml")
            with suppress(OSError):  # nobody reads it
                print(self.describe(), flush=True)
        logged = self.progress.step - (self.progress.unfinished is not None)
        ids, total = self.progress.logger_ids, self.total_steps
        self.logger = RunLogger(cfg.trainer, public(cfg), ids, logged, total, first, self.timers)
        self.progress.logger_ids = self.logger.ids

    def make_learner(self, total_updates: int, ema: EmaConfig, averages: Sequence[str]) -> Learner:
        """The policy with its optimizer and averages."""
        offload = self.cfg.parallel.optimizer_offload
        return Learner(self.policy.trained, self.cfg.optim, total_updates, ema=ema, averages=averages, offload=offload)

    def describe(self) -> str:
        """The world and what is trained, in one line."""
        w, model = self.world, self.policy.trained
        trained = sum(p.numel() for p in model.parameters.values())
        total = sum(p.numel() for p in model.module.parameters())
        shared = f", each sample on {w.context_size}" if w.context_size > 1 else ""
        return (
            f"{w.size} ranks on {w.device.type}: {w.size // w.shard_size} replicas of {w.shard_size} shards{shared}; "
            f"{type(model.module).__name__}: {trained / 1e6:.2f} M of {total / 1e6:.2f} M weights are trained; "
            f"steps {self.progress.step} to {self.total_steps} of {self.batch()}; files in {self.output_dir}"
        )

    def batch(self) -> str:
        """What a step trains on, in words."""
        return f"{self.cfg.data.batch_size(self.world.data_size)} prompts"

    def fit(self) -> None:
        """Train to the last step."""
        raise AssertionError("a job has its own loop")

    def run(self) -> None:
        """Train, write the report, and say what came of it. Raises JobError, or Stopped once the state is saved."""
        # whoever hears a signal waits for its neighbours' answer
        if self.world.link is None:
            dist.barrier()
        else:
            self.world.link.meet()
        self.world.watch.listen()
        try:
            self._run()
        finally:
            folder_lock.release()
        mesh.stop()

    def _run(self) -> None:
        try:
            self.fit()
        except JobError:  # every rank has it, so the checkpoint in flight can still be finished
            self.checkpointer.wait()
            raise
        except Stopped as stop:
            raise self._keep(stop) from None
        self.release()
        self.world.watch.close()
        if self.cfg.trainer.save_freq > 0 and self.checkpointer.saved_step < self.total_steps:
            raise JobError("the last checkpoint was not written; make space, and the same command goes on")
        if self.world.rank == 0:
            try:
                report = f"report: {write_report(self.output_dir)}"
            except (OSError, ValueError) as error:  # a full disk, a damaged file: the training is done all the same
                report = f"the report was not written: {error}"
            with suppress(OSError):  # a closed terminal fails no finished job
                print(*validation_summary(self.output_dir), report, sep="\n", flush=True)

    def validate(self, step: int) -> dict[str, float]:
        """Validate on all sets and hand the samples to the loggers; returns the row, empty where there is nothing."""
        if not self.cfg.reward.functions:
            return {}
        with self.timers("validation"):
            row, kept = self.validated(nullcontext if self.learner.ema is None else partial(self.policy.using, "ema"))
            for name, records in kept.items():
                self.logger.records(step, name, records)
        return row

    def begin(self) -> None:
        """What is due before the first step: the validation before training (trainer.val_before_train), or the end of
        a step in whose validation the run was stopped.
        """
        if self.progress.unfinished is not None:
            self.end_step(self.progress.step, self.progress.unfinished)
        elif self.progress.step == 0 and self.cfg.trainer.val_before_train and self.val_sets:
            if self.cfg.reward.functions:
                log.info("validating on %d prompts", sum(map(len, self.val_sets.values())))
            self.logger.log(0, self.validate(0) | self.timers.pop())

    def end_step(self, step: int, row: dict[str, float]) -> None:
        """After training step number `step` (from 1): validate, log and save, each where it is due."""
        t, last = self.cfg.trainer, step == self.total_steps
        self.progress.step, self.progress.unfinished = step, row
        self.progress.updates_beside = {name: learner.updates for name, learner in self.beside.items()}
        if t.test_freq > 0 and (last or step % t.test_freq == 0):
            row = row | self.validate(step)
        self.progress.unfinished = None
        # before the checkpoint: a run that is killed after it must find this row
        self.logger.log(step, row | self.timers.pop())
        self._count_bad_step()
        if t.save_freq > 0 and (last or (step % t.save_freq == 0 and not self.bad_steps)):
            self._save(self.progress)
        if not last:
            self.go_on()

    def step_optimizer(self, loss: Tensor) -> dict[str, float | Tensor]:
        """Apply the gradients that the backward passes left; `loss` is this rank's sum of them.

        An update with NaN or infinity in the gradient, or in any rank's loss, is skipped on all ranks. Returns
        grad_norm, lr, and whether it was skipped.
        """
        stats = self.learner.step(loss)
        self.progress.updates = self.learner.updates
        if stats["skipped"]:
            self._non_finite += 1
        else:
            self._applied += 1
        return stats

    @property
    def stepped(self) -> bool:
        """Whether this training step changed the weights, or had nothing to learn; False: all its updates were bad."""
        return self._applied > 0 or self._non_finite == 0

    def _count_bad_step(self) -> None:
        """A bad step is one all of whose updates were skipped: the weights stay those of the last good one. Too many
        in a row end the job (trainer.max_bad_steps) with a checkpoint from before them.
        """
        if self._applied:
            self.bad_steps = 0
        elif self._non_finite:
            self.bad_steps += 1
        self._applied = self._non_finite = 0
        if self.bad_steps == 0:
            self._good = replace(self.progress)
        if self.bad_steps < self.cfg.trainer.max_bad_steps:
            return
        self.checkpointer.wait()
        if self.cfg.trainer.save_freq > 0 and self._good.step > self.checkpointer.saved_step:
            self._save(self._good)
        raise JobError(
            f"no update of the last {self.bad_steps} training steps was finite (NaN or infinity in loss or gradient): "
            f"the weights are still those of step {self._good.step}; lower optim.lr, or look at the rewards"
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def release(self, stop: int = 0) -> None:
        """Let ranks of other roles end, by the signal `stop` where there was one."""

    def in_flight(self, step: int) -> Tensor | None:
        """What a checkpoint of step number `step` keeps of samples that are drawn already, of this rank: bytes."""
        return None

    def _save(self, progress: Progress) -> None:
        in_flight = self.in_flight(progress.step)
        with self.timers("checkpoint"):
            problem = self._not_finite()
            if problem is not None:
                raise JobError(
                    f"after step {progress.step} {problem}; nothing is saved over the checkpoints of before; "
                    "lower optim.lr, or look at the rewards"
                )
            self.checkpointer.save(self.state(), replace(progress), in_flight)

    def _not_finite(self) -> str | None:
        """On all ranks: the weights that hold NaN or infinity, in words; None where there are none."""
        names = (learner.not_finite() for learner in (self.learner, *self.beside.values()))
        name = next((name for name in names if name is not None), None)
        return agree(None if name is None else f"the weights {name} hold NaN or infinity", 0)[0]

    def _keep(self, stop: Stopped) -> Stopped:
        """Save the state as it was after the last whole step; returns what to raise."""
        step = self.progress.step
        self.checkpointer.wait()
        if self.cfg.trainer.save_freq > 0 and step > self.checkpointer.saved_step:
            self._save(self.progress)
            self.checkpointer.wait()
        self.logger.close()
        self.release(stop.number)
        self.world.watch.close()
        newest = find(self.checkpointer.root)
        kept = "no checkpoint is kept" if newest is None else f"the same command goes on from {newest}"
        return Stopped(stop.number, f" after step {step} of {self.total_steps}; {kept}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as tensors of the mesh: the policy's at the top, and others below their names."""
        return self.learner.state() | {name: learner.state() for name, learner in self.beside.items()}

    def _signature(self) -> dict[str, Any]:
        signature = self.learner.signature()
        for name, learner in self.beside.items():
            signature |= {f"{name}: {key}": value for key, value in learner.signature().items()}
        return signature

    def _resume(self) -> Progress:
        folder = self.checkpointer.locate(self.cfg.trainer.resume)
        self.kept = [] if folder is None else kept_in_flight(folder)
        if folder is None:
            return Progress()
        progress = self.checkpointer.load(folder, self.state())
        self.learner.loaded(progress.updates)
        for name, learner in self.beside.items():
            learner.loaded(progress.updates_beside[name])
        if self.world.rank == 0:
            log.warning("resuming from %s: step %d of %d", folder, progress.step, self.total_steps)
        return progress


def validation_summary(folder: Path) -> list[str]:
    """A line for each validation set: the first mean reward in a run's metrics.jsonl, and the last one if there is
    another.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        for key, value in row.items():
            if key.startswith("val/") and key.endswith("/reward/mean"):
                found.setdefault(key, []).append((row["step"], value))
    lines = []
    for key, points in found.items():
        ends = points[:1] if len(points) == 1 else [points[0], points[-1]]
        lines.append(f"{key}: " + " -> ".join(f"{value:.3f} (step {step})" for step, value in ends))
    return lines


def peak_memory_gb(device: torch.device) -> float:
    """The largest memory that this process ever held, in GB (10^9): the device's, or on a CPU the process's own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
