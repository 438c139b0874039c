"""Train a causal language model with GRPO or another algorithm of phalanx.algorithms.

sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.lm import LMRLConfig
from phalanx.run.cli import parse, run


def build(cfg: LMRLConfig) -> Callable[[], None]:
    from phalanx.run import rl
    from phalanx.run.sweep import built
    from phalanx.tools.board.report import write_report

    return partial(built(rl.build, cfg).run, write_report)


def check(cfg: LMRLConfig) -> None:
    from phalanx.models.lm.lm_folder import check_folder
    from phalanx.tools.inputs import check_lm

    check_lm(cfg)
    if cfg.critic.model.path is not None:
        check_folder(cfg.critic.model.path, "critic.model.path")


def plan(cfg: LMRLConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(LMRLConfig, __doc__ or "", plan=plan, check=check))
