"""The first update of a supervised job, whose samples are not drawn: its loss and gradient under several settings.

Without a sampler there is no ratio that could be off. What dtype, packing, attention, batch size and layout change is
the loss of the same samples, with the same noise, and its gradient.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowMatchingTaskConfig
from phalanx.config.lm_supervised import DPOConfig, SFTConfig
from phalanx.distributed.collectives import reduce_float
from phalanx.distributed.mesh import World
from phalanx.run import block_diffusion_sft, flow_matching, rl
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.training.loop import train_step
from phalanx.training.supervised import SupervisedTrainer

TASKS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "sft": (SFTConfig, rl.build),
    "dpo": (DPOConfig, rl.build),
    "flow_matching": (FlowMatchingTaskConfig, flow_matching.build),
    "block_diffusion": (BlockDiffusionTaskConfig, block_diffusion_sft.build),
}
VALUES = {"loss": ("train/loss", "actor/dpo_loss", "actor/nll"), "grad_norm": ("actor/grad_norm",)}
NOTHING = "Nothing is sampled, so that no ratio can be off before an update"


def measure_update(cfg: Any, task: str, base: dict[str, Any] | None) -> tuple[dict[str, Any], World]:
    """A job's row: loss and norm of the gradient of its first update, and relative differences from those of `base`,
    the first job's row. All ranks call this together.
    """
    trainer = TASKS[task][1](cfg)
    world = trainer.policy.trained.world
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    start = time.perf_counter()
    if isinstance(trainer, SupervisedTrainer):
        trainer.task.begin(range(1))
        metrics = trainer.update(0)
    else:
        metrics = train_step(trainer.job, trainer.collector, trainer.updater, 0)
    row: dict[str, Any] = {"unit": "update", "step_s": reduce_float(time.perf_counter() - start, "max")}
    row["memory_gb"] = reduce_float(peak_memory_gb(world.device), "max")
    for name, keys in VALUES.items():
        row[name] = next(metrics[key] for key in keys if key in metrics)
    if task == "dpo":
        row["margin"] = metrics["actor/margin"]
    if base is not None:
        row["beside"] = {name: abs(row[name] - base[name]) / max(abs(base[name]), 1e-30) for name in VALUES}
    return row, world


def update_verdict(rows: dict[str, dict[str, Any]]) -> str:
    """A sentence about what the variants change in the first update, and about the reference of pairs."""
    base, *others = rows.values()
    text = NOTHING
    if "margin" in base:
        off = "the reference gives pairs the policy's log-probabilities, bit for bit"
        if base["margin"] != 0:
            off = f"reference and policy are apart before any update: the mean margin of pairs is {base['margin']:.1e}"
        text += f"; {off}"
    if not others:
        return f"{text}; with variants, or standard=true, the first update is compared."
    names = [name for name, row in rows.items() if "beside" in row]
    equal = [name for name in names if not any(rows[name]["beside"].values())]
    if len(equal) == len(names):
        return f"{text}; no variant changes a bit of the first update's loss and gradient norm."
    most = max(names, key=lambda name: rows[name]["beside"]["grad_norm"])
    far = rows[most]["beside"]
    return (
        f"{text}; of the variants {most} changes the first update most: the loss by {far['loss']:.1e} of it, the norm "
        f"of the gradient by {far['grad_norm']:.1e}."
    )


def update_line(name: str, row: dict[str, Any]) -> str:
    """A job's line of the terminal."""
    text = f"{name}: loss {row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}; {row['step_s']:.2f} s to update"
    if "beside" in row:
        text += f"; off by {row['beside']['loss']:.1e} and {row['beside']['grad_norm']:.1e}"
    return text
