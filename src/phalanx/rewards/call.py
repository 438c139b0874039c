"""One call of a reward: its arguments, the checks of its result, one-line error messages, and the worker threads."""

import math
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.config.messages import cut, place, reason
from phalanx.functional.rewards import LARGEST
from phalanx.rewards.base import RewardError, RewardOutput
from phalanx.rewards.registry import Term
from phalanx.types import Outputs, Prompt, copied

_SHOWN = 120  # maximum characters of a prompt in a message
_FOLDERS = re.compile(r"""(?<![\w.:/])/(?:[^/\s"']+/)+""")

T = TypeVar("T")
_Task = tuple[Future[Any], Callable[[], Any]]
Rows = dict[str, Tensor]  # float32 [B] on the CPU, by name in the logs


class Call:
    """One call of one term, on a micro-batch or a part of it, or on all answers to a judge.

    `start` and `end`, by time.perf_counter, are set by the worker thread and are 0 until then.
    """

    def __init__(
        self, term: Term, subject: Outputs, prompts: list[Prompt], frames: int = 1, *, forgives: bool = False
    ) -> None:
        """subject: the outputs that the term's function gets, `frames` for each sample.
        prompts: the prompt of each of these outputs.
        forgives: neither exceptions of the function nor scores that are not finite are failures.
        """
        self.term = term
        self._forgives = forgives
        self.prompts = prompts
        self.start = self.end = 0.0
        self.future: Future[Rows] | None = None
        self._frames = frames
        self.subject: Outputs | None = subject
        self._problem: str | None = None  # why scores are missing, according to the function
        self.refused = 0  # samples of rows that the reward's check_row refuses

    def overdue(self, limit_s: float) -> bool:
        """Whether the call has been running for longer than `limit_s`; time in the queue does not count."""
        running = self.start > 0 and self.future is not None and not self.future.done()
        return running and time.perf_counter() - self.start > limit_s

    def failure(self) -> RewardError | None:
        """The error that ended the call, as one line and with its cause; None if the call has not failed so far."""
        if self.future is None or not self.future.done() or self.future.cancelled():
            return None
        error = self.future.exception()
        if error is None or isinstance(error, RewardError):
            return error
        return None if self._forgives and isinstance(error, Exception) else self._wrapped(error)

    def outcome(self) -> tuple[Rows, str | None]:
        """Rows of a finished call that did not fail, NaN for samples without a score, and why a score is missing."""
        assert self.future is not None
        error = self.future.exception()
        if error is not None:
            missing = torch.full((len(self.prompts) // self._frames,), torch.nan)
            return dict.fromkeys(self.term.rows, missing), str(self._wrapped(error))
        rows = self.future.result()
        lost = torch.stack([~(values.abs() <= LARGEST) for values in rows.values()]).any(0)  # true for NaN, too
        if not lost.any():
            return rows, None
        prompts = [self.prompts[i * self._frames] for i in lost.nonzero().flatten().tolist()]
        what = f"returned NaN, infinity or more than {LARGEST:g}" if self._problem is None else "has no score"
        why = "" if self._problem is None else f": {self._problem}"
        problem = f"reward {self.term.name!r} {what} on {on_prompts(prompts)}{why}"
        return {row: values.masked_fill(lost, torch.nan) for row, values in rows.items()}, problem

    def _wrapped(self, error: BaseException) -> RewardError:
        """An exception of the function as a RewardError of one line, with the exception as its cause."""
        where = f"on {on_prompts(self.prompts)}{self.line_of(error)}"
        failure = RewardError(f"reward {self.term.name!r} raised {reason(error)} {where}")
        failure.__cause__ = error
        return failure

    def line_of(self, error: BaseException) -> str:
        """File and line where the function raised, as the end of a message; empty for an exit, see `reason`."""
        return "" if isinstance(error, SystemExit) else place(error)

    def private(self, subject: Outputs) -> Outputs:
        """A copy for this call: a reward that modifies it does not change the input of other rewards and the logs."""
        return subject.to(torch.float32, copy=True) if isinstance(subject, Tensor) else copied(subject)

    def run(self) -> Rows:
        """Call the reward and check its result. Returns the term's rows, its scores first."""
        assert self.subject is not None
        separable = self.term.per_sample and len(self.prompts) > self._frames
        again = self.subject if separable else None
        copy, self.subject = self.private(self.subject), None  # so that the outputs are freed once they are scored
        self.start = time.perf_counter()
        try:
            rows = self._score(copy, self.prompts)
        except Exception:  # whatever the reward raises
            if again is None:
                raise
            rows = self._score_singly(again)
        self.end = time.perf_counter()
        return rows

    def _score(self, subject: Outputs, prompts: list[Prompt]) -> Rows:
        """The term's rows of all or some of the samples; `subject` is a private copy. Where errors are forgiven,
        samples of rows that the reward's check_row refuses are not passed to the reward, and their values are NaN.
        """
        good = list(range(len(prompts)))
        if self._forgives:
            for i, prompt in enumerate(prompts):
                objection = self.term.objection(prompt.text, prompt.meta)
                if objection is not None:
                    good.remove(i)
                    self._problem = self._problem or objection
        if len(good) == len(prompts):
            return mean_of_frames(self._call(subject, prompts), self._frames)
        self.refused += (len(prompts) - len(good)) // self._frames
        rows = {row: torch.full((len(prompts),), torch.nan) for row in self.term.rows}
        if good:
            kept = subject[good] if isinstance(subject, Tensor) else [subject[i] for i in good]
            for row, values in self._call(kept, [prompts[i] for i in good]).items():
                rows[row][good] = values
        return mean_of_frames(rows, self._frames)

    def _call(self, subject: Outputs, prompts: list[Prompt]) -> Rows:
        """Call the function on these outputs, and check its result."""
        metadata = [copied(prompt.meta) for prompt in prompts]
        texts: list[Any] = [prompt.text for prompt in prompts]
        if self.term.chats:
            texts = [prompt.text if prompt.messages is None else copied(prompt.messages) for prompt in prompts]
        returned = self.term.function(subject, texts, metadata)
        output = without_none(returned if isinstance(returned, RewardOutput) else RewardOutput(returned))
        self._problem = self._problem or output.problem
        return _rows(output, self.term, prompts, forgives=self._forgives)

    def _score_singly(self, subject: Outputs) -> Rows:
        """Repeat a call that raised sample by sample, to find the sample that is to blame: the error names only its
        prompt, or, where errors are forgiven, only its score is missing.
        """
        rows: dict[str, list[Tensor]] = {row: [] for row in self.term.rows}
        prompts = self.prompts
        self.refused = 0
        for first in range(0, len(prompts), self._frames):
            sample = slice(first, first + self._frames)
            try:
                scored = self._score(self.private(subject[sample]), prompts[sample])
            except Exception as error:  # whatever the reward raises
                if not self._forgives or isinstance(error, RewardError):
                    self.prompts = prompts[sample]  # for the error message
                    raise
                self._problem = self._problem or reason(error) + self.line_of(error)
                scored = dict.fromkeys(self.term.rows, torch.full((1,), torch.nan))
            for row, values in scored.items():
                rows[row].append(values)
        return {row: torch.cat(values) for row, values in rows.items()}


def without_none(output: RewardOutput) -> RewardOutput:
    """The output with NaN in place of None, which marks a missing score."""
    scores: Any = output.scores
    if not isinstance(scores, list | tuple):
        return output
    absent = [i for i, score in enumerate(scores) if score is None]
    if not absent:
        return output
    numbers = [math.nan if score is None else score for score in scores]
    return RewardOutput(numbers, output.extras, output.problem or f"scores[{absent[0]}] is None")


def _rows(output: RewardOutput, term: Term, prompts: list[Prompt], *, forgives: bool) -> Rows:
    """The term's rows of an output of its reward. Raises RewardError for unexpected extras, and as `_check` does."""
    if output.extras.keys() != set(term.extras):
        returned = ", ".join(sorted(output.extras)) or "none"
        named = ", ".join(sorted(term.extras)) or "none"
        raise RewardError(
            f"reward {term.name!r} returned the extras {returned} on {on_prompts(prompts)}; expected those that "
            f"`extras` of its class, derived from RewardWithExtras, names: {named}"
        )
    values = [output.scores, *(output.extras[extra] for extra in term.extras)]
    rows = {}
    for row, scores in zip(term.rows, values, strict=True):
        rows[row] = _check(scores, row, term.takes, prompts, output.problem, forgives=forgives)
    return rows


def _check(scores: Any, name: str, takes: str, prompts: list[Prompt], problem: str | None, *, forgives: bool) -> Tensor:
    """The scores as float32 [B] on the CPU. Raises RewardError if they are not B numbers and, unless `forgives`, for
    NaN, infinity and numbers above LARGEST; `problem` is the reward's own reason for NaN.
    """
    expected = f"expected {len(prompts)} numbers: a list, an array or a tensor"
    if isinstance(scores, Tensor):
        scores = scores.detach()
    try:
        values = torch.as_tensor(scores, dtype=torch.float32, device="cpu").clone()  # the reward may reuse its own
    except (TypeError, ValueError, RuntimeError):
        odd = ""
        for i, score in enumerate(scores if isinstance(scores, list) else ()):
            if not odd and isinstance(score, str | bytes | dict):
                odd = f" with {cut(repr(score))} as scores[{i}]"
        kind = f"{type(scores).__name__}{odd}"
        raise RewardError(
            f"reward {name!r} returned a {kind} instead of numbers on {on_prompts(prompts)}; {expected}"
        ) from None
    if values.shape != (len(prompts),):
        what = f"{len(values)} scores" if values.ndim == 1 else f"scores of shape {list(values.shape)}"
        raise RewardError(
            f"reward {name!r} returned {what} for {len(prompts)} {takes} on {on_prompts(prompts)}; {expected}"
        )
    bad = (~(values.abs() <= LARGEST)).nonzero().flatten().tolist()
    if bad and not forgives:
        count, where = f"{len(bad)} of {len(prompts)} {takes}", on_prompts([prompts[i] for i in bad])
        if problem is not None:
            raise RewardError(f"reward {name!r} has no score for {count} on {where}: {problem}")
        raise RewardError(
            f"reward {name!r} returned {values[bad[0]].item()} for {count} on {where}; expected finite numbers"
            f"{f' up to {LARGEST:g}' if values[bad[0]].isfinite() else ''}"
        )
    return values


def without_folders(text: str) -> str:
    """The text with absolute paths reduced to their last component, for readers outside this machine."""
    return _FOLDERS.sub("", text)


def on_prompts(prompts: list[Prompt]) -> str:
    """`the prompts "a" (+2 more)`: the first of the distinct prompts, cut to _SHOWN characters."""
    texts = list(dict.fromkeys(" ".join(p.text.split()) for p in prompts))
    shown = texts[0] if len(texts[0]) <= _SHOWN else texts[0][:_SHOWN] + "…"
    return f'the prompts "{shown}" (+{len(texts) - 1} more)' if len(texts) > 1 else f'the prompt "{shown}"'


def mean_of_frames(rows: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
    """Average scores [B k] of k frames per video to scores [B] of the videos, by name."""
    return {name: values.view(-1, frames).mean(1) for name, values in rows.items()}


class DaemonPool:
    """Daemon threads that take calls from one queue; they are started by the first call, hence after any fork.

    The process does not wait for them when it exits. `ThreadPoolExecutor` joins its threads at exit, so that a reward
    that hangs would block the exit of a job that the time limit has just ended.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._queue: queue.SimpleQueue[_Task] | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call. Calls start in the order of submission."""
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            for i in range(self._threads):
                threading.Thread(target=_work, args=(self._queue,), name=f"{self._name}-{i}", daemon=True).start()
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future


def _work(tasks: "queue.SimpleQueue[_Task]") -> None:
    while True:
        future, function = tasks.get()
        try:
            result = function()
        except BaseException as error:
            # Anything that a user's reward raises must reach the thread that waits for the future.
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del future, function  # so that no images are kept alive while the thread waits
