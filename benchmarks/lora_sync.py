"""A LoRA's sync to vLLM and the sampling after it, with the LoRA beside its base and merged, in turns in one run.

    sh train.sh benchmarks/lora_sync.py configs/grpo/my_job.yaml model.lora_rank=32 rollout.engine=vllm

Each round changes all trained weights, syncs them to an engine of each way, which includes gathering, loading and the
comparison of what the engine holds with what was sent, and samples a batch. Medians over 7 rounds after one that is not
measured; seconds are this rank's. The last line is JSON.
"""

import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import origin, table

from phalanx.config.lm import LMRLConfig
from phalanx.run.cli import parse, rank, run
from phalanx.run.rl import build
from phalanx.run.world import stop_world

ROUNDS = 7


def synced(trainer: Any, number: int) -> tuple[float, float, float]:
    """Seconds of a sync and of sampling, and megabytes sent, after a change of the weights."""
    rollout, trained = trainer.collector.rollout, trainer.policy.trained
    trained.take([(name, value * 1.01 + 1e-4) for name, value in trained.whole()])
    refresh, adapt, sent = rollout.engine.refresh, rollout.engine.adapt, []

    def counted(weights: Any) -> Any:
        for name, tensor in weights:
            sent.append(tensor.nbytes)
            yield name, tensor

    rollout.check = rollout._check_weights
    rollout.engine.refresh = lambda weights: refresh(counted(weights))
    rollout.engine.adapt = lambda weights: adapt(counted(weights))
    start = time.perf_counter()
    with rollout.awake():
        middle = time.perf_counter()
        prompts = trainer.collector.prompts.batch(number)
        rollout.sample(prompts, seed=0, step=number, each=lambda texts, prompts: None)
        end = time.perf_counter()
    rollout.engine.refresh, rollout.engine.adapt = refresh, adapt
    return middle - start, end - middle, sum(sent) / 1e6


def measure(cfg: LMRLConfig) -> None:
    """Sync and sample in turns, and print the medians."""
    trainers: dict[str, Any] = {}
    for way in ("adapter", "merged"):
        one = copy.deepcopy(cfg)
        one.rollout.lora_sync, one.trainer.output_dir = way, f"{cfg.trainer.output_dir}/{way}"
        trainers[way] = build(one)
    seconds: dict[str, list[tuple[float, float, float]]] = {way: [] for way in trainers}
    for number in range(ROUNDS + 1):
        for way in sorted(trainers, reverse=number % 2 == 1):
            seconds[way].append(synced(trainers[way], number))
    result: dict[str, Any] = {"lora_rank": cfg.model.lora_rank, **origin(torch.device("cpu"))}
    rows = []
    for way, measured in seconds.items():
        sync, sample, size = (statistics.median(values) for values in zip(*measured[1:], strict=True))
        result |= {f"{way}_sync_s": sync, f"{way}_sample_s": sample, f"{way}_mb": size}
        rows.append((way, f"{sync:.3g} s and {size:.4g} MB per sync, {sample:.3g} s to sample"))
    if rank() == 0:
        table("Syncs of a LoRA to vLLM", rows)
        print(json.dumps(result), flush=True)
    stop_world()


def job(cfg: LMRLConfig) -> Callable[[], None]:
    return lambda: measure(cfg)


if __name__ == "__main__":
    run(job, parse(LMRLConfig, __doc__ or ""))
