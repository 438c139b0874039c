"""Console: a line per step, and one per validation; on a terminal, below them, a line that changes."""

import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import TYPE_CHECKING, Any

from phalanx import exit
from phalanx.config.messages import counted
from phalanx.telemetry.advice import is_training_row
from phalanx.telemetry.loggers import LOSS, Logger, RunStart
from phalanx.telemetry.records import SAMPLES, Record, kind_of, spoken, summary

if TYPE_CHECKING:
    from rich.progress import Progress

# Metrics of a row, in this order; losses come first.
CONSOLE_KEYS = (
    "reward/mean",
    "reward/std",
    "train/accuracy",
    "actor/accuracy",
    "response/length_mean",
    "response/truncated_ratio",
    "conversation/turns_mean",
    "actor/entropy",
    "actor/ratio_mean",
    "actor/clipfrac",
    "actor/grad_norm",
    "actor/kl_ref",
    "perf/step_s",
    "perf/images_per_gpu_per_s",
    "perf/tokens_per_gpu_per_s",
    "perf/peak_memory_gb",
    "perf/mfu",
    "idle/rollout",
    "idle/inference",
    "idle/actor",
)
CONSOLE_CHARACTERS = 600  # of a prompt, a text or a ground truth
CONSOLE_MESSAGES = 10  # of a conversation
_ETA_STEPS = 20  # recent steps by whose median the ETA goes, as a window changes their length


class Console(Logger):
    """The lines go to stdout. Where stderr is a terminal, the one that changes shows there the steps that are done, the
    phase and its micro-batches, the time since the start and the time left: see `Eta`.
    """

    terminal = True

    def __init__(self, start: RunStart) -> None:
        self.total = start.total_steps
        self.eta = Eta(start)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = _bar(start, self.eta)
            self._bar.start()
            self._bar.console.show_cursor()  # a rank that dies could not do so

    def log(self, step: int, row: dict[str, float]) -> None:
        self.eta.update(step, row)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        if is_training_row(row):
            parts = [f"{key} {row[key]:.4g}" for key in shown_keys(row)]
            self.show("  ".join([f"step {step}/{self.total}", *parts, f"ETA {self.eta}"]))
        parts = [f"{key.removeprefix('val/')} {value:.4f}" for key, value in row.items() if key.startswith("val/")]
        if parts:
            self.show("  ".join([f"step {step}/{self.total}  validation", *parts]))

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        """The first sample, where they are texts."""
        if kind_of(records) != SAMPLES:
            return
        first = records[0]
        text = f"{_middle_out(first.prompt)}\n{_middle_out(str(first.output))}"
        if first.conversation is not None:
            text = _talk(first.conversation)
        for shown in first.images:
            text = f"[{shown.title}]\n{text}"
        if first.ground_truth is not None:
            text += f"\nground truth: {_middle_out(first.ground_truth)}"
        heading = f"step {step}/{self.total}  {set_name}, prompt {first.index}, reward {first.reward:.3f}:"
        self.show(f"{heading}\n{indent(plain(text), '    ')}")

    def show(self, line: str) -> None:
        if self._bar is not None and sys.stdout.isatty():
            # above the line that changes, and not broken by the width of the terminal
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
            exit.copy(line, False)
        else:
            print(line, flush=True)

    def close(self, failed: bool) -> None:
        if self._bar is not None:
            self._bar.stop()


class Eta:
    """The time that is left: the median of the recent steps for each step, and that of the validations for each of
    those that `trainer.test_freq` will bring. A step is the time between two rows without a validation.

    The first step and the first validation of a start take longer, as engines start and models compile: each counts
    only until there is a second one.
    """

    def __init__(self, start: RunStart) -> None:
        self._step, self._total, self._test_freq = start.step, start.total_steps, start.trainer.test_freq
        self._time = time.monotonic()  # of the last row
        self._steps, self._validations = list[float](), list[float]()

    def update(self, step: int, row: dict[str, float]) -> None:
        """Take in a row that is logged now."""
        now, validation = time.monotonic(), row.get("time/validation")
        if validation is not None:
            self._validations.append(validation)
        if step > self._step:
            self._steps.append((now - self._time - (validation or 0.0)) / (step - self._step))
        self._step, self._time = step, now

    def __str__(self) -> str:
        """`h:mm:ss`; `-` before the first step has ended."""
        seconds = self.seconds()
        return "-" if seconds is None else str(timedelta(seconds=round(seconds)))

    def seconds(self) -> float | None:
        """The seconds that are left from now on; None before the first step has ended."""
        if not self._steps:
            return None
        steps, validations = self._steps[1:] or self._steps, self._validations[1:] or self._validations
        seconds = median(steps[-_ETA_STEPS:]) * (self._total - self._step)
        if validations:
            seconds += median(validations[-_ETA_STEPS:]) * self._validations_left()
        return max(seconds - (time.monotonic() - self._time), 0.0)

    def _validations_left(self) -> int:
        if self._test_freq <= 0 or self._step >= self._total:
            return 0
        every = self._total // self._test_freq - self._step // self._test_freq
        return every + (self._total % self._test_freq > 0)  # the last step has one as well


def shown_keys(row: dict[str, float]) -> list[str]:
    """The metrics of a row that its line shows: losses and CONSOLE_KEYS, but no ratio that cannot differ from 1.

    With one optimizer step per rollout the weights that sampled are those that are trained: the ratio is 1, and none
    is clipped.
    """
    keys = [key for key in row if LOSS.fullmatch(key)]
    constant = set()
    if row.get("actor/ratio_mean") == 1 and not row.get("actor/clipfrac"):
        constant = {"actor/ratio_mean", "actor/clipfrac"}
    return keys + [key for key in CONSOLE_KEYS if key in row and key not in constant]


def _bar(start: RunStart, eta: Eta) -> Any:
    """The line that changes. Its thread reads the timers at each refresh, without any call from the training."""
    from rich.console import Console as Screen
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total} done"),
        BarColumn(20),
        TextColumn("{task.fields[timers].phase}"),
        TimeElapsedColumn(),
        TextColumn("ETA {task.fields[eta]}"),
        console=Screen(stderr=True),
        redirect_stdout=sys.stdout.isatty(),  # what is printed stands above it; a file gets it as it is
        refresh_per_second=4,
    )
    bar.add_task("training", total=start.total_steps, completed=start.step, timers=start.timers, eta=eta)
    return bar


def _talk(conversation: dict[str, Any]) -> str:
    """A conversation in short."""
    lines = []
    for role, text in spoken(conversation["messages"]):
        lines.append(f"{role}: {_middle_out(text, CONSOLE_CHARACTERS // 3)}")
    half = CONSOLE_MESSAGES // 2
    if len(lines) > CONSOLE_MESSAGES:
        lines[half:-half] = [f"[… {counted(len(lines) - 2 * half, 'message')} …]"]
    return "\n".join([*lines, summary(conversation)])


def _middle_out(text: str, most: int = CONSOLE_CHARACTERS) -> str:
    """A text without its middle, where it is long: an answer stands at its end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} […] {text[-half:]}"


def plain(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
