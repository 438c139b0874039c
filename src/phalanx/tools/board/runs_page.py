"""The page about a folder of runs: a table that one sorts and filters, and chosen runs compared; see page/runs.js."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from phalanx.config.inside import status_inside
from phalanx.config.load import flat
from phalanx.config.messages import counted, cut
from phalanx.run.telemetry.run_folder import CONFIG_FILE, LATEST, METRICS_FILE, VALIDATION, Run, RunReader, key_of
from phalanx.telemetry.loggers import LOSS
from phalanx.tools.board.charts import Series
from phalanx.tools.board.comparison import figures_of, telling_settings
from phalanx.tools.board.markup import document, html_table
from phalanx.tools.board.runs import LIVING, run_folders

RUNS_FILE = "runs.html"
MOST_SETTINGS = 12  # columns
MOST_CURVES = 300  # runs with curves, the newest ones
MOST_POINTS = 200  # of a curve
MOST_PLAIN = 500  # rows that a browser without scripts shows
MOST_CELL = 60  # characters


@dataclass
class Entry:
    """The parts of a run in the table. `key`: of the files that were read; `reader` reads on while the run goes on."""

    key: str = ""
    changed: float = 0.0
    reader: RunReader | None = None
    figures: dict[str, float] = field(default_factory=dict)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        """Read the run, if its files have changed."""
        key = key_of(folder, METRICS_FILE, CONFIG_FILE)
        if key == self.key:
            return
        status = status_inside(folder, METRICS_FILE)
        self.key, self.changed = key, 0.0 if status is None else min(status.st_mtime, LATEST)
        self.reader = self.reader or RunReader(folder)
        try:
            run = self.reader.read()
        except ValueError:  # it has no metrics yet
            return
        self.figures, self.curves, self.config = figures_of(run), _main_curves(run), run.config


def _main_curves(run: Run) -> dict[str, dict[str, Any]]:
    """The validations, the training reward and the loss of a run, by metric."""
    curves = {}
    for name in run.metrics():
        if (name == "reward/mean" or VALIDATION.fullmatch(name) or LOSS.fullmatch(name)) and run.points(name):
            curves[name] = Series("", run.points(name)).data(MOST_POINTS)
    return curves


class RunTable:
    """The runs below a folder; `data` reads what is new. states: of these runs, see phalanx.tools.board.runs.states."""

    def __init__(self, root: Path, states: Callable[[Sequence[Path]], Mapping[Path, str]]) -> None:
        self.root, self._states = root, states
        self._entries: dict[Path, Entry] = {}

    def folders(self) -> dict[str, Path]:
        """The folders of the runs by their names below the root."""
        return {str(folder.relative_to(self.root)): folder for folder in run_folders(self.root)}

    def data(self) -> dict[str, Any]:
        """The table for page/runs.js: `columns`, with `settings` settings before the last; `rows`, the newest first;
        `reports`, the address of the page of each run, if there is one; and `curves`, by metric, of each row.
        """
        entries, folders = [], self.folders()
        states = self._states(list(folders.values()))
        for name, folder in folders.items():
            entry = self._entries.setdefault(folder, Entry())
            entry.read(folder)
            if states[folder] != LIVING:
                entry.reader = None  # its metrics are not kept in memory
            entries.append((name, folder, entry))
        entries.sort(key=lambda part: -part[2].changed)
        configs = [entry.config for _, _, entry in entries if entry.config]
        settings = list(telling_settings(configs))[:MOST_SETTINGS]
        figures = dict[str, None]()
        for _, _, entry in entries:
            figures |= dict.fromkeys(name for name in entry.figures if not name.endswith(" first"))
        rows, reports, curves = list[list[Any]](), list[str | None](), list[dict[str, Any]]()
        for name, folder, entry in entries:
            row, values = [name, states[folder], *map(entry.figures.get, figures)], flat(entry.config)
            for key in settings:
                row.append(_setting_cell(values.get(key)))
            rows.append([*row, time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.changed))])
            has_report = status_inside(folder, "report.html") is not None
            reports.append(f"{quote(name)}/report.html" if has_report else None)
            curves.append(entry.curves if len(curves) < MOST_CURVES else {})
        columns = ["run", "state", *figures, *settings, "changed"]
        return {"columns": columns, "settings": len(settings), "rows": rows, "reports": reports, "curves": curves}


def _setting_cell(value: str | None) -> Any:
    """A number if the setting is one, so that the column sorts by it."""
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        return cut(value, MOST_CELL)
    return number if abs(number) < float("inf") else value  # NaN and infinities are no JSON


def table_page(root: Path, data: dict[str, Any], *, live: bool = False) -> tuple[bytes, str]:
    """The page about `data`, of a folder of runs, and its Content-Security-Policy."""
    plain = [["-" if cell is None else str(cell) for cell in row] for row in data["rows"][:MOST_PLAIN]]
    body = f'<section id="runs" {"data-live" if live else ""}><noscript>{html_table(data["columns"], plain)}</noscript>'
    facts = [counted(len(data["rows"]), "run"), str(root)]
    facts += [f"curves of the newest {MOST_CURVES}"] if len(data["rows"]) > MOST_CURVES else []
    facts += [f"the first {MOST_SETTINGS} settings that differ"] if data["settings"] == MOST_SETTINGS else []
    footer = f"Made by <code>phalanx {'watch' if live else 'report'}</code> from {METRICS_FILE} and {CONFIG_FILE}."
    parts = {"runs": "Table", "compared": "Comparison"}
    place = '<section id="compared"></section>'
    scripts, held = ["report.js", "runs.js"], {"charts": [], "of-runs": data}
    return document("Runs", facts, [f"{body}</section>", place], footer, parts, scripts, held, live=live)
