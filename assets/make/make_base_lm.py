"""Make the tiny language model of the quickstart, and its word problems.

python3 assets/make/make_base_lm.py output_dir=outputs/base_lm
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.load import arg
from phalanx.run.cli import parse, run

sys.path.insert(0, str(Path(__file__).parents[2]))  # for assets.make, where a launcher runs this file


@dataclass
class BaseLMConfig:
    """Keys of the task."""

    output_dir: str = arg("outputs/base_lm", "gets train.jsonl, val.jsonl, test.jsonl and base/")
    steps: int = arg(225, "training steps; 0: write solutions.jsonl alone, see make base-bd", ge=0)
    batch_size: int = arg(48, "rows per step, half of them word problems and half bare arithmetic", ge=2)
    lr: float = arg(4e-3, "learning rate", gt=0)
    seed: int = arg(0, "seed of the data and of the weights", ge=0)


def build(cfg: BaseLMConfig) -> Callable[[], None]:
    from assets.make import tiny_lm, words

    folder = Path(cfg.output_dir)

    def job() -> None:
        if cfg.steps == 0:
            words.write_solutions(folder / "solutions.jsonl", cfg.seed)
            return
        words.write_data(folder)
        sizes = {"steps": cfg.steps, "batch_size": cfg.batch_size, "seed": cfg.seed}
        tiny_lm.pretrain(folder / "base", lr=cfg.lr, **sizes)

    return job


if __name__ == "__main__":
    run(build, parse(BaseLMConfig, __doc__ or ""))
