"""Attention over the states of many blocks: FlexAttention against a dense mask, alternating, on one thread.

    python benchmarks/block_attention.py [--lengths 256 512 1024] [--size 32] [--states 2] [--runs 5]

The rows are those of the replay of a response of `length` tokens in blocks of `size`, each in `states` states. Figures
are medians of CPU seconds (on a GPU: wall-clock seconds) of a forward pass with four heads of 64 dimensions, and on a
GPU also of a forward and backward pass. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from phalanx.functional.block_states import States, Views, sees, states_of


def rows(length: int, size: int, states: int, device: str) -> States:
    """States of one sample without a prompt."""
    ids = torch.zeros(1, length, dtype=torch.long)
    step = (torch.arange(length) % states).view(1, -1, 1, size)
    now = torch.arange(states)[:, None]
    views = Views(step >= now, (step == now).float())
    return states_of(ids, views, mask_id=1, count=length // size * states).to(torch.device(device))


def seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(length: int, options: argparse.Namespace, device: str) -> dict[str, float]:
    """Medians over the passes for one length."""
    all_states = rows(length, options.size, options.states, device)
    block, chunk, limit = all_states.block[0], all_states.chunk[0], all_states.limit[0]

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(block[q], chunk[q], limit[q], block[k], chunk[k])

    total = len(block)
    mask, blocks = all_states.allowed(), create_block_mask(rule, None, None, total, total, device=device)
    torch.manual_seed(0)
    train = device != "cpu"  # FlexAttention has no backward pass on CPUs
    q, k, v = (torch.randn(1, 4, total, 64, device=device, requires_grad=train) for _ in range(3))
    compiled = torch.compile(flex_attention, dynamic=False)
    ways: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "flex": lambda: compiled(q, k, v, block_mask=blocks),
    }
    difference = float((ways["dense"]() - ways["flex"]()).abs().max().detach())
    times: dict[str, list[float]] = {name: [] for name in ways}
    both: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, way in ways.items():
            times[name].append(seconds(way, device))
            if train:
                both[name].append(seconds(lambda run=way: run().sum().backward(), device))
    row = {"length": length, "positions": total, "largest difference": difference}
    row |= {f"{name}, forward": statistics.median(values) for name, values in times.items()}
    row |= {f"{name}, both": statistics.median(values) for name, values in both.items() if values}
    return row | {"ratio": row["dense, forward"] / row["flex, forward"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--states", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for length in options.lengths:
        results.append(measure(length, options, device))
        print(results[-1], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
