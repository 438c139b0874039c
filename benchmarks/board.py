"""A leaderboard whose rows anyone can train again: `phalanx verify benchmarks/board/learn_lm/grpo-0`.

    python benchmarks/board.py learn_lm grpo raft --seeds 0 1 2 3 4
    python benchmarks/board.py                    # only write the tables

The first argument is a comparison: learn, learn_lm, learn_bd or learn_tools; the others are recipes of its YAML file.
Each run goes to outputs/board, and its row to benchmarks/board/<comparison>/<recipe>-<seed>: configuration, versions,
processor, digests of the files that it read, metrics, digests of the final weights, and the curve over samples and CPU
seconds. The tables of docs/leaderboard.md are made from all rows.
"""

import argparse
import hashlib
import importlib
import json
from concurrent.futures import ThreadPoolExecutor
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


def train_row(subject: Subject, name: str, recipe: list[str], seed: int) -> None:
    """Train a recipe unless its row exists, and write the row."""
    row = BOARD / subject.name / f"{slug(name)}-{seed}"
    if (row / "result.json").is_file():
        return
    output = ROOT / "outputs" / "board" / subject.name
    output.mkdir(parents=True, exist_ok=True)
    result = trained(subject, output, name, recipe, seed, subject.steps)
    write_row(output / f"{slug(name)}-{seed}", row)
    (row / "result.json").write_text(json.dumps(result) + "\n")


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
    return " ".join(parts)


def value_at(curve: list[list[float]], seconds: float) -> float:
    """The last validation of a run within so many CPU seconds of training."""
    value = curve[0][1]
    for _, score, after in curve:
        if after <= seconds:
            value = score
    return value


def table(subject: Subject) -> list[str]:
    """The rows of a comparison: held-out scores at equal samples and at equal CPU seconds, and digests by seed."""
    rows = read_rows(subject)
    if not rows:
        return []
    first, key = next(iter(rows)), (subject.compared or tuple(subject.spreads))[0]
    shortest = min(min(run["curve"][-1][2] for run in runs) for runs in rows.values())
    samples = subject.steps * subject.samples
    (start, *_) = read_provenance(rows[first][0]["row"])
    versions = ", ".join(f"{name} {start['versions'][name]}" for name in ("python", "torch", "transformers"))
    processor = f"{start['processor'].get('model_name', '')} (model {start['processor'].get('model', '')})"
    lines = [
        f"### {TITLES[subject.name]}",
        "",
        f"`{subject.config}` with the keys of `benchmarks/{subject.name}.yaml`, {subject.ranks} CPU rank; {versions}; "
        f"{processor}, {start['processor']['instructions']}; source {start['versions']['source'][:12]}.",
        "",
        f"| recipe | seeds | {subject.scale}, {samples} {subject.noun} | difference from `{first}` | the same at "
        f"{shortest:.0f} CPU seconds | digests of metrics and weights, by seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        apart = "" if name == first else str(difference(runs, rows[first], key))
        early = with_interval([value_at(run["curve"], shortest) for run in runs])
        digests = "<br>".join(f"`{digest_row(run['row'])}`" for run in runs)
        scores = with_interval([run["after"][key] for run in runs])
        lines.append(f"| `{name}` | {len(runs)} | {scores} | {apart} | {early} | {digests} |")
    return [*lines, ""]


def main() -> None:
    """Train the rows that are missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", nargs="?", choices=sorted(TITLES))
    parser.add_argument("recipes", nargs="*", help="recipes of the comparison (its first)")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
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
            jobs = [pool.submit(train_row, subject, name, recipes[name], seed) for seed in args.seeds for name in names]
            for job in jobs:
                job.result()
    lines = [line for name in TITLES for line in table(subject_of(name))]
    insert(PAGE, "board", lines)


if __name__ == "__main__":
    main()
