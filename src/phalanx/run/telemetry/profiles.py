"""Profiles of the training steps in `trainer.profile_steps`, one per rank, in the run's folder:

- `profiles/step_000005/rank_0.json.gz`: a trace of operations for Perfetto or chrome://tracing;
- `profiles/step_000005/rank_0.txt`: a table of the operations that took most time;
- `profiles/step_000005/rank_0.pickle`: on GPUs, torch's memory snapshot for pytorch.org/memory_viz.

This module is imported only if steps are profiled.
"""

import gzip
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from phalanx.config.run import TrainerConfig
from phalanx.distributed.mesh import World
from phalanx.exit import place
from phalanx.run.telemetry.run_folder import PROFILES
from phalanx.telemetry.timers import Timers

ROWS = 50  # of the table
LONGEST_NAME = 60  # characters of an operation in the table
LARGEST = 400_000_000  # bytes (about a million operations); no table is made of a larger trace
ALLOCATIONS = 200_000  # the most recent ones, which a snapshot contains
_log = logging.getLogger(__name__)

# Kineto prints the start and the end of a profile as lines of a level above errors. It reads this at the first profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Profiler:
    """`with profiler(step): ...` profiles a training step, counted from 1, if `trainer.profile_steps` contains it."""

    def __init__(self, trainer: TrainerConfig, world: World, timers: Timers) -> None:
        """The trace shows the phases of `timers` as ranges."""
        self._steps, self._folder = frozenset(trainer.profile_steps), Path(trainer.output_dir) / PROFILES
        self._timers, self._rank, self._ranks = timers, world.watch.rank, len(world.watch.hosts)
        self._device, self._role = world.device, world.role

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Profile the `with` block; the files are written after it, unless it raises."""
        if step not in self._steps:
            yield
            return
        kinds, on_gpu = [ProfilerActivity.CPU], self._device.type == "cuda"
        if on_gpu:
            kinds.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=ALLOCATIONS)
        phases, self._timers.range = self._timers.range, record_function
        try:
            # on a GPU the snapshot shows memory in more detail
            with profile(activities=kinds, record_shapes=True, profile_memory=not on_gpu) as trace:
                yield
            self._write_profile(step, trace)
        finally:
            self._timers.range = phases
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write_profile(self, step: int, trace: profile) -> None:
        """Write the files of a step. If this fails, for example on a full disk, the run goes on."""
        folder, name = self._folder / f"step_{step:06d}", f"rank_{self._rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plain = folder / f"{name}.json"
            trace.export_chrome_trace(str(plain))
            size = plain.stat().st_size
            with plain.open("rb") as source, gzip.open(f"{plain}.gz", "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            plain.unlink()
            (folder / f"{name}.txt").write_text(self._operation_table(step, trace, size), encoding="utf-8")
            if self._device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))
        except OSError as error:
            _log.error("%s: the profile of step %d was not written: %s", place(), step, error)
        else:
            _log.info("trainer.profile_steps: the profile of step %d is in %s", step, folder)

    def _operation_table(self, step: int, trace: profile, size: int) -> str:
        """A table of the most expensive operations of a step whose trace has `size` bytes."""
        on_cpu, title = self._device.type == "cpu", f"Step {step}, rank {self._rank} of {self._ranks} ({self._role})"
        note = f"Open rank_{self._rank}.pickle at pytorch.org/memory_viz to see the memory."
        if on_cpu:
            note = "There is no memory snapshot, since torch makes them on GPUs only; the trace shows the allocations."
        if size > LARGEST:  # torch would take minutes, while other ranks wait
            return f"{title}: the trace is too large for a table, {size / 1e6:.0f} MB before compression.\n{note}\n"
        key = f"self_{'cpu' if on_cpu else 'device'}_time_total"
        table = trace.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=LONGEST_NAME)
        return f"{title}, sorted by {key}.\n{note}\n{table}"
