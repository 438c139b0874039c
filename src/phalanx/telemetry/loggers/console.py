"""Console: a line per step, and one per validation; on a terminal, below them, a line that changes."""

import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from phalanx.telemetry.loggers import ELAPSED, Logger, RunStart
from phalanx.telemetry.records import SAMPLES, Record, kind_of

if TYPE_CHECKING:
    from rich.progress import Progress

CONSOLE_KEYS = (
    "reward/mean",
    "reward/std",
    "actor/ratio_mean",
    "actor/clipfrac",
    "actor/grad_norm",
    "actor/kl_ref",
    "perf/step_s",
    "perf/images_per_gpu_per_s",
    "perf/tokens_per_gpu_per_s",
    "perf/mfu",
    "idle/rollout",
    "idle/inference",
    "idle/actor",
)
CONSOLE_CHARACTERS = 600  # of a prompt, a text or a ground truth
_ETA_STEPS = 20  # the ETA follows the last steps, as a window or a checkpoint changes their length


class Console(Logger):
    """The lines go to stdout. Where stderr is a terminal, the one that changes shows there the steps that are done, the
    phase and its micro-batches, and the time since the start. The time left goes by the mean length of the last steps,
    validations and checkpoints included.
    """

    terminal = True

    def __init__(self, start: RunStart) -> None:
        self.total = start.total_steps
        self._seen = deque([(start.step, time.monotonic())], maxlen=_ETA_STEPS + 1)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = _bar(start)
            self._bar.start()
            self._bar.console.show_cursor()  # a rank that dies could not do so

    def log(self, step: int, row: dict[str, float]) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        eta = self.eta_after(step)
        if any(not key.startswith(("val/", "time/", ELAPSED)) for key in row):  # else no step was trained
            parts = [f"{key} {row[key]:.4g}" for key in CONSOLE_KEYS if key in row]
            self.show("  ".join([f"step {step}/{self.total}", *parts, f"ETA {eta}"]))
        parts = [f"{key.removeprefix('val/')} {value:.4f}" for key, value in row.items() if key.startswith("val/")]
        if parts:
            self.show("  ".join([f"step {step}/{self.total}  validation", *parts]))

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        """The first sample, where they are texts."""
        if kind_of(records) != SAMPLES:
            return
        first = records[0]
        text = f"{_middle_out(first.prompt)}\n{_middle_out(str(first.output))}"
        if first.ground_truth is not None:
            text += f"\nground truth: {_middle_out(first.ground_truth)}"
        heading = f"step {step}/{self.total}  {set_name}, prompt {first.index}, reward {first.reward:.3f}:"
        self.show(f"{heading}\n{indent(plain(text), '    ')}")

    def show(self, line: str) -> None:
        if self._bar is not None and sys.stdout.isatty():
            # above the line that changes, and not broken by the width of the terminal
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def eta_after(self, step: int) -> str:
        """`h:mm:ss` once `step` steps are done; `-` before the first one."""
        self._seen.append((step, time.monotonic()))
        (first, start), (last, end) = self._seen[0], self._seen[-1]
        if last == first:
            return "-"
        seconds = (end - start) / (last - first) * (self.total - step)
        return str(timedelta(seconds=round(seconds)))

    def close(self, failed: bool) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(start: RunStart) -> Any:
    """The line that changes. Its thread reads the timers at each refresh, without any call from the training."""
    from rich.console import Console as Screen
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total} done"),
        BarColumn(20),
        TextColumn("{task.fields[timers].phase}"),
        TimeElapsedColumn(),
        console=Screen(stderr=True),
        redirect_stdout=sys.stdout.isatty(),  # what is printed stands above it; a file gets it as it is
        refresh_per_second=4,
    )
    bar.add_task("training", total=start.total_steps, completed=start.step, timers=start.timers)
    return bar


def _middle_out(text: str) -> str:
    """A text without its middle, where it is long: an answer stands at its end."""
    half = CONSOLE_CHARACTERS // 2
    return text if len(text) <= CONSOLE_CHARACTERS else f"{text[:half]} […] {text[-half:]}"


def plain(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
