"""Does the gradient of the reward help? Algorithms with and without it, with the same number of images, over several
seeds.

    python benchmarks/learn_gradient.py
    python benchmarks/learn_gradient.py draft --seeds 0 --no-docs

As learn.py, with the recipes of learn_gradient.yaml and a differentiable reward: the share of red in an image's light.
The table goes to docs/algorithms.md.
"""

from pathlib import Path

from learning import Rows, Subject, main, metrics, untrained

CONFIG = "configs/flowgrpo/quickstart.yaml"
FIXED = [
    "reward.functions=[{path: benchmarks/redness.py:redness}]",
    "optim.lr_scheduler=constant",
    "actor.ema.decay=null",
]
HELD_OUT = "val/held_out/reward/redness"


def base(output: Path) -> dict[str, float]:
    """Scores of the base model, from a run without training steps."""
    folder = untrained("train_flowgrpo", output, CONFIG, *FIXED)
    return after(folder, metrics(folder))


def after(folder: Path, rows: Rows) -> dict[str, float]:
    """Scores of a run at its end."""
    return {"redness": [row[HELD_OUT] for row in rows if HELD_OUT in row][-1]}


SUBJECT = Subject(
    name="learn_gradient",
    task="train_flowgrpo",
    config=CONFIG,
    fixed=FIXED,
    page="algorithms.md",
    mark="gradient",
    validation=HELD_OUT,
    scale="redness of held-out prompts",
    noun="images",
    samples=96,  # of every recipe
    steps=10,
    test_freq=10,
    spreads={"redness": "redness"},
    base=base,
    after=after,
    seeds=("trainer.seed", "data.seed"),
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
