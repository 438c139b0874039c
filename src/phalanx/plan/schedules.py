"""Seconds of a step under each schedule, and the fastest split of the ranks for it, in words."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from phalanx.config import ConfigError
from phalanx.config.run import SCHEDULES, RLConfig, RunConfig
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles
from phalanx.plan.pace import SHORTEST, Gpu, Interval, Rows, assumed, between, seconds, whole_job
from phalanx.plan.rehearsal import RLRehearsal
from phalanx.plan.split import Split, best_splits, step_seconds
from phalanx.plan.tasks import task_of

TRIED = 100  # splits that are tried until the job can run with one

Refusal = Callable[[str, Split], str | None]  # why the job cannot run by this schedule with this split; None: it can


@dataclass(frozen=True)
class Seconds:
    """Seconds of each role's phase if all ranks of the world did it, the least and the most; where from, in words."""

    phases: Mapping[str, Interval]
    source: str
    measured: bool = False


def given_seconds(words: Mapping[str, float], cfg: RunConfig, roles: Roles) -> Seconds | None:
    """Of the words rollout_s, inference_s and actor_s; None without them. ConfigError where one of them is missing, or
    the job samples nothing.
    """
    known = {}
    for role in (ROLLOUT, INFERENCE, ACTOR):
        if f"{role}_s" in words:
            known[role] = words[f"{role}_s"]
    if not known:
        return None
    first = f"{next(iter(known))}_s"
    if not isinstance(cfg, RLConfig):
        raise ConfigError(f"{first}: this task draws no samples; leave it out")
    for role in (ROLLOUT, ACTOR, *([INFERENCE] if INFERENCE in roles.ranks else [])):
        if role not in known:
            raise ConfigError(f"{first} without {role}_s; expected the seconds of each role, if all ranks did its part")
    phases, given = {}, []
    for role, value in known.items():
        phases[role] = value, value
        given.append(f"{role}_s={value:g}")
    return Seconds(phases, f"by {' '.join(given)} on all ranks", True)


def assumed_seconds(parts: Mapping[str, RLRehearsal], roles: Roles, gpu: Gpu) -> Seconds:
    """By the arithmetic of each role."""
    dtype = parts[ACTOR].policy.layout.dtype
    phases = {role: seconds(p.flops_of_role / roles.world_size, gpu, dtype) for role, p in parts.items()}
    return Seconds(phases, assumed(gpu, dtype))


def schedules(cfg: RLConfig, roles: Roles, of_all: Seconds, refusal: Refusal, gpu: Gpu) -> tuple[str, Rows]:
    """The title and rows: the time of each role, of each schedule with these roles, and with the best."""
    world, title = roles.world_size, f"Time of a step, {of_all.source}"
    work = {role: pair for role, pair in of_all.phases.items() if pair[1] > 0}
    together = _sum(work.values())
    if together[0] < SHORTEST and not of_all.measured:
        return "Time of a step", [("a step", "too little arithmetic to tell a time from")]
    rows = []
    now: Split = {}
    if not roles.collocated:
        now = {role: len(ranks) for role, ranks in roles.ranks.items() if role in work}
    per_role = dict(work)
    if now and INFERENCE in work and INFERENCE not in now:  # the actor takes the log-probs again
        per_role[ACTOR] = _sum([work[ACTOR], per_role.pop(INFERENCE)])
    for role in now:
        alone = _step("synchronous", 1, {role: per_role[role]}, {role: now[role]}, world)
        ranks = f"{now[role]} rank{'s' * (now[role] > 1)}"
        rows.append((role, f"{between(alone)} s on {ranks}; {between(per_role[role])} if all {world} did it"))
    rows.append(("colocated", f"{between(together)} s, one phase after the other on all ranks"))
    parts, chosen = cfg.rollout.parts, cfg.rollout.schedule
    for schedule in SCHEDULES:
        text = _fastest(cfg, schedule, work, world, refusal)
        if now:
            here = "here, as configured" if schedule == chosen else "here"
            text = f"{between(_step(schedule, parts, per_role, now, world))} s {here}; {text}"
        rows.append((schedule, text))
    if now:
        rows += whole_job(cfg, _step(chosen, parts, per_role, now, world), world, gpu)
    left_out = "weights and samples on their way, validation, checkpoints, the slowest rank"
    if not of_all.measured:
        untimed = task_of(cfg).untimed.partition("rewards, ")[0]
        left_out = f"{untimed}rewards, {left_out}; rollout_s=30 actor_s=10 would give seconds that a run took"
    rows.append(("left out", left_out))
    return title, rows


def _fastest(cfg: RLConfig, schedule: str, work: Mapping[str, Interval], world: int, refusal: Refusal) -> str:
    """The fastest split for a schedule; where the job cannot run with it, the fastest that it can run with, too."""
    parts = cfg.rollout.parts
    candidates = best_splits(
        schedule, parts, {role: most for role, (_, most) in work.items()}, world, cfg.rollout.engine_memory.ranks
    )
    if not candidates:
        return f"{world} rank{'s' * (world > 1)} cannot be split"

    def text(split: Split) -> str:
        ranks = ", ".join(f"{role} {split[role]}" for role in (ROLLOUT, INFERENCE, ACTOR) if role in split)
        return f"{between(_step(schedule, parts, work, split, world))} s with {ranks}"

    reason = refusal(schedule, candidates[0])
    if reason is None:
        return f"at best {text(candidates[0])}"
    whole = cfg.data.train_batch_size
    samples = 0 if whole is None else whole * cfg.rollout.n // (parts if schedule == "pipelined" else 1)
    dividing = [split for split in candidates if not any(samples % ranks for ranks in split.values())]
    reasons = []
    for split in dividing[:TRIED]:
        reasons.append(refusal(schedule, split))
        if reasons[-1] is None:
            return f"at best {text(candidates[0])}, and {text(split)} as batches divide"
    return f"refused: {reasons[0] if reasons else reason}"


def _step(schedule: str, parts: int, work: Mapping[str, Interval], split: Split, world: int) -> Interval:
    least = {role: work[role][0] * world for role in split}
    most = {role: work[role][1] * world for role in split}
    return step_seconds(schedule, parts, least, split), step_seconds(schedule, parts, most, split)


def _sum(intervals: Iterable[Interval]) -> Interval:
    least, most = zip(*intervals, strict=True)
    return sum(least), sum(most)
