"""Duration and cost of a job: its arithmetic over an assumed fraction of a GPU's peak."""

import math
from dataclasses import dataclass

import torch

from phalanx.config.run import RunConfig
from phalanx.plan.rehearsal import Planned
from phalanx.plan.tasks import task_of
from phalanx.telemetry.flops import named_peak_flops

CARD = "H100"  # where no GPU is named, nor here
USED = (0.25, 0.45)  # of its peak, an assumption
SPREAD = USED[1] / USED[0]  # of the most seconds to the least
SHORTEST = 1.0  # seconds of a step; a shorter one depends on launches of kernels and the host, not on arithmetic

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Gpu:
    """A GPU: the name that torch has for it, bytes of memory, and the price of an hour; None: not known."""

    name: str | None = None
    memory: int | None = None
    price: float | None = None


def arithmetic(p: Planned, gpu: Gpu) -> tuple[str, Rows]:
    """Title and rows: operations of a job, their time on such GPUs, and their price."""
    ranks, dtype, flops = p.policy.layout.cluster.ranks, p.policy.layout.dtype, p.flops
    unit, size = ("PFLOP", 1e15) if flops >= 1e15 else ("TFLOP", 1e12)
    counted = f"{flops / size:.4g} {unit}, {flops / ranks / size:.4g} a rank"
    step = seconds(flops / ranks, gpu, dtype)
    if step / SPREAD < SHORTEST:
        return "Arithmetic", [("a step", f"{counted}: too little to tell a time from")]
    rows = [("a step", f"{counted}: {between(step)} s")]
    again = 1 - p.model_flops / flops
    if again > 0:
        useful = between(100 * USED[1] * (1 - again))
        rows.append(("repeated", f"{100 * again:.0f} % of it, in backward passes: perf/mfu would be {useful} %"))
    samples = p.cfg.data.batch_size(p.cfg.parallel.data_ranks(ranks)) if p.plan is None else p.plan.samples
    rate, task = samples * SPREAD / step, task_of(p.cfg)
    rows.append((task.samples, f"{between(rate)} a second, {between(rate / ranks)} on a GPU"))
    if p.policy.tokens:
        tokens = between(rate * p.policy.tokens / ranks)
        rows.append(("tokens", f"{tokens} a second on a GPU, were all prompts and responses the longest"))
    rows += [*whole_job(p.cfg, step, ranks, gpu), ("left out", task.untimed)]
    return f"Arithmetic and time, {assumed(gpu, dtype)}", rows


def seconds(flops: float, gpu: Gpu, dtype: torch.dtype) -> float:
    """The most seconds of a rank for `flops` operations; the least are 1 / SPREAD of them."""
    return flops / _card(gpu, dtype)[1] / USED[0]


def assumed(gpu: Gpu, dtype: torch.dtype) -> str:
    """The assumption of `seconds`, in words."""
    card, peak = _card(gpu, dtype)
    part = f"{USED[0] * 100:.0f} to {USED[1] * 100:.0f} %"
    return f"assumed that {card} does {part} of its {peak / 1e12:.0f} TFLOP/s in {str(dtype).removeprefix('torch.')}"


def whole_job(cfg: RunConfig, step: float, ranks: int, gpu: Gpu, spread: float = SPREAD) -> Rows:
    """The time of all steps, and their price where that of a GPU is known."""
    total = cfg.trainer.total_training_steps
    hours = step * (1000 if total is None else total) / 3600
    text = f"{between(hours, spread)} hours, {between(hours * ranks, spread)} GPU-hours"
    rows = [("1000 steps", text) if total is None else ("the job", f"{total} steps: {text}")]
    if gpu.price is not None:
        rows.append(("cost", f"{between(hours * ranks * gpu.price, spread)}, at {gpu.price:g} for a GPU-hour"))
    return rows


def between(most: float, spread: float = SPREAD) -> str:
    """From `most` / `spread` to `most`, each of three digits, or of all digits before the point."""
    texts = []
    for number in (most / spread, most):
        texts.append(f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}")
    return texts[0] if spread == 1 else " to ".join(texts)


def _card(gpu: Gpu, dtype: torch.dtype) -> tuple[str, float]:
    """The name and the peak of the GPU, or where it is not known, of another one."""
    if gpu.name is not None and (known := named_peak_flops(gpu.name, dtype)) is not None:
        return gpu.name, known
    peak = named_peak_flops(CARD, dtype)
    assert peak is not None
    return CARD, peak
