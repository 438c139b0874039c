"""tasks/train_grpo.py with phases of given durations: sampling and training are real, and each phase then waits until
its duration is over. roles.py runs it.

EMULATE is `<seconds>,<seconds>`: the time of a step on one sampling rank, and on one training rank. Each rank writes
its phases, {role, phase, start, end}, to `<output_dir>/phases_<rank>.jsonl`.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.config.lm import LMRLConfig
from phalanx.run.cli import parse, run


def build(cfg: LMRLConfig) -> Callable[[], None]:
    from phalanx.run import rl
    from phalanx.run.disaggregated import workers
    from phalanx.telemetry import timers
    from phalanx.telemetry.timers import Timers
    from phalanx.training.collect import Collector
    from phalanx.training.minibatches import Minibatches
    from phalanx.training.update import StepLog

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

    def wait_until(end: float) -> None:
        time.sleep(max(end - time.time(), 0))

    sample, select, micro_batch = Collector.sample, Minibatches.select, StepLog.micro_batch
    started = [0.0]  # when the current forward and backward pass began

    def slow_sample(self: Collector, *args: Any) -> Any:
        start = time.time()
        drawn = sample(self, *args)
        wait_until(start + rollout_s / world.size / self.chunks)
        say("rollout", start)
        return drawn

    def begin_pass(self: Minibatches, *args: Any) -> Any:
        started[0] = time.time()
        return select(self, *args)

    def end_pass(self: StepLog, samples: Any, rows: Any, loss: Any) -> None:
        micro_batch(self, samples, rows, loss)
        wait_until(started[0] + actor_s / world.size * len(rows) / job.updater.plan.per_rank)
        say("update", started[0])

    timers.Timers = rl.Timers = workers.Timers = Phases  # type: ignore[misc]
    Collector.sample, Minibatches.select, StepLog.micro_batch = slow_sample, begin_pass, end_pass  # type: ignore[method-assign]
    job: Any = rl.build(cfg)
    world = job.world
    return job.run


if __name__ == "__main__":
    run(build, parse(LMRLConfig, __doc__ or ""))
