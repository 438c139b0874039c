"""`phalanx report RUN [RUN ...]`: a self-contained HTML page about one or several runs.

It reads metrics.jsonl, config.yaml, images/ and samples/ in each `trainer.output_dir`; all but the first may be
missing. Images, numbers, styles and scripts are inlined, so the page can be mailed and needs no network; without
JavaScript it still shows samples and tables.
"""

import argparse
import json
import re
import sys
import webbrowser
from collections.abc import Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.config.files import replace_file
from phalanx.config.inside import list_inside, status_inside
from phalanx.config.messages import cut
from phalanx.exit import show_mistake
from phalanx.run.telemetry.curves import Points
from phalanx.run.telemetry.run_folder import METRICS_FILE, PROFILES, RANKS, Run, RunReader, read_config
from phalanx.telemetry.loggers import LOSS
from phalanx.tools.board.charts import Chart, charts_of, constants_of
from phalanx.tools.board.comparison import (
    comparison_table,
    difference_of,
    differing_settings,
    labels_of,
    validation_bounds,
    verdict,
)
from phalanx.tools.board.markup import document, html_details, html_table, notes_html, value_tile
from phalanx.tools.board.rank_history import RankHistory
from phalanx.tools.board.runs import is_run, run_folders, states
from phalanx.tools.board.runs_page import RUNS_FILE, RunTable, table_page
from phalanx.tools.board.samples import Room, samples_html

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
MOST_PROFILES = 100
CONTENTS = {"samples": "Samples", "curves": "Curves", "ranks": "Ranks", "tables": "Figures and settings"}


def write_report(*run_dirs: str | Path, output: Path | None = None) -> Path:
    """Write a page about one or several runs and return its path.

    The default path is `report.html`, or `comparison.html` for several runs, in the first run's folder; for a folder
    that contains runs, `runs.html` in it, with a table. Raises ValueError if one of `run_dirs` is not a run's folder.
    """
    folders = list(dict.fromkeys(Path(run_dir) for run_dir in run_dirs))
    if len(folders) == 1 and not is_run(folders[0]) and any(run_folders(folders[0])):
        path = output or folders[0] / RUNS_FILE
        replace_file(path, table_page(folders[0], RunTable(folders[0], states).data())[0])
        return path
    runs = [reader.read() for reader in run_readers(folders)]
    path = output or folders[0] / (REPORT_FILE if len(runs) == 1 else COMPARISON_FILE)
    replace_file(path, page_of(runs)[0])
    return path


def run_readers(folders: Sequence[Path]) -> list[RunReader]:
    """Readers of the runs of a page, with labels if there are several."""
    if len(folders) == 1:
        return [RunReader(folders[0])]
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else list(map(str, folders))
    labels = labels_of([read_config(folder)[1] for folder in folders], names)
    return list(map(RunReader, folders, labels))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for a folder that is not a run's)."""
    parser = argparse.ArgumentParser(
        prog="phalanx report", description="Write a page about a run, or one that compares several runs."
    )
    parser.add_argument(
        "run_dir", metavar="RUN", nargs="+", help="trainer.output_dir of a run, or a folder that contains runs"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"the page; default: {REPORT_FILE} in RUN, or {COMPARISON_FILE} in the first of several runs",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    arguments = parser.parse_args(argv)
    try:
        path = write_report(*arguments.run_dir, output=arguments.output)
    except (ValueError, OSError) as error:
        return show_mistake(error)
    print(path)
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


# --- the page -----------------------------------------------------------------------------------------------------


def page_of(
    runs: list[Run], *, live: bool = False, room: Room | None = None, with_ranks: bool = True
) -> tuple[bytes, str]:
    """A page about runs, and its Content-Security-Policy. A live page requests updates from its server. `with_ranks`:
    with the hosts, timelines and events of the ranks.
    """
    if len(runs) == 1:
        name = runs[0].setting("trainer.experiment_name") or runs[0].folder.resolve().name
        facts = [runs[0].setting("algorithm.name"), runs[0].setting("model.path")]
    else:
        name, facts = f"Comparison of {len(runs)} runs", []
        for run in runs:
            folder = run.folder.resolve().name
            facts.append(run.label if folder in run.label else f"{run.label}: {folder}")
    sections = sections_of(runs, room=room)
    data = {"charts": sections.pop("charts")}
    ranks = _run_ranks(runs) if with_ranks and not live else None
    scripts = ["report.js"]
    if live or ranks is not None:
        data["of-ranks"] = ranks
        scripts.append("ranks.js")
        names = escape(json.dumps([run.label or run.folder.resolve().name for run in runs]))
        place = f'<section id="ranks" {"data-live" if live else ""} data-runs="{names}"><h2>Ranks</h2></section>'
        sections = sections | {"ranks": place, "tables": sections.pop("tables")}
    contents = {}
    for part, title in CONTENTS.items():
        if part in sections:
            contents[part] = title
    footer = f"Made by <code>phalanx report</code> from {METRICS_FILE}, config.yaml, images/ and samples/."
    return document(name, facts, list(sections.values()), footer, contents, scripts, data, live=live)


def sections_of(runs: list[Run], *, with_samples: bool = True, room: Room | None = None) -> dict[str, Any]:
    """The sections of a page, in order, by the ids of their elements; and the chart data as `charts`. `room`: for the
    samples.
    """
    known, others = charts_of(runs)
    headlines = [_headline_tiles(runs[0]) if len(runs) == 1 else comparison_table(runs), _run_notes(runs)]
    tables = [*map(_metric_table, runs), _settings_table(runs), *map(_config_section, runs)]
    sections: dict[str, Any] = {"headline": f'<div id="headline">{"".join(headlines)}</div>'}
    if with_samples:
        sections["samples"] = f'<div id="samples">{samples_html(runs, room)}</div>'
    sections["curves"] = _curve_section(known, others, constants_of(runs))
    sections["tables"] = f'<div id="tables">{"".join(tables)}</div>'
    return sections | {"charts": [chart.data() for chart in known + others]}


def _run_ranks(runs: list[Run]) -> list[dict[str, Any]] | None:
    """The last step of each run's ranks, in the format of the live page; None if no run has files of its ranks."""
    if not any(status_inside(run.folder, RANKS) for run in runs):
        return None
    data = []
    for run in runs:
        history = RankHistory(run.folder)
        data.append({"state": None, "done": run.last_step(), **history.data(done=run.last_step(), shown=run.advice)})
    return data


# --- headline figures ---------------------------------------------------------------------------------------------


def _headline_tiles(run: Run) -> str:
    tiles = []
    for name, points in run.validations().items():
        tiles.append(_validation_tile(run, name, points))
    reward = run.points("reward/mean")
    if reward:
        tiles.append(_change_tile("Training reward", reward))
    for key in run.metrics():
        if LOSS.fullmatch(key) and run.points(key):
            title = "Training loss" if key == "train/loss" else f"Loss · {key.removeprefix('actor/')}"
            tiles.append(_change_tile(title, run.points(key)))
    planned = run.setting("trainer.total_training_steps")
    tiles.append(value_tile("Training steps", str(run.last_step()), f"of {planned}" if planned is not None else ""))
    seconds = run.wall_seconds()
    if seconds is not None:
        tiles.append(value_tile("Wall time", str(timedelta(seconds=round(seconds))), "h:mm:ss"))
    tiles += _throughput_tiles(run)
    columns = min(range(5, 2, -1), key=lambda count: -len(tiles) % count)  # leaves the fewest empty places
    return (
        f'<section class="tiles" style="--columns:{min(columns, len(tiles))}" aria-label="Headline figures">'
        f"{''.join(tiles)}</section>"
    )


def _run_notes(runs: list[Run]) -> str:
    """The notes of the runs; each is shown once, with the runs that have it."""
    owners: dict[str, list[str]] = {}
    for run in runs:
        for note in dict.fromkeys(_notes_of(run)):
            owners.setdefault(note, []).append(run.label)
    notes = []
    for note, labels in owners.items():
        notes.append(note if len(labels) == len(runs) else f"{'; '.join(labels)}: {note}")
    return notes_html(notes)


def _notes_of(run: Run) -> list[str]:
    """Notes on missing data and on profiles, and the job's warnings about its metrics."""
    notes, rows = list(run.problems), run.curves.rows
    if not rows and not notes:
        notes.append(f"{METRICS_FILE} has no rows yet.")
    if run.curves.left_out:
        notes.append(f"{METRICS_FILE} is too large to be shown whole; the newest values of its first metrics are.")
    if rows and not run.validations():
        notes.append("No validation was logged, so there is no figure on held-out prompts.")
    if rows and not run.curves.is_trained:
        notes.append("No training step was logged.")
    notes += _profile_notes(run)
    for note in run.advice:
        notes.append(f"{note[0].upper()}{note[1:]}.")
    return notes


def _profile_notes(run: Run) -> list[str]:
    """Notes on where the profiles of each profiled step are."""
    notes = list[str]()
    for name, is_folder in list_inside(run.folder, PROFILES):
        number = re.fullmatch("step_([0-9]{1,15})", name)
        if number is None or not is_folder or len(notes) == MOST_PROFILES:
            continue
        place = f"{PROFILES}/{name}"
        count = sum(file.endswith(".json.gz") for file, _ in list_inside(run.folder, place))
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        notes.append(f"Step {int(number[1])} was profiled on {ranks}: ui.perfetto.dev opens the traces in {place}.")
    return notes


def _throughput_tiles(run: Run) -> list[str]:
    """Tiles with the median throughput and model FLOPs utilization over the steps."""
    tiles = []
    for noun in ("images", "samples", "tokens"):
        rates = run.values(f"perf/{noun}_per_gpu_per_s")
        if rates:
            tiles.append(value_tile("Throughput", _rate_text(median(rates)), f"{noun} per second and rank"))
    shares = run.values("perf/mfu")
    if shares:
        tiles.append(value_tile("Model FLOPs", f"{100 * median(shares):.1f} %", "of the device's peak"))
    return tiles


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if 1000 <= rate < 1e15 else f"{rate:.3g}"


def _validation_tile(run: Run, name: str, points: Points) -> str:
    """A tile with the first and the last validation, coloured if they differ beyond their interval."""
    ends = [validation_bounds(run, name, step) for step in (points[0][0], points[-1][0])]
    before, after = ends
    if len(points) == 1 or before is None or after is None:
        return _change_tile(f"Validation · {name}", points)
    difference = difference_of(after, before)
    kind = verdict(difference)
    note = f", 95 % interval {difference.low:+.3f} to {difference.high:+.3f}{': a tie' if kind == 'tie' else ''}"
    return _change_tile(f"Validation · {name}", points, kind, note)


def _change_tile(title: str, points: Points, kind: str = "", more: str = "") -> str:
    """A tile with the first and the last value of a curve."""
    (first, before), (last, after) = points[0], points[-1]
    if len(points) == 1:
        return value_tile(title, f"{before:.3f}", f"step {first} only", kind)
    sign = "▲" if after > before else "▼" if after < before else "="
    note = f"{'' if kind == 'tie' else f'{sign} '}{after - before:+.3f} from step {first} to {last}{more}"
    return value_tile(title, f"{before:.3f} → {after:.3f}", note, kind)


# --- curves and tables --------------------------------------------------------------------------------------------


def _curve_section(known: list[Chart], others: list[Chart], constants: dict[str, float]) -> str:
    fixed = ", ".join(f"{name} {value:.4g}" for name, value in constants.items())
    notes = notes_html([f"Constant over all steps, and therefore not drawn: {fixed}."] if constants else [])
    if not known and not others:
        return f'<section id="curves"><h2>Curves</h2>{notes_html(["There is nothing to draw."])}{notes}</section>'
    slider = (
        '<label class="slider" hidden>Smoothing <input type="range" id="smoothing" min="0" max="0.98" step="0.02" '
        'value="0"><output>0</output></label>'
    )
    hint = (
        '<p class="n" hidden>Point at a curve for its values. Drag to zoom all charts, double-click to zoom out, '
        "click a name to hide its curve.</p>"
    )
    rest = html_details("All other metrics as curves", _chart_grid(others)) if others else ""
    no_script = '<noscript><p class="note">Curves need JavaScript; below are their figures.</p></noscript>'
    return f'<section id="curves"><h2>Curves</h2>{no_script}{slider}{hint}{_chart_grid(known)}{notes}{rest}</section>'


def _chart_grid(charts: list[Chart]) -> str:
    return f'<div class="charts">{"".join(map(Chart.html, charts))}</div>'


def _metric_table(run: Run) -> str:
    """A table of all metrics, as an accessible alternative to the curves."""
    rows = []
    for key in run.metrics():
        cells, values = ["-"] * 4, run.points(key).values
        if values:
            cells = list(map("{:.5g}".format, (values[0], values[-1], min(values), max(values))))
        rows.append([key, *cells, str(len(values))])
    columns = ["metric", "first", "last", "lowest", "highest", "values"]
    return html_details(run.titled("All metrics in figures"), html_table(columns, rows)) if rows else ""


def _settings_table(runs: list[Run]) -> str:
    """The settings that differ between the runs."""
    if len(runs) == 1:
        return ""
    rows = []
    for key, values in sorted(differing_settings([run.config for run in runs]).items()):
        rows.append([cut(key), *map(cut, values)])
    table = html_table(["setting", *(run.label for run in runs)], rows)
    return html_details("Settings that differ", table, is_open=True) if rows else notes_html(["No settings differ."])


def _config_section(run: Run) -> str:
    """The resolved configuration, collapsed."""
    if run.config_text is None:
        return notes_html([f"There is no config.yaml in {run.label or 'the folder'}."])
    return html_details(run.titled("Resolved configuration"), f"<pre>{escape(run.config_text)}</pre>")


if __name__ == "__main__":
    sys.exit(main())
