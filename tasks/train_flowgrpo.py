"""Train a flow-matching text-to-image model with FlowGRPO (or another algorithm of phalanx.algorithms).

sh train.sh tasks/train_flowgrpo.py configs/flowgrpo/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.schema import TrainConfig


def build(cfg: TrainConfig) -> Callable[[], None]:
    from phalanx.trainer import Trainer

    return Trainer(cfg).run


def plan(cfg: TrainConfig, words: dict[str, str]) -> str:
    from phalanx.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(TrainConfig, __doc__ or "", plan=plan))
