"""Workers that sample, and workers that compute old log-probabilities, for actors on separate ranks.

Both wait for an order of the actor, load the weights that come with it, do the work and wait for the next order. The
sources and receivers of samples follow from the samples' numbers, without further communication.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch

from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped, speak_for_role
from phalanx.rewards.client import RewardClient
from phalanx.rollout.rescore import rescore
from phalanx.run import in_place
from phalanx.run.disaggregated.wire import Mail, serialize_records, stopped
from phalanx.run.link import VALIDATION, Order
from phalanx.run.start import JobComponents
from phalanx.run.telemetry.profiles import Profiler
from phalanx.run.telemetry.rank_files import RankFiles
from phalanx.run.validation import Validator
from phalanx.run.world import stop_world
from phalanx.telemetry.timers import Timers
from phalanx.training.collect import Collector
from phalanx.training.components import TrainedPolicy
from phalanx.training.minibatches import BatchPlan
from phalanx.types import KeepsSamples


class Worker(ABC):
    """A rank that works on the actor's orders. keeps: its rollout, if that keeps samples for later steps."""

    keeps: KeepsSamples | None = None

    def __init__(self, cfg: RLConfig, plan: BatchPlan, world: World, policy: TrainedPolicy) -> None:
        """plan: batch sizes of this role, see phalanx.run.disaggregated.role_batches.of_role."""
        self.cfg, self.plan, self.world, self.policy = cfg, plan, world, policy
        self.timers = Timers()
        if cfg.trainer.profile_steps:
            self.timers.profiler = Profiler(cfg.trainer, world, self.timers)
        self._since = time.perf_counter()  # of the phases that `pace` tells next
        together = cfg.parallel.ulysses_sequence_parallel_size
        self.mail = Mail(world, policy.trace_type, plan.samples, together)
        self.link = self.mail.link

    def pace(self) -> dict[str, float]:
        """The metrics idle/<role>, a fraction of the time, and time/... since the last call."""
        now, seconds = time.perf_counter(), self.timers.pop()
        share = seconds.pop("time/idle", 0.0) / (now - self._since)
        seconds.pop("time/sync", None)  # the actor reports it
        self._since = now
        return seconds | {f"idle/{self.world.role}": share}

    def run(self, report: object = None) -> None:
        """Work until the actor, whose `report` it is, ends the job."""
        with RankFiles(Path(self.cfg.trainer.output_dir), self.world, self.timers, None) as files:
            self._follow_orders(files)

    def _follow_orders(self, files: RankFiles) -> None:
        """Follow the actor's orders, each with the weights sent with it."""
        link, trained = self.link, self.policy.trained
        link.meet()  # as in Job.run
        self.world.watch.listen()
        speak_for_role()
        link.connect(self.mail.routes)
        link.compare(trained.shapes)
        begins = link.announce()
        if self.keeps is not None:
            self.keeps.begin(*begins)
        in_place.begin(None)
        while True:
            with self.timers("idle"):
                order = link.order()
            if order.end:
                break
            with self.timers("sync"):
                trained.take(link.receive_weights(trained.shapes))
            self.work(order)
        files.flush()  # the actor's report shows the last step of this rank, too
        link.part(self.world.watch)
        stop_world()
        if order.stop:
            raise Stopped(order.stop, "; what is kept is said where the actor runs")

    def work(self, order: Order) -> None:
        """Follow an order: deliver the samples of its steps."""
        for step in order.steps:
            with self.timers.training_step(step + 1):
                for chunk in range(self.plan.parts):
                    self.deliver(step, chunk, order.version)

    @abstractmethod
    def deliver(self, step: int, chunk: int, version: int) -> None:
        """Send the samples of a chunk of a step, of weights `version`, to the ranks that they belong to."""


class RolloutWorker(Worker):
    """A rank that samples, scores and validates."""

    def __init__(self, cfg: RLConfig, plan: BatchPlan, components: JobComponents, prompts: PromptStream) -> None:
        """plan: see Worker."""
        rollout = components.rollout
        assert rollout is not None, "this role samples"
        super().__init__(cfg, plan, components.world, components.policy)
        rewards = RewardClient(cfg, self.world, components.rewards, self.timers, components.noun, self._on_stop)
        # samples with the weights that the actor has sent, whatever their name
        common = (cfg, plan, self.policy, rollout, rewards, prompts, self.timers)
        self.collector = Collector(*common, chunks=plan.parts, tell=components.tell)
        val_sets = components.val_sets
        self.validator = Validator(cfg, self.world, self.policy, rollout, rewards, val_sets, self.timers)
        self.keeps = self.validator.keeps
        self._finishes = cfg.rollout.schedule == "one_step_off" and cfg.rollout.in_flight == "finish"
        self._stop = 0

    def run(self, report: object = None) -> None:
        """Sample until the actor ends the job."""
        try:
            super().run(report)
        finally:
            self.validator.end()

    def work(self, order: Order) -> None:
        """Follow an order: validate, or sample steps."""
        if order.validate:
            self.report()
        super().work(order)

    def report(self) -> None:
        """Validate with the current weights and send the result to the actor."""
        try:
            with self.timers("validation"):
                data = serialize_records(*self.validator.validate(0, None))
        except Stopped as stop:
            data = stopped(stop.number)
        if self.world.rank == 0:
            self.link.send(data, self.link.lead, VALIDATION)

    def deliver(self, step: int, chunk: int, version: int) -> None:
        """Sample a chunk of a step, and send the samples."""
        pending = None
        try:
            if self.keeps is not None:
                self.keeps.of_version(version)
            collected = self.collector.collect(step, chunk)
        except Stopped as stop:
            self.mail.send(None, stop.number)
            return
        samples = collected.samples
        if self.keeps is None:
            samples = replace(samples, version=torch.full((self.plan.per_rank,), version))
        elif self.world.rank == 0 or in_place.generation is not None:  # any rank of the actor may survive alone
            pending = self.keeps.in_flight(step + 1)
        row = collected.row | self.pace()
        self.mail.send(replace(collected, samples=samples, row=row, pending=pending), self._stop)

    def _on_stop(self, signal: int) -> None:
        """Stop at once, or finish the samples that the actor waits for first (rollout.in_flight=finish)."""
        self._stop = signal
        if not self._finishes:
            raise Stopped(signal)


class LogProbWorker(Worker):
    """A rank that computes old log-probabilities of samples drawn by an engine with other kernels."""

    def deliver(self, step: int, chunk: int, version: int) -> None:
        """Receive samples, score them, and send them on."""
        with self.timers("idle"):
            collected, stop = self.mail.receive()
        if collected is not None:
            with self.timers("rescore"):
                samples, row = rescore(self.policy, collected.samples, self.cfg.rollout, self.plan.passes_of(1))
            row = collected.row | row | self.pace()
            collected = replace(collected, samples=replace(samples, exact=True), row=row)
        self.mail.send(collected, stop)
