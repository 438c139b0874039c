"""Console: one line per step and per validation, with a progress line below them on a terminal."""

import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import TYPE_CHECKING, Any

from phalanx import exit
from phalanx.config.messages import counted
from phalanx.telemetry.loggers import LOSS, Logger, RunStart
from phalanx.telemetry.records import SAMPLES, Record, kind_of, spoken, summary
from phalanx.telemetry.timers import is_training_row

if TYPE_CHECKING:
    from rich.progress import Progress

# The metrics shown for a step, in this order, after its losses.
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
CONSOLE_CHARACTERS = 600  # shown of a prompt, a text or a ground truth
CONSOLE_MESSAGES = 10  # shown of a conversation
_ETA_STEPS = 20  # recent steps for the median duration; several, because a moving window changes their duration


class Console(Logger):
    """Prints lines to stdout. If stderr is a terminal, a progress line there shows the number of completed steps, the
    current phase and its micro-batches, the elapsed time, and the remaining time: see `Eta`.
    """

    terminal = True

    def __init__(self, start: RunStart) -> None:
        self.total = start.total_steps
        self.eta = Eta(start)
        self._bar: Progress | None = None
        from phalanx.models.meeting import here  # it imports torch, which a check of trainer.logger does without

        seat = here()
        self.prefix = "" if seat is None else f"{seat.name}  "
        if sys.stderr.isatty() and seat is None:  # a terminal has room for the line of one run
            self._bar = _progress_bar(start, self.eta)
            self._bar.start()
            self._bar.console.show_cursor()  # a rank that dies could not restore a hidden cursor

    def log(self, step: int, row: dict[str, float]) -> None:
        self.eta.update(step, row)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        if is_training_row(row):
            parts = [f"{key} {row[key]:.4g}" for key in shown_keys(row)]
            self.show("  ".join([f"step {step}/{self.total}", *parts, f"ETA {self.eta}"]))
        shown = filter(re.compile(r"val/(?!.*/ci95_low$)").match, row)
        parts = [f"{key.removeprefix('val/')} {row[key]:.4f}" for key in shown]
        if parts:
            self.show("  ".join([f"step {step}/{self.total}  validation", *parts]))

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        """Print the first sample of a text validation."""
        if kind_of(records) != SAMPLES:
            return
        first = records[0]
        text = f"{_middle_out(first.prompt)}\n{_middle_out(str(first.output))}"
        if first.conversation is not None:
            text = _conversation_text(first.conversation)
        for shown in first.images:
            text = f"[{shown.title}]\n{text}"
        if first.ground_truth is not None:
            text += f"\nground truth: {_middle_out(first.ground_truth)}"
        heading = f"step {step}/{self.total}  {set_name}, prompt {first.index}, reward {first.reward:.3f}:"
        self.show(f"{heading}\n{indent(plain(text), '    ')}")

    def show(self, line: str) -> None:
        line = f"{self.prefix}{line}"
        if self._bar is not None and sys.stdout.isatty():
            # above the progress line, without wrapping at the width of the terminal
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
            exit.copy(line, False)
        else:
            print(line, flush=True)

    def close(self, failed: bool) -> None:
        if self._bar is not None:
            self._bar.stop()


class Eta:
    """The remaining time: the median duration of recent steps for each remaining step, plus the median duration of
    recent validations for each that `trainer.test_freq` schedules. The duration of a step is the time between two rows,
    minus that of a validation.

    The first step and the first validation after a start take longer, because engines start and models compile; they
    are used only until there is a second one.
    """

    def __init__(self, start: RunStart) -> None:
        self._step, self._total, self._test_freq = start.step, start.total_steps, start.trainer.test_freq
        self._time = time.monotonic()  # of the last row
        self._steps, self._validations = list[float](), list[float]()

    def update(self, step: int, row: dict[str, float]) -> None:
        """Account for a row that is logged now."""
        now, validation = time.monotonic(), row.get("time/validation")
        if validation is not None:
            self._validations.append(validation)
        if step > self._step:
            self._steps.append((now - self._time - (validation or 0.0)) / (step - self._step))
        self._step, self._time = step, now

    def __str__(self) -> str:
        """The remaining time as `h:mm:ss`; `-` before the first step has ended."""
        seconds = self.seconds()
        return "-" if seconds is None else str(timedelta(seconds=round(seconds)))

    def seconds(self) -> float | None:
        """The remaining seconds from now; None before the first step has ended."""
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
        return every + (self._total % self._test_freq > 0)  # the last step is always validated


def shown_keys(row: dict[str, float]) -> list[str]:
    """The metrics to show of a row: losses and CONSOLE_KEYS, except ratio metrics that are constant.

    With one optimizer step per rollout, samples are trained by the weights that drew them, so all ratios are 1 and none
    is clipped.
    """
    keys = [key for key in row if LOSS.fullmatch(key)]
    constant = set()
    if row.get("actor/ratio_mean") == 1 and not row.get("actor/clipfrac"):
        constant = {"actor/ratio_mean", "actor/clipfrac"}
    return keys + [key for key in CONSOLE_KEYS if key in row and key not in constant]


def _progress_bar(start: RunStart, eta: Eta) -> Any:
    """The progress line. Its thread reads the timers at each refresh, so training need not update it."""
    from rich.console import Console as Screen
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("step {task.completed}/{task.total} done"),
        BarColumn(20),
        TextColumn("{task.fields[timers].phase}"),
        TimeElapsedColumn(),
        TextColumn("ETA {task.fields[eta]}"),
        console=Screen(stderr=True),
        redirect_stdout=sys.stdout.isatty(),  # print above the line; leave stdout alone if it is a file
        refresh_per_second=4,
    )
    bar.add_task("training", total=start.total_steps, completed=start.step, timers=start.timers, eta=eta)
    return bar


def _conversation_text(conversation: dict[str, Any]) -> str:
    """An abridged conversation."""
    lines = []
    for role, text in spoken(conversation["messages"]):
        lines.append(f"{role}: {_middle_out(text, CONSOLE_CHARACTERS // 3)}")
    half = CONSOLE_MESSAGES // 2
    if len(lines) > CONSOLE_MESSAGES:
        lines[half:-half] = [f"[… {counted(len(lines) - 2 * half, 'message')} …]"]
    return "\n".join([*lines, summary(conversation)])


def _middle_out(text: str, most: int = CONSOLE_CHARACTERS) -> str:
    """Shorten a long text by cutting its middle, because answers are at the end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} […] {text[-half:]}"


def plain(text: str) -> str:
    """Escape the control characters in a text, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
