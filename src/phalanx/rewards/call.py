"""One call of a reward: its arguments, the checks of its result, one-line error messages, and the worker threads."""

import functools
import inspect
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.config.messages import cut, place, reason
from phalanx.functional.advantage import LARGEST, Share
from phalanx.rewards.base import MARK, HasGradient, RewardError, RewardOutput, objection_of
from phalanx.rewards.judge import ParsedAnswers
from phalanx.types import Outputs, Prompt, copied

_SHOWN = 120  # maximum characters of a prompt in a message

T = TypeVar("T")
Rows = dict[str, Tensor]  # float32 [B] on the CPU, by name in the logs


@dataclass(frozen=True)
class Term:
    """One term of the reward: its name in the logs, the function with bound arguments, and its share in the sum."""

    name: str
    function: Callable[..., Any]  # a reward, a PolicyReward, or ParsedAnswers around a judge
    share: Share
    on_device: bool
    takes: str = "images"  # one of TAKES
    frames: int = 1  # frames per video that are scored as images
    extras: tuple[str, ...] = ()  # names of its extras; see RewardWithExtras
    per_sample: bool = False  # calls may be split, because each score depends only on its own sample
    chats: bool = False  # prompts that are chats are passed as lists of messages

    @property
    def reward(self) -> object:
        """The reward itself, where `function` stands around a judge."""
        return self.function.judge if isinstance(self.function, ParsedAnswers) else self.function

    def objection(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        """Why samples of this row cannot be scored: see `objection_of`."""
        return objection_of(self.reward, prompt, metadata)

    @cached_property
    def gradient(self) -> Callable[..., Tensor] | None:
        """The function that computes differentiable scores; None if the reward has none."""
        function = self.function
        if isinstance(function, HasGradient):
            return function.with_gradient
        inner = function.func if isinstance(function, functools.partial) else None
        return function if inspect.isfunction(inner) and vars(inner).get(MARK) else None

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Names in the logs: the term's name, for the scores, then those of the extras."""
        return self.name, *(f"{self.name}_{extra}" for extra in self.extras)


class Task(Future[T]):
    """The result of a call on a thread. `start` and `end`, by time.perf_counter, are 0 until it starts or ends."""

    start = end = 0.0


@dataclass(frozen=True)
class Scored:
    """The rows of a term for B samples, its scores first.

    problem: why scores are missing, if some are. refused: samples of rows that the reward's check_row refuses.
    feedback: what the reward says about each sample; empty if it says nothing.
    """

    rows: Rows
    problem: str | None = None
    refused: int = 0
    feedback: tuple[str, ...] = ()


@dataclass(eq=False)
class Call:
    """A call of a term on a micro-batch or a part of it, or on all answers to a judge.

    subject: the outputs that the term's function gets, `frames` for each sample, and, in `prompts`, the prompt of each;
        None once they are copied, so that they are freed. task: the result; None until the call is queued.
    """

    term: Term
    subject: "Outputs | None"
    prompts: list[Prompt]
    frames: int = 1
    task: Task[Scored] | None = None


Score = Callable[[Call], Scored]


class Raised(RewardError):
    """The function of a reward raised an exception, the cause of this error."""


def private(subject: Outputs) -> Outputs:
    """A copy for one call: a reward that modifies it does not change the input of other rewards and the logs."""
    return subject.to(torch.float32, copy=True) if isinstance(subject, Tensor) else copied(subject)


def score(call: Call, *, forgives: bool = False, copy: Callable[[Outputs], Outputs] = private) -> Scored:
    """Call the function of a term, and check what it returns. Raises RewardError, in one line.

    forgives: numbers that are not finite are no failures. copy: makes the outputs that the function gets.
    """
    term, prompts = call.term, call.prompts
    assert call.subject is not None, "a call runs once"
    try:
        outputs, call.subject = copy(call.subject), None
        texts: list[Any] = [prompt.text for prompt in prompts]
        if term.chats:
            texts = [prompt.text if prompt.messages is None else copied(prompt.messages) for prompt in prompts]
        returned = term.function(outputs, texts, [copied(prompt.meta) for prompt in prompts])
    except RewardError:
        raise
    except BaseException as error:  # whatever the reward raises
        kind, line = (Raised, place(error)) if isinstance(error, Exception) else (RewardError, "")  # see `reason`
        raise kind(f"reward {term.name!r} raised {reason(error)} on {on_prompts(prompts)}{line}") from error
    output = returned if isinstance(returned, RewardOutput) else RewardOutput(returned)
    if output.extras.keys() != set(term.extras):
        names, expected = (", ".join(sorted(extras)) or "none" for extras in (output.extras, term.extras))
        raise RewardError(
            f"reward {term.name!r} returned the extras {names} on {on_prompts(prompts)}; expected those that "
            f"`extras` of its class, derived from RewardWithExtras, names: {expected}"
        )
    scores: Any = output.scores
    problem = output.problem
    absent = [i for i, each in enumerate(scores) if each is None] if isinstance(scores, list | tuple) else []
    if absent:  # None marks a missing score
        scores = [math.nan if each is None else each for each in scores]
        problem = problem or f"scores[{absent[0]}] is None"
    rows = {}
    for row, values in zip(term.rows, (scores, *map(output.extras.get, term.extras)), strict=True):
        of_outputs = as_numbers(values, row, term.takes, prompts, problem, forgives=forgives)
        rows[row] = of_outputs.view(-1, call.frames).mean(1)
    if output.feedback is None:
        return Scored(rows, problem)
    return Scored(rows, problem, feedback=_texts(output.feedback, term.name, prompts)[:: call.frames])


def _texts(feedback: Any, name: str, prompts: list[Prompt]) -> tuple[str, ...]:
    """The texts of a reward. Raises RewardError if they are not one, or None, for each prompt."""
    texts = tuple("" if text is None else text for text in feedback)
    if len(texts) != len(prompts) or {*map(type, texts)} - {str}:
        raise RewardError(
            f"reward {name!r} returned the feedback {cut(repr(feedback))} on {on_prompts(prompts)}; expected a text or "
            f"None for each of {len(prompts)} outputs"
        )
    return texts


def as_numbers(
    scores: Any, name: str, takes: str, prompts: list[Prompt], problem: str | None, *, forgives: bool
) -> Tensor:
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
        for i, each in enumerate(scores if isinstance(scores, list) else ()):
            if not odd and isinstance(each, str | bytes | dict):
                odd = f" with {cut(repr(each))} as scores[{i}]"
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


def on_prompts(prompts: list[Prompt]) -> str:
    """`the prompts "a" (+2 more)`: the first of the distinct prompts, cut to _SHOWN characters."""
    texts = list(dict.fromkeys(" ".join(p.text.split()) for p in prompts))
    shown = texts[0] if len(texts[0]) <= _SHOWN else texts[0][:_SHOWN] + "…"
    return f'the prompts "{shown}" (+{len(texts) - 1} more)' if len(texts) > 1 else f'the prompt "{shown}"'


Calls = queue.SimpleQueue[tuple[Task[Any], Callable[[], Any]] | None]  # None ends a thread


class DaemonPool:
    """Daemon threads that take calls from one queue; they are started by the first call, hence after any fork, and end
    when the pool is no longer used.

    The process does not wait for them when it exits. `ThreadPoolExecutor` joins its threads at exit, so that a reward
    that hangs would block the exit of a job that the time limit has just ended. `device`: the current one of the
    threads, if it is a CUDA device; a new thread starts on device 0, regardless of the device of the thread before.
    """

    def __init__(self, threads: int, name: str, device: torch.device | None = None) -> None:
        self._threads, self._name, self._device = threads, name, device
        self._queue: Calls | None = None

    def submit(self, function: Callable[[], T]) -> Task[T]:
        """Queue a call. Calls start in the order of submission."""
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            for i in range(self._threads):
                arguments, name = (self._queue, self._device), f"{self._name}-{i}"
                threading.Thread(target=_run_tasks, args=arguments, name=name, daemon=True).start()
                weakref.finalize(self, self._queue.put, None).atexit = False
        task: Task[T] = Task()
        self._queue.put((task, function))
        return task


def _run_tasks(tasks: Calls, device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    while (entry := tasks.get()) is not None:
        task, function = entry
        if task.set_running_or_notify_cancel():
            task.start = time.perf_counter()
            try:
                result = function()
            except BaseException as error:
                # Anything that a user's reward raises must reach the thread that waits for the result.
                task.end = time.perf_counter()
                task.set_exception(error)
            else:
                task.end = time.perf_counter()
                task.set_result(result)
                del result
        del entry, task, function  # so that no images are kept alive while the thread waits
