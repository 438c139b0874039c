"""How far may a rollout engine's log-probs be off before learning suffers, and which corrections help?

    python benchmarks/learn_mismatch.py
    python benchmarks/learn_mismatch.py --no-training       # only the table, the page and the figure
    python benchmarks/learn_mismatch.py --seeds 100 --steps 5 --results /tmp/tried.json    # only train

The same jobs with engines of mismatched.py: FlowGRPO of the images quickstart's model at two clip ranges, and GRPO of
the text quickstart's. Runs are copies of this process, one after the other, on one core, in the order of RUNS, with all
seeds of a condition before the next one. A run in results/learn_mismatch.json is not repeated. Tables go to
docs/mismatch.md, and the figure to docs/images/mismatch.svg; both leave out conditions that lack a seed.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from learning import ROOT, Run, difference, insert, metrics, with_interval

from phalanx.config import load
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.functional.statistics import t_half_width

RESULTS = ROOT / "benchmarks" / "results" / "learn_mismatch.json"
OUTPUT = ROOT / "outputs" / "learn_mismatch"
PAGE = ROOT / "docs" / "mismatch.md"
FIGURE = ROOT / "docs" / "images" / "mismatch.svg"
SEEDS = [0, 1, 2, 3, 4]
LAST = 5  # final steps, over whose samples rewards are averaged


@dataclass(frozen=True)
class Job:
    """A training job. engine: the prefix of its engines' classes. clip: its clip range. held_out: the metric that is
    reported, `unit` in the tables.
    """

    title: str
    schema: Any
    config: str
    engine: str
    clip: float
    held_out: str
    unit: str
    keys: Sequence[str]


IMAGES = (
    "data.val_files=[outputs/learn_mismatch/held_out.txt]",
    "reward.functions=[{path: benchmarks/redness.py:redness}]",
    "data.train_batch_size=2",
    "actor.ppo_mini_batch_size=1",
    "actor.ppo_micro_batch_size_per_gpu=8",
    "actor.ema.decay=null",
    "optim.lr=5e-4",
    "optim.lr_warmup_steps=0",
    "optim.lr_scheduler=constant",
)
TEXT = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=16",
    "optim.lr=2e-4",
)


def images(clip: float) -> Job:
    """FlowGRPO with a clip range."""
    return Job(f"Images, clip range {clip:g}", FlowRLConfig, "configs/flowgrpo/quickstart.yaml", "Images", clip,
               "val/held_out/reward/mean", "redness", (*IMAGES, f"algorithm.clip_ratio={clip:g}"))  # fmt: skip


JOBS = {
    "images_1e-3": images(1e-3),
    "images_1e-4": images(1e-4),
    "images_1": images(1.0),  # a control that clips next to nothing
    "text": Job("Text, clip range 0.2", LMRLConfig, "configs/grpo/quickstart.yaml", "Texts", 0.2,
                "val/test/reward/mean", "right answers", TEXT),
}  # fmt: skip
STEPS = 10
PROMPTS = 32  # held-out ones of images: a validation of all would take as long as four steps

# (jobs, engines, correction): each line is a condition of the tables; earlier lines are trained first
NARROW, WIDE, OPEN, LM = ("images_1e-4",), ("images_1e-3",), ("images_1",), ("text",)
FLOW = (*WIDE, *NARROW)
RUNS = [
    ((*FLOW, *OPEN, *LM), ("exact",), "none"),
    ((*WIDE, *LM), ("stale",), "none"),
    ((*WIDE, *LM), ("stale",), "rescore"),
    (WIDE, ("fp8", "noise_1e_2", "low_1e_2"), "none"),
    (NARROW, ("noise_1e_3",), "none"),
    (LM, ("fp8",), "none"),
    (WIDE, ("noise_1e_3", "bf16"), "none"),
    (NARROW, ("stale", "fp8", "bf16", "noise_1e_2", "low_1e_2"), "none"),
    (LM, ("noise_1e_0", "bf16"), "none"),
    (WIDE, ("low_1e_3", "noise_1e_4"), "none"),
    (LM, ("fp8",), "rescore"),
    (LM, ("stale",), "token_tis"),
    (NARROW, ("low_1e_3", "noise_1e_4"), "none"),
    (WIDE, ("fp8",), "rescore"),
    (LM, ("noise_1e_2", "low_1e_2"), "none"),
    (FLOW, ("low_1e_4", "noise_1e_5", "low_1e_5"), "none"),
    (NARROW, ("stale", "fp8"), "rescore"),
    (LM, ("fp8",), "token_tis"),
    (LM, ("stale", "fp8"), "sequence_mask"),
    (LM, ("noise_1e_3", "low_1e_3", "noise_1e_4", "low_1e_4", "noise_1e_5", "low_1e_5"), "none"),
    (FLOW, ("stale", "fp8"), "truncated_is"),
]


def conditions() -> list[tuple[str, str, str]]:
    """All (job, engine, correction), the first to train first."""
    every = [(job, off, correction) for jobs, offs, correction in RUNS for off in offs for job in jobs]
    return list(dict.fromkeys(every))


def arguments(job: Job, off: str, correction: str, seed: int, steps: int, folder: Path) -> list[str]:
    """The keys of a run beside its configuration."""
    engine = f"rollout.engine=benchmarks/mismatched.py:{job.engine}_{off}"
    trainer = [f"total_training_steps={steps}", f"test_freq={max(steps, 1)}", f"seed={seed}", f"output_dir={folder}"]
    trainer += ["val_before_train=false", "save_freq=-1", "resume=never", "logger=[]", "log_val_generations=0"]
    if steps == 0:
        trainer.remove("val_before_train=false")
    keys = [*job.keys, engine, f"rollout.correction={correction}", "parallel.fsdp_size=1", f"data.seed={seed}"]
    return [*keys, *(f"trainer.{key}" for key in trainer)]


def train(name: str, off: str, correction: str, seed: int, steps: int) -> Run:
    """Train a run in a copy of this process, which need not import again, and return its result."""
    job, folder = JOBS[name], OUTPUT / f"{name}-{off}-{correction}-{seed}"
    keys = arguments(job, off, correction, seed, steps, folder)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with folder.with_suffix(".log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            run(job, keys)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"learn_mismatch.py: {folder.name} failed; see {folder.with_suffix('.log')}")
    rows = metrics(folder)
    last = [row for row in rows if job.held_out in row][-1]
    result = {"name": f"{off}, {correction}", "job": name, "off": off, "correction": correction, "seed": seed}
    result |= {"steps": steps, "after": {"held_out": round(last[job.held_out], 4)}}
    if steps:
        result["after"]["sampled"] = round(statistics.fmean(row["reward/mean"] for row in rows[-LAST:]), 4)
        for key in ("median", "largest", f"beyond_{job.clip:g}"):
            values = [row[f"mismatch/{key}"] for row in rows if f"mismatch/{key}" in row]
            result[key.partition("_")[0]] = float(f"{statistics.fmean(values):.3g}") if values else None
        result["clipped"] = round(statistics.fmean(row["actor/clipfrac"] for row in rows), 4)
    return result | {"seconds": round(usage.ru_utime + usage.ru_stime, 1)}


def prepare() -> None:
    """Write the held-out prompts, and import and measure once what each copy of this process needs."""
    import torch

    import phalanx.zoo.families.sd3  # noqa: F401
    from phalanx.run import rl  # noqa: F401
    from phalanx.telemetry.flops import peak_flops

    torch.set_num_threads(1)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    lines = (ROOT / "assets/digits/held_out.txt").read_text().splitlines(keepends=True)
    (OUTPUT / "held_out.txt").write_text("".join(lines[:PROMPTS]))
    for job in JOBS.values():  # imports its engine
        load(job.schema, job.config, arguments(job, "exact", "none", 0, 1, OUTPUT))
    peak_flops(torch.device("cpu"), torch.float32)
    gc.freeze()


def run(job: Job, keys: list[str]) -> None:
    """Train in this process, on one rank."""
    from phalanx.run import rl

    rl.build(load(job.schema, job.config, keys)).run()


def read(file: Path) -> dict[str, Any]:
    """The results so far."""
    empty: dict[str, Any] = {"recipes": {}, "base": {}, "runs": []}
    return empty | (json.loads(file.read_text()) if file.is_file() else {})


def write(file: Path, known: dict[str, Any]) -> None:
    """Write the results, a run per line."""
    rows = ",\n".join(json.dumps(run) for run in known["runs"])
    head = f'"recipes": {json.dumps(known["recipes"])},\n"base": {json.dumps(known["base"])}'
    file.write_text(f'{{{head},\n"runs": [\n{rows}\n]}}\n')


# -- tables and figure --------------------------------------------------------------------------------------------

WORDS = {
    "exact": "nothing",
    "bf16": "weights in bfloat16",
    "fp8": "weights in fp8",
    "stale": "weights of a step before",
}
WORDS |= {f"noise_1e_{n}": f"noise of 1e-{n}" for n in range(1, 6)} | {"noise_1e_0": "noise of 1"}
WORDS |= {f"{way}_1e_{n}": f"all 1e-{n} too {way}" for way in ("low", "high") for n in range(6)}
ORDER = [
    "exact",
    *(f"{way}_1e_{n}" for way in ("noise", "low", "high") for n in range(5, -1, -1)),
    "bf16",
    "fp8",
    "stale",
]
CORRECTIONS = ["none", "rescore", "truncated_is", "token_tis", "sequence_mask"]
COLORS = dict(zip(CORRECTIONS, ("#3f51b5", "#00897b", "#ef6c00", "#ef6c00", "#8e24aa"), strict=True))
SHORT = {"fp8": "fp8", "stale": "a step before", "bf16": "bfloat16"}  # in the figure, beside a correction
ROW = 15.0  # height of a row of the figure
INK, GREY, PALE = "#263238", "#78909c", "#eceff1"


def finished(known: dict[str, Any], name: str) -> dict[tuple[str, str], list[Run]]:
    """The runs of a job by correction and engine, in the order of the tables; conditions without all seeds are left
    out.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for correction in CORRECTIONS:
        for off in ORDER:
            runs = [r for r in known["runs"] if (r["job"], r["off"], r["correction"]) == (name, off, correction)]
            if {run["seed"] for run in runs} >= set(SEEDS):
                groups[correction, off] = runs
    return groups


def share(runs: list[Run]) -> str:
    """The share of ratios beyond the clip range before any update, in percent."""
    percent = 100 * statistics.fmean(run["beyond"] for run in runs)
    return f"{percent:.0f} %" if percent == 0 or percent >= 1 else f"{percent:.1g} %"


def table(known: dict[str, Any], name: str) -> list[str]:
    """The rows of a job in Markdown: means over the seeds, with Student's intervals."""
    job, groups = JOBS[name], finished(known, name)
    exact = groups["none", "exact"]
    lines = [
        f"### {job.title}",
        "",
        f"`{job.config}`, `algorithm.clip_ratio={job.clip:g}`, {exact[0]['steps']} steps; before training, {job.unit}: "
        f"{known['base'][name]:.3f}.",
        "",
        f"|off by|`rollout.correction`|held-out {job.unit}|difference|beyond|median|largest|",
        "|---|---|---|---|---|---|---|",
    ]
    for (correction, off), runs in groups.items():
        apart = "" if runs is exact else str(difference(runs, exact, "held_out"))
        sizes = [f"{statistics.fmean(run[key] for run in runs):.1e}" for key in ("median", "largest")]
        cells = [WORDS[off], f"`{correction}`", with_interval([run["after"]["held_out"] for run in runs]), apart]
        lines.append(f"|{'|'.join([*cells, share(runs), *sizes])}|".replace(" ± ", "±"))
    return [*lines, ""]


def text(x: float, y: float, words: str, size: int = 11, color: str = INK, anchor: str = "start") -> str:
    """A line of the figure."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{words}</text>'


def panel(known: dict[str, Any], name: str, left: float) -> list[str]:
    """A job's part of the figure: a row per condition, with the mean of its seeds and Student's interval."""
    job, top = JOBS[name], 52.0
    rows = []
    for (correction, off), runs in finished(known, name).items():
        values = np.array([run["after"]["held_out"] for run in runs])
        rows.append((correction, off, share(runs), float(values.mean()), t_half_width(values) or 0.0))
    base = known["base"][name]
    low = min(base, *(mean - half for *_, mean, half in rows))
    high = max(mean + half for *_, mean, half in rows)

    def x(value: float) -> float:
        return left + 136 + 90 * (value - low) / (high - low)

    bottom = top + ROW * len(rows)
    parts = [text(left, 20, job.title, 12), text(left + 181, 38, job.unit, 9, GREY, "middle")]
    parts += [text(left, 38, "engine off by", 9, GREY), text(left + 264, 38, "beyond", 9, GREY, "end")]
    (_, _, _, mean, half), *_ = rows  # an exact engine
    parts.append(f'<rect x="{x(mean - half):.1f}" y="{top - 10:.1f}" width="{x(mean + half) - x(mean - half):.1f}" '
                 f'height="{bottom - top:.1f}" fill="{PALE}"/>')  # fmt: skip
    parts.append(f'<path d="M{x(base):.1f} {top - 10:.1f} V{bottom - 10:.1f}" stroke="{GREY}" stroke-dasharray="2 2"/>')
    for number, (correction, off, beyond, mean, half) in enumerate(rows):
        y, color = top + ROW * number, COLORS[correction]
        words = WORDS[off] if correction == "none" else f"{SHORT[off]}, {correction}"
        parts.append(text(left, y + 3, words, 9, color if correction != "none" else INK))
        parts.append(f'<path d="M{x(mean - half):.1f} {y:.1f} H{x(mean + half):.1f}" stroke="{color}"/>')
        parts.append(f'<circle cx="{x(mean):.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        parts.append(text(left + 264, y + 3, beyond, 9, GREY, "end"))
    for value in (base, rows[0][3]):
        parts.append(text(x(value), bottom + 4, f"{value:.2f}", 9, GREY, "middle"))
    return parts


def figure(known: dict[str, Any]) -> str:
    """The figure, as SVG: a panel per job."""
    names = [name for name in JOBS if len(finished(known, name)) > 1]
    parts = [line for number, name in enumerate(names) for line in panel(known, name, 12 + 280.0 * number)]
    height = 64 + ROW * max(len(finished(known, name)) for name in names)
    size = f'width="{280 * len(names) + 10}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def tables(known: dict[str, Any]) -> list[str]:
    """The tables of all jobs."""
    return [line for name in JOBS if finished(known, name) for line in table(known, name)]


def show(known: dict[str, Any]) -> None:
    """Write the tables and the figure of the conditions that have all seeds."""
    insert(PAGE, "mismatch", tables(known))
    FIGURE.write_text(figure(known))


def main() -> None:
    """Train the runs that are missing, and write the tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="*", help="conditions such as text,fp8,none (all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-training", action="store_true", help="use only runs that have results")
    args = parser.parse_args()
    os.chdir(ROOT)
    known = read(args.results)
    recipes = {name: [*job.keys, f"{args.steps} steps"] for name, job in JOBS.items()}
    for name, before in known["recipes"].items():
        if before != recipes[name]:
            sys.exit(f"learn_mismatch.py: {args.results} has runs of another recipe of {name}; remove it")
    known["recipes"] = recipes
    if not args.no_training:
        prepare()
        for name in JOBS:
            if name not in known["base"]:
                known["base"][name] = train(name, "exact", "none", 0, 0)["after"]["held_out"]
                write(args.results, known)
        done = {(run["job"], run["off"], run["correction"], run["seed"]) for run in known["runs"]}
        for condition in conditions():
            for seed in args.seeds:
                if (*condition, seed) in done or (args.only and ",".join(condition) not in args.only):
                    continue
                known["runs"].append(train(*condition, seed, args.steps))
                print(known["runs"][-1], flush=True)
                write(args.results, known)
            if args.results == RESULTS:
                show(known)
    if args.results == RESULTS:
        show(known)


if __name__ == "__main__":
    main()
