"""A leaderboard whose rows anyone can train again: `phalanx verify benchmarks/board/learn_lm/grpo-0`.

    python benchmarks/board.py learn_lm grpo raft --seeds 0 1 2 3 4
    python benchmarks/board.py                    # only write the tables

The first argument is a comparison such as learn_lm, a module beside this one with its YAML file; the others are
recipes of its YAML file. Each run goes to outputs/board, and its row to benchmarks/board/<comparison>/<recipe>-<seed>,
with --label another name for those of another processor: configuration, versions, processor, digests of the files that
it read, metrics, digests of the final weights, and the curve over samples and CPU seconds. The teacher of a recipe is
the model of the first recipe with seed 0, which stands beside the rows. The tables of docs/leaderboard.md are made from
all rows: one for each processor, since neither bits nor CPU seconds are those of another one; the table and the curves
on a comparison's own page from those of the processor that has most.
"""

import argparse
import hashlib
import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import yaml
from learning import ROOT, Run, Subject, curves, difference, insert, remembered, slug, task, trained, with_interval
from learning import table as own_table

from phalanx.run.provenance import read_provenance
from phalanx.tools.reproduce.rows import write_row

BOARD = ROOT / "benchmarks" / "board"
PAGE = ROOT / "docs" / "leaderboard.md"
TITLES = {
    "learn": "Images",
    "learn_lm": "Text",
    "learn_tools": "Tools",
    "learn_tools_algorithms": "Tools, algorithms",
    "learn_bd": "Block diffusion, estimates of a log-probability",
    "learn_bd_algorithms": "Block diffusion, algorithms",
}
SEEDS = [0, 1, 2, 3, 4]
MARGIN = 0.15  # by which CPU seconds of equal work differ between runs of a shared machine


def subject_of(name: str) -> Subject:
    """The comparison of a benchmark's module, with the board's teacher."""
    subject: Subject = importlib.import_module(name).SUBJECT
    return replace(subject, paths=subject.paths | {"teacher": lambda output: shipped_teacher(subject, output)})


def shipped_teacher(subject: Subject, output: Path) -> Path:
    """The folder of the model that the first recipe with seed 0 gave, which is trained if it is missing."""
    folder = BOARD / subject.name / "teacher"
    if not folder.is_dir():
        name, recipe = next(iter(read_recipes(subject).items()))
        trained(subject, output, name, recipe, 0, subject.steps)
        export = [f"checkpoint={output / f'{slug(name)}-0'}", f"output_dir={folder}"]
        task("export_checkpoint", export, output / "teacher.log")
    return folder


def read_recipes(subject: Subject) -> dict[str, list[str]]:
    """The recipes of a comparison by name."""
    recipes: dict[str, list[str]] = yaml.safe_load((ROOT / "benchmarks" / f"{subject.name}.yaml").read_text())
    return recipes


def output_of(subject: Subject) -> Path:
    """The folder of a comparison's runs."""
    output = ROOT / "outputs" / "board" / subject.name
    output.mkdir(parents=True, exist_ok=True)
    return output


def train_row(subject: Subject, name: str, recipe: list[str], seed: int, label: str = "") -> None:
    """Train a recipe unless its row exists, and write the row."""
    row = BOARD / subject.name / f"{slug(name)}-{seed}{label}"
    if (row / "result.json").is_file():
        return
    output = output_of(subject)
    result = trained(subject, output, name, recipe, seed, subject.steps)
    write_row(output / f"{slug(name)}-{seed}", row)
    (row / "result.json").write_text(json.dumps(result) + "\n")


def read_rows(subject: Subject) -> dict[str, list[Run]]:
    """The results of a comparison's rows by recipe, each with its `row`, in the order of the recipes and seeds."""
    rows: dict[str, list[Run]] = {}
    for name in read_recipes(subject):
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
    """The CPU seconds of training steps at each validation of a recipe: those of its run that took least, since other
    work on the machine adds to them, spread evenly over the steps.
    """
    least = min(run["curve"][-1][2] for run in runs)
    return [least * step / runs[0]["steps"] for step, _, _ in runs[0]["curve"]]


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


def base_of(subject: Subject) -> dict[str, float]:
    """The scores of a comparison's base model, which are kept beside its rows."""
    return remembered(BOARD / subject.name / "base.json", partial(subject.base, output_of(subject)))


def shown_runs(subject: Subject) -> list[Run]:
    """The runs on a comparison's own page: those of the processor that has most rows, each with the CPU seconds of its
    recipe.
    """
    places = by_processor(read_rows(subject)).values()
    shown = list[Run]()
    for runs in max(places, key=lambda rows: sum(map(len, rows.values()))).values():
        after = least_seconds(runs)
        for run in runs:
            curve = [[step, score, at] for (step, score, _), at in zip(run["curve"], after, strict=True)]
            shown.append(run | {"curve": curve})
    return shown


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
    lines = [f"{place} {sources}", "", *divided([*head(subject, rows), "seeds", "digests"])]
    for name, cells in compared(subject, rows).items():
        digests = "<br>".join(f"`{digest_row(run['row'])}`" for run in rows[name])
        lines.append(f"|{'|'.join(cells)}|{len(rows[name])}|{digests}|")
    return [*lines, ""]


def divided(columns: list[str]) -> list[str]:
    """The first two lines of a table."""
    return [f"|{'|'.join(columns)}|", f"|{'---|' * len(columns)}"]


def head(subject: Subject, rows: dict[str, list[Run]]) -> list[str]:
    """The columns of what `compared` returns."""
    first, runs = next(iter(rows.items()))
    samples = f"{subject.scale}, {runs[0]['steps'] * subject.samples} {subject.noun}"
    columns = ["recipe", samples, f"difference from `{first}`"]
    return [*columns, f"at {least_seconds(runs)[-1]:.0f} CPU seconds", "difference"]


def compared(subject: Subject, rows: dict[str, list[Run]]) -> dict[str, list[str]]:
    """By recipe its name, and held-out scores at equal samples and at equal CPU seconds, each with the difference from
    the first recipe; * marks those that ended before so many seconds.
    """
    first = next(iter(rows.values()))
    key, until = (subject.compared or tuple(subject.spreads))[0], least_seconds(first)[-1]
    table = {}
    for name, runs in rows.items():
        after, whole, tied = least_seconds(runs), difference(runs, first, key), False
        for share in (1 - MARGIN, 1 + MARGIN, 1):
            for run in runs:  # those of the first recipe come first
                run["after"]["early"] = value_at(run["curve"], after, until * share)
            early = difference(runs, first, "early", scored=False)
            tied |= not early.told_apart
        apart = [str(whole), f"{early}{' ≈' * (tied and early.told_apart)}"] if runs is not first else ["", ""]
        scores = [with_interval([run["after"][name] for run in runs]) for name in (key, "early")]
        table[name] = [f"`{name}`", scores[0], apart[0], f"{scores[1]}{'*' * (after[-1] < until)}", apart[1]]
    return table


def main() -> None:
    """Train the rows that are missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", nargs="?", choices=sorted(TITLES))
    parser.add_argument("recipes", nargs="*", help="recipes of the comparison (its first)")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--label", default="", help="the end of new rows' names, such as -epyc")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs, each on one CPU core (2)")
    args = parser.parse_args()
    if args.comparison:
        subject = subject_of(args.comparison)
        recipes = read_recipes(subject)
        names = args.recipes or list(recipes)[:1]
        unknown = sorted(set(names) - set(recipes))
        if unknown:
            parser.error(f"unknown recipe {unknown[0]!r}; known: {', '.join(recipes)}")
        with ThreadPoolExecutor(args.jobs) as pool:
            runs = product(args.seeds, names)
            jobs = [pool.submit(train_row, subject, name, recipes[name], seed, args.label) for seed, name in runs]
            for job in jobs:
                job.result()
    docs = ROOT / "docs"
    for subject in map(subject_of, TITLES):
        runs = shown_runs(subject)
        insert(docs / subject.page, subject.mark, own_table(subject, base_of(subject), runs))
        if subject.picture:
            curves(subject, runs, docs / "images" / subject.picture)
    insert(PAGE, "board", tables())


if __name__ == "__main__":
    main()
