"""Trackio: a local dashboard with its data in TRACKIO_DIR, or the one of the Space TRACKIO_SPACE_ID."""

import secrets
from pathlib import Path
from typing import Any

from phalanx.telemetry.loggers import Logger, RunStart
from phalanx.telemetry.records import SAMPLES, Record, kind_of, together


class Trackio(Logger):
    """Logs metrics, and validations as tables of images, of texts and the images in their prompts, or as mp4 files.

    Trackio identifies a run by its name, which therefore ends in random digits; the group is `trainer.experiment_name`.
    """

    extra = "trackio"
    one_run = True
    append_only = True

    def __init__(self, start: RunStart) -> None:
        import trackio

        trainer = start.trainer
        self._trackio = trackio
        self.id = start.id or f"{trainer.experiment_name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project=trainer.project_name,
            name=self.id,
            group=trainer.experiment_name,
            config=start.config,
            resume="never" if start.id is None else "allow",
            embed=False,
        )

    def log(self, step: int, row: dict[str, float]) -> None:
        self._run.log(row, step=step)

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        if records[0].is_video:
            for record in records:
                video = self._trackio.Video(folder / f"{record.stem}.mp4", caption=record.caption)
                self._run.log({f"videos/{set_name}/{record.stem}": video}, step=step)
            return
        kind, rows = kind_of(records), []
        shows = any(record.images for record in records)
        for record in records:
            row: dict[str, Any] = {"prompt": record.prompt, "reward": record.reward}
            for term, score in record.scores.items():
                row[f"reward/{term}"] = score
            if kind == SAMPLES:
                row |= {"ground_truth": record.ground_truth, "text": record.output}
                if shows:
                    row["images"] = self._trackio.Image(together(record.images)) if record.images else None
                rows.append(row if record.conversation is None else row | {"messages": record.transcript})
            else:
                rows.append(row | {"image": self._trackio.Image(folder / f"{record.stem}.png")})
        self._run.log({f"{kind}/{set_name}": self._trackio.Table(data=rows)}, step=step)

    def close(self, failed: bool) -> None:
        self._trackio.finish()
