"""Make the tiny vision-language model of the quickstart, and its pictures of numbers.

python3 assets/make/make_base_vl.py output_dir=outputs/base_vl
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.load import arg
from phalanx.run.cli import parse, run

sys.path.insert(0, str(Path(__file__).parents[2]))  # for assets.make, where a launcher runs this file


@dataclass
class BaseVLConfig:
    """Keys of the task."""

    output_dir: str = arg("outputs/base_vl", "gets train.parquet, val.parquet, test.parquet and base/")
    steps: int = arg(500, "training steps until it reads", ge=1)
    backwards_steps: int = arg(80, "training steps in which it comes to say numbers backwards", ge=0)
    batch_size: int = arg(48, "pictures per step", ge=1)
    lr: float = arg(3e-3, "learning rate", gt=0)
    seed: int = arg(0, "seed of the data and of what is trained", ge=0)


def build(cfg: BaseVLConfig) -> Callable[[], None]:
    from assets.make import reading

    folder = Path(cfg.output_dir)

    def job() -> None:
        reading.write_data(folder)
        sizes = {"steps": cfg.steps, "backwards_steps": cfg.backwards_steps, "batch_size": cfg.batch_size}
        reading.pretrain(folder / "base", lr=cfg.lr, seed=cfg.seed, **sizes)

    return job


if __name__ == "__main__":
    run(build, parse(BaseVLConfig, __doc__ or ""))
