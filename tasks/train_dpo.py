"""Direct preference optimisation of a language model, on pairs of the data or of its own responses.

sh train.sh tasks/train_dpo.py model.path=Qwen2.5-0.5B-Instruct 'data.train_files=[pairs.jsonl]'
"""

from collections.abc import Callable
from functools import partial

from phalanx.config.lm_supervised import DPOConfig
from phalanx.run.cli import parse, run


def build(cfg: DPOConfig) -> Callable[[], None]:
    from phalanx.run import rl
    from phalanx.run.sweep import built
    from phalanx.tools.board.report import write_report

    return partial(built(rl.build, cfg).run, write_report)


def check(cfg: DPOConfig) -> None:
    from phalanx.tools.inputs import check_lm

    check_lm(cfg)


def plan(cfg: DPOConfig, words: dict[str, str]) -> str:
    from phalanx.tools.plan import plan_job

    return plan_job(cfg, words)


if __name__ == "__main__":
    run(build, parse(DPOConfig, __doc__ or "", plan=plan, check=check))
