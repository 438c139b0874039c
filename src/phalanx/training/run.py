"""What every training job is made of: optimizer, checkpoints, validation, logs, around the parts that it is handed."""

import logging
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import save
from phalanx.config.run import EmaConfig, RunConfig
from phalanx.config.secrets import public
from phalanx.distributed import mesh
from phalanx.distributed.collectives import agree, reduce_int
from phalanx.exit import Stopped
from phalanx.rewards import RewardError
from phalanx.telemetry.metrics import METRICS_FILE, RunLogger, Timers, read_metrics
from phalanx.telemetry.report import write_report
from phalanx.training import folder_lock
from phalanx.training.checkpoint import Checkpointer, Progress, find
from phalanx.training.learner import Learner
from phalanx.training.parts import Parts
from phalanx.training.validation import validate
from phalanx.types import JobError, Outputs, Prompt

log = logging.getLogger(__name__)


class Run:
    """One run of a training job. Subclasses bring the loop, `fit`."""

    cfg: RunConfig

    def __init__(self, cfg: RunConfig, parts: Parts) -> None:
        """Take the parts, which are made already on all ranks."""
        self.cfg, self.world = cfg, parts.world
        self.policy, self.rollout = parts.policy, parts.rollout
        self.rewards, self.val_sets = parts.rewards, parts.val_sets
        self.output_dir = Path(cfg.trainer.output_dir)
        self.timers = Timers()
        self.unscored = 0  # samples that a reward failed on since a row of metrics took the number
        self._told_of_errors = False

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
        wandb_id, total = self.progress.wandb_id, self.total_steps
        self.logger = RunLogger(cfg.trainer, public(cfg), wandb_id, logged, total, first, self.timers)
        self.progress.wandb_id = self.logger.wandb_id

    def make_learner(self, total_updates: int, ema: EmaConfig, averages: Sequence[str]) -> Learner:
        """The policy with its optimizer and averages."""
        offload = self.cfg.parallel.optimizer_offload
        return Learner(self.policy.trained, self.cfg.optim, total_updates, ema=ema, averages=averages, offload=offload)

    def describe(self) -> str:
        """The world and what is trained, in one line."""
        w, model = self.world, self.policy.trained
        trained = sum(p.numel() for p in model.parameters.values())
        total = sum(p.numel() for p in model.module.parameters())
        return (
            f"{w.size} ranks on {w.device.type}: {w.size // w.shard_size} replicas of {w.shard_size} shards; "
            f"{type(model.module).__name__}: {trained / 1e6:.2f} M of {total / 1e6:.2f} M weights are trained; "
            f"steps {self.progress.step} to {self.total_steps} of {self.batch()}; files in {self.output_dir}"
        )

    def batch(self) -> str:
        """What a step trains on, in words."""
        return f"{self.cfg.data.batch_size(self.world.size)} prompts"

    def fit(self) -> None:
        """Train to the last step."""
        raise AssertionError("a job has its own loop")

    def run(self) -> None:
        """Train, write the report, and say what came of it. Raises JobError, or Stopped once the state is saved."""
        dist.barrier()  # whoever hears a signal waits for its neighbours' answer
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

    # -- scoring and validation -----------------------------------------------------------------------------------

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Hand a micro-batch to the rewards. All ranks call it equally often: a failure that shows on one ends all,
        and so does a signal to stop, since nothing is trained while samples are drawn.
        """
        with self.together():
            check_finite(outputs, prompts)
            if self.rewards is not None:
                self.rewards.submit(outputs, prompts)
        self.timers.advance()

    def ask(self) -> None:
        """Wait for the reward model's answers to the judges' questions about what was submitted, as a phase of its own.

        A question that it cannot be asked ends the job on all ranks.
        """
        if self.rewards is not None and self.rewards.must_ask:
            with self.timers("judge"), self.together():
                self.rewards.ask()

    def score(self) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's rewards [B] and their terms; a reward that fails on any rank ends the job on all."""
        assert self.rewards is not None
        if self.rewards.must_ask:  # in validation, where nobody has asked yet
            with self.together():
                self.rewards.ask()
        with self.together():
            terms = self.rewards.collect()
        if self.cfg.reward.on_error != "fail" and terms:  # the policy may give all of them
            terms = self._forgiven(terms)
        return self.rewards.weighted(terms), terms

    def _forgiven(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's terms [B] as reward.on_error wants them: 0 where there is no score, or NaN for one to skip.

        Raises RewardError, on all ranks, where more have none than reward.max_error_fraction allows.
        """
        assert self.rewards is not None
        cfg, lost = self.cfg.reward, torch.stack([values.isnan() for values in terms.values()]).any(0)
        count, scored = reduce_int(int(lost.sum()), "sum"), reduce_int(len(lost), "sum")
        self.unscored += count
        if count == 0:
            return terms
        first, _ = agree(self.rewards.problem, 0)
        what = f"{count} of {scored} {self.rollout.noun} have no score"
        if count > cfg.max_error_fraction * scored:
            allowed = f"more than reward.max_error_fraction={cfg.max_error_fraction:g} of them"
            raise RewardError(f"{what}, {allowed}; the first: {first}")
        if self.world.rank == 0 and not self._told_of_errors:
            log.warning(
                "reward.on_error=%s: %s; from here on see reward/errors; the first: %s", cfg.on_error, what, first
            )
        self._told_of_errors = True
        return terms if cfg.on_error == "skip" else {name: values.nan_to_num(0.0) for name, values in terms.items()}

    @contextmanager
    def together(self) -> Iterator[None]:
        """For the rewards' part of all ranks: what fails on one ends all, as in `go_on`."""
        failure: RewardError | None = None
        try:
            yield
        except RewardError as error:
            failure = error
        self.go_on(failure)

    def go_on(self, failure: RewardError | None = None) -> None:
        """On all ranks at once: raise the RewardError of the lowest rank that has one, or Stopped where a rank was
        told to stop.
        """
        message, stop = agree(str(failure) if failure is not None else None, self.world.watch.stop or 0)
        if message is not None:
            raise RewardError(message) from failure
        if stop:
            raise Stopped(stop)

    def take_errors(self, prefix: str = "") -> dict[str, float]:
        """The number of samples that rewards failed on since the last call, as a metric where they may fail."""
        if self.cfg.reward.on_error == "fail":
            return {}
        count, self.unscored = self.unscored, 0
        return {f"{prefix}reward/errors": float(count)}

    def validate(self, step: int) -> dict[str, float]:
        """Validate on all sets and hand the samples to the loggers; returns the row, empty where there is nothing."""
        row: dict[str, float] = {}
        if self.rewards is None:
            return row
        with self.timers("validation"):
            for name, prompts in self.val_sets.items():
                samples = -(-len(prompts) // self.world.size) * self.cfg.rollout.val.n  # of a rank
                self.timers.expect(-(-samples // self.rollout.micro_batch_size))
                weights = nullcontext() if self.learner.ema is None else self.policy.using("ema")
                found, records = validate(
                    self.cfg, self.rollout, weights, self.submit, self.score, name, prompts, self.world
                )
                row |= found | self.take_errors(f"val/{name}/")
                self.logger.records(step, name, records)
        return row

    def begin(self) -> None:
        """What is due before the first step: the validation before training (trainer.val_before_train), or the end of
        a step in whose validation the run was stopped.
        """
        if self.progress.unfinished is not None:
            self.end_step(self.progress.step, self.progress.unfinished)
        elif self.progress.step == 0 and self.cfg.trainer.val_before_train and self.val_sets:
            if self.rewards is not None:
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

    def _save(self, progress: Progress) -> None:
        with self.timers("checkpoint"):
            problem = self._not_finite()
            if problem is not None:
                raise JobError(
                    f"after step {progress.step} {problem}; nothing is saved over the checkpoints of before; "
                    "lower optim.lr, or look at the rewards"
                )
            self.checkpointer.save(self.state(), replace(progress))

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


def check_finite(outputs: Outputs, prompts: Sequence[Prompt]) -> None:
    """Raise RewardError for a picture or video with NaN or infinity, which would be scored as a black one."""
    if not isinstance(outputs, Tensor):
        return
    fine = outputs.flatten(1).isfinite().all(1)
    if not fine.all():
        bad = fine.tolist().index(False)
        raise RewardError(
            f"the sample of the prompt {prompts[bad].text!r} holds NaN or infinity; look at the weights of "
            "model.path, at model.dtype and at optim.lr"
        )


def peak_memory_gb(device: torch.device) -> float:
    """The largest memory that this process ever held, in GB (10^9): the device's, or on a CPU the process's own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
