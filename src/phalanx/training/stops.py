"""Where a signal ends a training step: between two micro-batches, if the step has not changed weights or is undone."""

import logging
import os
import time
from collections.abc import Mapping
from copy import copy

from phalanx.distributed.collectives import agree
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.telemetry.timers import Timers
from phalanx.training.optim import TrainState
from phalanx.training.progress import Progress

log = logging.getLogger(__name__)
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # GRACE_S of train.sh


class Stops:
    """Stops a job within a training step. states: all models that it trains."""

    def __init__(self, world: World, states: Mapping[str, TrainState], progress: Progress, timers: Timers) -> None:
        self.world, self.states, self.progress, self.timers = world, states, progress, timers
        self._warned = False
        self.begin()

    def begin(self) -> None:
        """A training step begins."""
        self.before, self._checked = copy(self.progress), time.perf_counter()
        for state in self.states.values():
            state.begin_step()

    def check(self) -> None:
        """Between two micro-batches, on all ranks at once: raise Stopped if any rank has received a signal. The step is
        dropped, and repeated by a resumed run.

        Once a step has changed weights that do not return to those before it, it is finished first, and so is every
        step of ranks with different roles.
        """
        if self.world.link is not None or any(state.applied and not state.undoes for state in self.states.values()):
            return
        _, stop = agree(None, self.world.watch.stop or 0)
        if stop:
            # in a joint run, a policy that had nothing to learn may have counted its samples
            vars(self.progress).update(vars(self.before))
            for state in self.states.values():
                state.undo()
            raise Stopped(stop)
        self._checked = time.perf_counter()

    def after_micro_batch(self, timers: Timers) -> None:
        """Count a micro-batch of an update in `timers`, and `check`."""
        timers.advance()
        self.check()

    def warn(self, step: int) -> None:
        """At the end of step number `step`: warn, once, if a signal would have waited longer than the launcher does."""
        limit = os.environ.get(SHUTDOWN)
        # of ranks with roles, only the update is this rank's own time
        held = time.perf_counter() - self._checked if self.world.link is None else self.timers.seconds("update")
        if self._warned or limit is None or held <= float(limit):
            return
        self._warned = True
        if self.world.rank == 0:
            log.warning(
                "step %d: a signal to stop would have had to wait %.0f s for the rest of the update, but its ranks are "
                "killed after GRACE_S=%s: raise it, or a stopped job may resume from the last regular checkpoint "
                "(trainer.save_freq)",
                step,
                held,
                limit,
            )
