"""Training steps under each schedule, with phases of emulated durations: seconds, idle shares, and a timeline of the
roles.

    python benchmarks/roles.py                       # a rollout of 3 s and an update of 2 s, each on a separate rank
    python benchmarks/roles.py --rollout 1.5 --actor 1 --steps 6 --no-docs

Everything except the durations is real: the quickstart's language model on two ranks, its rewards, and the transfer of
its weights. When all ranks do both, each phase has twice as many ranks and takes half as long. The table goes to
docs/measurements.md, and the picture to docs/images/roles.png.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from alone import QUIET, ROOT
from learning import insert, metrics

CONFIG = "configs/grpo/quickstart.yaml"
APART = "placement={rollout: 0, actor: 1}"
SCHEDULES = {
    "all ranks do both": [],
    "synchronous": [APART],
    "pipelined": [APART, "rollout.schedule=pipelined", "rollout.parts=8", "actor.ppo_micro_batch_size_per_gpu=16"],
    "one step off": [APART, "rollout.schedule=one_step_off"],
}
COLORS = {"rollout": "#4477aa", "update": "#cc6677", "sync": "#ddcc77", "reward": "#44aa99"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout", type=float, default=3.0, help="seconds of a step's rollout on one rank (3)")
    parser.add_argument("--actor", type=float, default=2.0, help="seconds of a step's update on one rank (2)")
    parser.add_argument("--steps", type=int, default=8, help="training steps of each schedule, at least 4 (8)")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "roles")
    parser.add_argument("--no-docs", action="store_true", help="print the table, write nothing below docs/")
    args = parser.parse_args()
    lines = ["| schedule | s per step | rollout idle | actor idle | samples are older by |", "|---|---|---|---|---|"]
    spans = {}
    for name, keys in SCHEDULES.items():
        folder = args.output / name.replace(" ", "_")
        rows, spans[name] = measured(folder, keys, args)
        lines.append(f"| {name} | {' | '.join(cells(rows, spans[name]))} |")
    print("\n".join(lines))
    if not args.no_docs:
        picture(spans, ROOT / "docs" / "images" / "roles.png")
        insert(ROOT / "docs" / "measurements.md", "roles", lines)


def measured(
    folder: Path, keys: list[str], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a run and the phases of its ranks."""
    trainer = [*QUIET, f"total_training_steps={args.steps}", f"output_dir={folder}"]
    command = ["sh", "train.sh", "benchmarks/emulated.py", CONFIG, *keys, *(f"trainer.{key}" for key in trainer)]
    environment = {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1", "EMULATE": f"{args.rollout},{args.actor}"}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"roles.py: {' '.join(command)}\nended with {done.returncode}; see {folder / 'log'}")
    phases = [json.loads(line) for file in sorted(folder.glob("phases_*")) for line in file.read_text().splitlines()]
    return [row for row in metrics(folder) if row["step"] > 0], phases


def steady(phases: list[dict[str, Any]]) -> tuple[float, float]:
    """From the end of the second step's update to that of the last but one: no rollout overlaps the last update."""
    ends = updates(phases)
    return ends[1], ends[-2]


def updates(phases: list[dict[str, Any]]) -> list[float]:
    """When the updates of each step ended, on the first training rank."""
    mine = [p for p in phases if p["phase"] == "update" and p["role"] == "actor"]
    steps: list[float] = []
    for before, after in zip(mine, [*mine[1:], None], strict=True):
        apart = after is None or any(
            before["end"] <= p["start"] < after["start"]
            for p in phases
            if p["phase"] in ("sync", "rollout") and p["role"] == "actor"
        )
        if apart:
            steps.append(before["end"])
    return steps


def cells(rows: list[dict[str, Any]], phases: list[dict[str, Any]]) -> list[str]:
    """The cells of a line of the table."""
    ends = updates(phases)
    step = statistics.median(b - a for a, b in pairwise(ends[1:-1]))
    begin, end = steady(phases)
    idle = []
    for role in ("rollout", "actor"):
        waits = [p for p in phases if p["role"] == role and p["phase"] in ("idle", "wait")]
        inside = sum(max(min(p["end"], end) - max(p["start"], begin), 0) for p in waits)
        idle.append(f"{inside / (end - begin):.0%}" if any(p["role"] == "rollout" for p in phases) else "-")
    age = rows[-1].get("rollout/staleness_max", 0)
    return [f"{step:.2f}", *idle, "1 step" if age else "0"]


def picture(spans: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """The steady part of each schedule, a line a role."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(len(spans), 1, figsize=(9, 5.2), sharex=True)
    for axis, (name, phases) in zip(axes, spans.items(), strict=True):
        begin, _ = steady(phases)
        roles = sorted({p["role"] for p in phases}, reverse=True)
        for line, role in enumerate(reversed(roles)):
            for p in (p for p in phases if p["role"] == role and p["phase"] in COLORS):
                axis.barh(line, p["end"] - p["start"], left=p["start"] - begin, color=COLORS[p["phase"]], height=0.8)
        axis.set_yticks(range(len(roles)), list(reversed(roles)) if len(roles) > 1 else ["both"])
        axis.set_xlim(0, 12)
        axis.set_title(name, loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("seconds")
    handles = [Patch(color=color, label=phase) for phase, color in COLORS.items()]
    figure.legend(handles=handles, loc="upper right", ncol=len(COLORS), frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
