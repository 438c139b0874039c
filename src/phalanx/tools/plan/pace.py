"""Time and price of a job: its arithmetic over an assumed fraction of a GPU's peak.

Also the seconds of a step under each schedule, and the fastest split of the ranks for it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.config.joint import JointConfig
from phalanx.config.messages import ConfigError, counted
from phalanx.config.ranges import SCHEDULES
from phalanx.config.run import RLConfig, RunConfig
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.run.roles import Roles
from phalanx.telemetry.flops import named_peak_flops
from phalanx.tools.plan.jobs import roles_on, task_of
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.rehearsal import Rehearsal, RLRehearsal
from phalanx.tools.plan.tables import Rows

CARD = "H100"  # the GPU if none is named and there is none here
USED = (0.25, 0.45)  # assumed fractions of its peak
SPREAD = USED[1] / USED[0]  # ratio of the longest to the shortest time
SHORTEST = 1.0  # seconds of a step; shorter steps depend on kernel launches and the host, not on arithmetic
TRIED = 100  # number of splits that are tried until the job can run with one
MOST = 256  # number of sizes of a role that are tried; in a larger world they grow by several units

UNTIMED = (
    "rewards, validation, checkpoints, text encoders, VAE, vision tower, the memory bandwidth of decoding, and "
    "waiting for the slowest rank"
)

Split = dict[str, int]  # ranks of each role


@dataclass(frozen=True)
class Gpu:
    """A GPU: torch's name of it, its bytes of memory, and the price of an hour; None for what is unknown."""

    name: str | None = None
    memory: int | None = None
    price: float | None = None

    def peak(self, dtype: torch.dtype) -> tuple[str, float]:
        """The name and the FLOP/s of this GPU, or if they are unknown of CARD."""
        for name in (self.name or CARD, CARD):
            flops = named_peak_flops(name, dtype)
            if flops is not None:
                return name, flops
        raise AssertionError(f"{CARD} has a peak in {dtype}")


def arithmetic(parts: Sequence[Rehearsal], gpu: Gpu, *, alternate: bool = False) -> tuple[str, Rows]:
    """Title and rows: the operations of a step, or of each policy of a joint run in one, their time and their price.
    alternate: each step trains only one of the policies.
    """
    ranks, step, rows = parts[0].policy.layout.cluster.ranks, 0.0, []
    cards: dict[str, None] = {}
    for p in parts:
        dtype, flops = p.policy.layout.dtype, p.flops
        unit, size = ("PFLOP", 1e15) if flops >= 1e15 else ("TFLOP", 1e12)
        text = f"{flops / size:.4g} {unit}, {flops / ranks / size:.4g} per rank"
        if alternate:
            assert isinstance(p, RLRehearsal), "both draw samples"
            text += f"; {p.drawn_flops / size:.4g} in a step that does not train it"
            flops = (flops + p.drawn_flops) // 2
        each = seconds(flops / ranks, gpu, dtype)
        if each / SPREAD >= SHORTEST:
            text += f": {between(each)} s{' on average' * alternate}"
        step += each
        cards[assumed(gpu, dtype)] = None
        rows.append((p.part or "a step", text))
    little = "too little for an estimate of the time"
    if step / SPREAD < SHORTEST:
        return "Arithmetic", [*rows, ("a step", little)] if p.part else [("a step", f"{text}: {little}")]
    if p.part:
        rows.append(("a step", f"{between(step)} s"))
    else:
        rows += _rates(p, step)
    rows += [*whole_job(p.cfg, step, ranks, gpu), ("left out", UNTIMED)]
    return f"Arithmetic and time, {' and '.join(cards)}", rows


def _rates(p: Rehearsal, step: float) -> Iterator[tuple[str, str]]:
    """Rows: the share of recomputation with the MFU, and samples and tokens per second if a step takes `step` s."""
    ranks, again = p.policy.layout.cluster.ranks, 1 - p.model_flops / p.flops
    if again > 0:
        useful = between(100 * USED[1] * (1 - again))
        yield "repeated", f"{100 * again:.0f} % of it, recomputed in backward passes: perf/mfu would be {useful} %"
    samples = p.cfg.data.batch_size(p.cfg.parallel.data_ranks(ranks)) if p.plan is None else p.plan.samples
    rate = samples * SPREAD / step
    yield task_of(p.cfg).samples, f"{between(rate)} per second, {between(rate / ranks)} per GPU"
    if p.policy.tokens:
        tokens = between(rate * p.policy.tokens / ranks)
        yield "tokens", f"{tokens} per second and GPU, if all prompts and responses have their maximum lengths"


def seconds(flops: float, gpu: Gpu, dtype: torch.dtype) -> float:
    """The longest time of a rank for `flops` operations; the shortest is 1 / SPREAD of it."""
    return flops / gpu.peak(dtype)[1] / USED[0]


def assumed(gpu: Gpu, dtype: torch.dtype) -> str:
    """The assumption of `seconds`, in words."""
    card, peak = gpu.peak(dtype)
    part = f"{USED[0] * 100:.0f} to {USED[1] * 100:.0f} %"
    return (
        f"assuming that {card} reaches {part} of its {peak / 1e12:.0f} TFLOP/s in {str(dtype).removeprefix('torch.')}"
    )


def whole_job(cfg: RunConfig, step: float, ranks: int, gpu: Gpu, spread: float = SPREAD) -> Rows:
    """The time of all steps, and their cost if the price of a GPU is known."""
    total = cfg.trainer.total_training_steps
    hours = step * (1000 if total is None else total) / 3600
    text = f"{between(hours, spread)} hours, {between(hours * ranks, spread)} GPU-hours"
    rows = [("1000 steps", text) if total is None else ("the job", f"{total} steps: {text}")]
    if gpu.price is not None:
        rows.append(("cost", f"{between(hours * ranks * gpu.price, spread)}, at {gpu.price:g} for a GPU-hour"))
    return rows


def between(most: float, spread: float = SPREAD) -> str:
    """From `most` / `spread` to `most`, with three digits each, or all digits before the point if they are more."""
    texts = []
    for number in (most / spread, most):
        texts.append(f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}")
    return texts[0] if spread == 1 else " to ".join(texts)


# -- schedules, where each rank has one role ----------------------------------------------------------------------

# Work is seconds x ranks: n ranks need work / n seconds for their phase.


@dataclass(frozen=True)
class Seconds:
    """The longest time of each role's phase if all ranks of the world did it, `spread` times the shortest, and where it
    is from, in words.
    """

    phases: Mapping[str, float]
    source: str
    spread: float = SPREAD


def given_seconds(words: Mapping[str, float], cfg: RunConfig | JointConfig, cluster: Cluster) -> Seconds | None:
    """The times of the words rollout_s, inference_s and actor_s; None without them. Raises ConfigError if one of them
    is missing, or the job has no roles.
    """
    phases = {role: words[f"{role}_s"] for role in (ROLLOUT, INFERENCE, ACTOR) if f"{role}_s" in words}
    if not phases:
        return None
    first = f"{next(iter(phases))}_s"
    if not isinstance(cfg, RLConfig):
        raise ConfigError(
            f"{first}: only the ranks of a single policy's reinforcement learning have roles; leave it out"
        )
    for role in (ROLLOUT, ACTOR, *([INFERENCE] if INFERENCE in roles_on(cfg, cluster).ranks else [])):
        if role not in phases:
            raise ConfigError(f"{first} without {role}_s; expected the seconds of each role, if all ranks did its part")
    given = " ".join(f"{role}_s={value:g}" for role, value in phases.items())
    return Seconds(phases, f"by {given} on all ranks", spread=1)


def assumed_seconds(parts: Sequence[Rehearsal], gpu: Gpu) -> Seconds:
    """The times that the arithmetic of each role takes."""
    world, dtype = sum(p.policy.layout.cluster.ranks for p in parts), parts[0].policy.layout.dtype
    phases = {}
    for p in parts:
        assert isinstance(p, RLRehearsal), "only samples are drawn elsewhere"
        phases[p.role] = seconds(p.flops_of_role / world, gpu, dtype)
    return Seconds(phases, assumed(gpu, dtype))


def schedules(cfg: RLConfig, cluster: Cluster, roles: Roles, of_all: Seconds, gpu: Gpu) -> tuple[str, Rows]:
    """Title and rows: the time of each role, and of each schedule with these roles and with the fastest ones."""
    world, spread, rows = cluster.ranks, of_all.spread, []
    work = {role: most * world for role, most in of_all.phases.items() if most > 0}
    together = sum(work.values()) / world
    if together / spread < SHORTEST and spread > 1:
        return "Time of a step", [("a step", "too little arithmetic for an estimate of the time")]
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
    measured = "weights and samples on their way, validation, checkpoints"
    rows.append(
        ("left out", f"{UNTIMED}; rollout_s=30 actor_s=10 would give seconds of a run" if spread > 1 else measured)
    )
    return f"Time of a step, {of_all.source}", rows


def _fastest(cfg: RLConfig, cluster: Cluster, schedule: str, work: Mapping[str, float], spread: float) -> str:
    """The fastest split that the job can run with under a schedule, or the reason why it can run with none."""
    parts, batch = cfg.rollout.parts, cfg.data.train_batch_size
    splits = best_splits(schedule, parts, work, cluster.ranks, cfg.rollout.engine_memory.ranks)
    samples = 0 if batch is None else batch * cfg.rollout.n // (parts if schedule == "pipelined" else 1)
    # most of the others are refused because samples do not divide
    dividing = [split for split in splits if not any(samples % ranks for ranks in split.values())]
    reasons = []
    for split in (dividing or splits)[:TRIED]:
        reasons.append(_refusal(cfg, cluster, schedule, split))
        if reasons[-1] is None:
            ranks = ", ".join(f"{role} {split[role]}" for role in (ROLLOUT, INFERENCE, ACTOR) if role in split)
            return f"at best {between(step_seconds(schedule, parts, work, split), spread)} s with {ranks}"
    return f"refused: {reasons[0]}" if reasons else f"{counted(cluster.ranks, 'rank')} cannot be split"


def _refusal(cfg: RLConfig, cluster: Cluster, schedule: str, split: Split) -> str | None:
    """Why the job cannot run under this schedule with this split of the ranks; None if it can."""
    staleness = max(cfg.rollout.max_staleness, schedule == "one_step_off")
    rollout: Any = replace(cfg.rollout, schedule=schedule, max_staleness=staleness)
    placement = {role: f"{ranks} ranks" for role, ranks in split.items()}
    try:
        task_of(cfg).check(replace(cfg, rollout=rollout, placement=placement), cluster.launch)
    except ConfigError as error:
        return str(error)
    return None


def step_seconds(schedule: str, parts: int, work: Mapping[str, float], split: Mapping[str, int]) -> float:
    """Seconds of a step under a schedule of phalanx.run.disaggregated.schedules, without the transfer of weights.
    parts: rollout.parts.
    """
    seconds = {role: work[role] / ranks for role, ranks in split.items()}
    together, longest = sum(seconds.values()), max(seconds.values())
    if schedule == "synchronous":
        return together
    if schedule == "pipelined":  # nothing runs beside the first and last parts of the other roles
        return longest + (together - longest) / parts
    return max(seconds[ROLLOUT], together - seconds[ROLLOUT])


def best_splits(schedule: str, parts: int, work: Mapping[str, float], world: int, unit: int = 1) -> list[Split]:
    """The splits of a world among the roles that have work, in multiples of `unit`, the fastest first."""
    splits, step = [], unit * -(-world // (unit * MOST))
    for rollout in range(step, world, step):
        for inference in range(step, world - rollout, step) if INFERENCE in work else [0]:
            split = {ROLLOUT: rollout, ACTOR: world - rollout - inference, INFERENCE: inference}
            if split[ACTOR] % unit == 0:
                splits.append({role: ranks for role, ranks in split.items() if ranks})
    return sorted(splits, key=lambda split: step_seconds(schedule, parts, work, split))
