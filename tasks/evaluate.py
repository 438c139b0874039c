"""Evaluate a checkpoint or a model folder: rewards with intervals, alone or against a baseline.

sh train.sh tasks/evaluate.py checkpoint=outputs/phalanx/quickstart_lm n=4 rollout.val.temperature=1
"""

from collections.abc import Callable

from phalanx.config.tasks import EvaluateConfig
from phalanx.run.cli import parse, run


def build(cfg: EvaluateConfig) -> Callable[[], None]:
    from phalanx.tools.evaluate import Evaluation

    return Evaluation(cfg).run


if __name__ == "__main__":
    run(build, parse(EvaluateConfig, __doc__ or ""))
