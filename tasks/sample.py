"""Sample images, and a grid of them, from a diffusers model folder or a run's checkpoint.

sh train.sh tasks/sample.py checkpoint=outputs/phalanx/quickstart prompt_file=assets/digits/held_out.txt n=2
"""

from collections.abc import Callable

from phalanx.config.tasks import SampleConfig
from phalanx.run.cli import parse, run


def build(cfg: SampleConfig) -> Callable[[], None]:
    from phalanx.tools.sample import Generator

    return Generator(cfg).run


if __name__ == "__main__":
    run(build, parse(SampleConfig, __doc__ or ""))
