"""A custom logger for 'trainer.logger=[console,examples/my_logger.py:Csv]': it writes a table of rewards to a file."""

import csv
from pathlib import Path

from phalanx.telemetry.loggers import Logger, RunStart
from phalanx.telemetry.records import Record

COLUMNS = ("step", "reward/mean", "reward/std", "actor/grad_norm", "perf/step_s")


class Csv(Logger):
    """Writes a line per step, and the best sample of each validation."""

    def __init__(self, start: RunStart) -> None:
        path, kept = Path(start.trainer.output_dir) / "rewards.csv", []
        if start.step and path.is_file():  # resumed: the steps after the checkpoint will be logged again
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["step"]) <= start.step]
        self.file = path.open("w", newline="")
        self.table = csv.DictWriter(self.file, COLUMNS, extrasaction="ignore")
        self.table.writeheader()
        self.table.writerows(kept)

    def log(self, step: int, row: dict[str, float]) -> None:
        self.table.writerow({"step": step, **row})
        self.file.flush()

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        best = max(records, key=lambda record: record.reward)
        with (folder.parent / "best.txt").open("a") as file:
            file.write(f"step {step}: {best.reward:.3f} {best.prompt}\n")

    def close(self, failed: bool) -> None:
        self.file.close()
