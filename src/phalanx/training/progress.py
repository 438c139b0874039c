"""The counters of a run, which its checkpoints contain."""

from dataclasses import InitVar, dataclass, field

MOST = 10**15  # limit of counters, to detect damaged files


@dataclass
class Progress:
    """The run's counters: training steps done, samples drawn, optimizer steps, and the ids that loggers gave the run.

    updates_beside: optimizer steps of other trained models by name. rescoring: rollout and replay were found to differ,
    so the policy recomputes the old log-probs. unfinished: metrics of the last step if the run was stopped during its
    validation. ended: trainer.end_below ended the run after `step`.
    """

    step: int = 0
    samples_seen: int = 0
    updates: int = 0
    wandb_id: InitVar[str | None] = None  # in older checkpoints, instead of logger_ids
    unfinished: dict[str, float] | None = None
    rescoring: bool = False
    ended: bool = False
    updates_beside: dict[str, int] = field(default_factory=dict)
    logger_ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self, wandb_id: str | None) -> None:
        if wandb_id is not None:
            self.logger_ids = {"wandb": wandb_id}

    def check(self) -> None:
        """Raise ValueError for values that no run writes."""
        counts = [self.step, self.samples_seen, self.updates, *self.updates_beside.values()]
        for count in counts:
            if type(count) is not int or not 0 <= count < MOST:
                raise ValueError(f"the counts {counts}; expected integers from 0")
        for value in self.logger_ids.values():
            if not isinstance(value, str):
                raise ValueError("logger_ids of another type")
        row = {} if self.unfinished is None else self.unfinished
        flags = isinstance(self.rescoring, bool) and isinstance(self.ended, bool)
        if not flags or not all(isinstance(value, int | float) for value in row.values()):
            raise ValueError("rescoring, ended or unfinished of another type")
