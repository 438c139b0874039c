"""The end of a run that has no chance: trainer.end_below."""

import logging

from phalanx.config.run import TrainerConfig
from phalanx.distributed.collectives import broadcast_object

log = logging.getLogger(__name__)


def ends_early(trainer: TrainerConfig, step: int, row: dict[str, float], *, first: bool) -> bool:
    """Whether trainer.end_below ends the run after training step number `step`, whose metrics are `row`; all ranks call
    it together. first: this is rank 0, which has all metrics.
    """
    if not trainer.end_below or step < trainer.end_below_from:
        return False
    ends = False
    for name, limit in trainer.end_below.items() if first else ():
        if name not in row and not name.startswith("val/") and step == trainer.end_below_from:
            log.warning("trainer.end_below: step %d has no metric %s", step, name)
        if row.get(name, limit) < limit:
            log.info("the run ends after step %d: %s is %.4g, below %g", step, name, row[name], limit)
            ends = True
    return broadcast_object(ends)
