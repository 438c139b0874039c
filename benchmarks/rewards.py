"""Time that a rollout waits for rewards after its last micro-batch, with whole calls and calls split over the workers.

    python benchmarks/rewards.py --workers 4 --samples 32 --seconds 0.05

The reward sleeps `--seconds` per sample, so the number of cores does not matter. Sampling a micro-batch takes as long
as all workers together need for its rewards. The two ways alternate; figures are medians. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config.flow import FlowRewardConfig, FlowRewardFunctionConfig
from phalanx.rewards import RewardSet
from phalanx.types import Prompt


def sleepy(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], seconds: float) -> Tensor:
    """Rewards of zero, after `seconds` per image."""
    time.sleep(seconds * len(images))
    return torch.zeros(len(images))


def tail_s(args: argparse.Namespace, parts: int, *, cut: bool) -> float:
    """Seconds from the end of sampling, which has `parts` micro-batches, to the end of the rewards."""
    path = f"{Path(__file__).resolve()}:sleepy"
    entry = FlowRewardFunctionConfig(path=path, kwargs={"seconds": args.seconds}, per_sample=cut)
    rewards = RewardSet(FlowRewardConfig(functions=[entry], num_workers=args.workers), "cpu")
    size = args.samples // parts
    prompts = [Prompt("p", 0, {})] * size
    for _ in range(parts):
        time.sleep(args.seconds * size / args.workers)
        rewards.submit(torch.zeros(size, 3, 8, 8), prompts)
    sampled = time.perf_counter()
    rewards.collect()
    return time.perf_counter() - sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="reward.num_workers (4)")
    parser.add_argument("--samples", type=int, default=32, help="samples per rank and step (32)")
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds of the reward per sample (0.05)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each way (5)")
    args = parser.parse_args()
    found: dict[str, Any] = vars(args).copy()
    for parts in (1, 2, 4, 8):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.runs):
            for cut, tails in seconds.items():
                tails.append(tail_s(args, parts, cut=cut))
        whole, cut_s = (statistics.median(tails) for tails in seconds.values())
        found[f"tail_s_of_{parts}"] = (whole, cut_s)
        print(f"{parts} micro-batches: whole calls {whole:.3f} s, cut {cut_s:.3f} s, {whole / cut_s:.1f} times less")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
