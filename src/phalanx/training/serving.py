"""The ranks that sample, and those that score samples, where the actor has ranks of its own.

Both wait for an order of the actor, take the weights that come with it, do what it asks for, and wait for the next one.
Which samples come from whom, and go to whom, follows from their numbers: nothing else has to be agreed on.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed import mesh
from phalanx.distributed.link import VALIDATION, Link, Order
from phalanx.distributed.mesh import World
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT
from phalanx.exit import Stopped, speak_for_role
from phalanx.rewards import RewardError
from phalanx.rollout.correction import rescore
from phalanx.telemetry.metrics import Timers
from phalanx.training.batches import BatchPlan
from phalanx.training.collecting import Collected, Collecting, steps_of
from phalanx.training.parts import Parts, TrainedPolicy
from phalanx.training.transfer import joined, overlaps, packed, packed_records, routes, shares, stopped, unpacked
from phalanx.types import Algorithm


def serve(world: World, policy: TrainedPolicy, samples: int, timers: Timers, work: Callable[[Order], None]) -> None:
    """Do what the actor orders, each time with the weights of then, until it ends the job. `samples`: of a part of a
    step, of all ranks.
    """
    link = link_of(world)
    link.meet()  # as in Run.run
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
    """The link of a rank whose role is its own."""
    assert world.link is not None, "each rank does everything here"
    return world.link


class Pace:
    """The seconds of each phase of a rank that serves, and the share of its time in which it waited for others."""

    def __init__(self, timers: Timers) -> None:
        self._timers, self._since = timers, time.perf_counter()

    def row(self, role: str) -> dict[str, float]:
        """idle/<role> and time/... since the last call."""
        now = time.perf_counter()
        seconds = self._timers.pop()
        share = seconds.pop("time/idle", 0.0) / (now - self._since)
        seconds.pop("time/sync", None)  # the actor has it, too
        self._since = now
        return seconds | {f"idle/{role}": share}


class Sampler(Collecting):
    """A rank that samples: rewards and validation are its business, too."""

    def __init__(
        self, cfg: RLConfig, plan: BatchPlan, algorithm: Algorithm, parts: Parts, prompts: PromptStream
    ) -> None:
        """`plan` is that of this role: see phalanx.training.batches.of_role."""
        super().__init__(cfg, parts)
        self.plan, self.algorithm, self.prompts = plan, algorithm, prompts
        self.total_steps = steps_of(cfg.trainer, prompts)
        self.parts = plan.parts
        self.group_id = torch.arange(plan.samples) // cfg.rollout.n
        self.link = link_of(self.world)
        self.pace = Pace(self.timers)
        roles = self.link.roles.ranks
        self._receivers = shares(roles.get(INFERENCE, roles[ACTOR]), plan.samples)
        self._own = shares(roles[ROLLOUT], plan.samples)[self.world.rank]
        self._finishes = cfg.rollout.schedule == "one_step_off" and cfg.rollout.in_flight == "finish"
        self._stop = 0

    def run(self) -> None:
        """Sample until the actor ends the job."""
        serve(self.world, self.policy, self.plan.samples, self.timers, self.work)

    def work(self, order: Order) -> None:
        """Validate, and sample steps, as ordered."""
        if order.validate:
            self.report()
        for step in order.steps:
            for part in range(self.parts):
                self.deliver(step, part, order.version)

    def report(self) -> None:
        """Validate with the weights that are here, and tell the actor."""
        try:
            with self.timers("validation"):
                data = packed_records(*self.validated(nullcontext))
        except Stopped as stop:
            data = stopped(stop.number)
        if self.world.rank == 0:
            self.link.send(data, self.link.lead, VALIDATION)

    def deliver(self, step: int, part: int, version: int) -> None:
        """Sample a part of a step, and send the samples to the ranks whose share they are in."""
        try:
            found = self.collect(step, part)
        except Stopped as stop:
            for rank, _, _ in overlaps(self._own, self._receivers):
                self.link.send(stopped(stop.number), rank)
            return
        drawn = replace(found.samples, version=torch.full((self.plan.per_rank,), version))
        found = replace(found, samples=drawn, row=found.row | self.pace.row(ROLLOUT))
        for rank, first, last in overlaps(self._own, self._receivers):
            rows = slice(first - self._own.first, last - self._own.first)
            self.link.send(packed(found, rows, self._stop), rank)

    def behaviour(self) -> "nullcontext[None]":
        """The weights that sample for training are those that the actor has sent."""
        return nullcontext()

    def go_on(self, failure: RewardError | None = None) -> None:
        """As of all jobs; but samples that the actor waits for are finished."""
        try:
            super().go_on(failure)
        except Stopped as stop:
            self._stop = stop.number
            if not self._finishes:
                raise


class Scorer:
    """A rank that takes the old log-probabilities of samples that an engine with other kernels drew."""

    def __init__(self, cfg: RLConfig, plan: BatchPlan, world: World, policy: TrainedPolicy) -> None:
        """`plan` is that of this role: see phalanx.training.batches.of_role."""
        self.cfg, self.plan, self.world, self.policy = cfg, plan, world, policy
        self.timers = Timers()
        self.pace = Pace(self.timers)
        self.link = link_of(world)
        roles = self.link.roles.ranks
        self._senders, self._receivers = shares(roles[ROLLOUT], plan.samples), shares(roles[ACTOR], plan.samples)
        self._own = shares(roles[INFERENCE], plan.samples)[world.rank]

    def run(self) -> None:
        """Score until the actor ends the job."""
        serve(self.world, self.policy, self.plan.samples, self.timers, self.work)

    def work(self, order: Order) -> None:
        """Score the samples of the steps that are ordered."""
        for _ in range(len(order.steps) * self.plan.parts):
            self.pass_on()

    def pass_on(self) -> None:
        """Receive samples, score them, and send them on."""
        parts, stop = [], 0
        with self.timers("idle"):
            for rank, _, _ in overlaps(self._own, self._senders):
                found, told = unpacked(self.link.receive(rank), self.policy.trace_type, self.world.device)
                parts.append(found)
                stop = max(stop, told)
            self.link.meet_role()
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            for rank, _, _ in overlaps(self._own, self._receivers):
                self.link.send(stopped(stop), rank)
            return
        found = joined(whole)
        with self.timers("rescore"):
            samples, row = rescore(self.policy, found.samples, self.cfg.rollout, self.plan.passes_of(1))
        samples = replace(samples, exact=True)
        scored = Collected(samples, found.reward, found.row | row | self.pace.row(INFERENCE))
        for rank, first, last in overlaps(self._own, self._receivers):
            rows = slice(first - self._own.first, last - self._own.first)
            self.link.send(packed(scored, rows, stop), rank)
