"""Schedules for ranks of other roles that sample: what the actor orders, and what it receives, in each training step t.

synchronous     order t, wait for all of t, update
pipelined       order t, update on each part of t as it arrives
one step off    order t + 1, wait for t, which was ordered one step earlier, update while t + 1 is sampled
"""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.run import RLConfig
from phalanx.distributed.collectives import broadcast_object
from phalanx.distributed.mesh import ROLLOUT, World
from phalanx.exit import Stopped
from phalanx.run import in_place
from phalanx.run.disaggregated.wire import Mail, deserialize_records
from phalanx.run.link import VALIDATION, Order
from phalanx.telemetry.timers import Timers
from phalanx.training.components import Records, Sampling, TrainedPolicy
from phalanx.training.exchange import concatenate, deserialize, serialize
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Collected, JobError, Samples

log = logging.getLogger(__name__)
Collect = Callable[[int, int], Collected]
Rescore = Callable[[Samples], tuple[Samples, dict[str, float]]]
IN_FLIGHT = "in flight"  # the name of the weights that drew the samples in flight


class Schedule(Sampling):
    """The actor's side of the link: orders each step and receives its samples, in one or several chunks.

    The training loop uses it through Delivered.
    """

    def __init__(
        self,
        cfg: RLConfig,
        plan: BatchPlan,
        world: World,
        policy: TrainedPolicy,
        timers: Timers,
        weights: str | None,
        held_out: int,
    ) -> None:
        """plan: batch sizes of one chunk on the actor's ranks. weights: name of the weights that sample, None for the
        policy's. held_out: number of validation prompts.
        """
        self.cfg, self.plan, self.world, self.policy, self.timers = cfg, plan, world, policy, timers
        self.weights, self.validates = weights, held_out
        self.mail = Mail(world, policy.trace_type, plan.samples, world.context_size)
        self.link = self.mail.link

    def begin(self, step: int, total_steps: int, kept: Sequence[Tensor]) -> None:
        """See phalanx.training.components.Sampling."""
        self.total_steps = total_steps
        parcels, pending = self.opened(kept)
        if parcels and self.world.lead:
            log.warning("the checkpoint's samples in flight are dropped: in this run each step draws its own samples")
        self.announce(step, pending)

    def announce(self, first: int, pending: Tensor | None) -> None:
        """Meet the other roles. The rollout begins with step `first`, and with these samples, see Collected.pending."""
        self._pending = {first: pending}
        self.link.connect(self.mail.routes)
        self.link.compare(self.policy.trained.shapes)
        self.link.announce(first, pending)

    def opened(self, kept: Sequence[Tensor]) -> tuple[list[Collected], Tensor | None]:
        """The samples in flight of a checkpoint: those that wait to be trained, and those that the rollout keeps."""
        parcels, pending = [], None
        for data in kept:
            parcel, _ = deserialize(data, self.policy.trace_type, self.world.device)
            if parcel is None:
                pending = data
            else:
                parcels.append(parcel)
        return parcels, pending

    def collect(self, step: int, chunk: int) -> Collected:
        """Return this rank's samples of a chunk of training step `step`, with the rewards of all ranks' samples."""
        if chunk == 0:
            self.order(Order(step, step, step + 1), self.weights)
        return self.receive(step)

    def order(self, order: Order, weights: str | None) -> None:
        """Send an order and the weights for it; all ranks of the actor call this together."""
        with self.timers("wait"):  # for ranks that still work on the previous order
            self.link.order(order)
            self.link.meet_role()
        with self.timers("sync"):
            trained = self.policy.trained
            self.link.send_weights(trained.whole(weights), trained.shapes)

    def receive(self, step: int) -> Collected:
        """Receive this rank's samples of the next chunk that was ordered, of training step `step`."""
        with self.timers("wait"):
            collected, stop = self.mail.receive()
        self.hear(stop)
        if collected is None:
            raise Stopped(stop)
        self._pending = {step: self._pending.get(step), step + 1: collected.pending}
        return self.checked(collected, step)

    def hear(self, stop: int) -> None:
        """Make this rank stop if a rank of another role got the signal `stop`; 0: none did."""
        if stop:
            self.world.watch.stop = signal.Signals(stop)

    def checked(self, collected: Collected, step: int) -> Collected:
        """Add metrics of the samples' age in training steps; JobError if it exceeds rollout.max_staleness."""
        version, limit = collected.samples.version, self.cfg.rollout.max_staleness
        assert version is not None, "ranks that sample set the version of their weights"
        age = step - version
        if age.max() > limit:
            raise JobError(f"samples of step {step} are {age.max()} steps old; rollout.max_staleness is {limit}")
        samples, row = collected.samples, {}
        of_tokens = age.dim() > 1  # counted where they were sampled
        if not of_tokens:
            row = {"rollout/staleness_mean": age.double().mean().item(), "rollout/staleness_max": float(age.max())}
        if age.any() or of_tokens:  # older weights sampled them, so a replay cannot repeat their log-probs
            samples = replace(samples, exact=False)
        return replace(collected, samples=samples, row=collected.row | row)

    def validate(self, step: int, weights: str | None) -> tuple[dict[str, float], Records]:
        """See phalanx.training.components.Sampling."""
        self.order(Order(step, validate=True), weights)
        answer: tuple[dict[str, float], Records, int] = {}, {}, 0
        with self.timers("wait"):
            if self.world.lead:
                answer = deserialize_records(self.link.receive(self.link.roles.ranks[ROLLOUT][0], VALIDATION))
            self.link.meet_role()
        row, kept, stop = answer
        row, stop = broadcast_object((row, stop))
        self.hear(stop)
        if stop:
            raise Stopped(stop)
        return row, kept

    def end(self, stop: int = 0) -> None:
        """End the other roles."""
        self.link.order(Order(end=True, stop=stop))
        self.link.part(self.world.watch)

    def in_flight(self, step: int) -> Tensor | None:
        """Samples that the rollout keeps, on the first rank; none are drawn ahead."""
        return self._pending.get(step) if self.world.lead else None

    def held(self, step: int) -> list[Tensor]:
        """See phalanx.training.components.Sampling."""
        pending = self._pending.get(step)
        return [] if pending is None else [pending]


class OneStepOffSchedule(Schedule):
    """Draws the samples of the next step during the training of a step, with weights that are one step old.

    After a loss of ranks in place, the samples in flight are drawn again, with the weights that drew them.
    """

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self._drawing: dict[int, list[Tensor]] = {}  # by step, see drawing
        self._saved: dict[int, list[Tensor]] = {}  # samples in flight of the checkpoint, by step

    def begin(self, step: int, total_steps: int, kept: Sequence[Tensor]) -> None:
        self.total_steps = total_steps
        self._at = self._next = step  # the next step to train, and the first step not yet ordered
        self._drawn: Collected | None = None  # samples of the next step, if a checkpoint has needed them
        parcels, pending = self.opened(kept)
        whole = concatenate(parcels) if parcels else None
        if whole is not None:
            pending = whole.pending
            if len(whole.reward) == self.plan.samples:  # the batch size has not changed
                share = serialize(whole, slice(self.mail.own.first, self.mail.own.last))
                self._drawn, self._next = self.opened([share])[0][0], step + 1
            self._saved[step] = list(kept)
        self.announce(self._next, pending)
        if whole is None and step in self._drawing and step < total_steps:
            version, *values = self._drawing[step]
            trained = self.policy.trained
            trained.add_weights(IN_FLIGHT, dict(zip(trained.parameters, values, strict=True)))
            self._next = step + 1
            self.order(Order(int(version), step, self._next), IN_FLIGHT)
            trained.drop_weights(IN_FLIGHT)

    def collect(self, step: int, chunk: int) -> Collected:
        last = min(step + 2, self.total_steps)
        self.order(Order(step, self._next, last), self.weights)
        self._next, self._at = last, step + 1
        now = self._sampling_parts(step)
        self._drawing = {step: self._drawing.get(step, now), step + 1: now}
        collected, self._drawn = self._drawn or self.receive(step), None
        return collected

    def in_flight(self, step: int) -> Tensor | None:
        if self.cfg.rollout.in_flight == "drop" or step != self._at or self._next <= self._at:
            return super().in_flight(step)
        if self._drawn is None:
            try:
                self._drawn = self.receive(self._at)
            except Stopped:  # the rollout ranks stopped before they finished the samples
                return super().in_flight(step)
        # once of those that several ranks train
        return None if self.world.rank % self.world.context_size else serialize(self._drawn, slice(None))

    def held(self, step: int) -> list[Tensor]:
        return self._saved.get(step) or super().held(step)

    def drawing(self, step: int) -> list[Tensor]:
        if step not in self._drawing:
            self._drawing[step] = self._sampling_parts(step)
        return self._drawing[step]

    def _sampling_parts(self, version: int) -> list[Tensor]:
        """`version`, and copies of the weights that sample now."""
        if in_place.generation is None:
            return []
        trained = self.policy.trained
        return [torch.tensor(version, device=self.world.device), *trained.local_copies(self.weights)]


class Delivered:
    """Samples that come with their rewards, by `collect(step, chunk)`: see phalanx.training.loop.Collects. rescore:
    computes the policy's own old log-probabilities if they lack these, see phalanx.training.rescorer.Rescorer.
    """

    def __init__(self, collect: Collect, chunks: int = 1, rescore: Rescore = lambda samples: (samples, {})) -> None:
        self._collect, self.chunks, self._rescore = collect, chunks, rescore
        self._reward: Tensor  # of the last chunk

    def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
        """Receive the samples, and all metrics."""
        received = self._collect(step, chunk)
        self._reward = received.reward
        samples, row = self._rescore(received.samples)
        return samples, received.row | row

    def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
        """The rewards that came with the samples, without further metrics."""
        return samples, self._reward, {}
