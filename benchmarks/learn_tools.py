"""Does a model learn to call a tool, and to call it twice if the second call needs the answer to the first?

    make learn-tools
    python benchmarks/learn_tools.py grpo --seeds 0 --steps 20

As learn_lm.py, with the recipes of learn_tools.yaml on the task of the quickstart with tools. The table has the greedy
answers to test.jsonl and the rewards of the training samples, because greedy decoding changes abruptly when a call
becomes likelier than a guess. The page is docs/environments.md.
"""

import statistics
from pathlib import Path

from learning import Rows, Subject, main, metrics, untrained

CONFIG = "configs/grpo/quickstart_tools.yaml"
TEST = "val/test/reward/gsm8k"
LAST = 5  # final steps, over which the rewards of samples are averaged


def base(output: Path) -> dict[str, float]:
    """Scores of the base model, from a run without training steps."""
    return {"test": metrics(untrained("train_grpo", output, CONFIG))[-1][TEST]}


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run at its end."""
    steps = [row for row in rows if row["step"] > 0]
    means = {"first": steps[0]["reward/mean"]}
    for key, name in {"sampled": "reward/mean", "calls": "tools/call_frequency"}.items():
        means[key] = statistics.fmean(row[name] for row in steps[-LAST:])
    return means | {"test": [row[TEST] for row in rows if TEST in row][-1]}


SUBJECT = Subject(
    name="learn_tools",
    task="train_grpo",
    config=CONFIG,
    fixed=[],
    page="environments.md",
    picture="",  # greedy answers change within a few steps
    mark="learning",
    validation=TEST,
    scale="right answers to test.jsonl",
    noun="samples",
    samples=64,  # of every recipe
    steps=60,
    test_freq=20,
    target=0.8,
    board=True,
    spreads={"test": "test, greedy", "first": "first", "sampled": "last"},
    means={"calls": "calls per sample"},
    base=base,
    after=after,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
