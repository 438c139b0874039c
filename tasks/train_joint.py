"""Train a language model that rewrites prompts and a flow model that paints them, with one reward on the image.

sh train.sh tasks/train_joint.py configs/joint/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.joint import JointConfig


def build(cfg: JointConfig) -> Callable[[], None]:
    from phalanx.training import joint

    return joint.build(cfg).run


def check(cfg: JointConfig) -> None:
    from phalanx.jobs.inputs import check_flow
    from phalanx.models.lm.headers import check_folder

    check_flow(cfg.of_painter())
    check_folder(cfg.writer.model.path, "writer.model.path")


def plan(cfg: JointConfig, words: dict[str, str]) -> str:
    from phalanx.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(JointConfig, __doc__ or "", plan=plan, check=check))
