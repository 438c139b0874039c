"""The result of a run: the files of its folder as Python values."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.run.checkpoint_folder import find
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE, read_run
from phalanx.telemetry.records import read_index
from phalanx.tools.board.evaluation_files import RESULT, read_records
from phalanx.tools.board.kept_samples import CONTENT
from phalanx.tools.board.report import write_report


@dataclass
class RunResult:
    """A run's folder, its trainer.output_dir. Every property reads its files anew, so that a run in progress can be
    looked at as well. Rank 0 writes them; other ranks see them where they share a file system.
    """

    folder: Path
    trusted: bool = False  # this program has trained it: an evaluation may run the code that its configuration names

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, each with its `step`; `pandas.DataFrame(run.metrics)` is a table of them. Raises
        OSError if there is no such file.
        """
        return read_metrics(self.folder / METRICS_FILE)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples of all validations, by set and step: `set`, `step`, `prompt`, `reward`, `text` or the `file` of
        an image, and others.
        """
        rows = []
        for kind, content in CONTENT.items():
            for index in sorted((self.folder / kind).glob("*/step_*/index.jsonl")):
                where = {"set": index.parts[-3], "step": int(index.parts[-2].removeprefix("step_"))}
                for row in read_index(index.parent, content):
                    place = {"file": str(index.with_name(row["file"]))} if "file" in row else {}
                    rows.append(where | row | place)
        return rows

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        return find(self.folder / "checkpoints")

    def report(self) -> Path:
        """Write the page about the run, and return its path. Raises ValueError if the folder is not a run's."""
        return write_report(self.folder)

    def plot(self, *names: str) -> "Plot":
        """Metrics such as "reward/mean" over the steps, by matplotlib; a notebook shows it.

        Raises ValueError for a metric that no row has, and ImportError without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib; report() needs nothing") from error
        run = read_run(self.folder)
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        for name in names or ("reward/mean",):
            points = run.points(name)
            if not points:
                raise ValueError(f"no row of {self.folder} has {name!r}; it has {', '.join(run.metrics())}")
            axes.plot(*points.columns(), label=name)
        axes.set_xlabel("step")
        axes.legend()
        return Plot(figure)


@dataclass(frozen=True)
class Plot:
    """A `figure` of matplotlib."""

    figure: Any

    def _repr_svg_(self) -> str:
        """The picture that IPython shows, whichever backend it has chosen."""
        text = io.StringIO()
        self.figure.savefig(text, format="svg")
        return text.getvalue()


@dataclass(frozen=True)
class EvaluationResult:
    """The folder of an evaluation, its output_dir."""

    folder: Path

    @property
    def statistics(self) -> dict[str, Any]:
        """The content of evaluation.json: means, pass@k and others, with their intervals, of each set."""
        return dict(json.loads((self.folder / RESULT).read_text(encoding="utf-8")))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of records.jsonl: `set`, `prompt`, `reward`, `scores`, `text` or `file`, and others."""
        return read_records(self.folder)
