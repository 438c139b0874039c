"""Train a flow-matching text-to-image model with FlowGRPO or another algorithm of phalanx.algorithms.

sh train.sh tasks/train_flowgrpo.py configs/flowgrpo/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.flow import FlowRLConfig


def build(cfg: FlowRLConfig) -> Callable[[], None]:
    from phalanx.training import flow_rl

    return flow_rl.build(cfg).run


def check(cfg: FlowRLConfig) -> None:
    from phalanx.jobs.inputs import check_flow

    check_flow(cfg)


def plan(cfg: FlowRLConfig, words: dict[str, str]) -> str:
    from phalanx.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(FlowRLConfig, __doc__ or "", plan=plan, check=check))
