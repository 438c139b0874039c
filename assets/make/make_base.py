"""Make parts of the tiny base: pictures of numbers, an untrained model folder, its trained VAE.

    sh train.sh assets/make/make_base.py output_dir=outputs/base

The transformer is then trained by tasks/train_flow_matching.py; `make base` does it all.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.load import arg
from phalanx.run.cli import parse, rank, run

sys.path.insert(0, str(Path(__file__).parents[2]))  # for assets.make, where a launcher runs this file


@dataclass
class BaseConfig:
    """Keys of the task."""

    output_dir: str = arg("outputs/base", "gets train.txt, held_out.txt, images/ and model/")
    images: int = arg(20000, "rendered pictures", ge=1)
    vae_steps: int = arg(1500, "training steps of the VAE", ge=1)
    batch_size: int = arg(32, "pictures per step of the VAE, across all ranks", ge=1)
    seed: int = arg(0, "seed of the pictures and of the weights")


def build(cfg: BaseConfig) -> Callable[[], None]:
    from assets.make import digits
    from assets.make.vae import train_vae

    folder = Path(cfg.output_dir)
    if rank() == 0:
        digits.write_data(folder, cfg.images, cfg.seed)
        digits.write_untrained_model(folder / "model", cfg.seed)

    def job() -> None:
        sizes = {"steps": cfg.vae_steps, "batch_size": cfg.batch_size, "seed": cfg.seed}
        train_vae(folder / "model", folder / "images", digits.HEIGHT, digits.WIDTH, **sizes)

    return job


if __name__ == "__main__":
    run(build, parse(BaseConfig, __doc__ or ""))
