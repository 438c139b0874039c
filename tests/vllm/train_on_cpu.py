"""tasks/train_flowgrpo.py where vLLM-omni knows the CPU: sh train.sh tests/vllm/train_on_cpu.py [CONFIG] [KEY=VALUE …]"""

import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.cli import parse, run
from phalanx.config.schema import TrainConfig

sys.path.insert(0, str(Path(__file__).parents[2]))


def build(cfg: TrainConfig) -> Callable[[], None]:
    from tests.vllm import omni_cpu_platform

    omni_cpu_platform.install()
    from phalanx.trainer import Trainer

    return Trainer(cfg).run


if __name__ == "__main__":
    run(build, parse(TrainConfig, __doc__ or ""))
