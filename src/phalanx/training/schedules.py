"""When samples are drawn, where other ranks than the actor's draw them. A schedule says what the actor orders, and what
it then receives; the rest of the loop is that of every job.

    synchronous     order t, wait for all of t, update
    pipelined       order t, update on each part of t as it comes
    one step off    order t + 1, wait for t, which was ordered before, update while t + 1 is drawn
"""

import signal
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from phalanx.config.run import RLConfig
from phalanx.distributed.collectives import broadcast_object
from phalanx.distributed.link import VALIDATION, Order
from phalanx.distributed.mesh import World
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT
from phalanx.exit import Stopped
from phalanx.telemetry.metrics import Timers
from phalanx.training.batches import BatchPlan
from phalanx.training.collecting import Collected
from phalanx.training.parts import TrainedPolicy
from phalanx.training.scoring import Records
from phalanx.training.serving import link_of
from phalanx.training.transfer import joined, overlaps, packed, routes, shares, unpacked, unpacked_records
from phalanx.types import JobError


class Synchronous:
    """The actor's side of the link: each step is ordered, waited for, and then trained."""

    def __init__(
        self, cfg: RLConfig, plan: BatchPlan, world: World, policy: TrainedPolicy, timers: Timers, weights: str | None
    ) -> None:
        """`plan` is of a part of a step, on the actor's ranks; `weights`: those that sample, None for the policy's."""
        self.cfg, self.plan, self.world, self.policy, self.timers = cfg, plan, world, policy, timers
        self.link, self.weights = link_of(world), weights
        roles = self.link.roles.ranks
        self._senders = shares(roles.get(INFERENCE, roles[ROLLOUT]), plan.samples)
        self._own = shares(roles[ACTOR], plan.samples)[world.rank]

    def begin(self, step: int, total_steps: int, kept: Sequence[Tensor]) -> None:
        """Once, before the first training step of this start of the job, `step` of `total_steps`; `kept` is what a
        checkpoint has of `in_flight`, of all ranks that wrote it.
        """
        self.total_steps = total_steps
        self.link.connect(routes(self.link.roles.ranks, self.plan.samples))
        self.link.compare(self.policy.trained.shapes)

    def collect(self, step: int) -> Collected:
        """The samples of training step `step`, of this rank, with the rewards of all ranks' samples."""
        self.order(Order(step, step, step + 1), self.weights)
        return self.receive(step)

    def order(self, order: Order, weights: str | None) -> None:
        """Give an order, with the weights to follow it by, on all ranks of the actor."""
        with self.timers("wait"):  # for ranks that are still at the order before
            self.link.order(order)
            self.link.meet_role()
        with self.timers("sync"):
            trained = self.policy.trained
            self.link.send_weights(trained.whole(weights), trained.shapes)

    def receive(self, step: int) -> Collected:
        """The samples of a part of training step `step`, the next one that was ordered."""
        with self.timers("wait"):
            parts, stop = [], 0
            for rank, _, _ in overlaps(self._own, self._senders):
                found, told = unpacked(self.link.receive(rank), self.policy.trace_type, self.world.device)
                parts.append(found)
                stop = max(stop, told)
            self.link.meet_role()
        self.hear(stop)
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise Stopped(stop)
        return self.checked(joined(whole), step)

    def hear(self, stop: int) -> None:
        """Have this rank stop, as another one was told to; 0: none was."""
        if stop:
            self.world.watch.stop = signal.Signals(stop)

    def checked(self, found: Collected, step: int) -> Collected:
        """The samples with how old they are, in training steps; JobError where they are older than allowed."""
        version, limit = found.samples.version, self.cfg.rollout.max_staleness
        assert version is not None, "a rank that samples says by which weights"
        age = step - version
        if age.max() > limit:
            raise JobError(f"samples of step {step} are {age.max()} steps old; rollout.max_staleness is {limit}")
        row = {"rollout/staleness_mean": age.double().mean().item(), "rollout/staleness_max": float(age.max())}
        samples = found.samples
        if age.any():  # the weights are others by now
            samples = replace(samples, exact=False)
        return replace(found, samples=samples, row=found.row | row)

    def validated(self, version: int, weights: str | None) -> tuple[dict[str, float], Records]:
        """The row of a validation of these weights, and on the first rank the samples to keep."""
        self.order(Order(version, validate=True), weights)
        answer: tuple[dict[str, float], Records, int] = {}, {}, 0
        with self.timers("wait"):
            if self.world.lead:
                answer = unpacked_records(self.link.receive(self.link.roles.ranks[ROLLOUT][0], VALIDATION))
            self.link.meet_role()
        row, kept, stop = answer
        row, stop = broadcast_object((row, stop))
        self.hear(stop)
        if stop:
            raise Stopped(stop)
        return row, kept

    def end(self, stop: int = 0) -> None:
        """Let the other roles end, too."""
        self.link.order(Order(end=True, stop=stop))
        self.link.part(self.world.watch)

    def in_flight(self, step: int) -> Tensor | None:
        """What a checkpoint of step number `step` keeps of samples that are drawn already, of this rank: bytes."""
        return None


class Pipelined(Synchronous):
    """The parts of a step are trained as they come, by the weights that drew them."""

    def collect(self, step: int) -> Collected:
        self.order(Order(step, step, step + 1), self.weights)
        return replace(self.receive(step), later=(self.receive(step) for _ in range(self.plan.parts - 1)))


class OneStepOff(Synchronous):
    """Each step's samples are drawn while the step before is trained, by weights that are one step old."""

    def begin(self, step: int, total_steps: int, kept: Sequence[Tensor]) -> None:
        super().begin(step, total_steps, kept)
        self._at = self._next = step  # the next step to train, and the first one that nobody was asked for
        self._drawn: Collected | None = None  # samples of the next step, where a checkpoint wanted them
        whole = self._joined(kept) if kept else None
        if whole is not None and len(whole.reward) == self.plan.samples:  # the same batch as then
            own = packed(whole, slice(self._own.first, self._own.last))
            self._drawn, self._next = self._joined([own]), step + 1

    def collect(self, step: int) -> Collected:
        last = min(step + 2, self.total_steps)
        self.order(Order(step, self._next, last), self.weights)
        self._next, self._at = last, step + 1
        found, self._drawn = self._drawn or self.receive(step), None
        return found

    def in_flight(self, step: int) -> Tensor | None:
        if self.cfg.rollout.in_flight == "drop" or step != self._at or self._next <= self._at:
            return None
        if self._drawn is None:
            try:
                self._drawn = self.receive(self._at)
            except Stopped:  # there is nothing to keep
                return None
        return packed(self._drawn, slice(None))

    def _joined(self, kept: Sequence[Tensor]) -> Collected:
        parts = [unpacked(data, self.policy.trace_type, self.world.device)[0] for data in kept]
        return joined([part for part in parts if part is not None])


SCHEDULES: dict[str, type[Synchronous]] = {
    "synchronous": Synchronous,
    "pipelined": Pipelined,
    "one_step_off": OneStepOff,
}
