"""Does a student learn from several teachers what each of them knows? Measured over several seeds.

    python benchmarks/learn_teachers.py
    python benchmarks/learn_teachers.py "two teachers" --seeds 0 --no-docs

The problems of the language-model quickstart are split into two tasks: problems with a product, and problems with only
sums and differences. A teacher is trained on the rows of each task, for as many steps as a student. As learn_lm.py,
with the recipes of learn_teachers.yaml; the table goes to docs/algorithms.md.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from learning import ROOT, Rows, Subject, main, metrics, teacher, untrained

CONFIG = "configs/grpo/quickstart.yaml"
TEST = "val/test/reward/gsm8k"
TASKS = ("sums", "products")
STEPS = 40


def kind(question: str) -> str:
    """The task of a problem."""
    return "products" if " boxes with " in question or " a day for " in question else "sums"


def rows_of(output: Path, *tasks: str) -> Path:
    """Write a file with the training problems of these tasks and a column `task`."""
    file = output / f"{'_'.join(tasks)}.jsonl"
    lines = []
    for line in (ROOT / "assets/words/train.jsonl").read_text().splitlines():
        row = json.loads(line)
        row["task"] = kind(row["question"])
        if row["task"] in tasks:
            lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))
    return file


def taught(output: Path, name: str) -> Path:
    """The teacher of a task."""
    keys = [f"data.train_files=[{rows_of(output, name)}]", f"trainer.total_training_steps={STEPS}"]
    keys += [f"trainer.test_freq={STEPS}", f"trainer.save_freq={STEPS}"]
    return teacher(SUBJECT, output, f"teacher_{name}", keys)


def base(output: Path) -> dict[str, float]:
    """Scores of the base model, from a run without training steps."""
    folder = untrained("train_grpo", output, CONFIG, "trainer.log_val_generations=1000")
    return after(folder, metrics(folder))


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run at its end."""
    index = sorted(folder.glob("samples/test/step_*/index.jsonl"))[-1]
    records = [json.loads(line) for line in index.read_text().splitlines()]
    scores: dict[str, list[float]] = {name: [] for name in TASKS}
    for record in records:
        scores[kind(record["prompt"])].append(record["scores"]["gsm8k"])
    return {"test": mean([*scores["sums"], *scores["products"]])} | {name: mean(scores[name]) for name in TASKS}


def mean(values: Sequence[float]) -> float:
    """The mean, rounded for the tables."""
    return round(statistics.fmean(values), 4)


SUBJECT = Subject(
    name="learn_teachers",
    task="train_grpo",
    config=CONFIG,
    fixed=["data.train_files=[{tasks}]", "trainer.val_before_train=false"],
    page="algorithms.md",
    mark="teachers",
    validation=TEST,
    scale="right answers to test.jsonl",
    noun="samples",
    samples=128,  # of every recipe
    steps=STEPS,
    test_freq=STEPS,
    spreads={"test": "test", "sums": "sums", "products": "products"},
    base=base,
    after=after,
    compared=("test", "sums", "products"),
    seeds=("trainer.seed", "data.seed"),
    paths={
        "tasks": lambda output: rows_of(output, *TASKS),
        "sums": lambda output: taught(output, "sums"),
        "products": lambda output: taught(output, "products"),
    },
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
