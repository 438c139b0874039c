"""How long a job may take, and what that may cost: its arithmetic over an assumed part of a GPU's peak."""

import math
from dataclasses import dataclass

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.lm import LMRunConfig
from phalanx.config.run import RunConfig
from phalanx.plan.rehearsal import BlockDiffusionRehearsal, LMRehearsal, Planned
from phalanx.telemetry.flops import named_peak_flops

CARD = "H100"  # where no GPU is named, nor here
USED = (0.25, 0.45)  # of its peak, an assumption
SHORTEST = 1.0  # seconds of a step; below, launches of kernels and the host decide, not arithmetic

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Gpu:
    """A GPU: the name that torch has for it, bytes of memory, and the price of an hour; None: not known."""

    name: str | None = None
    memory: int | None = None
    price: float | None = None


def arithmetic(p: Planned, gpu: Gpu) -> tuple[str, Rows]:
    """The title and rows of what a job computes, how long that takes on such GPUs, and its price."""
    ranks, dtype, flops = p.policy.layout.cluster.ranks, p.policy.layout.dtype, p.flops
    unit, size = ("PFLOP", 1e15) if flops >= 1e15 else ("TFLOP", 1e12)
    counted = f"{flops / size:.4g} {unit}, {flops / ranks / size:.4g} a rank"
    card, peak = CARD, named_peak_flops(CARD, dtype)
    if gpu.name is not None and (known := named_peak_flops(gpu.name, dtype)) is not None:
        card, peak = gpu.name, known
    assert peak is not None
    least, most = USED
    step = flops / ranks / peak / most, flops / ranks / peak / least
    if step[0] < SHORTEST:
        return "Arithmetic", [("a step", f"{counted}: too little to tell a time from")]
    noun = sampled(p.cfg)
    images = p.cfg.data.batch_size(ranks) if p.plan is None else p.plan.samples
    rate = images / step[1], images / step[0]
    total = p.cfg.trainer.total_training_steps
    steps = 1000 if total is None else total
    hours = _times(step, steps / 3600)
    whole = _times(hours, ranks)
    rows = [
        ("a step", f"{counted}: {_range(step)} s"),
        (noun, f"{_range(rate)} a second, {_range(_times(rate, 1 / ranks))} on a GPU"),
        ("1000 steps" if total is None else "the job", f"{_range(hours)} hours, {_range(whole)} GPU-hours"),
    ]
    if total is not None:
        rows[-1] = ("the job", f"{steps} steps: {rows[-1][1]}")
    left_out = "rewards, validation, checkpoints, text encoders, VAE, waiting for the slowest rank"
    if isinstance(p, LMRehearsal | BlockDiffusionRehearsal):
        data = p.cfg.data
        tokens = _times(rate, (data.max_prompt_length + data.max_response_length) / ranks)
        rows.insert(2, ("tokens", f"{_range(tokens)} a second on a GPU, were all prompts and responses the longest"))
        left_out = "validation, checkpoints, the slowest rank"
    if isinstance(p, LMRehearsal):
        left_out = "that decoding waits for memory, rewards, validation, checkpoints, the slowest rank"
    if gpu.price is not None:
        rows.append(("cost", f"{_range(_times(whole, gpu.price))}, at {gpu.price:g} for a GPU-hour"))
    rows.append(("left out", left_out))
    kind = str(dtype).removeprefix("torch.")
    title = f"Arithmetic and time, assumed that {card} does {least * 100:.0f} to {most * 100:.0f} %"
    return f"{title} of its {peak / 1e12:.0f} TFLOP/s in {kind}", rows


def sampled(cfg: RunConfig) -> str:
    """What a job samples, or what it learns from."""
    if isinstance(cfg, BlockDiffusionTaskConfig):
        return "samples"
    return "responses" if isinstance(cfg, LMRunConfig) else "images"


def _times(interval: tuple[float, float], factor: float) -> tuple[float, float]:
    return interval[0] * factor, interval[1] * factor


def _range(interval: tuple[float, float]) -> str:
    """Two numbers of three digits, or of all that stand before the point."""
    least, most = (f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" for x in interval)
    return f"{least} to {most}"
