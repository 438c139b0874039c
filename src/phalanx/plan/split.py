"""Seconds of a step where each rank has one role, and the split of the ranks that makes it shortest.

Work is seconds x ranks: n ranks need work / n seconds for their phase.
"""

from collections.abc import Iterator, Mapping

from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT

MOST = 256  # sizes of a role that are tried; in a larger world they grow by several units

Split = dict[str, int]  # ranks of each role


def step_seconds(schedule: str, parts: int, work: Mapping[str, float], split: Mapping[str, int]) -> float:
    """Seconds of a step under a schedule of phalanx.training.disaggregated.schedules, without the transfer of weights;
    `parts` is rollout.parts.
    """
    seconds = {role: work[role] / ranks for role, ranks in split.items()}
    together, longest = sum(seconds.values()), max(seconds.values())
    if schedule == "synchronous":
        return together
    if schedule == "pipelined":  # the others' first and last parts have nothing beside them
        return longest + (together - longest) / parts
    return max(seconds[ROLLOUT], together - seconds[ROLLOUT])


def splits(world: int, roles: tuple[str, ...], unit: int = 1) -> Iterator[Split]:
    """All ways to give a world's ranks to rollout and actor, and inference where it is among `roles`, in multiples of
    `unit`.
    """
    step = unit * -(-world // (unit * MOST))
    for rollout in range(step, world, step):
        left = world - rollout
        for inference in range(step, left, step) if INFERENCE in roles else [0]:
            actor = left - inference
            if actor % unit == 0:
                split = {ROLLOUT: rollout, ACTOR: actor}
                yield split | {INFERENCE: inference} if inference else split


def best_splits(schedule: str, parts: int, work: Mapping[str, float], world: int, unit: int = 1) -> list[Split]:
    """The splits of a world among the roles that have work, the fastest first."""
    every = splits(world, tuple(work), unit)
    return sorted(every, key=lambda split: step_seconds(schedule, parts, work, split))
