"""Make the products of configs/grpo/products_smollm2_135m.yaml: chats that show one call of the calculator and ask for
another one. No two numbers whose product is asked for in one file are asked for in the other.

python3 assets/make/make_products.py output_dir=data/products
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.load import arg
from phalanx.run.cli import parse, run

SHOWN = (205, 318)


@dataclass
class ProductsConfig:
    """Keys of the task."""

    output_dir: str = arg("data/products", "gets train.jsonl and test.jsonl")
    train: int = arg(256, "questions to train on", ge=1, le=100_000)
    test: int = arg(128, "questions held out", ge=1, le=100_000)
    seed: int = arg(0, "seed of the numbers", ge=0)


def example(a: int, b: int) -> list[dict[str, str]]:
    """A question, the call, the answer of the tool, and that of the model."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a} * {b}"}})
    return [
        {"role": "user", "content": f"What is {a} * {b}?"},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def build(cfg: ProductsConfig) -> Callable[[], None]:
    def job() -> None:
        rng = random.Random(cfg.seed)
        pairs = {frozenset(SHOWN)}
        chat = [{"role": "system", "content": "Use the calculator."}, *example(*SHOWN)]
        rows: list[str] = []
        while len(rows) < cfg.train + cfg.test:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            if frozenset((a, b)) not in pairs:
                pairs.add(frozenset((a, b)))
                question = {"role": "user", "content": f"What is {a} * {b}?"}
                rows.append(json.dumps({"prompt": [*chat, question], "ground_truth": str(a * b)}) + "\n")
        folder = Path(cfg.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.jsonl").write_text("".join(rows[: cfg.train]))
        (folder / "test.jsonl").write_text("".join(rows[cfg.train :]))

    return job


if __name__ == "__main__":
    run(build, parse(ProductsConfig, __doc__ or ""))
