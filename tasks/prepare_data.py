"""Make training data for a language model: prompts with an instruction, answers, and a held-out split.

python3 tasks/prepare_data.py source=gsm8k/train.jsonl test_source=gsm8k/test.jsonl output_dir=data/gsm8k
"""

from collections.abc import Callable

from phalanx.config.tasks import PrepareDataConfig
from phalanx.run.cli import parse, run


def build(cfg: PrepareDataConfig) -> Callable[[], None]:
    from phalanx.tools.prepare_data import PrepareData

    return PrepareData(cfg).run


if __name__ == "__main__":
    run(build, parse(PrepareDataConfig, __doc__ or ""))
