"""What the bit-for-bit check of a weight sync costs, beside the sync itself, in turns in one run.

    python benchmarks/sync_check.py                                   # a tiny model
    python benchmarks/sync_check.py Qwen/Qwen2.5-0.5B-Instruct

A sync casts each trained weight, in float32, to the engine's bfloat16, and copies it into the engine's tensors, which
join the projections of a layer as vLLM's do. The engine is in place of vLLM: what vLLM's own loading adds is not
measured, nor gathers of sharded weights. Checked, each tensor's fingerprints are taken on its way, and those of all of
the engine's tensors are compared with them (phalanx.engines.receipt). Every round syncs both ways, in alternating
order; the weights change between rounds. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lm_shapes
import torch
from measure import origin, table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from phalanx.engines.receipt import Receipt
from phalanx.run.cli import fail

JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


class Engine(nn.Module):
    """Holds a model's weights in bfloat16, projections of the same input in one tensor."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        parts: dict[str, list[str]] = {}
        for name in weights:
            owner = name.split(".")[-2] if "." in name else ""
            parts.setdefault(name.replace(owner, JOINED[owner]) if owner in JOINED else name, []).append(name)
        self.places: dict[str, Tensor] = {}  # views of the engine's tensors, by the names of the model's
        for i, names in enumerate(parts.values()):
            rows = [len(weights[name]) for name in names]
            held = weights[names[0]].new_empty(sum(rows), *weights[names[0]].shape[1:], dtype=torch.bfloat16)
            self.register_buffer(str(i), held)
            self.places.update(zip(names, held.split(rows), strict=True))

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take weights one by one."""
        for name, tensor in weights:
            self.places[name].copy_(tensor)


def sync(weights: dict[str, Tensor], engine: Engine, receipt: Receipt | None) -> None:
    """Copy all weights, checked if there is a receipt."""
    cast = ((name, tensor.to(torch.bfloat16)) for name, tensor in weights.items())
    engine.load(cast if receipt is None else receipt.noted(cast))
    if receipt is not None and (missing := receipt.missing(engine.buffers(), lambda here: here)):
        fail(f"the engine does not hold {missing[0]}", status=1)


def clock(device: torch.device) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default=lm_shapes.TINY, help="a shape of lm_shapes.py (tiny_lm)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after one that is not (7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            folder = lm_shapes.folder_of(args.shape, Path(name) / "model")
        except ValueError as error:
            fail(str(error), status=2)
        lm = lm_shapes.made(AutoModelForCausalLM, str(folder), torch.float32, "sdpa")
    weights = {name: weight.data for name, weight in lm.named_parameters()}
    device, engine = lm.device, Engine(weights)
    kinds: dict[str, Receipt | None] = {"copied": None, "copied and checked": Receipt(1)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(args.rounds + 1):
        for weight in weights.values():
            weight.mul_(1.01)
        for name in sorted(kinds, reverse=number % 2 == 1):
            start = clock(device)
            sync(weights, engine, kinds[name])
            end = clock(device)
            seconds[name].append((end[0] - start[0], end[1] - start[1]))
    size = sum(held.nbytes for held in engine.buffers())
    result = {"shape": args.shape, "tensors": len(weights), "gb": size / 1e9, "rounds": args.rounds} | origin(device)
    rows = [("weights", f"{len(weights)} tensors, {size / 1e9:.3g} GB in bfloat16")]
    for name, measured in seconds.items():
        wall, cpu = (statistics.median(values) for values in zip(*measured[1:], strict=True))
        rows.append((name, f"{wall:.4g} s, {cpu:.4g} CPU s per sync"))
        result |= {f"{name.replace(' ', '_')}_s": wall, f"{name.replace(' ', '_')}_cpu_s": cpu}
    check = result["copied_and_checked_cpu_s"] - result["copied_cpu_s"]
    result["check_cpu_s_per_gb"] = check / size * 1e9
    rows.append(("the check", f"{check:.4g} CPU s, {result['check_cpu_s_per_gb']:.3g} per GB"))
    table(f"A weight sync of {args.shape}, medians of {args.rounds} rounds", rows)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
