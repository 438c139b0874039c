"""Supervised block diffusion on chats: fine-tune LLaDA2, or make any causal language model denoise blocks.

sh train.sh tasks/train_block_diffusion.py configs/block_diffusion/llada2_mini_sft.yaml trainer.seed=1
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.block_diffusion import BlockDiffusionTaskConfig


def build(cfg: BlockDiffusionTaskConfig) -> Callable[[], None]:
    from phalanx.training import block_diffusion

    return block_diffusion.build(cfg).run


def check(cfg: BlockDiffusionTaskConfig) -> None:
    from phalanx.jobs.inputs import check_lm

    check_lm(cfg, answered=cfg.data.response_key is None)


def plan(cfg: BlockDiffusionTaskConfig, words: dict[str, str]) -> str:
    from phalanx.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(BlockDiffusionTaskConfig, __doc__ or "", plan=plan, check=check))
