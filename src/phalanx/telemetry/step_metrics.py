"""The metrics of a training step, as written to metrics.jsonl."""

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.collectives import mean_rows, reduce_float, reduce_int
from phalanx.functional.advantage import group_std, has_signal
from phalanx.telemetry.metrics import Timers

MOST_TURNS = 8  # samples with more turns share one metric


def reward_metrics(reward: Tensor, terms: dict[str, Tensor], group_id: Tensor) -> dict[str, float]:
    """reward/... metrics of the rewards [N] of all ranks and of their terms."""
    spread = group_std(reward, group_id)
    row = {
        "reward/mean": reward.mean().item(),
        "reward/std": reward.std(correction=0).item(),
        "reward/max": reward.max().item(),
        "reward/min": reward.min().item(),
        "reward/std_mean": spread.mean().item(),
        "reward/zero_std_ratio": 1 - has_signal(reward, group_id).float().mean().item(),
    }
    return row | {f"reward/{name}": values.mean().item() for name, values in terms.items()}


def reward_by_turns(reward: Tensor, turns: Tensor) -> dict[str, float]:
    """conversation/reward_turns_<k>: the mean reward over all ranks' samples [N] with a reward and k turns (0: no turn
    fitted); conversation/reward_turns_more is for samples with more than MOST_TURNS turns.
    """
    row = {}
    for k in range(MOST_TURNS + 2):
        known = reward[(turns.clamp(max=MOST_TURNS + 1) == k) & ~reward.isnan()]
        if len(known):
            row[f"conversation/reward_turns_{k if k <= MOST_TURNS else 'more'}"] = known.mean().item()
    return row


def merged_rows(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's chunks: take extremes of max and min, sum seconds and errors, average the rest."""
    merged = {}
    for key in rows[0]:
        values = [row[key] for row in rows if key in row]
        if key.endswith("max"):
            merged[key] = max(values)
        elif key.endswith("min"):
            merged[key] = min(values)
        elif key.startswith("time/") or key.endswith(("_s", "/errors")):
            merged[key] = sum(values)
        else:
            merged[key] = sum(values) / len(values)
    return merged


def token_metrics(
    lengths: Tensor, trained: int, step_s: float, timers: Timers, ranks: int | None = None
) -> dict[str, float]:
    """perf/... metrics of samples that are made of tokens: the number of tokens, and the throughput of each phase per
    rank. `lengths` [B, 3]: see phalanx.types.Samples; `trained`: this rank's tokens in the update. `ranks`: number of
    ranks of all roles; None: that of this group.
    """
    ranks, here = ranks or dist.get_world_size(), dist.get_world_size()
    local, trained = trained, reduce_int(trained, "sum")
    total, drawn = reduce_int(int(lengths[:, :2].sum()), "sum"), reduce_int(int(lengths[:, 2].sum()), "sum")
    row = {
        "perf/total_num_tokens": float(total),
        "perf/tokens_per_gpu_per_s": total / ranks / step_s,
        "perf/token_imbalance": reduce_int(local, "max") * here / trained if trained else 1.0,
    }
    for phase, tokens in (("rollout", drawn), ("rescore", total), ("update", trained)):
        if timers.seconds(phase) > 0:
            row[f"perf/{phase}_tokens_per_gpu_per_s"] = tokens / here / timers.seconds(phase)
    return row


def by_teacher(means: dict[str, float]) -> dict[str, float]:
    """Convert sums over the samples of each teacher, averaged over micro-batches, into metrics.

    `teacher_share/<name>` counts the samples of a teacher and becomes their share; other metrics `<metric>/<name>`
    become means over these samples, and are dropped if there are none. All other metrics are unchanged.
    """
    counts = {key.split("/", 1)[1]: value for key, value in means.items() if key.startswith("teacher_share/")}
    row = {}
    for key, value in means.items():
        metric, _, teacher = key.partition("/")
        if teacher not in counts:
            row[key] = value
        elif metric == "teacher_share":
            row[key] = value / max(sum(counts.values()), 1e-9)
        elif counts[teacher] > 0:
            row[key] = value / counts[teacher]
    return row


def update_metrics(
    who: str, stats: Sequence[Sequence[dict[str, Any]]], updates: Sequence[dict[str, Any]], planned: int
) -> dict[str, float]:
    """The metrics actor/... of a step, or those of another model `who`, equal on all ranks. stats: the loss's scalars
    per optimizer step and micro-batch. updates: the results of the optimizer steps. planned: number of optimizer steps
    without early stopping.
    """
    skipped = planned - len(updates)
    if not stats:
        return {f"{who}/updates_skipped": float(skipped)}
    plain = []
    for micro_batches in stats:
        for row in micro_batches:
            plain.append({name: float(value) for name, value in row.items()})
    means = by_teacher(mean_rows(plain))
    if "ratio_error" in plain[0]:
        # in the first optimizer step: exactly 0 if rollout and replay run with equal shapes
        error = max(row["ratio_error"] for row in plain[: len(stats[0])])
        means.pop("ratio_error")
        means["first_ratio_error"] = reduce_float(error, "max")
    norms, non_finite = 0.0, 0
    for update in updates:
        norms += float(update["grad_norm"])
        non_finite += bool(update["skipped"])
    means["grad_norm"] = norms / len(updates)
    means["lr"] = float(updates[-1]["lr"])
    means["updates_skipped"] = float(skipped)
    means["updates_non_finite"] = float(non_finite)
    return {f"{who}/{name}": value for name, value in means.items()}


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GB (10^9 bytes): device memory, or on a CPU the resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # macOS counts bytes, other systems kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
