"""Does a model learn from itself, with a hint or another response in its prompt, what it learns from rewards?

    python benchmarks/learn_self.py
    python benchmarks/learn_self.py sdft --seeds 0 --no-docs

As learn_lm.py, with the recipes of learn_self.yaml from the model of the supervised stage of docs/recipe.md, which is
trained here first. Accuracies are of one answer to each problem of test.jsonl at temperature 1.
"""

import statistics
from pathlib import Path

from learning import Rows, Subject, main, metrics, task, untrained

CONFIG = "configs/recipe/grpo.yaml"
TEST = "val/test/reward/gsm8k"
LAST = 5  # final steps, over which the rewards of samples are averaged
FIXED = ["model.path={sft}", "data.train_files=[{problems}]", "data.val_files=[assets/calculator/test.jsonl]",
         "rollout.val.temperature=1", "reward.functions=[{name: gsm8k}]"]  # fmt: skip


def problems(output: Path) -> Path:
    """The problems with hints, and beside them the conversations and the model that the first stage begins with."""
    folder = output / "recipe"
    if not (folder / "base").is_dir():
        task("../assets/make/make_recipe", [f"output_dir={folder}"], output / "recipe.log")
    return folder / "train.jsonl"


def sft(output: Path) -> Path:
    """The model after the recipe's supervised stage."""
    folder = problems(output).parent
    if not (folder / "model").is_dir():
        files = [f"model.path={folder}/base", f"data.train_files=[{folder}/conversations.jsonl]", "trainer.logger=[]"]
        task("train_sft", ["configs/recipe/sft.yaml", *files, f"trainer.output_dir={folder}/sft"], output / "sft.log")
        export = [f"checkpoint={folder}/sft", f"output_dir={folder}/model"]
        task("export_checkpoint", export, output / "export.log")
    return folder / "model"


def base(output: Path) -> dict[str, float]:
    """Scores of the model that all recipes begin with, from a run without training steps."""
    keys = [key.format(sft=sft(output), problems=problems(output), name="{name") for key in FIXED[:4]]
    return {"test": metrics(untrained("train_grpo", output, CONFIG, *keys))[-1][TEST]}


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run at its end."""
    steps = [row for row in rows if row["step"] > 0]
    sampled = statistics.fmean(row["reward/mean"] for row in steps[-LAST:])
    return {"test": [row[TEST] for row in rows if TEST in row][-1], "sampled": sampled}


SUBJECT = Subject(
    name="learn_self",
    task="train_grpo",
    config=CONFIG,
    fixed=FIXED,
    page="algorithms.md",
    picture="",
    mark="learning from itself",
    validation=TEST,
    scale="right answers to test.jsonl",
    noun="samples",
    samples=64,  # of every recipe
    steps=30,
    test_freq=10,
    target=0.7,
    spreads={"test": "test", "sampled": "last"},
    base=base,
    after=after,
    paths={"sft": sft, "problems": problems},
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
