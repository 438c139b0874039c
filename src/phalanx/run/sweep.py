"""A sweep: jobs that differ in a few settings, each with a LoRA of its own on one base, side by side in one process.

Each job is a complete one, with its own folder, metrics and checkpoints, and does exactly what it would do alone. Base,
text encoders, rewards and process groups are loaded once, and passes through the model are shared: see
phalanx.models.meeting.
"""

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.config.messages import ConfigError
from phalanx.config.run import RunConfig
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.models.meeting import Meeting
from phalanx.run import in_place
from phalanx.run.cli import RUN
from phalanx.run.kind import kind_of
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.run.world import stop_world, use_device
from phalanx.telemetry.loggers import check_loggers
from phalanx.training.components import Training
from phalanx.types import JobError

log = logging.getLogger(__name__)


def built(build: Callable[[Any], Any], cfg: RunConfig) -> Any:
    """The job of a configuration, by `build`; or its sweep, which has the same method `run`."""
    return Sweep(build, cfg) if cfg.runs else build(cfg)


class Sweep:
    """The jobs of `cfg.runs`; all ranks build and run them together."""

    def __init__(self, build: Callable[[Any], Training], cfg: RunConfig) -> None:
        """Build the jobs. A ValueError of any of them is the user's mistake, and names the run."""
        kind_of(cfg).check()
        for entry, logger in check_loggers(cfg.trainer.logger).items():
            if logger.one_run:
                raise ConfigError(f"trainer.logger: {entry} logs one run per process; expected others in a sweep")
        self.folder, self.names, configs = Path(cfg.trainer.output_dir), list(cfg.runs), list(cfg.runs.values())
        self._shared: dict[Hashable, Any] = {"seeds": [each.trainer.seed for each in configs]}
        self.jobs: list[Training] = [None] * len(configs)  # type: ignore[list-item]  # until they are built

        def work(number: int) -> None:
            self.jobs[number] = build(configs[number])

        for name, error in self._run_together(work, ValueError).items():
            if isinstance(error, JobError):
                raise error
            raise ValueError(f"sweep, run {name}: {error}") from error

    def run(self, report: Callable[..., object] | None = None) -> None:
        """Run all jobs to their ends. report: writes a page about the folder of a run, or about those of several.

        One that ends with a JobError leaves the others alone; raises JobError after them, or Stopped after all states
        were saved.
        """
        world: World = self._shared["world"]
        use_device(world.device)
        dist.barrier()  # as in Job.run: the handler waits for the other ranks, so all of them must be up
        world.watch.listen()
        errors = self._run_together(lambda number: self.jobs[number].run(report), Stopped)
        world.watch.close()
        for error in errors.values():
            if isinstance(error, Stopped):
                raise Stopped(error.number, "; the same command resumes all runs of the sweep")
        stop_world()
        folders = [self.folder / name for name in self.names if (self.folder / name / METRICS_FILE).exists()]
        if world.rank == 0 and report is not None and folders:
            with suppress(OSError):  # a full disk, or a closed terminal; the training itself succeeded
                print(f"all runs: {report(*folders, output=self.folder / 'comparison.html')}", flush=True)
        if errors:
            name, error = next(iter(errors.items()))
            ended = f"{len(errors)} of the {len(self.jobs)} runs of the sweep ended with an error"
            raise JobError(f"{ended}; {name}: {error}")

    def _run_together(self, work: Callable[[int], None], kind: type[Exception]) -> dict[str, BaseException]:
        """Call `work` for each job, on threads that take turns. Returns errors of this kind, JobErrors and SystemExits,
        each of which ends a job on all ranks, by its name; raises any other error, after which no job goes on.
        """
        meeting, ended = Meeting(len(self.names), self._shared), queue.Queue[tuple[int, BaseException | None]]()

        def run(number: int) -> None:
            problem: BaseException | None = None
            try:
                with meeting.seat(number, self.names[number]):
                    try:
                        if self.jobs[number] is not None:
                            use_device(self.jobs[number].world.device)
                        work(number)
                    except (kind, JobError, SystemExit) as error:
                        problem = error
            except BaseException as error:  # no other thread gets a turn
                error.add_note(f"in the run {self.names[number]} of the sweep")
                ended.put((-1, error))
            else:
                ended.put((number, problem))

        threads = []
        for number, name in enumerate(self.names):
            threads.append(threading.Thread(target=run, args=(number,), name=f"{RUN}{name}", daemon=True))
            threads[-1].start()
        errors = {}
        for _ in self.names:
            number, problem = ended.get()
            if number < 0:
                assert problem is not None
                if in_place.generation is not None:  # the process may go on, without these threads and their jobs
                    meeting.disband()
                    for thread in threads:
                        thread.join()
                raise problem
            if problem is not None:
                errors[self.names[number]] = problem
        return errors
