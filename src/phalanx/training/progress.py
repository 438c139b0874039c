"""The counters of a run, which its checkpoints contain."""

from dataclasses import InitVar, dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, StrictBool, StrictFloat

Count = Annotated[int, Field(strict=True, ge=0, lt=10**15)]  # more are of a damaged file


@dataclass
class Progress:
    """The run's counters: training steps done, samples drawn, optimizer steps, and the ids that loggers gave the run.

    updates_beside: optimizer steps of other trained models by name. rescoring: rollout and replay were found to differ,
    so the policy recomputes the old log-probs. unfinished: metrics of the last step if the run was stopped during its
    validation. ended: trainer.end_below ended the run after `step`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of the types that are checked when a checkpoint is read

    step: Count = 0
    samples_seen: Count = 0
    updates: Count = 0
    wandb_id: InitVar[str | None] = None  # in older checkpoints, instead of logger_ids
    unfinished: dict[str, StrictFloat] | None = None
    rescoring: StrictBool = False
    ended: StrictBool = False
    updates_beside: dict[str, Count] = field(default_factory=dict)
    logger_ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self, wandb_id: str | None) -> None:
        if wandb_id is not None:
            self.logger_ids = {"wandb": wandb_id}
