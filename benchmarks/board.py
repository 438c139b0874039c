"""A leaderboard whose rows anyone can train again: `phalanx verify benchmarks/board/learn_lm/grpo-0`.

    python benchmarks/board.py learn_lm grpo raft --seeds 0 1 2 3 4
    python benchmarks/board.py                    # only write the tables

The first argument is a comparison: learn, learn_lm, learn_bd or learn_tools; the others are recipes of its YAML file.
Each run goes to outputs/board, and its row to benchmarks/board/<comparison>/<recipe>-<seed>, with --label another name
for those of another processor: configuration, versions, processor, digests of the files that it read, metrics, digests
of the final weights, and the curve over samples and CPU seconds. The tables of docs/leaderboard.md are made from all
rows: one for each processor, since neither bits nor CPU seconds are those of another one. Until each recipe of a
comparison has rows, a table of its results follows.
"""

import argparse
import hashlib
import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path

import yaml
from learning import ROOT, Run, Subject, difference, insert, slug, trained, with_interval

from phalanx.run.provenance import read_provenance
from phalanx.tools.reproduce.rows import write_row

BOARD = ROOT / "benchmarks" / "board"
PAGE = ROOT / "docs" / "leaderboard.md"
TITLES = {"learn": "Images", "learn_lm": "Text", "learn_tools": "Tools", "learn_bd": "Block diffusion"}
SEEDS = [0, 1, 2, 3, 4]


def subject_of(name: str) -> Subject:
    """The comparison of a benchmark's module."""
    subject: Subject = importlib.import_module(name).SUBJECT
    return subject


def train_row(
    subject: Subject, name: str, recipe: list[str], seed: int, label: str = "", *, timed: bool = True
) -> None:
    """Train a recipe unless its row exists, and write the row. timed: its CPU seconds may be compared with others."""
    row = BOARD / subject.name / f"{slug(name)}-{seed}{label}"
    if (row / "result.json").is_file():
        return
    output = ROOT / "outputs" / "board" / subject.name
    output.mkdir(parents=True, exist_ok=True)
    result = trained(subject, output, name, recipe, seed, subject.steps)
    write_row(output / f"{slug(name)}-{seed}", row)
    (row / "result.json").write_text(json.dumps(result | {"timed": timed}) + "\n")


def read_rows(subject: Subject) -> dict[str, list[Run]]:
    """The results of a comparison's rows by recipe, each with its `row`, in the order of the recipes and seeds."""
    rows: dict[str, list[Run]] = {}
    recipes = yaml.safe_load((ROOT / "benchmarks" / f"{subject.name}.yaml").read_text())
    for name in recipes:
        for file in sorted((BOARD / subject.name).glob(f"{slug(name)}-*/result.json")):
            result = json.loads(file.read_text())
            if result["name"] == name:
                rows.setdefault(name, []).append(result | {"row": file.parent})
    return rows


def digest_row(row: Path) -> str:
    """Eight digits for the metrics and eight for the final weights of a row."""
    parts = [hashlib.sha256((row / name).read_bytes()).hexdigest()[:8] for name in ("metrics.jsonl", "weights.json")]
    return "/".join(parts)


def least_seconds(runs: list[Run]) -> list[float]:
    """The CPU seconds at each validation of a recipe, whose runs all do the same work: between two of them those of the
    run that took least, since other work on the machine adds to them.
    """
    spans: list[list[float]] = []
    for run in runs:
        after = [seconds for _, _, seconds in run["curve"]]
        spans.append([0.0, *(b - a for a, b in pairwise(after))])
    longest = max(map(len, spans))
    return list(accumulate(min(span[i] for span in spans if i < len(span)) for i in range(longest)))


def value_at(curve: list[list[float]], after: list[float], seconds: float) -> float:
    """The last validation of a run within so many CPU seconds of training. after: those at each validation."""
    value = curve[0][1]
    for (_, score, _), at in zip(curve, after, strict=False):
        if at <= seconds:
            value = score
    return value


def by_processor(rows: dict[str, list[Run]]) -> dict[str, dict[str, list[Run]]]:
    """The rows of each processor and its versions, described in a line, by recipe."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for name, runs in rows.items():
        for run in runs:
            start = read_provenance(run["row"])[0]
            run["source"] = start["versions"]["source"][:12]
            versions = ", ".join(f"{part} {start['versions'][part]}" for part in ("python", "torch", "transformers"))
            processor = f"{start['processor'].get('model_name', '')} (model {start['processor'].get('model', '')})"
            place = f"{processor}, {start['processor']['instructions']}; {versions}"
            groups.setdefault(place, {}).setdefault(name, []).append(run)
    return groups


def tables() -> list[str]:
    """The tables of all rows by processor, the oldest first."""
    parts: dict[str, list[str]] = {}
    for name in TITLES:
        subject = subject_of(name)
        for place, rows in by_processor(read_rows(subject)).items():
            parts.setdefault(place, [f"### {place}", ""]).extend(table(subject, rows))
    return [line for lines in parts.values() for line in lines]


def table(subject: Subject, rows: dict[str, list[Run]]) -> list[str]:
    """Rows of one processor, with the digests of metrics and weights by seed."""
    sources = ", ".join(sorted({run["source"] for runs in rows.values() for run in runs}))
    place = (
        f"{TITLES[subject.name]}: `{subject.config}`, `benchmarks/{subject.name}.yaml`, {subject.ranks} rank, source"
    )
    lines = [f"{place} {sources}", "", f"{head(subject, rows)}seeds|digests|", "|---|---|---|---|---|---|---|"]
    for name, cells in compared(subject, rows).items():
        digests = "<br>".join(f"`{digest_row(run['row'])}`" for run in rows[name])
        lines.append(f"|{'|'.join(cells)}|{len(rows[name])}|{digests}|")
    return [*lines, ""]


def without_digests(subject: Subject) -> list[str]:
    """All recipes of a comparison, from the runs of its own results, of which only the curves are kept; nothing if each
    recipe has rows.
    """
    rows: dict[str, list[Run]] = {}
    for run in json.loads(subject.results.read_text())["runs"]:
        rows.setdefault(run["name"], []).append(run)
    if rows.keys() <= read_rows(subject).keys():
        return []
    title = f"### {TITLES[subject.name]}"
    lines = [f"|{'|'.join(cells)}|" for cells in compared(subject, rows).values()]
    return [title, "", head(subject, rows), "|---|---|---|---|---|", *lines, ""]


def until(rows: dict[str, list[Run]]) -> float:
    """The CPU seconds at which recipes are compared: those of the first one."""
    return least_seconds(next(iter(rows.values())))[-1]


def head(subject: Subject, rows: dict[str, list[Run]]) -> str:
    """The first line of a table."""
    steps = next(iter(rows.values()))[0]["steps"]
    samples = f"{subject.scale}, {steps * subject.samples} {subject.noun}"
    return f"|recipe|{samples}|difference from `{next(iter(rows))}`|at {until(rows):.0f} CPU seconds|difference|"


def compared(subject: Subject, rows: dict[str, list[Run]]) -> dict[str, list[str]]:
    """By recipe its name, and held-out scores at equal samples and at equal CPU seconds, each with the difference from
    the first recipe; * marks those that ended before so many seconds. Nothing stands for seconds that do not count.
    """
    first, key, seconds = next(iter(rows)), (subject.compared or tuple(subject.spreads))[0], until(rows)
    timed = all(run.get("timed", True) for runs in rows.values() for run in runs)
    for runs in rows.values():
        for run in runs:
            run["after"]["early"] = value_at(run["curve"], least_seconds(runs), seconds)
    table = {}
    for name, runs in rows.items():
        cells = [f"`{name}`"]
        for column in (key, "early"):
            cells.append(with_interval([run["after"][column] for run in runs]).replace(" ± ", "±"))
            apart = difference(runs, rows[first], column, scored=column == key)
            shown = str(replace(apart, prompts=None)).removesuffix(" ≈").replace(" ± ", "±")
            cells.append("" if name == first else shown + " ≈" * (not apart.told_apart))
        cells[3] += "*" * (least_seconds(runs)[-1] < seconds)
        cells[3:] = cells[3:] if timed else ["", ""]
        table[name] = cells
    return table


def main() -> None:
    """Train the rows that are missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", nargs="?", choices=sorted(TITLES))
    parser.add_argument("recipes", nargs="*", help="recipes of the comparison (its first)")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--label", default="", help="the end of new rows' names, such as -epyc")
    parser.add_argument("--untimed", action="store_true", help="other work runs beside, so that seconds do not count")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs, each on one CPU core (2)")
    args = parser.parse_args()
    if args.comparison:
        subject = subject_of(args.comparison)
        recipes = yaml.safe_load((ROOT / "benchmarks" / f"{subject.name}.yaml").read_text())
        names = args.recipes or list(recipes)[:1]
        unknown = sorted(set(names) - set(recipes))
        if unknown:
            parser.error(f"unknown recipe {unknown[0]!r}; known: {', '.join(recipes)}")
        with ThreadPoolExecutor(args.jobs) as pool:
            runs = product(args.seeds, names)
            timed = not args.untimed
            jobs = [
                pool.submit(train_row, subject, name, recipes[name], seed, args.label, timed=timed)
                for seed, name in runs
            ]
            for job in jobs:
                job.result()
    insert(PAGE, "recipes", [line for name in TITLES for line in without_digests(subject_of(name))])
    insert(PAGE, "board", tables())


if __name__ == "__main__":
    main()
