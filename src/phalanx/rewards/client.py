"""The rewards as the ranks that sample see them: samples go in by micro-batches, in step, and scores come out."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.run import RunConfig
from phalanx.distributed.collectives import agree, all_gather_apart, reduce_int
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.rewards.base import RewardError
from phalanx.rewards.runner import RewardSet
from phalanx.telemetry.metrics import Timers
from phalanx.types import Outputs, Prompt

log = logging.getLogger(__name__)


def raise_stopped(signal: int) -> None:
    """Raise Stopped: the default where the job gets a signal to stop."""
    raise Stopped(signal)


class RewardClient:
    """Hands samples to the rewards and collects their scores, in step on all ranks of a world.

    `reward_set` is None if the configuration has no rewards, or other ranks sample. `noun` is what a sample is
    called in messages, in the plural. `on_stop` is called on all ranks at once where a signal asked one to stop.
    """

    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        reward_set: RewardSet | None,
        timers: Timers,
        noun: str,
        on_stop: Callable[[int], None] = raise_stopped,
        judged: Callable[[Prompt], Prompt] | None = None,
    ) -> None:
        """`judged(prompt)` is the prompt by which samples of a prompt are scored, None for itself."""
        self.cfg, self.world, self.timers, self.noun = cfg.reward, world, timers, noun
        self.reward_set, self.on_stop, self.judged = reward_set, on_stop, judged
        self._errors = 0  # samples that a reward failed on since a row of metrics took the number
        self._warned_of_errors = False
        self._submitted = 0  # samples that were handed over and not yet scored

    @property
    def rewards(self) -> RewardSet:
        """The rewards, where there are some."""
        assert self.reward_set is not None, "nothing is scored without rewards"
        return self.reward_set

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Hand a micro-batch to the rewards. All ranks call it equally often: a failure that shows on one ends all,
        and so does a signal to stop, since nothing is trained while samples are drawn.
        """
        with self._in_step():
            check_finite(outputs, prompts)
            if self.reward_set is not None:
                self._submit(outputs, prompts)
        self.timers.advance()

    def ask(self) -> None:
        """Wait for the reward model's answers to the judges' questions about submitted samples, timed as one phase.

        Raises RewardError, on all ranks, for a question that the reward model cannot be asked.
        """
        if self.reward_set is not None and self.reward_set.must_ask:
            with self.timers("judge"), self._in_step():
                self.reward_set.ask()

    def collect(self) -> dict[str, Tensor]:
        """The terms [B] of the reward of what this rank submitted since the last call, NaN for samples to skip.

        Raises RewardError, on all ranks, where a reward fails on one.
        """
        if self.rewards.must_ask:  # in validation, where nobody has asked yet
            with self._in_step():
                self.rewards.ask()
        with self._in_step():
            terms = self.rewards.collect()
        terms = self._of_all(terms)
        if self.cfg.on_error != "fail" and terms:  # the policy may give all of them
            terms = self._forgive(terms)
        return terms

    def score(self) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's rewards [B] and their terms, as `collect`."""
        terms = self.collect()
        return self.rewards.weighted(terms), terms

    def metrics(self) -> dict[str, float]:
        """perf/... of the threads and the reward model that scored last; time/reward is what was left to wait for."""
        if self.reward_set is None:
            return {}
        row = {"perf/reward_busy_s": self.reward_set.busy_s}
        if self.reward_set.judge_s is not None:
            row["perf/judge_busy_s"] = self.reward_set.judge_s
        return row

    def take_errors(self, prefix: str = "") -> dict[str, float]:
        """The number of samples that rewards failed on since the last call, as a metric where they may fail."""
        if self.cfg.on_error == "fail":
            return {}
        count, self._errors = self._errors, 0
        return {f"{prefix}reward/errors": float(count)}

    def _submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Hand over the samples that this rank scores: those that several ranks hold are dealt out."""
        first, size = self.world.rank - self._submitted, self.world.context_size
        self._submitted += len(prompts)
        local = slice(first % size, None, size)
        shown = prompts[local] if self.judged is None else list(map(self.judged, prompts[local]))
        if shown:
            self.rewards.submit(outputs[local], shown)

    def _of_all(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The terms [B] of this rank's samples, of some of which other ranks have the scores."""
        count, self._submitted = self._submitted, 0
        size = self.world.context_size
        if size == 1:
            return terms
        place = self.world.rank // size * size
        merged = {}
        for name, values in terms.items():
            padded = torch.full((-(-count // size),), torch.nan)
            padded[: len(values)] = values
            dealt = all_gather_apart(padded)[place : place + size]
            merged[name] = torch.stack(dealt, 1).flatten()[:count]
        return merged

    def _forgive(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's terms [B] as reward.on_error wants them: 0 where there is no score, or NaN for one to skip.

        Raises RewardError, on all ranks, where more have none than reward.max_error_fraction allows.
        """
        cfg, lost = self.cfg, torch.stack(list(terms.values())).isnan().any(0)
        count, scored = reduce_int(int(lost.sum()), "sum"), reduce_int(len(lost), "sum")
        self._errors += count
        if count == 0:
            return terms
        first, _ = agree(self.rewards.problem, 0)
        problem = f"{count} of {scored} {self.noun} have no score"
        # rows that rewards refuse were counted as the data were loaded, and a step may have several of them
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
        """For a block that all ranks run at once: raise the RewardError of the lowest rank that has one, on all."""
        failure: RewardError | None = None
        try:
            yield
        except RewardError as error:
            failure = error
        message, stop = agree(str(failure) if failure is not None else None, self.world.watch.stop or 0)
        if message is not None:
            raise RewardError(message) from failure
        if stop:
            self.on_stop(stop)


def without_filling(prompts: list[Prompt], first: int, real: int) -> list[Prompt]:
    """The prompts of the samples `first`, `first` + 1 and so on of all ranks. Those from `real` on only fill up the
    last ranks: none of them is in a group, so that real samples are not compared with them.
    """
    shown = []
    for number, prompt in enumerate(prompts, start=first):
        shown.append(prompt if number < real else replace(prompt, group_id=-1 - number))
    return shown


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
