"""Generate texts with a language model from a model folder or a run's checkpoint. Runs in one process.

python3 tasks/generate.py checkpoint=outputs/phalanx/quickstart_lm prompt_file=assets/words/test.jsonl n=2
"""

from collections.abc import Callable

from phalanx.config.tasks import GenerateConfig
from phalanx.run.cli import parse, run


def build(cfg: GenerateConfig) -> Callable[[], None]:
    from phalanx.tools.generate import Generation

    return Generation(cfg).run


if __name__ == "__main__":
    run(build, parse(GenerateConfig, __doc__ or ""))
