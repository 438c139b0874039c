"""`python -m phalanx.telemetry.report RUN_DIR [--open]`: one self-contained HTML page about a run, from its files.

Reads metrics.jsonl, config.yaml, images/ and samples/ of a `trainer.output_dir`; every piece but the first may be
missing. Images are inlined and curves are SVG, so that the page can be mailed and needs no network.
"""

import argparse
import base64
import io
import os
import re
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from phalanx.telemetry.charts import CHART_CSS, Point, Series, line_chart, stacked_bars
from phalanx.telemetry.metrics import ELAPSED, METRICS_FILE, read_metrics
from phalanx.telemetry.records import IMAGES, SAMPLES, read_index

REPORT_FILE = "report.html"
CONTENT = {IMAGES: "file", SAMPLES: "text"}  # what an index.jsonl has in the folders of a run
MAX_PAIRS = 24
INLINE_SIDE = 384  # pixels of an inlined image; larger ones are scaled down
_VAL_KEY = re.compile(r"val/(.+)/reward/mean")
_PLAIN_REWARD = {f"reward/{k}" for k in ("mean", "std", "max", "min", "zero_std_ratio", "std_mean")}

_PHASES = tuple(f"time/{name}" for name in ("rollout", "judge", "reward", "update", "checkpoint", "validation"))


@dataclass(frozen=True)
class Run:
    """The contents of a run's files."""

    folder: Path
    rows: list[dict[str, Any]]
    config_text: str | None
    config: dict[str, Any]

    def points(self, key: str) -> list[Point]:
        """(step, value) of all rows that have a finite value of `key`."""
        return [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]

    def setting(self, section: str, key: str) -> str | None:
        """A value of the configuration as text, None where there is none."""
        part = self.config.get(section)
        value = part.get(key) if isinstance(part, dict) else None
        return None if value is None else str(value)

    def metrics(self) -> list[str]:
        """The keys of all rows but the step, in the order of first use."""
        return list(dict.fromkeys(key for row in self.rows for key in row if key != "step"))

    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0


def write_report(run_dir: str | Path) -> Path:
    """Write `RUN_DIR/report.html` and return its path. Raises ValueError if RUN_DIR is not a run's folder."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the trainer.output_dir of a run")
    if not (folder / METRICS_FILE).is_file():
        raise ValueError(f"{folder}: no {METRICS_FILE} in it; give the trainer.output_dir of a run")
    path = folder / REPORT_FILE
    partial = path.with_name(REPORT_FILE + ".tmp")
    partial.write_text(_page(_read(folder)), encoding="utf-8")
    os.replace(partial, path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status (2 for a folder that is not a run's)."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.telemetry.report", description="Make RUN_DIR/report.html.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="trainer.output_dir of a run")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    arguments = parser.parse_args(argv)
    try:
        path = write_report(arguments.run_dir)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(path)
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _read(folder: Path) -> Run:
    path = folder / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    try:
        config = yaml.safe_load(text) if text is not None else {}
    except yaml.YAMLError:
        config = {}  # its text is still shown
    return Run(folder, read_metrics(folder / METRICS_FILE), text, config if isinstance(config, dict) else {})


def _page(run: Run) -> str:
    name = run.setting("trainer", "experiment_name") or run.folder.resolve().name
    facts = [run.setting("algorithm", "name"), run.setting("model", "path")]
    body = "\n".join([_headline(run), _samples(run), _curves(run), _table(run), _config(run)])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)} · Phalanx</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_CSS}{CHART_CSS}</style></head>\n"
        f"<body><main><header><h1>{escape(name)}</h1>"
        f"<p>{' · '.join(escape(fact) for fact in facts if fact)}</p></header>\n{body}\n"
        "<footer>Made by <code>python -m phalanx.telemetry.report</code> from "
        f"{METRICS_FILE}, config.yaml, images/ and samples/.</footer>"
        "</main></body></html>\n"
    )


# --- headline figures ---------------------------------------------------------------------------------------------


def _headline(run: Run) -> str:
    validations, reward = _validations(run), run.points("reward/mean")
    tiles = []
    for name, points in validations.items():
        kind = "wide better" if points[-1][1] > points[0][1] else "wide"
        tiles.append(_change(f"Validation · {name}", points, kind))
    if reward:
        tiles.append(_change("Training reward", reward))
    planned = run.setting("trainer", "total_training_steps")
    tiles.append(_tile("Training steps", str(run.last_step()), f"of {planned}" if planned is not None else ""))
    seconds = _wall_seconds(run)
    if seconds is not None:
        tiles.append(_tile("Wall time", str(timedelta(seconds=round(seconds))), "h:mm:ss"))
    notes = []
    if not run.rows:
        notes.append(f"{METRICS_FILE} has no rows yet.")
    if run.rows and not validations:
        notes.append("No validation was logged, so there is no figure on held-out prompts.")
    if run.rows and not reward:
        notes.append("No training step was logged.")
    return f'<section class="tiles" aria-label="Headline figures">{"".join(tiles)}</section>' + _notes(notes)


def _validations(run: Run) -> dict[str, list[Point]]:
    """The mean reward of every validation set over steps."""
    keys = sorted(key for key in run.metrics() if _VAL_KEY.fullmatch(key))
    found = {key.removeprefix("val/").removesuffix("/reward/mean"): run.points(key) for key in keys}
    return {name: points for name, points in found.items() if points}


def _wall_seconds(run: Run) -> float | None:
    elapsed = run.points(ELAPSED)
    if elapsed:
        return elapsed[-1][1]
    steps = run.points("perf/step_s")
    return sum(value for _, value in steps) if steps else None


def _change(title: str, points: list[Point], kind: str = "") -> str:
    """A tile with the first and the last value of a curve."""
    (first, before), (last, after) = points[0], points[-1]
    if len(points) == 1:
        return _tile(title, f"{before:.3f}", f"step {first} only", kind)
    sign = "▲" if after > before else "▼" if after < before else "="
    note = f"{sign} {after - before:+.3f} from step {first} to {last}"
    return _tile(title, f"{before:.3f} → {after:.3f}", note, kind)


def _tile(title: str, value: str, note: str, kind: str = "") -> str:
    return (
        f'<div class="tile {kind}"><div class="k">{escape(title)}</div><div class="v">{escape(value)}</div>'
        f'<div class="n">{escape(note)}</div></div>'
    )


def _notes(notes: list[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


# --- samples ------------------------------------------------------------------------------------------------------


def _samples(run: Run) -> str:
    """The same held-out prompts at the first and the last validation that kept samples."""
    parts = []
    for kind, content in CONTENT.items():
        folders = sorted(path for path in (run.folder / kind).glob("*") if path.is_dir())
        parts += [_set(run, folder, content) for folder in folders]
    none = "No validation samples were kept (trainer.log_val_generations, images/ or samples/)."
    return f"<section><h2>Held-out prompts, before and after</h2>{''.join(parts) or _notes([none])}</section>"


def _set(run: Run, folder: Path, content: str) -> str:
    """A heading and the cards of a validation set; empty where it has no samples."""
    found: list[tuple[int, Path, dict[int, Any]]] = []
    for path in folder.glob("step_*"):
        # a folder that was used before may hold samples of steps that this run has not reached
        if path.name[5:].isdecimal() and int(path.name[5:]) <= run.last_step():
            found.append((int(path.name[5:]), path, {row["index"]: row for row in read_index(path, content)}))
    found = sorted((step, path, rows) for step, path, rows in found if rows)
    if not found:
        return ""
    (first, old, before), (last, new, after) = found[0], found[-1]
    labels = ("Before", "After") if first == 0 else (f"Step {first}", f"Step {last}")
    shared = [i for i in before if i in after and before[i]["prompt"] == after[i]["prompt"]]
    cards = []
    for i in shared[:MAX_PAIRS]:
        sides = _side(labels[0], old, before[i])
        if last != first:
            sides += _side(labels[1], new, after[i])
        caption = escape(before[i]["prompt"])
        cards.append(f'<figure><div class="pair">{sides}</div><figcaption>{caption}</figcaption></figure>')
    kind, title, notes = folder.parent.name, f"{folder.name}: step {first}", []
    if last == first:
        notes.append(f"Only the validation of step {first} kept {kind}: nothing to compare with yet.")
    else:
        title += f" and step {last}"
    if len(shared) > MAX_PAIRS:
        notes.append(f"{MAX_PAIRS} of {len(shared)} prompts are shown.")
    if not shared:
        notes.append("The two validations share no prompt.")
    return f"<h3>{escape(title)}</h3>{_notes(notes)}<div class='cards {kind}'>{''.join(cards)}</div>"


def _side(label: str, folder: Path, row: dict[str, Any]) -> str:
    """A sample with its label and reward."""
    reward = "no reward" if row["reward"] is None else f"{row['reward']:.3f}"
    if "text" in row:
        sample = f"<pre>{escape(row['text'])}</pre>"
    elif (folder / row["file"]).is_file():
        sample = _inline(folder / row["file"], escape(f"{label}, reward {reward}: {row['prompt']}", quote=True))
    else:
        sample = '<span class="lost">image file is missing</span>'
    caption = f"<span>{escape(label)}</span><b>{escape(reward)}</b>"
    return f'<div class="side">{sample}<div class="cap">{caption}</div></div>'


def _inline(path: Path, alt: str) -> str:
    """An <img> with the file inside: as it is where small, else as a scaled JPEG."""
    with Image.open(path) as image:
        width, height = image.size
        kind, data = "png", path.read_bytes()
        if max(width, height) > INLINE_SIDE:
            scaled = image.convert("RGB")
            scaled.thumbnail((INLINE_SIDE, INLINE_SIDE), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            scaled.save(buffer, "JPEG", quality=88)
            kind, data = "jpeg", buffer.getvalue()
    pixels = " class='pixels'" if max(width, height) <= INLINE_SIDE // 2 else ""
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img{pixels} width="{width}" height="{height}" alt="{alt}" src="{source}">'


# --- curves -------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> str:
    def of(*keys: str, band: str = "") -> list[Series]:
        found = [Series(key, run.points(key), run.points(band) if band else []) for key in keys]
        return [series for series in found if series.points]

    terms = sorted(key for key in run.metrics() if key.startswith("reward/") and key not in _PLAIN_REWARD)
    validation = [Series(name, points) for name, points in _validations(run).items()]
    same = "Share of prompts whose samples all score the same"
    ratio, spread = of("actor/ratio_mean", band="actor/ratio_std"), "The band is one standard deviation"
    charts = [
        line_chart("Training reward", of("reward/mean", band="reward/std"), f"{spread} over the step's samples."),
        line_chart("Validation reward", validation, "On held-out prompts.", marks=True),
        line_chart("Reward terms", of(*terms), "Before weighting and summing."),
        line_chart(same, of("reward/zero_std_ratio"), "Such prompts give no gradient."),
        line_chart("Importance ratio", ratio, f"{spread}."),
        line_chart("Clipped fraction", of("actor/clipfrac", "actor/clipfrac_higher", "actor/clipfrac_lower")),
        line_chart("Gradient norm", of("actor/grad_norm"), "Before clipping."),
        line_chart("KL to the policy that sampled", of("actor/approx_kl")),
        line_chart("KL to the reference", of("actor/kl_ref")),
        line_chart("Throughput (images per second and rank)", of("perf/images_per_gpu_per_s"), zero=True),
        _phases(run),
        line_chart("FLOPs utilisation", of("perf/mfu"), "Share of the device's peak.", zero=True),
        line_chart("Peak memory (GB)", of("perf/peak_memory_gb"), zero=True),
    ]
    drawn = "".join(charts)
    content = f'<div class="charts">{drawn}</div>' if drawn else _notes(["There is nothing to draw."])
    return f"<section><h2>Curves</h2>{content}</section>"


def _phases(run: Run) -> str:
    """Seconds per step, split by phase."""
    # the usual phases first, in their order, so that a bar with a validation looks like its neighbours at its bottom
    found = [key for key in run.metrics() if key.startswith("time/")]
    keys = [key for key in _PHASES if key in found] + [key for key in found if key not in _PHASES]
    rows = [row for row in run.rows if any(row.get(key) is not None for key in keys)]
    series = []
    for key in keys:
        series.append(Series(key.removeprefix("time/"), [(row["step"], row.get(key) or 0.0) for row in rows]))
    note = "Phases that run at the same time (rewards beside sampling) are stacked all the same."
    return stacked_bars("Seconds by phase", series if rows else [], note)


# --- tables -------------------------------------------------------------------------------------------------------


def _table(run: Run) -> str:
    """Every metric in figures, for those who cannot see the curves."""
    lines = []
    for key in run.metrics():
        values = [value for _, value in run.points(key)]
        cells = [f"{v:.5g}" for v in (values[0], values[-1], min(values), max(values))] if values else ["-"] * 4
        cells.append(str(len(values)))
        lines.append(f"<tr><th scope=row>{escape(key)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    if not lines:
        return ""
    head = "".join(f"<th scope=col>{name}</th>" for name in ("metric", "first", "last", "lowest", "highest", "values"))
    return (
        "<details><summary>All metrics in figures</summary><div class=scroll><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _config(run: Run) -> str:
    """The resolved configuration, folded."""
    if run.config_text is None:
        return _notes(["There is no config.yaml in the folder."])
    return f"<details><summary>Resolved configuration</summary><pre>{escape(run.config_text)}</pre></details>"


_CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1a2029;--soft:#5b6673;--line:#e2e6eb;--good:#0b7a53;
--c1:#2563c9;--c2:#c8590a;--c3:#0b8062;--c4:#9139a8;--c5:#b8324a;--c6:#6b6a16;--c7:#127c96;--c8:#6d5a4c}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1b2129;--ink:#e8ecf1;--soft:#9fabb9;--line:#2d3641;
--good:#4fd1a0;--c1:#74a9ff;--c2:#ffa45c;--c3:#46cfa4;--c4:#d691ea;--c5:#ff8696;--c6:#d6d057;--c7:#5fcbe6;--c8:#c9ae9a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:36px 24px 48px}
h1{font-size:28px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 12px}
h3{font-size:14px;font-weight:600;color:var(--soft);margin:20px 0 10px}
header p,footer,.n{color:var(--soft);margin:4px 0 0}
header p{overflow-wrap:anywhere}
.n{font-size:13px}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin-top:24px}
.tile,figure,details{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{flex:1 1 170px;padding:14px 18px}
.tile.wide{flex-basis:280px}
.k{font-size:13px;color:var(--soft)}
.v{font-size:24px;font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap}
.wide .v{font-size:30px}
.better .v{color:var(--good)}
.note{color:var(--soft);border-left:3px solid var(--line);padding-left:12px;margin:12px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(260px,1fr));gap:12px}
figure{margin:0;padding:12px;min-width:0}
.pair{display:flex;gap:10px}
.side{flex:1 1 0;min-width:0}
.side img{display:block;width:100%;height:auto;border-radius:5px;background:var(--line)}
.side img.pixels{image-rendering:pixelated}
.samples{grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr))}
.side pre{margin:0;max-height:24em;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere}
.samples figcaption{white-space:pre-wrap}
.cap{display:flex;justify-content:space-between;font-size:13px;margin-top:5px;font-variant-numeric:tabular-nums}
.cap span,.lost{color:var(--soft)}
.cards figcaption{font-size:13px;margin-top:6px;overflow-wrap:anywhere}
details{margin-top:16px;padding:12px 18px}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font-size:13px;line-height:1.45}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin-top:10px}
th,td{padding:3px 16px 3px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child{text-align:left;font-weight:400}
thead th{color:var(--soft);font-weight:600}
footer{margin-top:32px;font-size:13px}
@media print{details{break-inside:avoid}figure{break-inside:avoid}}
"""


if __name__ == "__main__":
    sys.exit(main())
