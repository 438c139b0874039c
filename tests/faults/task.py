"""tasks/train_flowgrpo.py, or with RECIPE=lm tasks/train_grpo.py and with RECIPE=sft tasks/train_block_diffusion.py, whose
ranks also record their current phase, so that tests can aim.

FAULT names a fault in reinforcement learning: `raise:RANK:STEP` and `hang:RANK:STEP` happen once, in the advantage of
that step, or during sampling on a rank that only samples.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx import exit
from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run.cli import parse, run

RECIPES: dict[str, tuple[str, type[Any]]] = {
    "": ("rl", FlowRLConfig),
    "lm": ("rl", LMRLConfig),
    "sft": ("block_diffusion", BlockDiffusionTaskConfig),
}
RECIPE = os.environ.get("RECIPE", "")
MODULE, SCHEMA = RECIPES[RECIPE]
PLAIN: list[Any] = []  # the Timers' own method
PHASES = ("rollout", "reward", "update", "checkpoint", "validation")


def build(cfg: Any) -> Callable[[], None]:
    from phalanx.run.disaggregated.workers import RolloutWorker
    from phalanx.run.rl import Trainer
    from phalanx.run.sweep import Sweep, built
    from phalanx.telemetry.timers import Timers

    own, seen = exit.rank(), [0]
    if not PLAIN:  # a process may build several jobs, one after another
        PLAIN.append(Timers.__call__)
    plain_timers = PLAIN[0]
    kind, rank, step = (os.environ.get("FAULT") or "none:-1:-1").split(":")

    @contextmanager
    def phase(self: Timers, name: str) -> Iterator[None]:
        """Write `<pid> <step> <phase>` to a file of the rank, and extend each phase a little, or while `hold` exists."""
        with plain_timers(self, name):
            part = said.with_suffix(".part")
            part.write_text(f"{os.getpid()} {step_of()} {name}")
            part.replace(said)
            time.sleep(float(os.environ.get("PHASE_S", "0")))
            while said.with_name("hold").exists():
                time.sleep(0.01)
            yield

    def fail(at: int) -> None:
        if kind != "none" and (own, at) == (int(rank), int(step)):
            if kind == "raise":
                raise KeyError("no such thing")
            time.sleep(1000)

    def step_of() -> int:
        first = trainer.jobs[0] if isinstance(trainer, Sweep) else trainer
        return seen[0] if isinstance(first, RolloutWorker) else first.job.progress.step

    recipe = import_module(f"phalanx.run.{MODULE}")
    trainer = built(recipe.build, cfg)
    said = Path(cfg.trainer.output_dir).parent / f"phase_{own}"
    Timers.__call__ = phase  # type: ignore[method-assign]
    if isinstance(trainer, RolloutWorker):
        plain_sample = trainer.collector.sample

        def sample(at: int, chunk: int = 0) -> Any:
            seen[:] = [at]
            fail(at)
            return plain_sample(at, chunk)

        trainer.collector.sample = sample  # type: ignore[method-assign]
    elif isinstance(trainer, Trainer):
        plain_advantage = trainer.updater.algorithm.advantage

        def advantage(*args: Any) -> Any:
            fail(trainer.job.progress.step)
            return plain_advantage(*args)

        trainer.updater.algorithm.advantage = advantage
    return trainer.run


def check(cfg: Any) -> None:
    from phalanx.tools.inputs import check_placement

    check_placement(cfg)


if __name__ == "__main__":
    run(build, parse(SCHEMA, __doc__ or "", check=check))
