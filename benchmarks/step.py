"""Time, throughput, memory and FLOPs utilization of a whole training step: rollout, reward, update.

    sh train.sh benchmarks/step.py benchmarks/cpu_reference.yaml
    sh train.sh benchmarks/step.py configs/flowgrpo/qwen_image_ocr_lora.yaml --shapes qwen_image data.train_batch_size=2

It runs the Trainer itself, on a CPU or GPUs, on as many ranks as train.sh starts. Figures are medians over the measured
steps. `--shapes` replaces the model folder, the prompts and the reward, so nothing is downloaded. The last line is
JSON.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from measure import Bench, arguments, configure, origin, table

from phalanx.cli import rank, run
from phalanx.config.flow import FlowRLConfig
from phalanx.distributed import mesh
from phalanx.telemetry.flops import peak_flops
from phalanx.training.flow_rl import build, check


def parse() -> tuple[Namespace, FlowRLConfig]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="torch.profiler trace of one more step")
    args = parser.parse_intermixed_args()
    return args, configure(args)


def measure(bench: Bench, args: Namespace) -> None:
    """Run the steps and print the results."""
    bench.fit()
    result = summary(bench, args)
    if rank() == 0:
        show(result, bench)
        if args.profile is not None:
            print(bench.profile.key_averages().table(sort_by=_busiest(bench), row_limit=25, max_name_column_width=60))
            bench.profile.export_chrome_trace(str(args.profile))
        print(json.dumps(result), flush=True)
    mesh.stop()


def summary(bench: Bench, args: Namespace) -> dict[str, Any]:
    """All figures as one flat dictionary."""
    m, cfg, plan = bench.medians(), bench.cfg, bench.plan
    fastest, slowest = bench.spread()
    seconds = m["perf/step_s"]
    peak = peak_flops(bench.world.device, bench.policy.model.dtype)
    measured = "cpu_" if bench.world.device.type == "cpu" else ""
    mfu = m.get(f"perf/{measured}mfu")
    return {
        "config": args.config,
        "overrides": args.overrides,
        "shapes": args.shapes,
        **origin(bench.world.device),
        "ranks": bench.world.size,
        "dtype": cfg.model.dtype,
        "images": plan.samples,
        "trained_steps": plan.actions,
        "steps": args.steps,
        "step_s": seconds,
        "step_s_min": fastest,
        "step_s_max": slowest,
        **{name: m[f"time/{key}"] for name, key in PHASES.items()},
        "reward_waited_s": m["time/reward"],
        "reward_busy_s": m["reward/busy_s"],
        "images_per_s": plan.samples / seconds,
        "images_per_rank_per_s": plan.per_rank / seconds,
        # the cost of a reward depends on the reward: this is the throughput of the rest
        "images_per_rank_per_s_without_reward": plan.per_rank / (m["time/rollout"] + m["time/update"]),
        "peak_memory_gb": bench.peak_memory_gb(),
        "memory_gb": bench.meter.memory_gb,
        "mfu": mfu,
        "hfu": m.get(f"perf/{measured}hfu"),
        "tflops_per_rank": None if mfu is None or peak is None else mfu * peak / 1e12,
        "peak_tflops": None if peak is None else peak / 1e12,
        "first_ratio_error": bench.measures[0]["actor/first_ratio_error"],
        "grad_norm": m["actor/grad_norm"],
    }


PHASES = {
    "rollout_s": "rollout",
    "decode_s": "decode",
    "reward_s": "reward",
    "update_s": "update",
    "optimizer_s": "optimizer",
}


def show(r: dict[str, Any], bench: Bench) -> None:
    """Print the table."""
    rest = r["step_s"] - r["rollout_s"] - r["reward_s"] - r["update_s"]
    rows = [
        ("step", f"{r['step_s']:.3f} s   ({r['step_s_min']:.3f} .. {r['step_s_max']:.3f} over {r['steps']} steps)"),
        ("  rollout", f"{r['rollout_s']:.3f} s   of it decoding {r['decode_s']:.3f}"),
        ("  waiting for rewards", f"{r['reward_s']:.3f} s   rewards worked {r['reward_busy_s']:.3f}"),
        ("  update", f"{r['update_s']:.3f} s   of it optimizer {r['optimizer_s']:.3f}"),
        ("  rest", f"{rest:.3f} s"),
        ("throughput", f"{r['images_per_s']:.3f} images/s   {r['images_per_rank_per_s']:.3f} a rank"),
        ("without rewards", f"{r['images_per_rank_per_s_without_reward']:.3f} images/s a rank"),
        ("peak memory", f"{r['peak_memory_gb']:.2f} GB a rank"),
    ]
    rows += [(f"  {name}", f"{value:.2f} GB") for name, value in r["memory_gb"].items()]
    if r["mfu"] is not None:
        again = f"{100 * r['hfu']:.1f} % with what checkpointing computes again"
        rows.append(("utilisation", f"{100 * r['mfu']:.1f} % of {r['peak_tflops']:.3f} TFLOP/s, {again}"))
    if r["first_ratio_error"]:
        rows.append(("|ratio - 1|", f"{r['first_ratio_error']:.1e} at most in the first update: shapes differ"))
    what = r["shapes"] or bench.cfg.model.path
    table(f"{what}, {r['dtype']}, {r['images']} images a step on {r['ranks']} x {r['device']}", rows)


def _busiest(bench: Bench) -> str:
    return "self_cuda_time_total" if bench.world.device.type == "cuda" else "self_cpu_time_total"


if __name__ == "__main__":
    args, cfg = parse()

    def build(cfg: FlowRLConfig) -> Any:
        check(cfg)
        bench = Bench.of(cfg, warmup=args.warmup, steps=args.steps, trace=args.profile)
        return lambda: measure(bench, args)

    run(build, cfg)
