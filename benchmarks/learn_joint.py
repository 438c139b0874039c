"""Which policies of a joint run should be trained? The quickstart with both, either or alternating, over several seeds.

    python benchmarks/learn_joint.py
    python benchmarks/learn_joint.py both writer --seeds 0 --steps 20 --no-docs

As learn.py, with the recipes of learn_joint.yaml. The table has rewards on test.jsonl: of pictures painted from the
writer's texts, and from texts that it wrote for another problem (`swapped`), the reward of a painter that ignores its
prompt. The table goes to docs/joint.md.
"""

from pathlib import Path

from learning import Rows, Subject, main, metrics, untrained

CONFIG = "configs/joint/quickstart.yaml"
VALIDATION = "val/test_{}/reward/mean"


def base(output: Path) -> dict[str, float]:
    """Scores of both base models, from a run without training steps."""
    folder = untrained("train_joint", output, CONFIG)
    return after(folder, metrics(folder))


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run at its end."""
    last = [row for row in rows if VALIDATION.format("swapped") in row][-1]
    scores = {kind: last[VALIDATION.format(kind)] for kind in ("rewritten", "swapped")}
    return scores | {"difference": scores["rewritten"] - scores["swapped"]}


SUBJECT = Subject(
    name="learn_joint",
    task="train_joint",
    config=CONFIG,
    fixed=["trainer.val_before_train=false"],  # it would be the same for all runs: the row of the base models
    page="joint.md",
    mark="learning",
    validation=VALIDATION.format("rewritten"),
    scale="reward of pictures of the writer's texts",
    noun="pictures",
    samples=256,  # of every recipe
    steps=20,
    test_freq=20,
    spreads={"rewritten": "rewritten", "swapped": "swapped", "difference": "rewritten - swapped"},
    base=base,
    after=after,
    compared=("rewritten", "difference"),
    seeds=("trainer.seed", "data.seed"),
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
