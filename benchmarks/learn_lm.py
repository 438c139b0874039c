"""Does each token-level algorithm learn? Measured on the quickstart's task, with the same number of samples, over
several seeds.

    make learn-lm
    python benchmarks/learn_lm.py grpo cispo --seeds 0 --steps 40

Each recipe of learn_lm.yaml is trained on one CPU process, `--jobs` of them concurrently. Training validates greedy
answers to val.jsonl, on which options are chosen, and to test.jsonl, which is reported. Finished runs are not repeated.
The teacher of a recipe is the quickstart's model, which is trained first. The table is printed; that of
docs/language-models.md and its curves are of the leaderboard's rows (board.py).
"""

from pathlib import Path

from learning import Rows, Subject, main, metrics, untrained

CONFIG = "configs/grpo/quickstart.yaml"
VAL, TEST = "val/val/reward/gsm8k", "val/test/reward/gsm8k"


def base(output: Path, config: str = CONFIG) -> dict[str, float]:
    """Scores of the base model, from a run without training steps."""
    return validated(metrics(untrained("train_grpo", output, config, *BOTH)))


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run at its end."""
    return validated(rows)


def validated(rows: Rows) -> dict[str, float]:
    """Shares of correct answers in the last validation."""
    last = [row for row in rows if TEST in row][-1]
    return {"test": last[TEST], "val": last[VAL]}


BOTH = ["data.val_files=[assets/words/val.jsonl,assets/words/test.jsonl]"]
SUBJECT = Subject(
    name="learn_lm",
    task="train_grpo",
    config=CONFIG,
    fixed=BOTH,
    page="language-models.md",
    picture="learning_lm.png",
    mark="learning",
    validation=TEST,
    scale="right answers to test.jsonl",
    noun="samples",
    samples=128,  # of every recipe
    steps=120,
    test_freq=10,
    target=0.8,
    board=True,
    spreads={"test": "test", "val": "val"},
    base=base,
    after=after,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
