"""Have a language model write: that of a folder, or of a checkpoint of a run. One process.

python3 tasks/generate.py checkpoint=outputs/phalanx/quickstart_lm prompt_file=assets/words/test.jsonl n=2
"""

from collections.abc import Callable

from phalanx.cli import parse, run
from phalanx.config.tasks import GenerateConfig


def build(cfg: GenerateConfig) -> Callable[[], None]:
    from phalanx.jobs.generate import Generation

    return Generation(cfg).run


if __name__ == "__main__":
    run(build, parse(GenerateConfig, __doc__ or ""))
