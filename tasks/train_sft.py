"""Supervised fine-tuning of a language model, also with images or tools, on chats or prompts with responses.

sh train.sh tasks/train_sft.py configs/sft/quickstart.yaml trainer.seed=1

A configuration with a section block_diffusion or flow_matching is one of the task of that name.
"""

import re
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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


def other_task(words: Sequence[str]) -> Path | None:
    """The task whose section the configuration has, in its file or among its overrides; None for this one."""
    keys = "\n".join(words)
    if words and "=" not in words[0] and Path(words[0]).is_file():
        keys += "\n" + Path(words[0]).read_text(errors="replace")
    section = re.search(r"^(block_diffusion|flow_matching)(?=[.:=])", keys, re.MULTILINE)
    return None if section is None else Path(__file__).with_name(f"train_{section[0]}.py")


if __name__ == "__main__":
    other = other_task(sys.argv[1:])
    if other is not None:
        runpy.run_path(str(other), run_name="__main__")
    else:
        run(build, parse(SFTConfig, __doc__ or "", plan=plan, check=check))
