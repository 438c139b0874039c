"""tasks/train_grpo.py with phases of given lengths: what it samples and trains is real, and each phase waits until it
has taken as long as it should. See roles.py, which runs it.

EMULATE is `<seconds of one rank that samples>,<seconds of one rank that trains>` of a step. Each rank writes its
phases, {role, phase, start, end}, to `<output_dir>/phases_<rank>.jsonl`.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.cli import parse, run
from phalanx.config.lm import LMRLConfig


def build(cfg: LMRLConfig) -> Callable[[], None]:
    from phalanx.telemetry.metrics import Timers
    from phalanx.training import collecting, in_parts, lm_rl, scoring

    rollout_s, actor_s = (float(word) for word in os.environ["EMULATE"].split(","))
    folder, rank = Path(cfg.trainer.output_dir), os.environ.get("RANK", "0")
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"phases_{rank}.jsonl").open("w")

    def say(phase: str, start: float) -> None:
        role = "actor" if world.link is None else world.link.role
        file.write(json.dumps({"role": role, "phase": phase, "start": start, "end": time.time()}) + "\n")
        file.flush()

    class Phases(Timers):
        @contextmanager
        def __call__(self, name: str) -> Iterator[None]:
            start = time.time()
            with super().__call__(name):
                yield
            if name in ("wait", "idle", "sync", "reward", "validation"):
                say(name, start)

    def lasting(call: Callable[..., Any], phase: str, seconds: Callable[..., float]) -> Callable[..., Any]:
        def slow(self: Any, *args: Any, **named: Any) -> Any:
            start = time.time()
            found = call(self, *args, **named)
            time.sleep(max(start + seconds(self, *args) - time.time(), 0))
            say(phase, start)
            return found

        return slow

    def sampling(self: Any, *_: Any) -> float:
        return rollout_s / self.world.size / self.parts

    def training(self: Any, batches: Any, rows: Any, *_: Any) -> float:
        return actor_s / self.world.size * len(rows) / self.plan.per_rank

    scoring.Timers = Phases  # type: ignore[misc]
    collecting.Collecting.sample = lasting(collecting.Collecting.sample, "rollout", sampling)  # type: ignore[method-assign]
    updates = in_parts.UpdatesInParts
    updates.learn_from = lasting(updates.learn_from, "update", training)  # type: ignore[method-assign]
    job: Any = lm_rl.build(cfg)
    world = job.world
    return job.run


if __name__ == "__main__":
    run(build, parse(LMRLConfig, __doc__ or ""))
