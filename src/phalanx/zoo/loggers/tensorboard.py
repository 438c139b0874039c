"""TensorBoard: event files in `<output_dir>/tensorboard`; a resumed run purges later steps of an earlier start."""

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
from PIL import Image

from phalanx.media.videos import gif
from phalanx.telemetry.loggers import Logger, RunStart
from phalanx.telemetry.records import IMAGES, SAMPLES, Record, kind_of, moving_grid, shown_grid


class Tensorboard(Logger):
    """Logs scalars, and validations as grids of images, GIFs, or texts with a grid of the images in their prompts."""

    extra = "tensorboard"

    def __init__(self, start: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = start.step + 1 if start.step else 0
        self._writer = SummaryWriter(str(Path(start.trainer.output_dir) / "tensorboard"), purge_step=purge)
        text = "```json\n" + json.dumps(start.config, indent=2, default=str) + "\n```"
        self._writer.add_text("config", text, start.step)

    def log(self, step: int, row: dict[str, float]) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        if kind_of(records) == SAMPLES:
            parts = []
            for record in records:
                # indented, so that markdown shows them verbatim
                prompt, text = indent(record.prompt, "    "), indent(record.transcript, "    ")
                parts.append(f"**prompt**\n\n{prompt}\n\n**reward {record.reward:.3f}**\n\n{text}")
                if record.ground_truth is not None:
                    parts[-1] += f"\n\n**ground truth**\n\n{indent(record.ground_truth, '    ')}"
            self._writer.add_text(f"{SAMPLES}/{set_name}", "\n\n---\n\n".join(parts), step)
            shown = shown_grid(records)
            if shown is not None:
                self._writer.add_image(f"{SAMPLES}/{set_name}", np.asarray(shown), step, dataformats="HWC")
            return
        picture = np.asarray(Image.open(folder / "grid.png").convert("RGB"))
        self._writer.add_image(f"{IMAGES}/{set_name}", picture, step, dataformats="HWC")
        if records[0].is_video:
            self._add_gif(f"videos/{set_name}", list(moving_grid(records)), records[0].fps, step)

    def _add_gif(self, tag: str, frames: list[Any], fps: int, step: int) -> None:
        """Add a GIF, the only video format that TensorBoard plays; SummaryWriter.add_video would need moviepy."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width, _ = frames[0].shape
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif(frames, fps))
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self, failed: bool) -> None:
        self._writer.close()
