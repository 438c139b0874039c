"""A training job around its loop: resume, count steps, validate, log, save checkpoints, and end."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.config.joint import JobConfig
from phalanx.config.load import save
from phalanx.config.messages import ConfigError
from phalanx.config.secrets import public
from phalanx.config.sources import changed
from phalanx.distributed.collectives import agree
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.models.linear import count_weights
from phalanx.models.lora import in_bfloat16
from phalanx.models.meeting import pause
from phalanx.run import folder_lock, in_place
from phalanx.run.checkpoint import Checkpointer, Progress
from phalanx.run.checkpoint_folder import kept_in_flight
from phalanx.run.early_end import ends_early
from phalanx.run.in_memory import copies_to_peers
from phalanx.run.keep_best import check_metric, judgement
from phalanx.run.provenance import with_whole_path, write_provenance
from phalanx.run.telemetry.profiles import Profiler
from phalanx.run.telemetry.rank_files import RankFiles
from phalanx.run.telemetry.run_folder import CONFIG_FILE
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.run.validation import validation_summary
from phalanx.run.world import stop_world
from phalanx.telemetry.timers import Timers
from phalanx.training.components import Sampling
from phalanx.training.optim import TrainState
from phalanx.training.stops import Stops
from phalanx.types import JobError

log = logging.getLogger(__name__)


class Job:
    """A training job. Its loop takes each step number from `steps`, and calls `end_step` after the step.

    policies: the policies to train by name; a single one is named "". beside: other trained models by name, such as a
    critic. `states` has all of them, `state` is that of the first policy.
    """

    def __init__(
        self,
        cfg: JobConfig,
        world: World,
        policies: Mapping[str, TrainState],
        sampling: Sampling,
        timers: Timers,
        total_steps: int,
        *,
        batch: str,
        exports: Callable[[Path], None] | None,
        beside: Mapping[str, TrainState] | None = None,
    ) -> None:
        """Resume from a checkpoint if there is one, and open the logs; all ranks call this together. batch: description
        of a step's batch for the log. exports: of new checkpoints, see phalanx.run.exporting.exports_of. Raises
        ValueError for weights that are not finite and for a folder that cannot be written.
        """
        self.cfg, self.world, self.sampling, self.timers = cfg, world, sampling, timers
        self.policies, self.beside = dict(policies), dict(beside or {})
        self.total_steps, self.batch = total_steps, batch
        self.state, self.states = next(iter(policies.values())), self.policies | self.beside
        self.output_dir = Path(cfg.trainer.output_dir)
        self.checkpointer = Checkpointer(
            self.output_dir, world, self._job_signature(), cfg.trainer.max_checkpoints, cfg.parallel.timeout_s
        )
        self.checkpointer.published = exports
        self.progress = self._resume_progress()
        if (problem := self._not_finite()) is not None:
            raise ValueError(f"model.path: {problem}; a base or a checkpoint of such weights cannot be trained")
        self.stops = Stops(world, self.states, self.progress, timers)
        several = sum(state.optimizer.total_updates for state in self.states.values()) > total_steps
        self.goes_on = goes_on = in_place.generation is not None
        self.copies = copies_to_peers(cfg.trainer.peer_copy, self.states.values(), world, in_place=goes_on)
        for state in self.states.values():
            undoes = state.model.lora or self.copies if cfg.trainer.undo_steps is None else cfg.trainer.undo_steps
            state.undoes = undoes and (goes_on or (several and world.link is None))
        self._set_profiling()
        self._good = copy(self.progress)  # after the last step with at least one finite update
        self.bad_steps = self._skipped = 0  # skipped: updates of policies and critic since this start of the job
        self.unconfirmed: dict[str, float] | None = None  # the last row, until all ranks have met after it was written
        try:
            self._open_files()
        except OSError as error:  # for example a disk without free inodes
            raise folder_lock.unwritable(self.output_dir, error) from error

    def _open_files(self) -> None:
        """Prepare the output folder for the steps to come, and open the logs. Raises OSError."""
        cfg, first = self.cfg, self.world.rank == 0
        self.checkpointer.set_aside(self.progress.step)
        if first:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            if cfg.trainer.save_freq > 0:
                self.checkpointer.root.mkdir(exist_ok=True)  # not found out when the first one is written
            save(with_whole_path(cfg), self.output_dir / CONFIG_FILE)
            write_provenance(cfg, self.world, self.output_dir, self.progress.step)
            with suppress(OSError):  # a closed terminal
                print(self.describe(), flush=True)
        ids, total, done = self.progress.logger_ids, self.total_steps, self.progress.step
        logged = done - (self.progress.unfinished is not None)
        self.logger = RunLogger(cfg.trainer, public(cfg), ids, logged, total, first, self.timers, done > 0)
        self.progress.logger_ids = self.logger.ids

    def _set_profiling(self) -> None:
        """Set up profiling of trainer.profile_steps. Raises ValueError for a step after the last one."""
        key, done, steps = "trainer.profile_steps", self.progress.step, self.cfg.trainer.profile_steps
        if max(steps, default=0) > self.total_steps:
            raise ValueError(f"{key}: {max(steps)} is beyond the last step; expected 1 to {self.total_steps}")
        passed = [step for step in steps if step <= done]
        if passed and self.world.rank == 0:
            log.warning("%s: %s are not profiled, since the run resumes after step %d", key, passed, done)
        if steps:
            self.timers.profiler = Profiler(self.cfg.trainer, self.world, self.timers)

    def describe(self) -> str:
        """Describe the ranks and the trained models in one line."""
        w, models = self.world, []
        for state in self.policies.values():
            model, kind = state.model, type(state.model.module).__name__
            trained, total = sum(p.numel() for p in model.parameters.values()), count_weights(model.module.parameters())
            models.append(f"{kind}: {trained / 1e6:.2f} M of {total / 1e6:.2f} M weights are trained")
        shared = f", each sample on {w.context_size}" if w.context_size > 1 else ""
        return (
            f"{w.size} ranks on {w.device.type}: {w.size // w.shard_size} replicas of {w.shard_size} shards{shared}; "
            f"{'; '.join(models)}; "
            f"steps {self.progress.step} to {self.total_steps} of {self.batch}; files in {self.output_dir}"
        )

    def run(self, fit: Callable[[], None], report: Callable[[Path], object] | None = None) -> None:
        """Train by `fit`, write the `report` of the folder, and print a summary. Raises JobError, or Stopped after the
        state was saved.
        """
        # the signal handler waits for the other ranks, so all of them must be up
        if self.world.link is None:
            dist.barrier()
        else:
            self.world.link.meet()
        self.world.watch.listen()
        try:
            with RankFiles(self.output_dir, self.world, self.timers, self.total_steps) as self.rank_files:
                self._run_loop(fit, report)
        finally:
            folder_lock.release(self.output_dir)
        stop_world()

    def _run_loop(self, fit: Callable[[], None], report: Callable[[Path], object] | None) -> None:
        try:
            fit()
        except JobError:  # all ranks raise it, so the pending checkpoint can still be completed
            self.checkpointer.wait()
            raise
        except Stopped as stop:
            raise self._save_stopped(stop) from None
        self.rank_files.end("finished")  # the report shows the last step of all ranks
        self.sampling.end()
        if self.world.link is None:
            dist.barrier()
        self.world.watch.close()
        if self.cfg.trainer.save_freq > 0 and self.checkpointer.saved_step < self.total_steps:
            raise JobError("the last checkpoint was not written; free disk space, and run the same command again")
        if self.world.rank == 0:
            if self._skipped > 0:
                log.warning("%d updates were skipped because of NaN or infinity in loss or gradient", self._skipped)
            lines = validation_summary(self.output_dir)
            if report is not None:
                try:
                    lines.append(f"report: {report(self.output_dir)}")
                except (OSError, ValueError) as error:  # a full disk or a damaged file; the training itself succeeded
                    lines.append(f"the report was not written: {error}")
            with suppress(OSError):  # a closed terminal must not fail a finished job
                print(*lines, sep="\n", flush=True)

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining training steps, counted from 0.

        First run the validation before training (trainer.val_before_train), or finish the step whose validation was
        interrupted when the run stopped.
        """
        self.sampling.begin(self.progress.step, self.total_steps, self.kept)
        in_place.begin(self)
        if self.progress.unfinished is not None:
            self.end_step(self.progress.step, self.progress.unfinished)
        elif self.progress.step == 0 and self.cfg.trainer.val_before_train and self.sampling.validates:
            if self.cfg.reward.functions:
                log.info("validating on %d prompts", self.sampling.validates)
            self.logger.log(0, self.validate(0) | self.timers.pop())
        for step in range(self.progress.step, self.total_steps):
            if self.progress.ended:
                break
            pause()
            self.stops.begin()
            with self.timers.training_step(step + 1):
                yield step
        self.checkpointer.wait()

    def validate(self, step: int) -> dict[str, float]:
        """Validate on all sets and log the samples. Returns the metrics, empty without reward functions."""
        if not self.cfg.reward.functions:
            return {}
        with self.timers("validation"):
            row, kept = self.sampling.validate(self.progress.step, None if self.state.ema is None else "ema")
            for name, records in kept.items():
                self.logger.records(step, name, records)
        if (self.cfg.trainer.keep_best or "").startswith("val/"):
            check_metric(self.cfg.trainer, row, step, self.checkpointer)
        return row

    def end_step(self, step: int, row: dict[str, float]) -> None:
        """Validate, log and save, each if due, after training step number `step` (from 1) with metrics `row`."""
        t, last = self.cfg.trainer, step == self.total_steps
        self._restore_files()
        if self.goes_on:
            in_place.confirm(self.world)
        self.progress.step, self.progress.unfinished = step, row
        self._count_updates()
        if self.copies:
            in_place.copy_state()
        self.stops.warn(step)
        if t.test_freq > 0 and (last or step % t.test_freq == 0):
            row = row | self.validate(step)
        if not last and ends_early(t, step, row, first=self.world.rank == 0):
            last, self.total_steps, self.progress.ended = True, step, True
        self.progress.unfinished = None
        # log before saving: a run that is killed after the checkpoint must find this row
        row = row | self.timers.pop()
        self.unconfirmed = row
        self.logger.log(step, row)
        self._count_bad_step()
        if t.save_freq > 0 and (last or (step % t.save_freq == 0 and not self.bad_steps)):
            self._save_checkpoint(self.progress, row)
            if not self.progress.ended:
                check_metric(t, row, step, self.checkpointer)
        if not last:
            _, stop = agree(None, self.world.watch.stop or (in_place.REGROUP if in_place.waiting(self.world) else 0))
            self.unconfirmed = None
            if stop == in_place.REGROUP:
                raise in_place.Regroup
            if stop:
                raise Stopped(stop)

    def _restore_files(self) -> None:
        """Recreate the output folder if it was deleted. Deleting it does not stop the job: a signal does."""
        if self.world.rank > 0 or (self.output_dir / CONFIG_FILE).exists():
            return
        log.warning(
            "trainer.output_dir: %s was deleted; the configuration, all metrics and the next checkpoints are written "
            "again, everything else in it is lost",
            self.output_dir,
        )
        with suppress(OSError):  # the metrics logger reports it with each row
            self.output_dir.mkdir(parents=True, exist_ok=True)
            save(with_whole_path(self.cfg), self.output_dir / CONFIG_FILE)

    def _count_bad_step(self) -> None:
        """Count consecutive steps all of whose updates were skipped, so that the weights did not change. After
        trainer.max_bad_steps of them the job saves the state before them and ends with JobError.
        """
        if any(state.diverged for state in self.policies.values()):
            self.bad_steps += 1
        elif any(state.applied for state in self.policies.values()):
            self.bad_steps = 0
        self._warn_of_skipped()
        if self.bad_steps == 0:
            self._good = copy(self.progress)
        if self.bad_steps < self.cfg.trainer.max_bad_steps:
            return
        self.checkpointer.wait()
        if self.cfg.trainer.save_freq > 0 and self._good.step > self.checkpointer.saved_step:
            self._save_checkpoint(self._good)
        raise JobError(
            f"no update of the last {self.bad_steps} training steps was finite (NaN or infinity in loss or gradient): "
            f"the weights are still those of step {self._good.step}; {self._nan_advice}"
        )

    @property
    def _nan_advice(self) -> str:
        """The advice about updates with NaN or infinity, for messages."""
        rates = [f"{state.optimizer.config:lr}" for state in self.policies.values()]
        return f"lower {' or '.join(rates)}, or look at the rewards"

    def _warn_of_skipped(self) -> None:
        """Count the skipped updates and warn at the first of them; `_run_loop` logs the total."""
        before = self._skipped
        for state in self.states.values():
            self._skipped += state.skipped
            state.applied = state.skipped = 0
        if before == 0 and self._skipped > 0 and self.world.rank == 0:
            log.warning(
                "step %d: an update with NaN or infinity in loss or gradient was skipped (actor/updates_non_finite); "
                "%s",
                self.progress.step,
                self._nan_advice,
            )

    def _count_updates(self) -> None:
        self.progress.updates = self.state.updates
        self.progress.updates_beside = {name: state.updates for name, state in self.states.items() if name}

    def _save_checkpoint(self, progress: Progress, row: Mapping[str, float] | None = None) -> None:
        in_flight = self.sampling.in_flight(progress.step)
        with self.timers("checkpoint"):
            problem = self._not_finite()
            if problem is not None:
                raise JobError(
                    f"after step {progress.step} {problem}; no checkpoint is written, and the earlier ones are kept; "
                    f"{self._nan_advice}"
                )
            self.checkpointer.save(self.tensors(), copy(progress), in_flight, judgement(self.cfg.trainer, row or {}))

    def _not_finite(self) -> str | None:
        """Describe, on all ranks, weights with NaN or infinity; None if all are finite."""
        name = None
        for state in self.states.values():
            name = name or state.not_finite()
        return agree(None if name is None else f"the weights {name} hold NaN or infinity", 0)[0]

    def _save_stopped(self, stop: Stopped) -> Stopped:
        """Save the state after the last complete step, and end. Returns the exception to raise."""
        step = self.progress.step
        self.checkpointer.wait()
        self._count_updates()
        if self.cfg.trainer.save_freq > 0 and step > self.checkpointer.saved_step:
            self._save_checkpoint(self.progress)
            self.checkpointer.wait()
        newest = self.checkpointer.newest()
        self.logger.close()
        self.sampling.end(stop.number)
        self.world.watch.close()
        kept = "no checkpoint was saved" if newest is None else f"the same command resumes from {newest}"
        return Stopped(stop.number, f" after step {step} of {self.total_steps}; {kept}")

    def tensors(self) -> dict[str, Any]:
        """The contents of a checkpoint as DTensors: a single policy at the top level, other models below their name."""
        tensors: dict[str, Any] = {}
        for name, state in self.states.items():
            tensors |= {name: state.state()} if name else state.state()
        return tensors

    def _job_signature(self) -> dict[str, Any]:
        signature: dict[str, Any] = {}
        seed = self.cfg.trainer.seed
        for name, state in self.states.items():
            before = f"{name}: " if name else ""
            signature |= {f"{before}{key}": value for key, value in state.signature().items()}
            if state.model.lora:
                # PiSSA changes the base weights by its initial LoRA, a function of the seed
                pissa = state.model.config.lora_init == "pissa"
                signature[f"{before}lora_init"] = f"pissa of trainer.seed={seed}" if pissa else "not pissa"
                if pissa and in_bfloat16(state.model.config):
                    signature[f"{before}lora_init"] += ", rounded before it was subtracted"
        if list(self.policies) != [""]:
            signature["trained policies"] = ", ".join(self.policies)
        data = vars(self.cfg.data)
        signature |= {key: data[key] for key in ("chat_template_date", "chat_template_kwargs") if key in data}
        return signature

    def _resume_progress(self) -> Progress:
        if (in_memory := in_place.taken(self.states, self.sampling, self.world)) is not None:
            progress, self.kept = in_memory
            self.checkpointer.continues(progress.step)
            self.total_steps = progress.step if progress.ended else self.total_steps
            return progress
        folder = self.checkpointer.locate(self.cfg.trainer.resume)
        self.kept = [] if folder is None else kept_in_flight(folder)
        if folder is None:
            return Progress()
        progress = self.checkpointer.load(folder, self.tensors())
        for name, state in self.states.items():
            state.loaded(progress.updates_beside[name] if name else progress.updates)
        progress.ended &= bool(self.cfg.trainer.end_below)
        self.total_steps = progress.step if progress.ended else self.total_steps
        done = progress.step >= self.total_steps and progress.unfinished is None
        if done and folder.resolve().parent != self.checkpointer.root.resolve():
            raise ValueError(
                f"trainer.resume: {folder} was saved after step {progress.step}, and this run ends after step "
                f"{self.total_steps}; expected an earlier checkpoint, or more steps (trainer.total_training_steps)"
            )
        if self.world.rank == 0:
            log.info("resuming from %s: step %d of %d", folder, progress.step, self.total_steps)
            if done:
                log.warning("no step is left to train: all %d are done already", self.total_steps)
            before = folder.parent.parent / CONFIG_FILE  # of the run that wrote the checkpoint, if it is there
            try:
                settings = changed(before, with_whole_path(self.cfg)) if before.is_file() else []
            except ConfigError as error:
                log.warning("the settings of the earlier run cannot be read: %s", error)
            else:
                if settings:
                    log.warning("other settings than in %s: %s", before, ", ".join(settings))
        return progress
