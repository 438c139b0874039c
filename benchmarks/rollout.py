"""Time and memory of the rollout with one engine; run it once per engine to compare them.

    sh train.sh benchmarks/rollout.py benchmarks/cpu_reference.yaml rollout.engine=policy
    sh train.sh benchmarks/rollout.py benchmarks/cpu_reference.yaml rollout.engine=vllm_omni

Figures are medians over the measured steps: preparing the weights, sampling an image, and rescoring it if the engine's
log-probabilities are not the policy's. On a CPU, which vLLM-omni does not support by itself, the platform of the tests
is used. The last line is JSON.
"""

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Meter, arguments, configure, origin, table, use_timers

from phalanx.config.flow import FlowRLConfig
from phalanx.distributed.collectives import reduce_float
from phalanx.run.cli import rank, run
from phalanx.run.kind import kind_of
from phalanx.run.rl import Trainer, build
from phalanx.run.world import stop_world
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.training.collect import Collector


def measure(cfg: FlowRLConfig, args: Namespace) -> None:
    """Sample `--warmup` + `--steps` times, and print the medians."""
    start = time.perf_counter()
    trainer = build(cfg)
    started = time.perf_counter() - start
    assert isinstance(trainer, Trainer), "each rank does everything"
    meter, collector = Meter(trainer.world.device), trainer.collector
    assert isinstance(collector, Collector), "samples are drawn here"
    use_timers(trainer, meter)
    rollout: Any = collector.rollout
    rows = []
    for step in range(args.warmup + args.steps):
        prompts = collector.prompts.batch(step)
        rollout.encode([prompts])
        awake = rollout.awake()
        with meter("weights"):
            awake.__enter__()
        with meter("sample"):
            samples = rollout.sample(prompts, seed=0, step=step, each=lambda images, prompts: None)
        awake.__exit__(None, None, None)
        _, drift = trainer.updater.rescorer(samples)
        rows.append(meter.pop() | drift)
    medians = {key: statistics.median(row[key] for row in rows[args.warmup :]) for key in rows[0]}
    result = summary(trainer, medians) | {"start_s": round(started, 1)}
    if rank() == 0:
        table("rollout", [(name, str(value)) for name, value in result.items()])
        print(json.dumps(result), flush=True)
    stop_world()


def summary(trainer: Trainer, medians: dict[str, float]) -> dict[str, Any]:
    """All figures as one flat dictionary: wall-clock seconds, and CPU seconds of this process."""
    cfg, plan, device = trainer.updater.cfg, trainer.updater.plan, trainer.world.device
    out: dict[str, Any] = {
        "engine": cfg.rollout.engine,
        "correction": cfg.rollout.correction,
        **origin(device),
        "ranks": trainer.world.size,
        "images_a_rank": plan.per_rank,
    }
    for phase, per in (("weights", 1), ("sample", plan.per_rank), ("rescore", plan.per_rank)):
        if f"time/{phase}" in medians:
            unit = "s" if per == 1 else "s_per_image"
            out[f"{phase}_{unit}"] = round(medians[f"time/{phase}"] / per, 4)
            out[f"{phase}_cpu_{unit}"] = round(medians[f"cpu/{phase}"] / per, 4)
    out |= {key: value for key, value in medians.items() if key.startswith("rollout/")}
    return out | {"peak_memory_gb": round(reduce_float(peak_memory_gb(device), "max"), 3)}


def timed(args: Namespace) -> Callable[[FlowRLConfig], Callable[[], None]]:
    def job(cfg: FlowRLConfig) -> Callable[[], None]:
        kind_of(cfg).check()
        if cfg.rollout.engine == "vllm_omni" and not torch.cuda.is_available():
            sys.path.append(str(Path(__file__).parents[1]))
            from tests.vllm import omni_cpu_platform

            omni_cpu_platform.install()
        return lambda: measure(cfg, args)

    return job


if __name__ == "__main__":
    args = arguments(__doc__ or "").parse_intermixed_args()
    run(timed(args), configure(args))
