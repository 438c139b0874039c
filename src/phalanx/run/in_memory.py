"""The state of a job in the memory of its ranks, from which the job goes on after others were lost."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.distributed.collectives import all_gather_object, broadcast_object, exchange
from phalanx.distributed.mesh import World
from phalanx.run.peer_copy import packed, unpack
from phalanx.training.optim import TrainState
from phalanx.training.progress import Progress

log = logging.getLogger(__name__)
LEFT = OSError, RuntimeError, ValueError  # the last one where a group was aborted
# By step, shard and number of shards: the counters after the step, this rank's part of each tensor, and the samples in
# flight; or no counters, and the bytes of another rank's parts.
Offers = dict[tuple[int, int, int], tuple[Progress | None, list[Tensor], list[Tensor]]]


class KeptJob(Protocol):
    """A phalanx.run.job.Job."""

    world: World
    progress: Progress
    stops: Any
    checkpointer: Any
    sampling: Any
    logger: Any
    rank_files: Any
    timers: Any
    copies: bool
    unconfirmed: dict[str, float] | None

    @property
    def states(self) -> Mapping[str, TrainState]: ...


def offers_of(job: KeptJob) -> Offers:
    """Return this rank's parts of the state after the last complete step and, if it has them, of that before it."""
    before, progress, offers = job.stops.before, job.progress, Offers()
    states = list(job.states.values())
    width = width_of(states, job.world)
    shard = job.world.rank % width
    copied = all(state.kept is not None or not state.changed for state in states)
    if before.step < progress.step:  # the step is complete on this rank
        after = copy(progress)
        after.unfinished = after.unfinished or job.unconfirmed  # the first rank may be lost before it wrote this row
        offers[progress.step, shard, width] = after, job_parts(job), job.sampling.held(progress.step)
        copied = all(state.kept is not None for state in states)
    if copied:
        parts = parts_of(job.states, job.sampling, before.step, before=True)
        offers[before.step, shard, width] = before, parts, job.sampling.held(before.step)
    return offers


def width_of(states: Iterable[TrainState], world: World) -> int:
    """Number of ranks that share one copy of the state; 1 if each has all that is trained."""
    for state in states:
        if any(isinstance(p, DTensor) for p in state.model.parameters.values()):
            return world.shard_size
    return 1


def copies_to_peers(asked: bool, states: Iterable[TrainState], world: World, *, in_place: bool) -> bool:
    """Whether ranks keep copies of each other's parts; the first one warns of copies without a use, and of missing
    ones. asked: trainer.peer_copy.
    """
    needed = in_place and width_of(states, world) > world.launch.local_world_size
    if asked != needed and world.rank == 0:
        why = "each node has the whole state" if in_place else "a lost rank ends the job without IN_PLACE=1"
        lost = "no other node has a lost one's part of the state, so that it costs the steps since the last checkpoint"
        log.warning("trainer.peer_copy: %s", f"true has no use, since {why}" if asked else f"false: {lost}")
    return asked and needed


def job_parts(job: KeptJob) -> list[Tensor]:
    """This rank's parts of all that a job goes on with after the last complete step."""
    return parts_of(job.states, job.sampling, job.progress.step)


def parts_of(states: Mapping[str, TrainState], sampling: Any, step: int, *, before: bool = False) -> list[Tensor]:
    """This rank's parts of all states, now or before the updates of this step, and of the weights that draw what is in
    flight after `step`.
    """
    parts = []
    for state in states.values():
        parts += state.parts_before() if before else state.local_parts()
    return parts + sampling.drawing(step)


def leave(job: KeptJob) -> None:
    """Close what this process will open again; its connections to other ranks are closed."""
    job.rank_files.close()
    with suppress(*LEFT):
        job.checkpointer.wait()
    with suppress(*LEFT):
        if job.world.link is None:  # ranks of other roles notice for themselves
            job.sampling.end()
        job.logger.close()


@torch.no_grad()
def take(
    offers: Offers, states: Mapping[str, TrainState], sampling: Any, world: World
) -> tuple[Progress, list[Tensor]] | None:
    """Fill the states with the latest one whose shards ranks offer, and return its counters and samples in flight; None
    if there is none. All ranks call this together.
    """
    width = width_of(states.values(), world)
    offered = all_gather_object({key: progress is not None for key, (progress, *_) in offers.items()})
    agreed = agreed_offer(offered, width)
    if agreed is None:
        return None
    step, sources, first = agreed
    parts, shard, roots = parts_of(states, sampling, step), world.rank % width, list(sources)
    parcels, senders = dict[int, Tensor](), list[int]()
    for number, source in enumerate(sources):
        if source % width == number:
            continue
        roots[number] = number  # of the ranks with this shard, the first one receives it from another
        if world.rank == source:
            counters, given, _ = offers[step, number, width]
            parcels[number] = given[0] if counters is None else packed(given)
        if world.rank == number:
            senders.append(source)
    received = exchange(parcels, senders)
    if senders:
        unpack(received[senders[0]], parts)
    elif world.rank == roots[shard]:
        counters, given, _ = offers[step, shard, width]
        if counters is None:
            unpack(given[0], parts)
        else:
            torch._foreach_copy_(parts, given)
    group = world.mesh.get_group("replicate") if width == world.shard_size else None
    for part in parts:
        dist.broadcast(part, roots[shard], group)
    complete = [
        offer for (after, _, of), offer in offers.items() if (after, of) == (step, width) and offer[0] is not None
    ]
    progress, _, held = complete[0] if world.rank == first else (None, [], [])
    progress, held = broadcast_object((progress, held), first)
    assert progress is not None, "the source has it"
    for name, state in states.items():
        state.loaded(progress.updates_beside[name] if name else progress.updates)
    return progress, held


def agreed_offer(offered: list[dict[tuple[int, int, int], bool]], width: int) -> tuple[int, list[int], int] | None:
    """The latest step of which ranks offer all `width` shards, a rank for each shard, and one with the counters.

    offered: by step, shard and number of shards, whether a rank also has the counters.
    """
    holders, first = dict[tuple[int, int], int](), dict[int, int]()
    for rank, keys in enumerate(offered):
        for (step, shard, of), counts in keys.items():
            if of != width:
                continue
            held = holders.get((step, shard))
            # one whose place is this shard's need not send it to another
            if held is None or (held % width != shard and rank % width == shard):
                holders[step, shard] = rank
            if counts:
                first.setdefault(step, rank)
    for step in sorted(first, reverse=True):
        sources = [holders[step, shard] for shard in range(width) if (step, shard) in holders]
        if len(sources) == width:
            return step, sources, first[step]
    return None
