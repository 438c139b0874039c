"""The metrics of a training step, as written to metrics.jsonl.

Model FLOPs utilisation is `step_flops(...) / (step_seconds * ranks * peak_flops(...))` without checkpointing; hardware
FLOPs utilisation includes the recomputation by checkpointing.
"""

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.collectives import all_gather_rows, reduce_int
from phalanx.functional.advantage import group_std, has_signal
from phalanx.functional.aggregation import Mean, Sums
from phalanx.telemetry.timers import Timers

_OTHER_THAN_MEANS = ("reward/max", "reward/min", "reward/errors")
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
    row: dict[str, float] = {}
    for k in range(MOST_TURNS + 2):
        known = reward[(turns.clamp(max=MOST_TURNS + 1) == k) & ~reward.isnan()]
        if len(known):
            row[f"conversation/reward_turns_{k if k <= MOST_TURNS else 'more'}"] = Mean(known.mean().item(), len(known))
    return row


def merged_rows(rows: Sequence[dict[str, float]], scored: Sequence[int]) -> dict[str, float]:
    """Merge the metrics of a step's chunks: take extremes of max and min, sum seconds and errors, average the rest.

    scored: the number of samples with a reward in each chunk, which weights reward/...; reward/std is that of all. Each
    Mean is weighted by its count, and the others equally, since all chunks have equally many samples.
    """
    merged = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values, counts = list[float](), list[float]()
        for row, count in zip(rows, scored, strict=True):
            if key in row:
                value = row[key]
                values.append(value)
                counts.append(value.count if isinstance(value, Mean) else count if key.startswith("reward/") else 1)
        term = key.startswith("reward/") and key not in _OTHER_THAN_MEANS  # whatever its name, that of a reward
        if not term and key.endswith("max"):
            merged[key] = max(values)
        elif not term and key.endswith("min"):
            merged[key] = min(values)
        elif not term and (key.startswith("time/") or key.endswith(("_s", "/errors"))):
            merged[key] = sum(values)
        else:
            merged[key] = _weighted_mean(values, counts)
    if "reward/std" in merged and len(rows) > 1:
        # the mean of the chunks' variances, and the variance of their means
        moved = [row["reward/std"] ** 2 + (row["reward/mean"] - merged["reward/mean"]) ** 2 for row in rows]
        merged["reward/std"] = _weighted_mean(moved, scored) ** 0.5
    return merged


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of values with weights; those of weight 0 may be NaN. A single value stays as it is."""
    if len(values) == 1:
        return float(values[0])
    total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return total / max(sum(weights), 1)


def token_metrics(lengths: Tensor, trained: int, step_s: float, timers: Timers, ranks: int) -> dict[str, float]:
    """perf/... metrics of samples that are made of tokens: the number of tokens, and the throughput of each phase per
    rank. `lengths` [B, 3]: see phalanx.types.Samples; `trained`: this rank's tokens in the update. `ranks`: number of
    ranks of all roles.
    """
    here, local, trained = dist.get_world_size(), trained, reduce_int(trained, "sum")
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


def over_ranks(sums: Sums) -> Sums:
    """The sums of all ranks' samples, on the CPU."""
    parts = sums.parts
    flat = list(map(float, torch.cat(list(parts.values())).cpu() if parts else ()))  # one wait for the device
    sizes, local = [len(part) for part in parts.values()], dict[str, list[float]]()
    for name, size in zip(parts, sizes, strict=True):
        local[name], flat = flat[:size], flat[size:]
    total = Sums()
    for row in all_gather_rows(local):
        total.merge([{name: torch.tensor(part, dtype=torch.float64) for name, part in row.items()}])
    return total


def update_metrics(
    who: str, stats: Sequence[Sums], updates: Sequence[dict[str, Any]], planned: int
) -> dict[str, float]:
    """The metrics actor/... of a step, or those of another model `who`, equal on all ranks. stats: the sums of the
    loss's metrics, by optimizer step; the metrics are over what counts in all of these together. updates: the results
    of the optimizer steps. planned: number of optimizer steps without early stopping.
    """
    skipped = planned - len(updates)
    if not stats:
        return {f"{who}/updates_skipped": float(skipped)}
    sums = Sums()
    sums.merge(update.parts for update in stats)
    row = over_ranks(sums).values()
    norms, non_finite = 0.0, 0
    for update in updates:
        norms += float(update["grad_norm"])
        non_finite += bool(update["skipped"])
    row["grad_norm"] = norms / len(updates)
    row["lr"] = float(updates[-1]["lr"])
    row["updates_skipped"] = float(skipped)
    row["updates_non_finite"] = float(non_finite)
    return {f"{who}/{name}": float(value) for name, value in row.items()}


def step_flops(
    forward: int,
    *,
    samples: int,
    lora: bool,
    checkpointing: float,
    steps: int = 0,
    window: int = 1,
    cfg: bool = False,
    updates_per_sample: float = 1,
    references: float = 0,
    detach_uncond: bool = False,
) -> int:
    """FLOPs of a training step on all ranks, given the `forward` FLOPs of one sample and one guidance branch. The
    defaults are those of supervised training.

    With `branches` = 2 under classifier-free guidance (otherwise 1), the cost of each sample in forward passes is:

    - rollout: `steps * branches`;
    - each of `references`, the passes of a sample with other weights: `window * branches`;
    - each of `updates_per_sample` updates (`ppo_epochs`), for each of the `window` trained steps: `branches` for the
      replay, and for every branch with a gradient (one of two if `detach_uncond`) 2 for the backward pass of a full
      fine-tune or 1 for a LoRA, plus `checkpointing`, the fraction of the blocks that is recomputed.

    A LoRA needs gradients of activations but not of the frozen weights, which is half of a backward pass. Not counted:
    the LoRA's own products (about rank / width), attention's backward pass beyond that half (its inputs are
    activations, so a LoRA saves nothing there), the VAE, the text encoders and the reward. The utilisation is therefore
    a lower bound.
    """
    branches = 2 if cfg else 1
    grad_branches = 1 if detach_uncond else branches
    backward = (1 if lora else 2) + checkpointing
    rollout = steps * branches
    others = references * window * branches
    update = window * (branches + grad_branches * backward)
    return round(forward * samples * (rollout + others + updates_per_sample * update))


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GB (10^9 bytes): device memory, or on a CPU the resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # macOS counts bytes, other systems kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
