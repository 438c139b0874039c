"""Which policies of a joint run should be trained? The quickstart with both, either or in turns, over several seeds.

    python benchmarks/learn_joint.py --seeds 0 1 2
    python benchmarks/learn_joint.py --trained both writer --seeds 0 --steps 20

Every run has equally many steps, samples and updates of what it trains, on one CPU process; `neither` is the validation
before the first step. Printed is a Markdown table of rewards of test.jsonl: of pictures of the writer's texts, and of
texts that it wrote for another problem (`swapped`), which is what a painter scores that ignores its prompt.
"""

import argparse
import statistics
from pathlib import Path

from learning import metrics, task

CONFIG = "configs/joint/quickstart.yaml"
TRAINED = {
    "both": ["train=[writer,painter]"],
    "writer": ["train=[writer]"],
    "painter": ["train=[painter]"],
    "in turns": ["train=[writer,painter]", "alternate=5"],
}
KINDS = ("rewritten", "swapped")


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", nargs="+", choices=tuple(TRAINED), default=list(TRAINED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("outputs/learn_joint"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    print("| trained | rewritten | swapped | difference | CPU seconds |\n|---|---|---|---|---|")
    for name in args.trained:
        ends, starts, seconds = [], [], []
        for seed in args.seeds:
            folder = args.output / f"{name.replace(' ', '_')}_{seed}"
            keys = [f"total_training_steps={args.steps}", f"seed={seed}", f"output_dir={folder}", "resume=never"]
            keys += ["save_freq=-1", "logger=[]"]
            overrides = [*TRAINED[name], f"data.seed={seed}", *(f"trainer.{key}" for key in keys)]
            seconds.append(task("train_joint", [CONFIG, *overrides], folder.with_suffix(".log")))
            rows = [row for row in metrics(folder) if "val/test_swapped/reward/mean" in row]
            starts.append([rows[0][f"val/test_{kind}/reward/mean"] for kind in KINDS])
            ends.append([rows[-1][f"val/test_{kind}/reward/mean"] for kind in KINDS])
        if name == args.trained[0]:
            print(line("neither", starts, [0.0]))
        print(line(name, ends, seconds), flush=True)


def line(name: str, scores: list[list[float]], seconds: list[float]) -> str:
    """A row of the table: means over the seeds, with the smallest and the largest."""
    columns = list(zip(*scores, strict=True))
    columns.append(tuple(rewritten - swapped for rewritten, swapped in scores))
    cells = [f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in columns]
    return f"| {name} | {' | '.join(cells)} | {statistics.fmean(seconds):.0f} |"


if __name__ == "__main__":
    main()
