"""Make what the recipe from a base to a policy begins with: a language model, conversations, and problems with hints.

python3 assets/make/make_recipe.py output_dir=outputs/recipe
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.load import arg
from phalanx.run.cli import parse, run

sys.path.insert(0, str(Path(__file__).parents[2]))  # for assets.make, where a launcher runs this file


@dataclass
class RecipeConfig:
    """Keys of the task."""

    base: str = arg("assets/words/base", "the language model to go on from, which has seen no tools", path=True)
    problems: str = arg("assets/calculator/train.jsonl", "the problems to give hints to", path=True)
    output_dir: str = arg("outputs/recipe", "gets base/, conversations.jsonl and train.jsonl")
    conversations: int = arg(200, "conversations, half of which say in the question what to calculate", ge=2)
    seed: int = arg(0, "seed of the conversations, and of new tokens' embeddings", ge=0)


def build(cfg: RecipeConfig) -> Callable[[], None]:
    from assets.make import calculator

    folder = Path(cfg.output_dir)

    def job() -> None:
        calculator.write_conversations(folder / "conversations.jsonl", cfg.conversations, cfg.seed)
        calculator.write_hints(Path(cfg.problems), folder / "train.jsonl")
        calculator.with_tools(Path(cfg.base), folder / "base", cfg.seed)

    return job


if __name__ == "__main__":
    run(build, parse(RecipeConfig, __doc__ or ""))
