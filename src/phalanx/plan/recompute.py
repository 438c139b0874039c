"""The fewest blocks of a model that gradient checkpointing has to recompute for the update to fit."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.plan.jobs import train_again
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu
from phalanx.plan.rehearsal import Planned
from phalanx.plan.warnings import ALLOWED, SPARE


def fewer_blocks(p: Planned, gpu: Gpu) -> tuple[int, int] | None:
    """The least number of blocks to recompute, and the operations of a step then; None where it is that of the job, or
    the job itself does not fit, or the GPU's memory is not known.

    By the secant method between two numbers of which one fits: blocks are nearly alike, so that two or three are tried.
    """
    share = p.policy.trained.recomputed
    if gpu.memory is None or not share or "update" not in p.ledger.phases:
        return None
    room = gpu.memory * (1 - SPARE) - ALLOWED
    configured, now = round(share * len(p.policy.blocks)), _update(count(p, gpu.memory))
    if now > room:
        return None
    with _restored(p):
        few, many, taken = 0, configured, {configured: now, 0: _with(p, 0, gpu)}
        if taken[0] <= room:
            many = 0
        while many - few > 1:
            met = few + (taken[few] - room) / (taken[few] - taken[many]) * (many - few)
            tried = min(max(math.ceil(met), few + 1), many - 1)
            taken[tried] = _with(p, tried, gpu)
            few, many = (few, tried) if taken[tried] <= room else (tried, many)
        p.policy.recompute(many)
        return (many, p.flops) if many < configured else None


def _with(p: Planned, blocks: int, gpu: Gpu) -> int:
    """The bytes of an update of which `blocks` blocks are recomputed."""
    train_again(p, blocks)
    return _update(count(p, gpu.memory))


def _update(memory: Memory) -> int:
    """Bytes on the device at the peak of the update."""
    (update,) = [phase for phase in memory.phases if phase.name == "update"]
    return sum(memory.held.values()) + update.total


@contextmanager
def _restored(p: Planned) -> Iterator[None]:
    """The job as it was, after trying others."""
    phases, updates, micro_batches = dict(p.ledger.phases), p.state.updates_made, p.state.micro_batches
    configured = round(p.policy.trained.recomputed * len(p.policy.blocks))
    yield
    p.policy.recompute(configured)
    p.ledger.phases, p.state.updates_made, p.state.micro_batches = phases, updates, micro_batches
