"""Does a LoRA learn on a 4-bit base model? Measured on the task of the flow quickstart, over several seeds.

    python benchmarks/learn_nf4.py
    python benchmarks/learn_nf4.py "lora, nf4" --seeds 0 --no-docs

As learn.py, with the recipes of learn_nf4.yaml; the table goes to docs/models.md. Quantization changes the base model,
so the table has the held-out reward before and after training, and the gain.
"""

from pathlib import Path

from learning import Rows, Subject, main

VALIDATION = "val/held_out/reward/mean"


def base(output: Path) -> dict[str, float]:
    """Return nothing: each recipe has a different base model."""
    return {}


def after(folder: Path, rows: Rows, validation: str = VALIDATION) -> dict[str, float]:
    """Scores of a run: its first and its last validation, and the difference."""
    rewards = [row[validation] for row in rows if validation in row]
    return {"before": rewards[0], "after": rewards[-1], "gain": rewards[-1] - rewards[0]}


SUBJECT = Subject(
    name="learn_nf4",
    task="train_flowgrpo",
    config="configs/flowgrpo/quickstart_lora.yaml",
    fixed=[],
    page="models.md",
    mark="nf4 flow",
    validation=VALIDATION,
    scale="OCR of held-out numbers",
    noun="images",
    samples=192,  # of every recipe
    steps=20,
    test_freq=20,
    spreads={"before": "before", "after": "after", "gain": "gain"},
    base=base,
    after=after,
    compared=("after", "gain"),
    seeds=("trainer.seed", "data.seed"),
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
