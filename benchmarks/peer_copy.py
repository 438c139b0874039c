"""What trainer.peer_copy costs in each step: milliseconds, CPU milliseconds and bytes of a rank.

    python -m benchmarks.peer_copy [--megabytes 1,64,512] [--runs 7] [--steps 0]

Two ranks, each as a node of its own, exchange states of these sizes over gloo on this machine: float32 weights and two
moments in 300 tensors each. In turns with it, the same memory is only copied within a rank, which is the least that any
copy would cost. With `--steps`, two jobs of a tiny language model on two nodes also take so many steps in turns, one
with trainer.peer_copy and the other one without IN_PLACE. The last line is JSON.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from phalanx.distributed.launch_env import Launch
from phalanx.run.peer_copy import PeerCopy, packed
from tests.faults.jobs import Job
from tests.helpers.lm import tiny_lm
from tests.helpers.ranks import free_port, run_ranks

TENSORS = 300


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a call, and of the CPU."""
    begin, used = time.perf_counter(), time.process_time()
    work()
    return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - used)


def exchanges(megabytes: int, runs: int) -> dict[str, list[tuple[float, float]]]:
    """This rank's times of exchanges and of copies within its memory, without the first ones, which allocate."""
    launch, peer, times = Launch.from_env(), PeerCopy(), dict[str, list[tuple[float, float]]](exchange=[], copy=[])
    world: Any = SimpleNamespace(
        rank=launch.rank, size=launch.world_size, shard_size=2, device=torch.device("cpu"), launch=launch
    )
    count = (megabytes << 20) // (4 * 3 * TENSORS)
    parts = list(torch.randn(3 * TENSORS, count))
    home = packed(parts)
    for step in range(runs + 2):
        times["exchange"].append(timed(lambda: peer.update(parts, step, world)))  # noqa: B023
        times["copy"].append(timed(lambda: home.copy_(packed(parts))))
    return {name: values[2:] for name, values in times.items()}


def steps_of_jobs(model: Path, folder: Path, steps: int) -> dict[str, list[float]]:
    """Seconds from step to step, in turns."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(2):
        for kind in ("with", "without"):
            place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "1"}
            settings = ["parallel.fsdp_size=2", f"trainer.total_training_steps={steps}"]
            if kind == "with":
                place["IN_PLACE"] = "1"
                settings.append("trainer.peer_copy=true")
            with contextlib.ExitStack() as stack:
                out, nodes = folder / f"{turn} {kind}", []
                for number in range(2):
                    job = Job(model, out, *settings, env=place | {"NODE_RANK": str(number)}, name=f"{number}", lm=True)
                    nodes.append(stack.enter_context(job))
                assert [node.wait() for node in nodes] == [0, 0], nodes[0].said
            lines = (out / "out" / "metrics.jsonl").read_text().splitlines()
            clock = [json.loads(line)["perf/elapsed_s"] for line in lines]
            seconds[kind] += [after - before for before, after in itertools.pairwise(clock[1:])]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", default="1,64,512", help="of a rank's state")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for megabytes in map(int, args.megabytes.split(",")):
        times, _ = run_ranks(exchanges, 2, megabytes, args.runs, local_world=1)
        row: dict[str, float] = {}
        for name, values in times.items():
            row[f"{name} ms"], row[f"{name} CPU ms"] = (
                round(statistics.median(each), 1) for each in zip(*values, strict=True)
            )
        result[f"{megabytes} MB"] = row
        print(f"{megabytes:5} MB of a rank: {row}")
    if args.steps:
        with tempfile.TemporaryDirectory() as name:
            seconds = steps_of_jobs(tiny_lm(Path(name) / "lm"), Path(name), args.steps)
        result["step"] = {kind: round(statistics.median(values), 3) for kind, values in seconds.items()}
        print(f"seconds of a step: {result['step']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
