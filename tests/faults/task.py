"""tasks/train_flowgrpo.py, or with RECIPE=lm tasks/train_grpo.py, whose ranks also say which phase they are in, so that
tests can aim.

FAULT names what goes wrong: `raise:RANK:STEP` and `hang:RANK:STEP` in the update of that step, once.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.cli import parse, run
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig

LANGUAGE = os.environ.get("RECIPE") == "lm"
PHASES = ("rollout", "reward", "update", "checkpoint", "validation")


def build(cfg: Any) -> Callable[[], None]:
    from phalanx.telemetry.metrics import Timers
    from phalanx.training.rl import Trainer

    kind, rank, step = (os.environ.get("FAULT") or "none:-1:-1").split(":")

    class Phases(Timers):
        """Timers that write `<pid> <step> <phase>` to a file of the rank, and stay a little in each phase."""

        @contextmanager
        def __call__(self, name: str) -> Iterator[None]:
            with super().__call__(name):
                part = said.with_suffix(".part")
                part.write_text(f"{os.getpid()} {trainer.progress.step} {name}")
                part.replace(said)
                time.sleep(float(os.environ.get("PHASE_S", "0")))
                yield

    class Faulty(Trainer):
        def update(self, *args: Any) -> dict[str, float]:
            if kind != "none" and (self.world.rank, self.progress.step) == (int(rank), int(step)):
                if kind == "raise":
                    raise KeyError("no such thing")
                time.sleep(1000)
            return super().update(*args)

    recipe = import_module("phalanx.training.lm_rl" if LANGUAGE else "phalanx.training.flow_rl")
    trainer = recipe.build(cfg, Faulty)
    said = Path(cfg.trainer.output_dir).parent / f"phase_{trainer.world.rank}"
    trainer.timers = Phases()
    return trainer.run


if __name__ == "__main__":
    run(build, parse(LMRLConfig if LANGUAGE else FlowRLConfig, __doc__ or ""))
