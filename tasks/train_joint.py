"""Train a language model that rewrites prompts and a flow model that paints them, with one reward on the image.

sh train.sh tasks/train_joint.py configs/joint/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.joint import JointConfig
from phalanx.run.cli import parse, run


def build(cfg: JointConfig) -> Callable[[], None]:
    from phalanx.run import joint_rl
    from phalanx.tools.board.report import write_report

    return partial(joint_rl.build(cfg).run, write_report)


def check(cfg: JointConfig) -> None:
    from phalanx.models.lm.lm_folder import check_folder
    from phalanx.tools.inputs import check_flow

    check_flow(cfg.of_painter())
    check_folder(cfg.writer.model.path, "writer.model.path")


def plan(cfg: JointConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(JointConfig, __doc__ or "", plan=plan, check=check))
