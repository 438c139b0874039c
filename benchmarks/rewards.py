"""How long a rollout waits for rewards behind its last micro-batch, with calls whole and cut over the workers.

    python benchmarks/rewards.py --workers 4 --samples 32 --seconds 0.05

The reward sleeps `--seconds` for each sample, so that cores do not matter; sampling a micro-batch takes as long as all
workers together need for its rewards. Both ways run in turns; figures are medians. The last line is JSON.
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
    """Zeros, after `seconds` for each image."""
    time.sleep(seconds * len(images))
    return torch.zeros(len(images))


def tail_s(args: argparse.Namespace, parts: int, *, cut: bool) -> float:
    """Seconds from the end of the sampling, in `parts` micro-batches, to that of the rewards."""
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
    parser.add_argument("--samples", type=int, default=32, help="of a rank and step (32)")
    parser.add_argument("--seconds", type=float, default=0.05, help="of the reward, for a sample (0.05)")
    parser.add_argument("--runs", type=int, default=5, help="of each (5)")
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
