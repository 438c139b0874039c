"""Compare the log-probabilities of a job's sampler and trainer before any update, under the job's and other settings.

sh train.sh tasks/check_numerics.py config=configs/grpo/quickstart.yaml 'variants={bf16: [model.dtype=bfloat16]}'
"""

from collections.abc import Callable

from phalanx.config.tasks import CheckNumericsConfig
from phalanx.run.cli import parse, run


def build(cfg: CheckNumericsConfig) -> Callable[[], None]:
    from phalanx.tools.numerics import NumericsCheck

    return NumericsCheck(cfg).run


if __name__ == "__main__":
    run(build, parse(CheckNumericsConfig, __doc__ or ""))
