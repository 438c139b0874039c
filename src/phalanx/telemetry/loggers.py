"""The loggers of `trainer.logger`: console, tensorboard and wandb. Each gets every row and the validations' samples."""

import json
import sys
import time
from collections import deque
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from phalanx.config.load import ConfigError
from phalanx.config.run import TrainerConfig
from phalanx.functional.frames import evenly_spaced
from phalanx.telemetry.records import IMAGES, SAMPLES, Record, kind_of, moving_grid

if TYPE_CHECKING:
    from phalanx.telemetry.metrics import Timers

ELAPSED = "perf/elapsed_s"
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
GIF_FRAMES = 16  # of a video in tensorboard: a GIF compresses badly
_ETA_STEPS = 20  # the ETA follows the last steps, as a window or a checkpoint changes their length


class Backend:
    """A logger: gets every row and every validation's samples, with the folder that they were written to."""

    def log(self, step: int, row: dict[str, float]) -> None:
        raise NotImplementedError

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        """Nothing, where a logger shows no samples."""

    def close(self, failed: bool) -> None:
        """Nothing, where there is nothing to end."""


class ConsoleLines(Backend):
    """Console: a line per step, and one per validation. The time left goes by the mean length of the last steps,
    validations and checkpoints included.
    """

    def __init__(self, start_step: int, total_steps: int) -> None:
        self.total = total_steps
        self._seen = deque([(start_step, time.monotonic())], maxlen=_ETA_STEPS + 1)

    def log(self, step: int, row: dict[str, float]) -> None:
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
        first, parts = records[0], [records[0].prompt, str(records[0].output)]
        if first.ground_truth is not None:
            parts.append(f"ground truth: {first.ground_truth}")
        words = "\n".join(indent(plain(_middle_out(part)), "    ") for part in parts)
        self.show(f"step {step}/{self.total}  {set_name}, prompt {first.index}, reward {first.reward:.3f}:\n{words}")

    def show(self, line: str) -> None:
        print(line, flush=True)

    def eta_after(self, step: int) -> str:
        """`h:mm:ss` once `step` steps are done; `-` before the first one."""
        self._seen.append((step, time.monotonic()))
        (first, start), (last, end) = self._seen[0], self._seen[-1]
        if last == first:
            return "-"
        seconds = (end - start) / (last - first) * (self.total - step)
        return str(timedelta(seconds=round(seconds)))


def _middle_out(text: str) -> str:
    """A text without its middle, where it is long: an answer stands at its end."""
    half = CONSOLE_CHARACTERS // 2
    return text if len(text) <= CONSOLE_CHARACTERS else f"{text[:half]} […] {text[-half:]}"


def plain(text: str) -> str:
    """A text without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class ConsoleLive(ConsoleLines):
    """Console on a terminal: below the lines of the steps one that changes, with the steps that are done, the phase
    and its micro-batches, and the time since the start.
    """

    def __init__(self, start_step: int, total_steps: int, timers: "Timers") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(start_step, total_steps)
        # read at each refresh, by a thread of its own: the training knows nothing of it
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total} done"),
            BarColumn(20),
            TextColumn("{task.fields[timers].phase}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # what is printed stands above it; a file gets it as it is
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("training", total=total_steps, completed=start_step, timers=timers)
        self._bar.start()
        self._bar.console.show_cursor()  # a rank that dies could not do so

    def log(self, step: int, row: dict[str, float]) -> None:
        self._bar.update(self._task, completed=step)
        super().log(step, row)

    def show(self, line: str) -> None:
        if sys.stdout.isatty():  # above the line that changes, and not broken by the width of the terminal
            self._bar.console.print(line, soft_wrap=True, markup=False, highlight=False)
        else:
            super().show(line)

    def close(self, failed: bool) -> None:
        self._bar.stop()


class TensorBoard(Backend):
    """Event files in `<output_dir>/tensorboard`; what an earlier start wrote of later steps is purged."""

    def __init__(self, folder: Path, resolved_config: dict[str, Any], start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = start_step + 1 if start_step else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        text = "```json\n" + json.dumps(resolved_config, indent=2, default=str) + "\n```"
        self._writer.add_text("config", text, start_step)

    def log(self, step: int, row: dict[str, float]) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        if kind_of(records) == SAMPLES:
            parts = []
            for record in records:
                assert isinstance(record.output, str)
                # each as it is: indented, as markdown wants what it should not read
                prompt, text = indent(record.prompt, "    "), indent(record.output, "    ")
                parts.append(f"**prompt**\n\n{prompt}\n\n**reward {record.reward:.3f}**\n\n{text}")
                if record.ground_truth is not None:
                    parts[-1] += f"\n\n**ground truth**\n\n{indent(record.ground_truth, '    ')}"
            self._writer.add_text(f"{SAMPLES}/{set_name}", "\n\n---\n\n".join(parts), step)
            return
        picture = np.asarray(Image.open(folder / "grid.png").convert("RGB"))
        self._writer.add_image(f"{IMAGES}/{set_name}", picture, step, dataformats="HWC")
        if records[0].is_video:
            self._add_gif(f"videos/{set_name}", list(moving_grid(records)), records[0].fps, step)

    def _add_gif(self, tag: str, frames: list[Any], fps: int, step: int) -> None:
        """Add a GIF, the only video that TensorBoard plays: SummaryWriter.add_video would need moviepy for it."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = [Image.fromarray(frames[i]) for i in evenly_spaced(len(frames), GIF_FRAMES)]
        file, ms = BytesIO(), 1000 * len(frames) / fps / len(shown)
        shown[0].save(file, "GIF", save_all=True, append_images=shown[1:], duration=ms, loop=0)
        image = Summary.Image(
            height=shown[0].height, width=shown[0].width, colorspace=3, encoded_image_string=file.getvalue()
        )
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb(Backend):
    """Weights & Biases; WANDB_MODE=offline needs no account. A resumed run continues under its id."""

    def __init__(self, trainer: TrainerConfig, resolved_config: dict[str, Any], wandb_id: str | None) -> None:
        import wandb

        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=trainer.project_name,
                name=trainer.experiment_name,
                dir=trainer.output_dir,
                config=resolved_config,
                id=wandb_id,
                resume="allow",
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"trainer.logger: wandb could not start: {reason}; run `wandb login`, set WANDB_MODE=offline, "
                "or leave wandb out"
            ) from None
        self.id = self._run.id

    def log(self, step: int, row: dict[str, float]) -> None:
        # given our own step, wandb drops the steps that it has seen, which a resumed run repeats, and `wandb sync` can
        # join the parts of an offline run
        self._run.log(row, step=step)

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        if kind_of(records) == SAMPLES:
            terms = list(records[0].scores)
            rows = [
                [step, r.prompt, r.output, r.ground_truth, r.reward, *(r.scores[term] for term in terms)]
                for r in records
            ]
            columns = ["step", "prompt", "text", "ground_truth", "reward", *(f"reward/{term}" for term in terms)]
            table = self._wandb.Table(columns=columns, data=rows)
            self._run.log({f"{SAMPLES}/{set_name}": table}, step=step)
            return
        kind, shown = "videos" if records[0].is_video else IMAGES, []
        for record in records:
            caption = f"{record.reward:.3f}: {record.prompt}"
            if record.is_video:
                file = str(folder / f"{record.stem}.mp4")
                shown.append(self._wandb.Video(file, caption=caption, format="mp4"))
            else:
                shown.append(self._wandb.Image(record.output, caption=caption))
        self._run.log({f"{kind}/{set_name}": shown}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
