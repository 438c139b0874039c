"""Seconds of a step under each schedule where each rank has one role, and the fastest split of the ranks for it.

Work is seconds x ranks: n ranks need work / n seconds for their phase.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config import ConfigError
from phalanx.config.run import SCHEDULES, RLConfig, RunConfig
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles
from phalanx.plan.batch import counted
from phalanx.plan.layout import Cluster
from phalanx.plan.pace import SHORTEST, SPREAD, Gpu, Rows, assumed, between, seconds, whole_job
from phalanx.plan.rehearsal import RLRehearsal
from phalanx.plan.tasks import task_of

TRIED = 100  # splits that are tried until the job can run with one
MOST = 256  # sizes of a role that are tried; in a larger world they grow by several units

Split = dict[str, int]  # ranks of each role


@dataclass(frozen=True)
class Seconds:
    """The most seconds of each role's phase if all ranks of the world did it, `spread` times the least; where from, in
    words.
    """

    phases: Mapping[str, float]
    source: str
    spread: float = SPREAD


def given_seconds(words: Mapping[str, float], cfg: RunConfig, roles: Roles) -> Seconds | None:
    """Of the words rollout_s, inference_s and actor_s; None without them. ConfigError where one of them is missing, or
    the job samples nothing.
    """
    phases = {role: words[f"{role}_s"] for role in (ROLLOUT, INFERENCE, ACTOR) if f"{role}_s" in words}
    if not phases:
        return None
    first = f"{next(iter(phases))}_s"
    if not isinstance(cfg, RLConfig):
        raise ConfigError(f"{first}: this task draws no samples; leave it out")
    for role in (ROLLOUT, ACTOR, *([INFERENCE] if INFERENCE in roles.ranks else [])):
        if role not in phases:
            raise ConfigError(f"{first} without {role}_s; expected the seconds of each role, if all ranks did its part")
    given = " ".join(f"{role}_s={value:g}" for role, value in phases.items())
    return Seconds(phases, f"by {given} on all ranks", spread=1)


def assumed_seconds(parts: Sequence[RLRehearsal], gpu: Gpu) -> Seconds:
    """By the arithmetic of each role."""
    world, dtype = sum(p.policy.layout.cluster.ranks for p in parts), parts[0].policy.layout.dtype
    phases = {p.role: seconds(p.flops_of_role / world, gpu, dtype) for p in parts}
    return Seconds(phases, assumed(gpu, dtype))


def schedules(cfg: RLConfig, cluster: Cluster, roles: Roles, of_all: Seconds, gpu: Gpu) -> tuple[str, Rows]:
    """The title and rows: the time of each role, of each schedule with these roles, and with the best."""
    world, spread, rows = cluster.ranks, of_all.spread, []
    work = {role: most * world for role, most in of_all.phases.items() if most > 0}
    together = sum(work.values()) / world
    if together / spread < SHORTEST and spread > 1:
        return "Time of a step", [("a step", "too little arithmetic to tell a time from")]
    now: Split = {}
    if not roles.collocated:
        now = {role: len(ranks) for role, ranks in roles.ranks.items() if role in work}
    per_role = dict(work)
    if now and INFERENCE in work and INFERENCE not in now:  # the actor takes the log-probs again
        per_role[ACTOR] += per_role.pop(INFERENCE)
    for role, ranks in now.items():
        here, by_all = between(per_role[role] / ranks, spread), between(per_role[role] / world, spread)
        rows.append((role, f"{here} s on {counted(ranks, 'rank')}; {by_all} if all {world} did it"))
    rows.append(("colocated", f"{between(together, spread)} s, one phase after the other on all ranks"))
    parts, chosen = cfg.rollout.parts, cfg.rollout.schedule
    for schedule in SCHEDULES:
        text = _fastest(cfg, cluster, schedule, work, spread)
        if now:
            configured = ", as configured" if schedule == chosen else ""
            here = between(step_seconds(schedule, parts, per_role, now), spread)
            text = f"{here} s here{configured}; {text}"
        rows.append((schedule, text))
    if now:
        rows += whole_job(cfg, step_seconds(chosen, parts, per_role, now), world, gpu, spread)
    left_out = "weights and samples on their way, validation, checkpoints, the slowest rank"
    if spread > 1:
        untimed = task_of(cfg).untimed.partition("rewards, ")[0]
        left_out = f"{untimed}rewards, {left_out}; rollout_s=30 actor_s=10 would give seconds that a run took"
    rows.append(("left out", left_out))
    return f"Time of a step, {of_all.source}", rows


def _fastest(cfg: RLConfig, cluster: Cluster, schedule: str, work: Mapping[str, float], spread: float) -> str:
    """The fastest split for a schedule; where the job cannot run with it, the fastest that it can run with, too."""
    parts, batch = cfg.rollout.parts, cfg.data.train_batch_size
    candidates = best_splits(schedule, parts, work, cluster.ranks, cfg.rollout.engine_memory.ranks)
    if not candidates:
        return f"{counted(cluster.ranks, 'rank')} cannot be split"

    def text(split: Split) -> str:
        ranks = ", ".join(f"{role} {split[role]}" for role in (ROLLOUT, INFERENCE, ACTOR) if role in split)
        return f"{between(step_seconds(schedule, parts, work, split), spread)} s with {ranks}"

    reason = _refusal(cfg, cluster, schedule, candidates[0])
    if reason is None:
        return f"at best {text(candidates[0])}"
    samples = 0 if batch is None else batch * cfg.rollout.n // (parts if schedule == "pipelined" else 1)
    dividing = [split for split in candidates if not any(samples % ranks for ranks in split.values())]
    reasons = []
    for split in dividing[:TRIED]:
        reasons.append(_refusal(cfg, cluster, schedule, split))
        if reasons[-1] is None:
            return f"at best {text(candidates[0])}, and {text(split)} as batches divide"
    return f"refused: {reasons[0] if reasons else reason}"


def _refusal(cfg: RLConfig, cluster: Cluster, schedule: str, split: Split) -> str | None:
    """Why the job cannot run by this schedule with this split of the ranks; None: it can."""
    staleness = max(cfg.rollout.max_staleness, schedule == "one_step_off")
    rollout: Any = replace(cfg.rollout, schedule=schedule, max_staleness=staleness)
    placement = {role: f"{ranks} ranks" for role, ranks in split.items()}
    try:
        task_of(cfg).check(replace(cfg, rollout=rollout, placement=placement), cluster.launch)
    except ConfigError as error:
        return str(error)
    return None


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


def best_splits(schedule: str, parts: int, work: Mapping[str, float], world: int, unit: int = 1) -> list[Split]:
    """The splits of a world among the roles that have work, in multiples of `unit`, the fastest first."""
    every = _splits(world, INFERENCE in work, unit)
    return sorted(every, key=lambda split: step_seconds(schedule, parts, work, split))


def _splits(world: int, scores: bool, unit: int) -> Iterator[Split]:
    """All ways to give a world's ranks to rollout and actor, and to inference if it `scores`."""
    step = unit * -(-world // (unit * MOST))
    for rollout in range(step, world, step):
        left = world - rollout
        for inference in range(step, left, step) if scores else [0]:
            actor = left - inference
            if actor % unit == 0:
                split = {ROLLOUT: rollout, ACTOR: actor}
                yield split | {INFERENCE: inference} if inference else split
