"""Workers that sample, and workers that compute old log-probabilities, for actors on separate ranks.

Both wait for an order of the actor, load the weights that come with it, do the work and wait for the next order. The
sources and receivers of samples follow from the samples' numbers, without further communication.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed import mesh
from phalanx.distributed.link import VALIDATION, Link, Order
from phalanx.distributed.mesh import World
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT
from phalanx.exit import Stopped, speak_for_role
from phalanx.rewards.client import RewardClient
from phalanx.rollout.correction import rescore
from phalanx.telemetry.metrics import Timers
from phalanx.telemetry.rank_files import RankFiles
from phalanx.training.collect import Collected, Collector
from phalanx.training.components import JobComponents, TrainedPolicy
from phalanx.training.disaggregated.wire import (
    concatenate,
    deserialize,
    overlaps,
    routes,
    serialize,
    serialize_records,
    shares,
    stopped,
)
from phalanx.training.minibatches import BatchPlan
from phalanx.training.validation import Validator


def serve(world: World, policy: TrainedPolicy, samples: int, timers: Timers, work: Callable[[Order], None]) -> None:
    """Follow the actor's orders, each with the weights sent with it, until it ends the job. samples: number of samples
    in one part of a step, over all ranks.
    """
    link = link_of(world)
    link.meet()  # as in Job.run
    world.watch.listen()
    speak_for_role()
    link.connect(routes(link.roles.ranks, samples))
    link.compare(policy.trained.shapes)
    while True:
        with timers("idle"):
            order = link.order()
        if order.end:
            break
        with timers("sync"):
            policy.trained.take(link.receive_weights(policy.trained.shapes))
        work(order)
    link.part(world.watch)
    mesh.stop()
    if order.stop:
        raise Stopped(order.stop, "; what is kept is said where the actor runs")


def link_of(world: World) -> Link:
    """The link between roles, for a world that has roles."""
    assert world.link is not None, "only jobs with roles call this"
    return world.link


class Pace:
    """Measures the phases of a worker, and the fraction of its time spent waiting."""

    def __init__(self, timers: Timers) -> None:
        self._timers, self._since = timers, time.perf_counter()

    def row(self, role: str) -> dict[str, float]:
        """The metrics idle/<role> and time/... since the last call."""
        now = time.perf_counter()
        seconds = self._timers.pop()
        share = seconds.pop("time/idle", 0.0) / (now - self._since)
        seconds.pop("time/sync", None)  # the actor reports it
        self._since = now
        return seconds | {f"idle/{role}": share}


class RolloutWorker:
    """A rank that samples, scores and validates."""

    def __init__(self, cfg: RLConfig, plan: BatchPlan, components: JobComponents, prompts: PromptStream) -> None:
        """plan: batch sizes of this role, see phalanx.training.disaggregated.batches.of_role."""
        assert components.rollout is not None, "this role samples"
        self.cfg, self.plan, self.world, self.policy = cfg, plan, components.world, components.policy
        self.timers = Timers()
        self.timers.profile(cfg.trainer, self.world)
        rewards = RewardClient(cfg, self.world, components.rewards, self.timers, components.noun, self._on_stop)
        rollout = components.rollout
        # samples with the weights that the actor has sent, whatever their name
        self.collector = Collector(cfg, plan, self.policy, rollout, rewards, prompts, self.timers, chunks=plan.parts)
        val_sets = components.val_sets
        self.validator = Validator(cfg, self.world, self.policy, rollout, rewards, val_sets, self.timers)
        self.link = link_of(self.world)
        self.pace = Pace(self.timers)
        roles = self.link.roles.ranks
        self._receivers = shares(roles.get(INFERENCE, roles[ACTOR]), plan.samples)
        self._share = shares(roles[ROLLOUT], plan.samples)[self.world.rank]
        self._finishes = cfg.rollout.schedule == "one_step_off" and cfg.rollout.in_flight == "finish"
        self._stop = 0

    def run(self) -> None:
        """Sample until the actor ends the job."""
        try:
            with RankFiles(Path(self.cfg.trainer.output_dir), self.world, self.timers, None):
                serve(self.world, self.policy, self.plan.samples, self.timers, self.work)
        finally:
            self.validator.end()

    def work(self, order: Order) -> None:
        """Follow an order: validate, or sample steps."""
        if order.validate:
            self.report()
        for step in order.steps:
            with self.timers.training_step(step + 1):
                for chunk in range(self.plan.parts):
                    self.deliver(step, chunk, order.version)

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
        """Sample a chunk of a step, and send the samples to the ranks that they belong to."""
        try:
            collected = self.collector.collect(step, chunk)
        except Stopped as stop:
            for rank, _, _ in overlaps(self._share, self._receivers):
                self.link.send(stopped(stop.number), rank)
            return
        samples = replace(collected.samples, version=torch.full((self.plan.per_rank,), version))
        collected = replace(collected, samples=samples, row=collected.row | self.pace.row(ROLLOUT))
        for rank, first, last in overlaps(self._share, self._receivers):
            rows = slice(first - self._share.first, last - self._share.first)
            self.link.send(serialize(collected, rows, self._stop), rank)

    def _on_stop(self, signal: int) -> None:
        """Stop at once, or finish the samples that the actor waits for first (rollout.in_flight=finish)."""
        self._stop = signal
        if not self._finishes:
            raise Stopped(signal)


class LogProbWorker:
    """A rank that computes old log-probabilities of samples drawn by an engine with other kernels."""

    def __init__(self, cfg: RLConfig, plan: BatchPlan, world: World, policy: TrainedPolicy) -> None:
        """plan: batch sizes of this role, see phalanx.training.disaggregated.batches.of_role."""
        self.cfg, self.plan, self.world, self.policy = cfg, plan, world, policy
        self.timers = Timers()
        self.timers.profile(cfg.trainer, world)
        self.pace = Pace(self.timers)
        self.link = link_of(world)
        roles = self.link.roles.ranks
        self._senders, self._receivers = shares(roles[ROLLOUT], plan.samples), shares(roles[ACTOR], plan.samples)
        self._share = shares(roles[INFERENCE], plan.samples)[world.rank]

    def run(self) -> None:
        """Score until the actor ends the job."""
        with RankFiles(Path(self.cfg.trainer.output_dir), self.world, self.timers, None):
            serve(self.world, self.policy, self.plan.samples, self.timers, self.work)

    def work(self, order: Order) -> None:
        """Follow an order: score the samples of its steps."""
        for step in order.steps:
            with self.timers.training_step(step + 1):
                for _ in range(self.plan.parts):
                    self.pass_on()

    def pass_on(self) -> None:
        """Receive samples, score them, and send them on."""
        parts, stop = [], 0
        with self.timers("idle"):
            for rank, _, _ in overlaps(self._share, self._senders):
                received, signal = deserialize(self.link.receive(rank), self.policy.trace_type, self.world.device)
                parts.append(received)
                stop = max(stop, signal)
            self.link.meet_role()
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            for rank, _, _ in overlaps(self._share, self._receivers):
                self.link.send(stopped(stop), rank)
            return
        collected = concatenate(whole)
        with self.timers("rescore"):
            samples, row = rescore(self.policy, collected.samples, self.cfg.rollout, self.plan.passes_of(1))
        samples = replace(samples, exact=True)
        scored = Collected(samples, collected.reward, collected.row | row | self.pace.row(INFERENCE))
        for rank, first, last in overlaps(self._share, self._receivers):
            rows = slice(first - self._share.first, last - self._share.first)
            self.link.send(serialize(scored, rows, stop), rank)
