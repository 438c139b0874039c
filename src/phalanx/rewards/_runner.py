"""Runs the configured rewards beside the rollout: micro-batches are scored on worker threads while the next is sampled.

Threads, not processes: onnxruntime, PIL and torch release the interpreter's lock while they compute, and images need no
copy.
"""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from phalanx.config.schema import RewardConfig
from phalanx.functional.rewards import combine
from phalanx.rewards._base import Marked, RewardError
from phalanx.rewards._frames import mean_of_frames, shown
from phalanx.rewards._judge import Reading
from phalanx.rewards._panel import Panel
from phalanx.rewards._pool import DaemonPool
from phalanx.rewards._registry import Term, build_terms, judged_frames
from phalanx.types import Prompt

_POLL_S = 0.05  # how soon a call that has just left the queue is watched
_SHOWN = 120  # characters of a prompt in a message

Rows = dict[str, Tensor]  # float32 [B] on the CPU, by the names in the logs


class RewardSet:
    """All terms of the reward of one rank.

    `submit` queues a sampled micro-batch, `collect` returns the scores of all of them. CPU rewards run on
    `reward.num_workers` threads from `submit` on (`reward.overlap`), or from `collect` on; rewards on the device
    (DeviceReward) run from `collect` on, one call at a time. Judges need an `ask` in between. After `collect`:
    `waited_s`, seconds that it waited; `busy_s`, seconds that rewards worked, without those of the reward model, which
    are `judge_s`; `spans`, (start, end) of each call by `time.perf_counter`.
    """

    def __init__(
        self, cfg: RewardConfig, device: str, group_timeout_s: float | None = None, *, beside: bool = False
    ) -> None:
        """Resolve and load the rewards; raises ConfigError, one line, for what cannot be used.

        `group_timeout_s` is the time limit of collectives between the ranks, which judges need; None: no judges.
        `beside`: the reward model answers from `submit` on, which all ranks of the world then call equally often.
        """
        self.terms = build_terms(
            cfg.functions, device, None if group_timeout_s is None else cfg.model.unparseable_score
        )
        self._asked = False
        self.waited_s = 0.0
        self.busy_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self._overlap = cfg.overlap
        self._timeout_s = cfg.timeout_s
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # A new thread starts on device 0, whatever this one uses.
            self._device = torch.device("cuda", torch.cuda.current_device())
        judges = {term.name: term.function.judge for term in self.terms if isinstance(term.function, Reading)}
        self._judged, self._frames = judged_frames(self.terms), 1
        self._panel: Panel | None = None
        if judges and group_timeout_s is not None:
            self._panel = Panel(judges, cfg.model, group_timeout_s, device=self._device, beside=beside)
        self._cpu_pool = DaemonPool(cfg.num_workers, "reward")
        self._device_pool = DaemonPool(1, "reward-device")
        self._calls: list[_Call] = []

    @property
    def names(self) -> list[str]:
        """Names of the terms, in the order of the configuration."""
        return [term.name for term in self.terms]

    def submit(self, images: Tensor, prompts: list[Prompt]) -> None:
        """Score images [B, 3, H, W], or videos [B, F, 3, H, W] (0..1, CPU) of B prompts, one each; the caller no longer
        writes to `images`.

        Raises RewardError where an earlier call has failed meanwhile, so that the job ends without a whole rollout, and
        where a judge has no question.
        """
        assert images.ndim in (4, 5) and images.shape[-3] == 3 and images.device.type == "cpu", images.shape
        assert len(images) == len(prompts) > 0, (len(images), len(prompts))
        for term in self.terms:
            if isinstance(term.function, Reading):
                continue
            subject, seen = shown(images, prompts, term.frames, whole=term.whole)
            call = _Call(term, subject.float(), seen, len(seen) // len(prompts))
            self._calls.append(call)
            if self._overlap and not term.on_device:
                self._start(call)
        if self._panel is not None:
            subject, seen = shown(images, prompts, self._judged, whole=False)
            self._panel.submit(subject, seen)
            self._frames = len(seen) // len(prompts)
        self._raise_failures(self._calls)

    @property
    def asks(self) -> bool:
        """Whether there are judges who have not asked yet, so that `ask` must be called before `collect`."""
        return self._panel is not None and not self._asked

    @property
    def judge_s(self) -> float | None:
        """Seconds from questions to answers, of the last `ask`, partly beside the sampling; None without judges."""
        return None if self._panel is None else self._panel.busy_s

    def ask(self) -> None:
        """Have the judges' questions about all submitted images answered, once before each `collect`.

        All ranks of the world call it at the same point, on their main threads: it is a collective.
        """
        if self._panel is None or self._asked:
            return
        prompts, answers = self._panel.ask()
        self._asked = True
        if prompts:
            own = [term for term in self.terms if term.name in answers]
            self._calls += [_Call(term, answers[term.name], prompts, self._frames) for term in own]

    def collect(self) -> dict[str, Tensor]:
        """Wait for all submitted micro-batches: unweighted float32 scores [B] by term, in the order of submission, and
        after those of a Marking reward its marks, as `<term>_<mark>` [B].

        Raises RewardError for a reward that raised, ran longer than `reward.timeout_s`, returned another number of
        scores, other marks than it names, or NaN or infinity. The submitted micro-batches are forgotten in any case.
        """
        assert not self.asks, "ask comes first"
        begin = time.perf_counter()
        calls, self._calls = self._calls, []
        self._asked = False
        for call in calls:
            if call.future is None:
                self._start(call)
        self._wait(calls)
        self.waited_s = time.perf_counter() - begin
        self.spans = [(call.start, call.end) for call in calls]
        self.busy_s = sum(end - start for start, end in self.spans)
        # also of terms without a call: all ranks gather the same rows
        found: dict[str, list[Tensor]] = {row: [] for term in self.terms for row in term.rows}
        for call in calls:
            assert call.future is not None
            for row, values in call.future.result().items():
                found[row].append(values)
        return {row: torch.cat(parts) if parts else torch.zeros(0) for row, parts in found.items()}

    def weighted(self, terms: dict[str, Tensor], step: int | None = None, group_id: Tensor | None = None) -> Tensor:
        """The reward [B] of the terms [B]; see phalanx.functional.rewards.combine."""
        shares = [term.share for term in self.terms]
        return combine([terms[term.name] for term in self.terms], shares, step=step, group_id=group_id)

    def _start(self, call: "_Call") -> None:
        if call.term.on_device:
            call.future = self._device_pool.submit(lambda: call.run(self._on_device()))
        else:
            call.future = self._cpu_pool.submit(lambda: call.run(nullcontext()))

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _wait(self, calls: list["_Call"]) -> None:
        pending = {call.future for call in calls if call.future is not None}
        while pending:
            self._raise_failures(calls)
            now = time.perf_counter()
            left = [call.start + self._timeout_s - now for call in calls if call.running()]
            _, pending = wait(pending, max(0.0, min(left, default=_POLL_S)), FIRST_COMPLETED)
        self._raise_failures(calls)

    def _raise_failures(self, calls: list["_Call"]) -> None:
        """Raise for the first call that has failed or is overdue, without waiting."""
        for call in calls:
            if call.running() and time.perf_counter() - call.start > self._timeout_s:
                raise RewardError(
                    f"reward {call.term.name!r} ran longer than reward.timeout_s={self._timeout_s:g} seconds "
                    f"on {_on(call.prompts)}"
                )
            error = call.future.exception() if call.future is not None and call.future.done() else None
            if isinstance(error, RewardError):
                raise error
            if error is not None:
                text = " ".join(str(error).split())
                raise RewardError(
                    f"reward {call.term.name!r} raised {type(error).__name__}: {text} on {_on(call.prompts)}"
                ) from error


class _Call:
    """One call of one term on one micro-batch, or on all answers to a judge. `start` and `end` are set by the worker
    thread; 0 until then.
    """

    def __init__(self, term: Term, subject: Tensor | list[str], prompts: list[Prompt], frames: int = 1) -> None:
        self.term = term
        self._frames = frames
        self.prompts = prompts
        self.start = self.end = 0.0
        self.future: Future[Rows] | None = None
        self._subject: Tensor | list[str] | None = subject

    def running(self) -> bool:
        return self.start > 0 and self.future is not None and not self.future.done()

    def run(self, device: AbstractContextManager[Any]) -> Rows:
        """Call the reward and check what it returns: the term's rows, its scores first."""
        assert self._subject is not None
        subject, self._subject = self._subject, None  # freed as soon as they are scored
        self.start = time.perf_counter()
        with device:
            returned = self.term.function(subject, [p.text for p in self.prompts], [p.meta for p in self.prompts])
            checked = _rows(returned, self.term, self.prompts)
        self.end = time.perf_counter()
        return mean_of_frames(checked, self._frames)


def _rows(returned: Any, term: Term, prompts: list[Prompt]) -> Rows:
    """What a reward returned as the term's rows; RewardError for other marks than it names, and see `_check`."""
    marked = returned if isinstance(returned, Marked) else Marked(returned, {})
    if marked.marks.keys() != set(term.marks):
        found, named = (", ".join(sorted(names)) or "none" for names in (marked.marks, term.marks))
        raise RewardError(
            f"reward {term.name!r} returned the marks {found} on {_on(prompts)}; right are those in `marks` of its "
            f"class, derived from Marking: {named}"
        )
    values = (marked.scores, *(marked.marks[mark] for mark in term.marks))
    return {row: _check(each, row, prompts) for row, each in zip(term.rows, values, strict=True)}


def _check(scores: Any, name: str, prompts: list[Prompt]) -> Tensor:
    """The scores as float32 [B] on the CPU; RewardError for another number of them, NaN or infinity."""
    right = f"right is {len(prompts)} numbers: a list, an array or a tensor"
    if isinstance(scores, Tensor):
        scores = scores.detach()
    try:
        values = torch.as_tensor(scores, dtype=torch.float32, device="cpu").clone()  # the reward may reuse its own
    except (TypeError, ValueError, RuntimeError):
        raise RewardError(
            f"reward {name!r} returned no numbers but a {type(scores).__name__} on {_on(prompts)}; {right}"
        ) from None
    if values.shape != (len(prompts),):
        what = f"{len(values)} scores" if values.ndim == 1 else f"scores of shape {list(values.shape)}"
        raise RewardError(f"reward {name!r} returned {what} for {len(prompts)} images on {_on(prompts)}; {right}")
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"reward {name!r} returned {values[bad[0]].item()} for {len(bad)} of {len(prompts)} images "
            f"on {_on([prompts[i] for i in bad])}; right are finite numbers"
        )
    return values


def _on(prompts: list[Prompt]) -> str:
    """`the prompts "a" (+2 more)`: the first of the distinct prompts, cut to a readable length."""
    texts = list(dict.fromkeys(" ".join(p.text.split()) for p in prompts))
    shown = texts[0] if len(texts[0]) <= _SHOWN else texts[0][:_SHOWN] + "…"
    return f'the prompts "{shown}" (+{len(texts) - 1} more)' if len(texts) > 1 else f'the prompt "{shown}"'
