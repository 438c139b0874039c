"""Supervised block diffusion on chats: fine-tune LLaDA2, or make any causal language model denoise blocks.

sh train.sh tasks/train_block_diffusion.py configs/block_diffusion/llada2_mini_sft.yaml trainer.seed=1
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.run.cli import parse, run


def build(cfg: BlockDiffusionTaskConfig) -> Callable[[], None]:
    from phalanx.run import block_diffusion_sft
    from phalanx.run.sweep import built
    from phalanx.tools.board.report import write_report

    return partial(built(block_diffusion_sft.build, cfg).run, write_report)


def check(cfg: BlockDiffusionTaskConfig) -> None:
    from phalanx.tools.inputs import check_lm

    check_lm(cfg, answered=cfg.data.response_key is None)


def plan(cfg: BlockDiffusionTaskConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(BlockDiffusionTaskConfig, __doc__ or "", plan=plan, check=check))
