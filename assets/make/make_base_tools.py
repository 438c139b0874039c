"""Make the tiny language model of the quickstart with tools, and its word problems.

python3 assets/make/make_base_tools.py output_dir=outputs/base_tools
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.load import arg
from phalanx.run.cli import parse, run

sys.path.insert(0, str(Path(__file__).parents[2]))  # for assets.make, where a launcher runs this file


@dataclass
class BaseToolsConfig:
    """Keys of the task."""

    base: str = arg("assets/words/base", "the language model to go on from", path=True)
    output_dir: str = arg("outputs/base_tools", "gets train.jsonl, val.jsonl, test.jsonl and base/")
    steps: int = arg(500, "training steps", ge=1)
    batch_size: int = arg(32, "transcripts per step", ge=1)
    lr: float = arg(3e-3, "learning rate", gt=0)
    seed: int = arg(0, "seed of the data and of what is trained", ge=0)


def build(cfg: BaseToolsConfig) -> Callable[[], None]:
    from assets.make import calculator

    folder = Path(cfg.output_dir)

    def job() -> None:
        calculator.write_data(folder)
        sizes = {"steps": cfg.steps, "batch_size": cfg.batch_size, "seed": cfg.seed}
        calculator.finetune(Path(cfg.base), folder / "base", lr=cfg.lr, **sizes)

    return job


if __name__ == "__main__":
    run(build, parse(BaseToolsConfig, __doc__ or ""))
