"""The ranks that sample: they hand samples to the rewards, and validate."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from phalanx.config.run import RunConfig
from phalanx.distributed.collectives import agree, all_gather_apart, reduce_int
from phalanx.exit import Stopped
from phalanx.rewards import RewardError
from phalanx.telemetry.metrics import Timers
from phalanx.telemetry.records import Record
from phalanx.training.parts import Parts
from phalanx.training.validation import validate
from phalanx.types import Outputs, Prompt

Records = dict[str, list[Record]]  # by the names of validation sets

log = logging.getLogger(__name__)


class Scoring:
    """The part of a job that samples and scores, in step on all ranks of its world."""

    cfg: RunConfig

    def __init__(self, cfg: RunConfig, parts: Parts) -> None:
        """Take the parts, which are made already on all ranks."""
        self.cfg, self.world = cfg, parts.world
        self.policy, self.rollout = parts.policy, parts.rollout
        self.rewards, self.val_sets = parts.rewards, parts.val_sets
        self.timers = Timers()
        self.unscored = 0  # samples that a reward failed on since a row of metrics took the number
        self._told_of_errors = False
        self._submitted = 0  # samples that were handed over and not yet scored

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Hand a micro-batch to the rewards. All ranks call it equally often: a failure that shows on one ends all,
        and so does a signal to stop, since nothing is trained while samples are drawn.
        """
        with self.together():
            check_finite(outputs, prompts)
            if self.rewards is not None:
                self._submit(outputs, prompts)
        self.timers.advance()

    def _submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Hand over the samples that this rank scores: those that several ranks hold are dealt out in turns."""
        assert self.rewards is not None
        first, size = self.world.rank - self._submitted, self.world.context_size
        self._submitted += len(prompts)
        mine = slice(first % size, None, size)
        if prompts[mine]:
            self.rewards.submit(outputs[mine], prompts[mine])

    def _of_all(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The terms [B] of this rank's samples, of which it has scored its own."""
        count, self._submitted = self._submitted, 0
        size = self.world.context_size
        if size == 1:
            return terms
        place = self.world.rank // size * size
        found = {}
        for name, values in terms.items():
            padded = torch.full((-(-count // size),), torch.nan)
            padded[: len(values)] = values
            dealt = all_gather_apart(padded)[place : place + size]
            found[name] = torch.stack(dealt, 1).flatten()[:count]
        return found

    def ask(self) -> None:
        """Wait for the reward model's answers to the judges' questions about what was submitted, as a phase of its own.

        A question that it cannot be asked ends the job on all ranks.
        """
        if self.rewards is not None and self.rewards.must_ask:
            with self.timers("judge"), self.together():
                self.rewards.ask()

    def score(self) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's rewards [B] and their terms; a reward that fails on any rank ends the job on all."""
        assert self.rewards is not None
        if self.rewards.must_ask:  # in validation, where nobody has asked yet
            with self.together():
                self.rewards.ask()
        with self.together():
            terms = self.rewards.collect()
        terms = self._of_all(terms)
        if self.cfg.reward.on_error != "fail" and terms:  # the policy may give all of them
            terms = self._forgiven(terms)
        return self.rewards.weighted(terms), terms

    def _forgiven(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's terms [B] as reward.on_error wants them: 0 where there is no score, or NaN for one to skip.

        Raises RewardError, on all ranks, where more have none than reward.max_error_fraction allows.
        """
        assert self.rewards is not None
        cfg, lost = self.cfg.reward, torch.stack([values.isnan() for values in terms.values()]).any(0)
        count, scored = reduce_int(int(lost.sum()), "sum"), reduce_int(len(lost), "sum")
        self.unscored += count
        if count == 0:
            return terms
        first, _ = agree(self.rewards.problem, 0)
        what = f"{count} of {scored} {self.rollout.noun} have no score"
        if count > cfg.max_error_fraction * scored:
            allowed = f"more than reward.max_error_fraction={cfg.max_error_fraction:g} of them"
            raise RewardError(f"{what}, {allowed}; the first: {first}")
        if self.world.rank == 0 and not self._told_of_errors:
            log.warning(
                "reward.on_error=%s: %s; from here on see reward/errors; the first: %s", cfg.on_error, what, first
            )
        self._told_of_errors = True
        return terms if cfg.on_error == "skip" else {name: values.nan_to_num(0.0) for name, values in terms.items()}

    @contextmanager
    def together(self) -> Iterator[None]:
        """For the rewards' part of all ranks: what fails on one ends all, as in `go_on`."""
        failure: RewardError | None = None
        try:
            yield
        except RewardError as error:
            failure = error
        self.go_on(failure)

    def go_on(self, failure: RewardError | None = None) -> None:
        """On all ranks at once: raise the RewardError of the lowest rank that has one, or Stopped where a rank was
        told to stop.
        """
        message, stop = agree(str(failure) if failure is not None else None, self.world.watch.stop or 0)
        if message is not None:
            raise RewardError(message) from failure
        if stop:
            raise Stopped(stop)

    def take_errors(self, prefix: str = "") -> dict[str, float]:
        """The number of samples that rewards failed on since the last call, as a metric where they may fail."""
        if self.cfg.reward.on_error == "fail":
            return {}
        count, self.unscored = self.unscored, 0
        return {f"{prefix}reward/errors": float(count)}

    def validated(self, weights: Callable[[], AbstractContextManager[None]]) -> tuple[dict[str, float], Records]:
        """The row of a validation on all sets, within `weights`, and on rank 0 the samples to keep of each set."""
        row: dict[str, float] = {}
        kept: Records = {}
        for name, prompts in self.val_sets.items():
            samples = -(-len(prompts) // self.world.data_size) * self.cfg.rollout.val.n  # of a rank
            self.timers.expect(-(-samples // self.rollout.micro_batch_size))
            found, kept[name] = validate(
                self.cfg, self.rollout, weights(), self.submit, self.score, name, prompts, self.world
            )
            row |= found | self.take_errors(f"val/{name}/")
        return row, kept


def check_finite(outputs: Outputs, prompts: Sequence[Prompt]) -> None:
    """Raise RewardError for a picture or video with NaN or infinity, which would be scored as a black one."""
    if not isinstance(outputs, Tensor):
        return
    fine = outputs.flatten(1).isfinite().all(1)
    if not fine.all():
        bad = fine.tolist().index(False)
        raise RewardError(
            f"the sample of the prompt {prompts[bad].text!r} holds NaN or infinity; look at the weights of "
            "model.path, at model.dtype and at optim.lr"
        )
