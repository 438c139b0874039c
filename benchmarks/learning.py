"""Shared code of the comparisons of recipes: see learn.py for flow models, and learn_lm.py for language models.

A table has the mean of each recipe over its seeds with Student's 95 % interval, and the difference from the first
recipe, over pairs of runs with the same seed. It is marked ≈ if its interval contains 0, or that over held-out prompts
if both runs have a score for each. With three seeds, the interval extends 2.5 standard deviations
to either side.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from phalanx.functional.statistics import Estimate, mean_interval, t_half_width

ROOT = Path(__file__).resolve().parents[1]
TEACHING = threading.Lock()
Rows = list[dict[str, Any]]
Run = dict[str, Any]  # the result of a run


@dataclass(frozen=True)
class Subject:
    """A comparison of the recipes in `<name>.yaml`, each on top of `config` and `fixed`, trained by `task`.

    Results go to `results/<name>.json`. `page` is a file below docs/, and `picture` its picture, if any; the table
    goes between the page's marks `<!-- mark: begin -->` and `<!-- mark: end -->`. `validation` is the metric of the
    curves, labelled `scale`, and `target` the value that it should reach, if any; a step samples `samples` of `noun`.
    `base(output)` returns the scores of the base model, and `after(folder, rows)` those of a finished run, from its
    folder and rows of metrics. The columns of the table (titles by key) are means over the seeds with their intervals
    (`spreads`), or only means (`means`).

    `board`: the table and picture are those of the rows in benchmarks/board, which board.py writes; `main` only prints.
    `compared`: the keys by which recipes are compared with the first one, in pairs of runs with the same seed; by
    default the first of `spreads`. `scores(folder)`: a finished run's scores of the held-out prompts, by the first
    compared key. `seeds`: the configuration keys that are set to a run's seed. A name in braces in a recipe or in
    `fixed` stands for a path: the result of `paths[name](output)`, or for {teacher} the folder of the final model of a
    whole run of the configuration.
    """

    name: str
    task: str
    config: str
    fixed: list[str]
    page: str
    mark: str
    validation: str
    scale: str
    noun: str
    samples: int
    steps: int
    test_freq: int
    spreads: dict[str, str]
    base: Callable[[Path], dict[str, float]]
    after: Callable[[Path, Rows], dict[str, float]]
    means: dict[str, str] = field(default_factory=dict)
    picture: str = ""
    target: float | None = None
    ranks: int = 1  # CPU processes of a run
    board: bool = False
    compared: tuple[str, ...] = ()
    scores: Callable[[Path], list[float]] | None = None  # None: the scores of the last validation
    seeds: tuple[str, ...] = ("trainer.seed",)
    paths: dict[str, Callable[[Path], Path]] = field(default_factory=dict)
    program: str = ""  # that `after` calls

    @property
    def results(self) -> Path:
        """The file of all results."""
        return ROOT / "benchmarks" / "results" / f"{self.name}.json"


def main(subject: Subject, description: str | None) -> None:
    """Train the missing runs, then print the table, and write it and the curves unless they are the board's."""
    recipes: dict[str, list[str]] = yaml.safe_load((ROOT / "benchmarks" / f"{subject.name}.yaml").read_text())
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"recipes of {subject.name}.yaml (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--steps",
        type=int,
        default=subject.steps,
        help=f"training steps of {subject.samples} {subject.noun} ({subject.steps})",
    )
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs, each on one CPU core (2)")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / subject.name)
    parser.add_argument("--no-training", action="store_true", help="use only runs that have results")
    parser.set_defaults(keep=False, no_docs=subject.board)
    if not subject.board:
        parser.add_argument("--keep", action="store_true", help=f"reuse the results in results/{subject.name}.json")
        parser.add_argument("--no-docs", action="store_true", help="print the table, write no results or docs")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(recipes))
    if unknown:
        sys.exit(f"{subject.name}.py: unknown recipe {unknown[0]!r}; known: {', '.join(recipes)}")
    names = args.names or list(recipes)
    runs = [(name, seed) for seed in args.seeds for name in names]
    args.output.mkdir(parents=True, exist_ok=True)
    if args.keep:
        keep(subject, args.output)
    if args.no_training:
        base, results = json.loads((args.output / "base" / "scores.json").read_text()), []
        for name, seed in runs:
            result = finished(args.output, name, recipes[name], seed, args.steps)
            if result is not None:
                results.append(result)
    else:
        base = remembered(args.output / "base" / "scores.json", lambda: subject.base(args.output))
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = [
                pool.submit(trained, subject, args.output, name, recipes[name], seed, args.steps) for name, seed in runs
            ]
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            if any(job.exception() is not None for job in done):
                pool.shutdown(cancel_futures=True)
            results = [job.result() for job in jobs]
    lines = table(subject, base, results)
    print("\n".join(lines))
    if not args.no_docs:
        docs = ROOT / "docs"
        runs_of_lines = ",\n".join(json.dumps(result) for result in results)
        subject.results.write_text(f'{{"base": {json.dumps(base)}, "runs": [\n{runs_of_lines}\n]}}\n')
        if subject.picture:
            curves(subject, results, docs / "images" / subject.picture)
        insert(docs / subject.page, subject.mark, lines)


def keep(subject: Subject, output: Path) -> None:
    """Copy the results of the repository to the folders of the runs, without overwriting newer ones."""
    known = json.loads(subject.results.read_text())
    for folder, file, result in [
        (output / "base", "scores.json", known["base"]),
        *((output / f"{slug(run['name'])}-{run['seed']}", "result.json", run) for run in known["runs"]),
    ]:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / file).is_file():
            (folder / file).write_text(json.dumps(result, indent=1) + "\n")


def remembered(file: Path, find: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Read the values in a file; a missing file is first written with the result of `find`."""
    if not file.is_file():
        found = find()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found) + "\n")
    known: dict[str, float] = json.loads(file.read_text())
    return known


def finished(output: Path, name: str, recipe: list[str], seed: int, steps: int) -> Run | None:
    """The result of a finished run; None if there is none, or if it had another recipe."""
    file = output / f"{slug(name)}-{seed}" / "result.json"
    if not file.is_file():
        return None
    result: Run = json.loads(file.read_text())
    wanted = {"name": name, "recipe": recipe, "seed": seed, "steps": steps}
    return result if {key: result[key] for key in wanted} == wanted else None


def trained(subject: Subject, output: Path, name: str, recipe: list[str], seed: int, steps: int) -> Run:
    """The result of a run, which is trained unless it has finished before."""
    result = finished(output, name, recipe, seed, steps)
    if result is not None:
        return result
    if subject.program and shutil.which(subject.program) is None:
        raise SystemExit(f"{subject.name}: the program {subject.program} is not installed")
    wanted = {"name": name, "recipe": recipe, "seed": seed, "steps": steps}
    folder = output / f"{slug(name)}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    keys = [f"total_training_steps={steps}", f"test_freq={subject.test_freq}", "log_val_generations=1000"]
    keys += ["resume=never", f"output_dir={folder}", f"save_freq={steps}", "logger=[]"]
    parts = [with_paths(subject, output, part) for part in (*subject.fixed, *recipe)]
    arguments = [subject.config, *parts, *(f"trainer.{key}" for key in keys)]
    arguments += [f"{key}={seed}" for key in subject.seeds]
    start = time.perf_counter()
    cpu_s = task(subject.task, arguments, output / f"{slug(name)}-{seed}.log", subject.ranks)
    share = cpu_s / (time.perf_counter() - start)  # of a core, so that other work on the machine does not count
    rows = metrics(folder)
    curve, seconds = [], 0.0
    for row in rows:
        seconds += row.get("perf/step_s", 0.0) * share
        if subject.validation in row:
            curve.append([row["step"], round(row[subject.validation], 4), round(seconds, 1)])
    result = wanted | {"curve": curve, "seconds": round(cpu_s, 1), "after": subject.after(folder, rows)}
    result["scores"] = validated(folder, subject.validation) if subject.scores is None else subject.scores(folder)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}, seed {seed}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f} in {result['seconds']:.0f} CPU s", flush=True)
    return result


def metrics(folder: Path) -> Rows:
    """The rows of metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def validated(folder: Path, metric: str) -> list[float]:
    """The scores of all prompts in a run's last validation, whose mean is `metric`."""
    _, name, _, term = metric.split("/")
    index = sorted(folder.glob(f"*/{name}/step_*/index.jsonl"))[-1]
    rows = [json.loads(line) for line in index.read_text().splitlines()]
    return [round(row["reward"] if term == "mean" else row["scores"][term], 4) for row in rows]


def with_paths(subject: Subject, output: Path, part: str) -> str:
    """Replace names in braces by their paths, which are created when they are first needed."""
    for name in ("teacher", *subject.paths):
        if f"{{{name}}}" in part:
            with TEACHING:
                path = subject.paths[name](output) if name in subject.paths else teacher(subject, output)
            part = part.replace(f"{{{name}}}", str(path))
    return part


def teacher(subject: Subject, output: Path, name: str = "teacher", keys: Sequence[str] = ()) -> Path:
    """The folder of the final model of the configuration's run with these keys, which is trained if it is missing."""
    folder = output / name
    if not (folder / "export").is_dir():
        keys = [*keys, *(f"trainer.{key}" for key in ("resume=never", "log_val_generations=0", "logger=[]"))]
        task(subject.task, [subject.config, *keys, f"trainer.output_dir={folder}"], output / f"{name}.log")
        export = [f"checkpoint={folder}", f"output_dir={folder / 'export'}"]
        task("export_checkpoint", export, output / f"{name}_export.log")
    return folder / "export"


def untrained(name: str, output: Path, *arguments: str) -> Path:
    """The folder of a task's run without training steps, which validates the base model."""
    folder = output / "base"
    keys = ["total_training_steps=0", "resume=never", "save_freq=-1", "logger=[]", f"output_dir={folder}"]
    task(name, [*arguments, *(f"trainer.{key}" for key in keys)], output / "base.log")
    return folder


def slug(name: str) -> str:
    """A recipe's name as a file name."""
    return name.replace(", ", "-").replace(" ", "_")


def task(name: str, arguments: Sequence[str], log: Path, ranks: int = 1) -> float:
    """Run a task on `ranks` CPU processes, with its output in `log`; if it fails, this program ends. Returns the CPU
    seconds of the task.
    """
    environment = os.environ | {"NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as file:
        start = ["sh", "train.sh"] if ranks > 1 else [sys.executable]  # a single rank needs no launcher
        command = [*start, f"tasks/{name}.py", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)  # the usage includes its children
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"learn.py: {' '.join(command)}\nended with {process.returncode}; see {log}")
    return usage.ru_utime + usage.ru_stime


def table(subject: Subject, base: dict[str, float], results: Iterable[Run]) -> list[str]:
    """The results as Markdown: means over the seeds with their intervals, and differences from the first recipe."""
    runs: dict[str, list[Run]] = {}
    for result in results:
        runs.setdefault(result["name"], []).append(result)
    first = next(iter(runs))
    compared = subject.compared or tuple(subject.spreads)[:1]
    differences = [f"{subject.spreads[key]}, difference from `{first}`" for key in compared]
    reaching = []
    if subject.target is not None:
        reaching = [f"{subject.noun} to {subject.target:g}", f"CPU seconds to {subject.target:g}"]
    seeds = {len(group) for group in runs.values()}
    alike = f"recipe, {seeds.pop()} seeds" if len(seeds) == 1 else None  # else in a column of their own
    names = [alike] if alike else ["recipe", "seeds"]
    titles = [*names, *subject.spreads.values(), *differences, *reaching, *subject.means.values()]

    def of_base(keys: Iterable[str]) -> list[str]:
        return [f"{base[key]:.3f}" if key in base else "" for key in keys]

    lines = [f"|{'|'.join(titles)}|", "|---" * len(titles) + "|"]
    if base:
        gap = [""] * (len(compared) + len(reaching))
        cells = ["the base", *[""] * (len(names) - 1), *of_base(subject.spreads), *gap, *of_base(subject.means)]
        lines.append(f"|{'|'.join(cells)}|")
    for name, group in runs.items():
        cells = [with_interval([run["after"][key] for run in group]) for key in subject.spreads]
        for key in compared:
            cells.append("" if name == first else str(difference(group, runs[first], key, scored=key == compared[0])))
        if subject.target is not None:
            samples, seconds = zip(*(reached(subject, run["curve"]) for run in group), strict=True)
            cells += [spread(samples, "{:.0f}"), spread(seconds, "{:.0f}")]
        cells += [f"{statistics.fmean(run['after'][key] for run in group):.3f}" for key in subject.means]
        cells = [f"`{name}`", *([] if alike else [str(len(group))]), *cells]
        lines.append(f"|{'|'.join(cells)}|")
    return lines


@dataclass(frozen=True)
class Difference:
    """The difference of two recipes: over runs with the same seed, and over held-out prompts if known."""

    seeds: Estimate
    prompts: Estimate | None

    @property
    def told_apart(self) -> bool:
        """Whether there is an interval over seeds, and neither interval contains 0."""
        for estimate in (self.seeds, self.prompts):
            if estimate is not None and (estimate.low is None or estimate.high is None):
                return False
            if estimate is not None and estimate.low <= 0 <= estimate.high:
                return False
        return True

    def __str__(self) -> str:
        text = f"{self.seeds.value:+.3f}"
        if self.seeds.high is not None:
            text += f"±{self.seeds.high - self.seeds.value:.3f}"
        return text if self.told_apart else f"{text} ≈"


def difference(runs: Sequence[Run], others: Sequence[Run], key: str, scored: bool = True) -> Difference:
    """The difference of `after[key]` of runs from others with equal seeds, with Student's interval since a run's score
    is a mean; that of prompts is of their means over these seeds, where `scored` says that the runs' scores are of this
    measure.
    """
    by_seed = {run["seed"]: run for run in others}
    pairs = [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    values, references = np.array([[run["after"][key] for run in pair] for pair in pairs]).T
    of_prompts = None
    if scored and all("scores" in run for pair in pairs for run in pair):
        scores, expected = np.array([[run["scores"] for run in pair] for pair in pairs]).mean(0)
        of_prompts = mean_interval(scores, expected)
    return Difference(mean_interval(values, references, unit=False), of_prompts)


def with_interval(values: Sequence[float]) -> str:
    """`mean±half the width` of Student's interval; of a single run only the mean."""
    half = t_half_width(np.array(values))
    return f"{statistics.fmean(values):.3f}" if half is None else f"{statistics.fmean(values):.3f}±{half:.3f}"


def reached(subject: Subject, curve: list[list[float]]) -> tuple[float | None, float | None]:
    """Samples and seconds until the validation first reaches the target; None where it never does."""
    for step, value, seconds in curve:
        if subject.target is not None and value >= subject.target:
            return step * subject.samples, seconds
    return None, None


def spread(values: Sequence[float | None], form: str) -> str:
    """The mean of the runs that got there; where some never did, how many."""
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    text = form.format(statistics.fmean(there))
    return text if len(there) == len(values) else f"{text}, {len(there)} of {len(values)}"


def curves(subject: Subject, results: Iterable[Run], file: Path) -> None:
    """Plot validation over the number of samples: a panel per recipe with all seeds, and the other recipes in gray."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: dict[str, list[list[list[float]]]] = {}
    for result in results:
        runs.setdefault(result["name"], []).append(result["curve"])
    columns = min(4, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3 * columns, 2.3 * rows), sharex=True, sharey=True, squeeze=False
    )
    draw: Callable[..., Any]
    for panel, (name, own) in zip(axes.flat, runs.items(), strict=False):
        draw = panel.plot
        for curve in (c for others in runs.values() for c in others):
            draw(*axes_of(subject, curve), color="0.87", linewidth=0.8)
        for curve in own:
            draw(*axes_of(subject, curve), color="tab:blue", linewidth=1.4)
        panel.set_title(name, fontsize=9)
        if subject.target is not None:
            panel.axhline(subject.target, color="0.6", linewidth=0.6, linestyle=":")
        panel.tick_params(labelsize=7)
    for panel in list(axes.flat)[len(runs) :]:
        panel.set_visible(False)
    figure.supxlabel(f"{subject.noun} sampled", fontsize=8)
    figure.supylabel(subject.scale, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def axes_of(subject: Subject, curve: list[list[float]]) -> tuple[list[float], list[float]]:
    """Samples and scores of a run's validations."""
    return [step * subject.samples for step, _, _ in curve], [value for _, value, _ in curve]


def insert(page: Path, mark: str, lines: list[str]) -> None:
    """Put the table between its marks on a page."""
    text, marks = page.read_text(), [f"<!-- {mark}: {end} -->" for end in ("begin", "end")]
    begin, end = (text.index(m) for m in marks)
    page.write_text(text[: begin + len(marks[0])] + "\n" + "\n".join(lines) + "\n" + text[end:])
