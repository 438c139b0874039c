"""Time, throughput, memory and FLOPs utilization of a whole training step: rollout, reward, update.

    sh train.sh benchmarks/step.py benchmarks/cpu_reference.yaml
    sh train.sh benchmarks/step.py configs/flowgrpo/qwen_image_ocr_lora.yaml --shapes qwen_image data.train_batch_size=2
    sh train.sh benchmarks/step.py configs/grpo/gsm8k_qwen25_0_5b.yaml --shapes Qwen/Qwen2.5-0.5B-Instruct

It runs the Trainer itself, on a CPU or GPUs, on as many ranks as train.sh starts, for flow models and language models.
Figures are medians over the measured steps. `--shapes` replaces the model folder, the prompts and the reward, so
nothing is downloaded; a language model then decodes by itself. The last line is JSON.
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lm_shapes
from measure import Bench, arguments, configure_any, origin, table
from shapes import blueprint

from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.models.lm.model import DTYPES
from phalanx.run.cli import rank, run
from phalanx.run.kind import kind_of
from phalanx.run.world import stop_world
from phalanx.telemetry.flops import peak_flops
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from phalanx.training.minibatches import BatchPlan


def parse(argv: list[str] | None = None) -> tuple[Namespace, FlowRLConfig | LMRLConfig]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="torch.profiler trace of one more step")
    args = parser.parse_intermixed_args(argv)
    return args, configure_any(args)


def prepared(cfg: FlowRLConfig | LMRLConfig, args: Namespace) -> Bench:
    """The job, ready to run; with --shapes, weights are random."""
    with lm_shapes.random_weights() if args.shapes else nullcontext():
        return Bench.of(cfg, warmup=args.warmup, steps=args.steps, trace=args.profile)


def expected(cfg: FlowRLConfig | LMRLConfig, shape: str) -> Iterator[dict[str, float]]:
    """The peak in GB and the PFLOP that --plan counts for a step of a shape on one GPU; `cfg` cannot be used after."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # in a process of its own, beside the one that is measured
    if isinstance(cfg, FlowRLConfig):
        cfg.model.path = str(blueprint(Path(cfg.trainer.output_dir) / "blueprint", shape))
        cfg.model.family = "qwen_image" if "qwen" in shape else "sd3"
    job = planned(cfg, Cluster(1, 1))
    yield {"planned_gb": count(job).peak / 1e9, "planned_pflop": job.flops / 1e15}


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
    stop_world()


def summary(bench: Bench, args: Namespace) -> dict[str, Any]:
    """All figures as one flat dictionary."""
    m, cfg, plan = bench.medians(), bench.cfg, bench.plan
    fastest, slowest = bench.spread()
    seconds = m["perf/step_s"]
    peak = peak_flops(bench.world.device, DTYPES[cfg.model.dtype])
    measured = "cpu_" if bench.world.device.type == "cpu" else ""
    mfu = m.get(f"perf/{measured}mfu")
    unit = "images" if isinstance(cfg, FlowRLConfig) else "responses"
    return {
        "config": args.config,
        "overrides": args.overrides,
        "shapes": args.shapes,
        **origin(bench.world.device),
        "ranks": bench.world.size,
        "dtype": cfg.model.dtype,
        unit: plan.samples,
        "steps": args.steps,
        "step_s": seconds,
        "step_s_min": fastest,
        "step_s_max": slowest,
        **{name: m[f"time/{key}"] for name, key in PHASES.items() if f"time/{key}" in m},
        **{f"{key}_cpu_s": m[f"cpu/{key}"] for key in PHASES.values() if f"cpu/{key}" in m},
        "reward_waited_s": m["time/reward"],
        "reward_busy_s": m["reward/busy_s"],
        f"{unit}_per_s": plan.samples / seconds,
        f"{unit}_per_rank_per_s": plan.per_rank / seconds,
        # the cost of a reward depends on the reward: this is the throughput of the rest
        f"{unit}_per_rank_per_s_without_reward": plan.per_rank / (m["time/rollout"] + m["time/update"]),
        **({"trained_steps": plan.actions} if unit == "images" else _of_tokens(m, plan)),
        "peak_memory_gb": bench.peak_memory_gb(),
        "memory_gb": bench.meter.memory_gb,
        "mfu": mfu,
        "hfu": m.get(f"perf/{measured}hfu"),
        "tflops_per_rank": None if mfu is None or peak is None else mfu * peak / 1e12,
        "peak_tflops": None if peak is None else peak / 1e12,
        "first_ratio_error": bench.measures[0].get("actor/first_ratio_error"),  # where the loss has ratios
        "grad_norm": m["actor/grad_norm"],
    }


def _of_tokens(m: dict[str, float], plan: BatchPlan) -> dict[str, float]:
    """Figures that only a language model has; `ms_per_pass`: the rollout's time for each token of a response."""
    longest = m["response/length_max"] * -(-plan.per_rank // plan.rollout_micro)
    return {
        "response_tokens": m["response/length_mean"],
        "tokens": m["perf/total_num_tokens"],
        "tokens_per_rank_per_s": m["perf/tokens_per_gpu_per_s"],
        "decoded_per_rank_per_s": m["perf/rollout_tokens_per_gpu_per_s"],
        "trained_per_rank_per_s": m["perf/update_tokens_per_gpu_per_s"],
        "ms_per_pass": 1e3 * m["time/rollout"] / longest,
    }


PHASES = {
    "rollout_s": "rollout",
    "decode_s": "decode",
    "reward_s": "reward",
    "update_s": "update",
    "rescore_s": "rescore",
    "optimizer_s": "optimizer",
}


def show(r: dict[str, Any], bench: Bench) -> None:
    """Print the table."""
    unit, of_rollout = "images", f"of it decoding {r.get('decode_s', 0):.3f}"
    if unit not in r:
        unit, of_rollout = "responses", f"{r['ms_per_pass']:.2f} ms a token of all responses"
    rest = r["step_s"] - r["rollout_s"] - r["reward_s"] - r["update_s"]
    rows = [
        ("step", f"{r['step_s']:.3f} s   ({r['step_s_min']:.3f} .. {r['step_s_max']:.3f} over {r['steps']} steps)"),
        ("  rollout", f"{r['rollout_s']:.3f} s   {of_rollout}"),
        ("  waiting for rewards", f"{r['reward_s']:.3f} s   rewards worked {r['reward_busy_s']:.3f}"),
        ("  update", f"{r['update_s']:.3f} s   of it optimizer {r['optimizer_s']:.3f}"),
        ("  rest", f"{rest:.3f} s"),
        ("CPU seconds", f"rollout {r['rollout_cpu_s']:.2f}, update {r['update_cpu_s']:.2f}, of this process"),
        ("throughput", f"{r[f'{unit}_per_s']:.3f} {unit}/s   {r[f'{unit}_per_rank_per_s']:.3f} a rank"),
        ("without rewards", f"{r[f'{unit}_per_rank_per_s_without_reward']:.3f} {unit}/s a rank"),
        ("peak memory", f"{r['peak_memory_gb']:.2f} GB a rank"),
    ]
    if unit == "responses":
        decoded, trained = r["decoded_per_rank_per_s"], r["trained_per_rank_per_s"]
        rows.append(("tokens", f"a rank and second: {decoded:.0f} decoded, {trained:.0f} trained"))
    rows += [(f"  {name}", f"{value:.2f} GB") for name, value in r["memory_gb"].items()]
    if r["mfu"] is not None:
        again = f"{100 * r['hfu']:.1f} % with what checkpointing computes again"
        rows.append(("utilisation", f"{100 * r['mfu']:.1f} % of {r['peak_tflops']:.3f} TFLOP/s, {again}"))
    if r["first_ratio_error"]:
        rows.append(("|ratio - 1|", f"{r['first_ratio_error']:.1e} at most in the first update: shapes differ"))
    what = r["shapes"] or bench.cfg.model.path
    table(f"{what}, {r['dtype']}, {r[unit]} {unit} a step on {r['ranks']} x {r['device']}", rows)


def _busiest(bench: Bench) -> str:
    return "self_cuda_time_total" if bench.world.device.type == "cuda" else "self_cpu_time_total"


if __name__ == "__main__":
    args, cfg = parse()

    def build(cfg: FlowRLConfig | LMRLConfig) -> Any:
        kind_of(cfg).check()
        bench = prepared(cfg, args)
        return lambda: measure(bench, args)

    run(build, cfg)
