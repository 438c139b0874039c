"""Train a causal language model with GRPO or another algorithm of phalanx.algorithms.

sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.lm import LMRLConfig


def build(cfg: LMRLConfig) -> Callable[[], None]:
    from phalanx.training import lm_rl

    return lm_rl.build(cfg).run


def check(cfg: LMRLConfig) -> None:
    from phalanx.jobs.inputs import check_lm
    from phalanx.models.lm.headers import check_folder

    check_lm(cfg)
    if cfg.critic.model.path is not None:
        check_folder(cfg.critic.model.path, "critic.model.path")


def plan(cfg: LMRLConfig, words: dict[str, str]) -> str:
    from phalanx.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(LMRLConfig, __doc__ or "", plan=plan, check=check))
