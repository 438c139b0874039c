"""Supervised flow matching: fine-tune a text-to-image model on images with prompts.

sh train.sh tasks/train_flow_matching.py configs/flow_matching/digits.yaml trainer.seed=1
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.flow import FlowMatchingTaskConfig
from phalanx.run.cli import parse, run


def build(cfg: FlowMatchingTaskConfig) -> Callable[[], None]:
    from phalanx.run import flow_matching
    from phalanx.run.sweep import built
    from phalanx.tools.board.report import write_report

    return partial(built(flow_matching.build, cfg).run, write_report)


def check(cfg: FlowMatchingTaskConfig) -> None:
    from phalanx.tools.inputs import check_flow

    check_flow(cfg, prompts=False)


def plan(cfg: FlowMatchingTaskConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(FlowMatchingTaskConfig, __doc__ or "", plan=plan, check=check))
