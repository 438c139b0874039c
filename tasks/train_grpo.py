"""Train a causal language model with GRPO, or another of phalanx.algorithms.

sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.lm import LMRLConfig


def build(cfg: LMRLConfig) -> Callable[[], None]:
    from phalanx.training import lm_rl

    return lm_rl.build(cfg).run


def check(cfg: LMRLConfig) -> None:
    from phalanx.jobs.inputs import check_lm, check_lm_folder

    check_lm(cfg)
    if cfg.critic.model.path is not None:
        check_lm_folder(cfg.critic.model.path, "critic.model.path")


if __name__ == "__main__":
    run(build, parse(LMRLConfig, __doc__ or "", check=check))
