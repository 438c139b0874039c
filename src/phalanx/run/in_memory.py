"""The state of a job in the memory of its ranks, from which the job goes on after others were lost."""

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.collectives import all_gather_object, broadcast_object
from phalanx.distributed.mesh import World
from phalanx.training.progress import Progress

# By step: the counters after it, this rank's part of each tensor, and the samples in flight.
Offers = dict[int, tuple[Progress, list[Tensor], list[Tensor]]]


class KeptState(Protocol):
    """A phalanx.training.optim.TrainState."""

    kept: Any
    applied: int
    model: Any

    @property
    def updates(self) -> int: ...
    def loaded(self, updates: int) -> None: ...
    def local_parts(self) -> list[Tensor]: ...
    def parts_before(self) -> list[Tensor]: ...


class KeptJob(Protocol):
    """A phalanx.run.job.Job."""

    world: World
    progress: Progress
    stops: Any
    checkpointer: Any
    sampling: Any
    logger: Any
    rank_files: Any
    unconfirmed: dict[str, float] | None

    @property
    def states(self) -> Mapping[str, KeptState]: ...


def offers_of(job: KeptJob) -> Offers:
    """Return this rank's parts of the state after the last complete step and, if it has them, of that before it."""
    before, progress, offers = job.stops.before, job.progress, Offers()
    states = list(job.states.values())
    copied = all(state.kept is not None or not state.applied for state in states)
    if before.step < progress.step:  # the step is complete on this rank
        progress.updates = next(iter(states)).updates
        progress.updates_beside = {name: state.updates for name, state in job.states.items() if name}
        after = copy(progress)
        after.unfinished = after.unfinished or job.unconfirmed  # the first rank may be lost before it wrote this row
        offers[progress.step] = after, _parts(states, before=False), job.sampling.held(progress.step)
        copied = all(state.kept is not None for state in states)
    if copied:
        offers[before.step] = before, _parts(states, before=True), job.sampling.held(before.step)
    return offers


def _parts(states: list[KeptState], *, before: bool) -> list[Tensor]:
    """This rank's parts of all states, now or before the updates of this step."""
    parts = []
    for state in states:
        parts += state.parts_before() if before else state.local_parts()
    return parts


def frozen_of(job: KeptJob) -> list[dict[str, Tensor]]:
    """This rank's parts of the weights that a job does not train, by the names in each of its models."""
    return [state.model.sharded.frozen for state in job.states.values()]


def leave(job: KeptJob) -> None:
    """Close what this process will open again; its connections to other ranks are closed."""
    job.rank_files.close()
    with suppress(OSError, RuntimeError):
        job.checkpointer.wait()
    with suppress(OSError, RuntimeError):
        if job.world.link is None:  # ranks of other roles notice for themselves
            job.sampling.end()
        job.logger.close()


@torch.no_grad()
def take(offers: Offers, states: Mapping[str, KeptState], world: World) -> tuple[Progress, list[Tensor]] | None:
    """Fill the states with the latest one that all ranks of a replica offer, and return its counters and samples in
    flight; None if there is none. All ranks call this together, survivors with the same shards as before.
    """
    width = world.shard_size
    agreed = agreed_offer(all_gather_object(sorted(offers)), width)
    if agreed is None:
        return None
    step, first = agreed
    source = first + world.rank % width
    progress, kept, held = offers[step] if world.rank == source else (None, [], [])
    parts = _parts(list(states.values()), before=False)
    for part, value in zip(parts, kept, strict=True) if kept else ():
        part.copy_(value)
    group = world.mesh.get_group("replicate")
    for part in parts:
        dist.broadcast(part, source, group)
    progress, held = broadcast_object((progress, held), first)
    assert progress is not None, "the source has it"
    for name, state in states.items():
        state.loaded(progress.updates_beside[name] if name else progress.updates)
    return progress, held


def agreed_offer(steps: list[list[int]], width: int) -> tuple[int, int] | None:
    """The latest step that all `width` ranks of a replica offer, and the replica's first rank. steps: those of each
    rank.
    """
    best: tuple[int, int] | None = None
    for first in range(0, len(steps), width):
        common = set(steps[first]).intersection(*steps[first + 1 : first + width])
        if common and (best is None or max(common) > best[0]):
            best = max(common), first
    return best
