"""numerics.html: a self-contained page about a check of numerics, in the style of the report."""

from collections.abc import Mapping
from html import escape
from typing import Any

from phalanx.tools.board.markup import document, html_details, html_table, notes_html, value_tile

COLUMNS = ("median", "p99", "largest", "k3", "actions_clipped", "samples_clipped")
TITLES = ["|ratio - 1|: median", "99 %", "largest", "KL", "actions beyond the clip range", "samples with one"]
UPDATE_TITLES = ["loss", "off by", "norm of the gradient", "off by", "s to update", "peak GB"]
NOTES = [
    "The ratio is that of the trainer's probability of an action to the sampler's, before any update. KL is Schulman's "
    "k3 estimate of KL(sampler, trainer) per action.",
    "Old log-probabilities are those that the loss takes: of the sampler, or computed by the trainer once more. Their "
    "ratios are those that the first optimizer step sees.",
]


def numerics_page(result: Mapping[str, Any]) -> bytes:
    """The page of `result`, the content of numerics.json."""
    jobs, base = result["jobs"], next(iter(result["jobs"].values()))
    facts = [result["config"], f"{result['ranks']} ranks on {result['device']}", f"torch {result['versions']['torch']}"]
    body = [f"<section><p><b>{escape(result['verdict'])}</b></p>"]
    refused = [f"{name} is refused: {reason}" for name, reason in result.get("refused", {}).items()]
    footer = "Made by <code>phalanx numerics</code>; the numbers are also in numerics.json."
    if base["unit"] == "update":
        cells = [[name, *_update_cells(job)] for name, job in jobs.items()]
        notes = notes_html([*refused, *(f"{name}: {' '.join(keys)}" for name, keys in result["keys"].items() if keys)])
        body.append(html_table(["job", *UPDATE_TITLES], cells) + notes + "</section>")
        return document("Check of numerics", facts, body, footer)[0]
    if base["sampler"]:
        body.append(f'<div class="tiles" style="--columns:3">{_stats_tiles(base)}</div>')
    rows = [[name, *_stats_cells(job["sampler"]), *_beside(job)] for name, job in jobs.items()]
    beside = [
        "old: largest",
        "samples equal to the job's",
        "replay of these, off by",
        "s to sample",
        "s to replay",
        "peak GB",
    ]
    body.append(html_table(["job", *TITLES, *beside], rows) + notes_html([*NOTES, *refused]) + "</section>")
    for name, job in jobs.items():
        table = [[_place(part), *_stats_cells(part)] for part in job["positions"]]
        content = html_table([job["unit"], *TITLES], table)
        content += html_table(["old log-probabilities", *TITLES], [["of the loss", *_stats_cells(job["old"])]])
        content += notes_html([" ".join(result["keys"][name]) or "As configured."])
        body.append(html_details(name, content, is_open=job is base))
    return document("Check of numerics", facts, body, footer)[0]


def _update_cells(job: Mapping[str, Any]) -> list[str]:
    beside = job.get("beside")
    off = ["-", "-"] if beside is None else [f"{beside[name]:.1e}" for name in ("loss", "grad_norm")]
    values = [f"{job['loss']:.6g}", off[0], f"{job['grad_norm']:.6g}", off[1]]
    return [*values, f"{job['step_s']:.2f}", f"{job['memory_gb']:.2f}"]


def _stats_tiles(job: Mapping[str, Any]) -> str:
    stats = job["sampler"]
    tiles = value_tile("largest |ratio - 1|", f"{stats['largest']:.1e}", f"the clip range is {job['clip_range']:g}")
    tiles += value_tile("beyond the clip range", f"{100 * stats['actions_clipped']:.3g} %", f"of {job['unit']}s")
    return tiles + value_tile("KL", f"{stats['k3']:.1e}", f"per {job['unit']}")


def _stats_cells(stats: Mapping[str, float]) -> list[str]:
    if not stats:
        return ["-"] * len(COLUMNS)
    cells = [f"{stats[name]:.1e}" for name in COLUMNS[:4]]
    return cells + [f"{100 * stats[name]:.3g} %" for name in COLUMNS[4:]]


def _beside(job: Mapping[str, Any]) -> list[str]:
    beside, old = job.get("beside"), _stats_cells(job["old"])[COLUMNS.index("largest")]
    first = ["-", "-"]
    if beside is not None:
        first = [f"{beside['equal_samples']:.0f} of {beside['samples']:.0f}", f"{beside['replay_off']:.1e}"]
    return [old, *first] + [f"{job[name]:.2f}" for name in ("sample_s", "replay_s", "memory_gb")]


def _place(part: Mapping[str, float]) -> str:
    first, last = int(part["first"]), int(part["last"])
    return str(first) if first == last else f"{first} to {last}"
