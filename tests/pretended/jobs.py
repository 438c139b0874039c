"""Whole jobs under a pretended accelerator: two steps with a checkpoint, and a third one after a resume."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.run import link
from phalanx.telemetry.timers import Timers
from tests.helpers.ranks import LIMIT_S, free_port, run_ranks
from tests.pretended.cuda import install
from tests.pretended.record import Record

Build = Callable[[Any], Any]  # the job of a configuration, or this rank's part in it


def rehearse(build: Build, cfg: Any, world: int = 1, timeout: float = LIMIT_S) -> list[Record]:
    """Train two steps with a checkpoint after each, then one more from the last of them; the records of the first
    start, by rank.

    Raises RankError with the fault, where there is one.
    """
    cfg = replace(cfg, trainer=replace(cfg.trainer, save_freq=1, total_training_steps=2))
    records: list[Record] = run_ranks(_train, world, build, cfg, free_port(), timeout=timeout, init=False)
    more = replace(cfg, trainer=replace(cfg.trainer, total_training_steps=3))
    run_ranks(_train, world, build, more, free_port(), timeout=timeout, init=False)
    names = [path.name for path in sorted(Path(cfg.trainer.output_dir, "checkpoints").iterdir())]
    assert names[-1] == "step_000003", names
    return records


def _train(build: Build, cfg: Any, port: int) -> Record:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    record = pretend()
    build(cfg).run()
    assert not record.faults, "\n".join(record.faults)
    return record


def without_faults(build: Callable[[Any], Callable[[], None]]) -> Callable[[Any], Callable[[], None]]:
    """The same on a pretended GPU, for a process that runs a task: it ends with an error after a fault."""
    record = pretend()

    def built(cfg: Any) -> Callable[[], None]:
        job = build(cfg)

        def checked() -> None:
            job()
            assert not record.faults, "\n".join(record.faults)

        return checked

    return built


def pretend() -> Record:
    """Give each rank of this node a GPU, and let the record know what the job is at."""
    link.BUCKET_BYTES = 2**14  # so that weights travel to other roles in many messages
    record = install(int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    call = Timers.__call__

    @contextlib.contextmanager
    def named(timers: Timers, name: str) -> Iterator[None]:
        before, record.phase = record.phase, name
        with call(timers, name):
            yield
        record.phase = before

    Timers.__call__ = named  # type: ignore[method-assign]
    return record
