"""The interface to the rewards for ranks that sample: micro-batches are submitted, scores collected, in step."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, zip_longest

import torch
from torch import Tensor

from phalanx.config.run import RunConfig
from phalanx.distributed.collectives import agree, all_gather_object, reduce_int
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.rewards.base import RewardError
from phalanx.rewards.runner import RewardSet
from phalanx.telemetry.timers import Timers
from phalanx.types import Outputs, Prompt

log = logging.getLogger(__name__)


class RewardClient:
    """Submits samples to the rewards and collects their scores, in step on all ranks of a world.

    reward_set: None if the configuration has no rewards, or if other ranks sample.
    noun: the plural noun for samples in messages.
    on_stop: called on all ranks at once after any of them has received a signal to stop; None: Stopped is raised.
    judged: maps a prompt to the prompt that its samples are scored with; None: the same prompt.
    forgives: whether samples may lack a score; `take_errors` has their number.
    has_judges: whether `ask` must be called between `submit` and `collect`.
    feedback: what rewards say about the samples of the last `collect`; empty if they say nothing.
    metrics: perf/... of the last `collect`: busy seconds of the reward threads and of the reward model. time/reward has
        only the waiting.
    """

    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        reward_set: RewardSet | None,
        timers: Timers,
        noun: str,
        on_stop: Callable[[int], None] | None = None,
        judged: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        self.cfg, self.world, self.timers, self.noun = cfg.reward, world, timers, noun
        self.reward_set, self.on_stop, self.judged = reward_set, on_stop, judged
        self.forgives = cfg.reward.on_error != "fail"
        self.has_judges = reward_set is not None and reward_set.judges is not None
        self.metrics: dict[str, float] = {}
        self.feedback: list[str] = []
        self._weights = f"{cfg.model:path}, {cfg.model:dtype} and {cfg.optim:lr}"  # for messages
        self._errors = 0  # samples without a score since the last take_errors
        self._warned_of_errors = False
        self._submitted = 0  # samples since the last collect

    @property
    def rewards(self) -> RewardSet:
        """The reward set, in jobs with rewards."""
        assert self.reward_set is not None, "nothing is scored without rewards"
        return self.reward_set

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Submit a micro-batch to the rewards. All ranks must call it equally often: a failure on one rank ends all of
        them, and so does a signal to stop, because nothing is trained while samples are drawn.
        """
        with self._in_step():
            if isinstance(outputs, Tensor):
                check_finite(outputs, prompts, self._weights)
            if self.reward_set is not None:
                if self.world.context_size > 1:
                    outputs, prompts = self._local_samples(outputs, prompts)
                if self.judged is not None:
                    prompts = list(map(self.judged, prompts))
                if prompts:
                    self.reward_set.submit(outputs, prompts)
        self.timers.advance()

    def ask(self) -> None:
        """Wait for the reward model's answers to the judges' questions about submitted samples, timed as one phase.

        Raises RewardError on all ranks if the reward model cannot be asked a question.
        """
        if self.reward_set is not None and self.reward_set.must_ask:
            with self.timers("judge"), self._in_step():
                self.reward_set.ask()

    def collect(self) -> dict[str, Tensor]:
        """The reward terms [B] of all samples that this rank submitted since the last call; NaN for samples to skip.

        Raises RewardError on all ranks if a reward fails on one of them.
        """
        rewards = self.reward_set
        assert rewards is not None, "nothing is scored without rewards"
        if self.has_judges and rewards.must_ask:  # validation does not call `ask` itself
            with self._in_step():
                rewards.ask()
        with self._in_step():
            terms = rewards.collect()
        self.metrics = {"perf/reward_busy_s": rewards.busy_s}
        if rewards.judges is not None:
            self.metrics["perf/judge_busy_s"] = rewards.judges.busy_s
        self.feedback = rewards.feedback
        if self.world.context_size > 1:
            terms, self.feedback = self._of_all(terms, rewards.feedback)
        if self.forgives and terms:  # there are none if every term is a PolicyReward
            terms = self._fill_missing(terms)
        return terms

    def score(self) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's rewards [B] and their terms; see `collect`."""
        terms = self.collect()
        return self.rewards.weighted(terms), terms

    def take_errors(self, prefix: str = "") -> dict[str, float]:
        """The number of samples without a score since the last call, as a metric."""
        count, self._errors = self._errors, 0
        return {f"{prefix}reward/errors": float(count)}

    def _local_samples(self, outputs: Outputs, prompts: list[Prompt]) -> tuple[Outputs, list[Prompt]]:
        """The samples that this rank scores: ranks that hold the same samples share them out one by one."""
        first, size = self.world.rank - self._submitted, self.world.context_size
        self._submitted += len(prompts)
        local = slice(first % size, None, size)
        return outputs[local], prompts[local]

    def _of_all(self, terms: dict[str, Tensor], texts: list[str]) -> tuple[dict[str, Tensor], list[str]]:
        """The terms [B] of all of this rank's samples and the texts about them, also of those that other ranks have
        scored for it.
        """
        self._submitted, size = 0, self.world.context_size
        place = self.world.rank // size * size
        local = [values.tolist() for values in terms.values()]
        merged = []
        for dealt in zip(*all_gather_object([*local, texts])[place : place + size], strict=True):
            merged.append([value for value in chain(*zip_longest(*dealt)) if value is not None])
        *rows, texts = merged
        return dict(zip(terms, map(torch.tensor, rows), strict=True)), texts

    def _fill_missing(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's terms [B] with missing scores set to 0, or left NaN with reward.on_error=skip.

        Raises RewardError on all ranks if more samples lack a score than reward.max_error_fraction allows.
        """
        cfg, lost = self.cfg, torch.stack(list(terms.values())).isnan().any(0)
        count, scored = reduce_int(int(lost.sum()), "sum"), reduce_int(len(lost), "sum")
        self._errors += count
        if count == 0:
            return terms
        first, _ = agree(self.rewards.problem, 0)
        problem = f"{count} of {scored} {self.noun} have no score"
        # refused rows were already checked against the limit when the data were loaded; a step may draw several of them
        refused = reduce_int(self.rewards.refused * self.world.context_size, "sum")
        if count - refused > cfg.max_error_fraction * scored:
            allowed = f"more than reward.max_error_fraction={cfg.max_error_fraction:g} of them"
            raise RewardError(f"{problem}, {allowed}; the first: {first}")
        if self.world.rank == 0 and not self._warned_of_errors:
            log.warning(
                "reward.on_error=%s: %s; from here on see reward/errors; the first: %s", cfg.on_error, problem, first
            )
        self._warned_of_errors = True
        return terms if cfg.on_error == "skip" else {name: values.nan_to_num(0.0) for name, values in terms.items()}

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """For a block that all ranks run at once: if any raises RewardError, raise that of the lowest rank on all."""
        failure: RewardError | None = None
        try:
            yield
        except RewardError as error:
            failure = error
        message, stop = agree(str(failure) if failure is not None else None, self.world.watch.stop or 0)
        if message is not None:
            raise RewardError(message) from failure
        if stop:
            if self.on_stop is None:
                raise Stopped(stop)
            self.on_stop(stop)


def without_filling(prompts: list[Prompt], first: int, real: int) -> list[Prompt]:
    """The prompts of samples `first`, `first` + 1, ..., numbered over all ranks. Samples from number `real` on are
    padding: each gets a group to itself, so that real samples are not compared with it.
    """
    shown = []
    for number, prompt in enumerate(prompts, start=first):
        shown.append(prompt if number < real else replace(prompt, group_id=-1 - number))
    return shown


def check_finite(outputs: Tensor, prompts: Sequence[Prompt], keys: str) -> None:
    """Raise RewardError for an image or video with NaN or infinity, which would otherwise be scored as a black one.

    keys: those that the weights depend on.
    """
    fine = outputs.flatten(1).isfinite().all(1)
    if not fine.all():
        bad = fine.tolist().index(False)
        raise RewardError(
            f"the sample of the prompt {prompts[bad].text!r} contains NaN or infinity; check the weights of {keys}"
        )
