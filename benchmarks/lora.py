"""Time ratios for a LoRA: merged or not while sampling, and sharded or replicated under FSDP.

    sh train.sh benchmarks/lora.py benchmarks/cpu_reference.yaml
    NPROC_PER_NODE=2 sh train.sh benchmarks/lora.py benchmarks/cpu_reference.yaml

One rank measures the first: seconds of a guided forward pass of the rollout's micro-batch as Phalanx samples (with the
same operations as in the update, so that log-probabilities are bit-equal), with the LoRA in peft's kernels, merged into
the base beforehand, and without it; and the change of the velocity by merging. Several ranks measure the second: whole
training steps with parallel.fsdp_size = the number of ranks, alternating. The last line is JSON.
"""

import copy
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from measure import Bench, arguments, configure, origin, table
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from phalanx.config.flow import FlowRLConfig
from phalanx.distributed.launch_env import Launch
from phalanx.models.fused_lora import fuse
from phalanx.models.lora import lora_off
from phalanx.run.cli import rank, run
from phalanx.run.kind import kind_of
from phalanx.run.rl import build
from phalanx.run.world import stop_world

NOISE = 0.02  # standard deviation of LoRA's B, whose initial value is 0


@contextmanager
def by_peft(transformer: nn.Module) -> Any:
    """Compute the LoRA with peft's own five kernels within the block."""
    for layer in transformer.modules():
        if isinstance(layer, Linear):
            layer.__class__ = Linear
    yield
    fuse(transformer)


@contextmanager
def merged(transformer: nn.Module) -> Any:
    """Merge the LoRA into the base weights within the block; afterwards the base is copied back, not subtracted."""
    layers = [m for m in transformer.modules() if isinstance(m, BaseTunerLayer)]
    kept = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    for layer in layers:
        layer.merge()
    yield
    for layer, weight in zip(layers, kept, strict=True):
        layer.unmerge()
        layer.get_base_layer().weight.data.copy_(weight)


@torch.no_grad()
def merging(cfg: FlowRLConfig, args: Namespace) -> dict[str, Any]:
    """Seconds of a forward pass in each mode, alternating, and of merging itself."""
    trainer: Any = build(cfg)
    policy, rollout, device = trainer.policy, trainer.collector.rollout, trainer.world.device
    for name, p in policy.trained.parameters.items():
        if "lora_B" in name:
            p.normal_(0, NOISE)
    policy.trained.sharded.copy_to_module()
    embeds = rollout.collate(trainer.collector.prompts.batch(0)[:1])
    micro, sampler = trainer.updater.plan.rollout_micro, rollout.sampler
    x = torch.randn(micro, *policy.model.latent_shape(sampler.height, sampler.width), device=device)
    rows, t = torch.zeros(micro, dtype=torch.long, device=device), torch.full((micro,), 500.0, device=device)
    transformer = policy.model.transformer
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "own": nullcontext,
        "peft": lambda: by_peft(transformer),
        "merged": lambda: merged(transformer),
        "without": lambda: lora_off(transformer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*modes, "merging")}
    velocity = {}
    for _ in range(args.warmup + args.steps):
        for name, mode in modes.items():
            start = clock(device)
            with mode():
                begin = clock(device)
                velocity[name] = policy.velocity(x, t, embeds, rows, sampler)
                seconds[name].append(clock(device) - begin)
            if name == "merged":
                seconds["merging"].append(clock(device) - start - seconds[name][-1])
    result = {f"{name}_s": statistics.median(values[args.warmup :]) for name, values in seconds.items()}
    result["peft_ratio"] = result["peft_s"] / result["own_s"]
    result["merged_ratio"] = result["own_s"] / result["merged_s"]
    error = (velocity["merged"] - velocity["own"]).abs().max() / velocity["own"].abs().max()
    result["velocity_error"] = float(error)
    rows_ = [
        ("as Phalanx samples", f"{result['own_s']:.4f} s a guided forward pass of {micro} samples"),
        ("by peft", f"{result['peft_s']:.4f} s   {result['peft_ratio']:.2f} times as long"),
        ("merged", f"{result['merged_s']:.4f} s   {result['merged_ratio']:.2f} times as fast"),
        ("no LoRA", f"{result['without_s']:.4f} s"),
        ("merging and undoing it", f"{result['merging_s']:.4f} s, once a rollout"),
        ("largest change of the velocity", f"{result['velocity_error']:.1e} of its largest value"),
    ]
    table(f"{cfg.model.path}, {cfg.model.dtype}, LoRA of rank {cfg.model.lora_rank}", rows_)
    return result


def sharding(cfg: FlowRLConfig, args: Namespace, ranks: int) -> dict[str, Any]:
    """Whole steps with the LoRA sharded and replicated, two rounds of each."""
    cfg.parallel.fsdp_size = ranks
    found: dict[str, list[dict[str, float]]] = {"shard": [], "replicate": []}
    for _ in range(2):
        for mode, rows in found.items():
            one = copy.deepcopy(cfg)
            one.parallel.lora_sharding = mode
            bench = Bench.of(one, warmup=args.warmup, steps=args.steps)
            bench.fit()
            rows += bench.measures[args.warmup :]
    keys = ("time/rollout", "time/update", "cpu/rollout", "cpu/update")
    result: dict[str, Any] = {}
    for mode, rows in found.items():
        result |= {f"{mode} {key}": statistics.median(row[key] for row in rows) for key in keys}
    lines = []
    for key in keys:
        shard, replicate = result[f"shard {key}"], result[f"replicate {key}"]
        lines.append((key, f"sharded {shard:.3f} s   replicated {replicate:.3f} s   ratio {shard / replicate:.2f}"))
    table(f"{cfg.model.path}, {cfg.model.dtype}, LoRA under FSDP over {ranks} ranks", lines)
    return result


def clock(device: torch.device) -> float:
    """Seconds; on a CPU, CPU seconds of this process, which other work on the machine disturbs less."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def main() -> None:
    args = arguments(__doc__ or "").parse_intermixed_args()

    def build(cfg: FlowRLConfig) -> Callable[[], None]:
        kind_of(cfg).check()

        def job() -> None:
            ranks = Launch.from_env().world_size
            result = merging(cfg, args) if ranks == 1 else sharding(cfg, args, ranks)
            head = {"config": args.config, "overrides": args.overrides, "ranks": ranks, "steps": args.steps}
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if rank() == 0:
                print(json.dumps(head | origin(device) | result), flush=True)
            stop_world()

        return job

    run(build, configure(args))


if __name__ == "__main__":
    main()
