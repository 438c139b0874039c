"""Supervised fine-tuning of a language model, also with images or tools, on chats or prompts with responses.

sh train.sh tasks/train_sft.py configs/sft/quickstart.yaml trainer.seed=1
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.lm_supervised import SFTConfig
from phalanx.run.cli import parse, run


def build(cfg: SFTConfig) -> Callable[[], None]:
    from phalanx.run import rl
    from phalanx.run.sweep import built
    from phalanx.tools.board.report import write_report

    return partial(built(rl.build, cfg).run, write_report)


def check(cfg: SFTConfig) -> None:
    from phalanx.tools.inputs import check_lm

    check_lm(cfg, answered=cfg.data.response_key is None)


def plan(cfg: SFTConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(SFTConfig, __doc__ or "", plan=plan, check=check))
