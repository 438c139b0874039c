"""The cost of the files that `phalanx watch` reads (phalanx.run.telemetry.rank_files) in a training step, on a CPU.

    python benchmarks/rank_files.py

It times the work of the training thread per phase and per collective, and that of the background thread per heartbeat
with the phases and waits of a step, and computes from these the share of a step.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from phalanx.config.parallel import ParallelConfig
from phalanx.distributed import collectives, mesh
from phalanx.run.telemetry.rank_files import RankFiles
from phalanx.run.world import lone_world
from phalanx.telemetry.timers import Phase, Timers


def microseconds(act: Callable[[], object], times: int = 2000, rounds: int = 15) -> float:
    """The mean CPU time of a call in microseconds; the median over rounds."""
    means = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(times):
            act()
        means.append((time.thread_time() - begin) / times)
    return 1e6 * median(means)


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", type=int, default=10, help="phases per step")
    parser.add_argument("--collectives", type=int, default=100, help="collectives per step, on small values")
    parser.add_argument("--waits", type=int, default=20, help="collectives per step that take more than a millisecond")
    parser.add_argument("--step_s", type=float, default=2.0, help="seconds of a step")
    args = parser.parse_args()
    timers = Timers()

    def note_phase() -> None:
        timers.spans.append((Phase("rollout").name, timers.step, time.perf_counter(), time.perf_counter()))

    def time_collective() -> None:
        with collectives._timed():
            pass

    phase, collective = microseconds(note_phase), microseconds(time_collective)
    with tempfile.TemporaryDirectory() as folder, mesh.alone():
        world = lone_world(ParallelConfig(), 1, 0, torch.device("cpu"))
        files = RankFiles(Path(folder), world, timers, 100)

        def beat() -> None:
            for _ in range(args.phases):
                note_phase()
            for number in range(args.waits):
                collectives.waits.append((number, 0.0, 1.0))
            files._write()

        per_beat = microseconds(beat, times=20)
    step = args.phases * phase + args.collectives * collective
    print(f"per phase {phase:.1f} us, per collective {collective:.1f} us, per beat of the thread {per_beat:.0f} us")
    print(f"per step of {args.step_s:g} s, in the training's thread: {step:.0f} us, {step / 1e4 / args.step_s:.4f} %")
    print(f"beside it, per beat of 2 s with all of a step's lines: {per_beat / 1e4 / 2:.3f} % of a core")


if __name__ == "__main__":
    main()
