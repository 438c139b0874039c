"""SwanLab: its cloud, or with SWANLAB_MODE=offline files in `<output_dir>/swanlab` that `swanlab sync` uploads."""

import signal
import sys
from pathlib import Path
from typing import Any

from phalanx.media.videos import gif
from phalanx.telemetry.loggers import Logger, RunStart, cannot_start
from phalanx.telemetry.records import IMAGES, SAMPLES, Record, kind_of, together


class Swanlab(Logger):
    """Logs metrics, and validations as images, GIFs, or texts with the images of their prompts. A resumed run continues
    under its id, and SwanLab drops steps that it already has.
    """

    extra = "swanlab"
    one_run = True

    def __init__(self, start: RunStart) -> None:
        import swanlab

        self._swanlab = swanlab
        hook, handler = sys.excepthook, signal.getsignal(signal.SIGINT)
        try:
            self._run = swanlab.init(
                project=start.trainer.project_name,
                name=start.trainer.experiment_name,
                log_dir=str(Path(start.trainer.output_dir) / "swanlab"),
                config=start.config,
                id=start.id,
                resume="allow",
                settings=swanlab.Settings(interactive=False),  # nobody can answer prompts of a rank
            )
        except RuntimeError as error:
            raise cannot_start("swanlab", error) from None
        # restore the job's own handlers of exceptions and Ctrl-C, which also close this run
        sys.excepthook = hook
        signal.signal(signal.SIGINT, handler)
        self.id = self._run.id

    def log(self, step: int, row: dict[str, float]) -> None:
        self._run.log(row, step=step)

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        kind, shown = "videos" if records[0].is_video else kind_of(records), list[Any]()
        for record in records:
            if kind == SAMPLES:
                shown.append(self._swanlab.Text(record.transcript, caption=record.caption))
            elif kind == IMAGES:
                shown.append(self._swanlab.Image(record.output, caption=record.caption))
            else:  # SwanLab plays no other video format
                shown.append(self._swanlab.Video(gif(list(record.frames), record.fps), caption=record.caption))
        row = {f"{kind}/{set_name}": shown}
        of_prompts = []
        for record in records:
            if record.images:
                of_prompts.append(self._swanlab.Image(together(record.images), caption=record.caption))
        if of_prompts:
            row[f"{kind}/{set_name}/{IMAGES}"] = of_prompts
        self._run.log(row, step=step)

    def close(self, failed: bool) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if failed:
            self._run.finish(state="crashed", error="the job failed")
        else:
            self._run.finish()
        signal.signal(signal.SIGINT, handler)  # `finish` restores an older handler
