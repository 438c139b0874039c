"""Train a flow-matching text-to-image model with FlowGRPO or another algorithm of phalanx.algorithms.

sh train.sh tasks/train_flowgrpo.py configs/flowgrpo/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.flow import FlowRLConfig
from phalanx.run.cli import parse, run


def build(cfg: FlowRLConfig) -> Callable[[], None]:
    from phalanx.run import rl
    from phalanx.run.sweep import built
    from phalanx.tools.board.report import write_report

    return partial(built(rl.build, cfg).run, write_report)


def check(cfg: FlowRLConfig) -> None:
    from phalanx.tools.inputs import check_flow

    check_flow(cfg)


def plan(cfg: FlowRLConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(FlowRLConfig, __doc__ or "", plan=plan, check=check))
