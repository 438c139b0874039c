"""Runs the configured rewards beside the rollout: micro-batches are scored on worker threads while the next is sampled.

Scoring has three steps: `submit` takes a sampled micro-batch and queues a call of each reward; `ask` has the judges'
questions about all of them answered by the reward model; `collect` waits for the calls and returns the scores.

Threads, not processes: onnxruntime, PIL and torch release the interpreter's lock while they compute, and images need no
copy.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.config.load import ConfigError
from phalanx.config.messages import reason
from phalanx.config.reward import RewardConfig
from phalanx.distributed.launch import Launch
from phalanx.distributed.passes import Passes
from phalanx.functional.frames import evenly_spaced
from phalanx.functional.rewards import combine
from phalanx.rewards.base import UNJUDGED, PolicyReward, RewardError, copied, transcript
from phalanx.rewards.call import Call, DaemonPool, Rows, on_prompts
from phalanx.rewards.judge._base import ParsedAnswers
from phalanx.rewards.judge._pool import Answers, JudgePool
from phalanx.rewards.registry import Term, build_terms, judged_frames
from phalanx.rewards.text.environment import Environment
from phalanx.types import Outputs, Policy, Prompt, Samples

log = logging.getLogger(__name__)
_POLL_S = 0.05  # seconds between checks for overdue calls


class Row(Protocol):
    """A row of a data file."""

    @property
    def text(self) -> str: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def place(self) -> str: ...


class RewardSet:
    """All terms of the reward of one rank.

    CPU rewards run on `reward.num_workers` threads from `submit` on (`reward.overlap`), or from `collect` on; a call is
    split over them where each score depends only on its own sample (Term.per_sample). Each DeviceReward runs from
    `collect` on, one call at a time. Judges need an `ask` in between. After `collect`: `busy_s`,
    seconds that rewards worked, without those of the reward model, which are `judge_s`; `spans`, (start, end) of each
    call by `time.perf_counter`.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        device: str,
        group_timeout_s: float | None = None,
        *,
        outputs: str = "images",
        beside: bool = False,
        launch: Launch | None = None,
        context_size: int = 1,
    ) -> None:
        """Resolve and load the rewards; raises ConfigError, one line, for what cannot be used.

        `group_timeout_s` is the time limit of collectives between the ranks, which judges need; None: no judges.
        `outputs` is what the job makes, "images" (or videos) or "completions": rewards of the other are refused.
        `beside`: the reward model answers from `submit` on, which all ranks of the world then call equally often;
        `launch` is that world, None for the launcher's; samples of `context_size` neighbours of it are dealt out to
        them one by one.
        """
        unparseable_score = None if group_timeout_s is None else cfg.model.unparseable_score
        self.terms = build_terms(cfg.functions, device, unparseable_score, outputs)
        self._scored = [term for term in self.terms if not isinstance(term.function, PolicyReward)]
        self.busy_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.problem: str | None = None  # the first one that the last `collect` forgave
        self.refused = 0  # of its samples, those of rows that a reward's check_row refuses
        self._forgives = cfg.on_error != "fail"
        self._max_error_fraction = cfg.max_error_fraction
        self._overlap = cfg.overlap
        self._timeout_s = cfg.timeout_s
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # a new thread starts on device 0, whatever this one uses
            self._device = torch.device("cuda", torch.cuda.current_device())

        # all judges of a job ask the same model about the same frames
        judges = {term.name: term.function.judge for term in self.terms if isinstance(term.function, ParsedAnswers)}
        self._max_judge_frames = judged_frames(self.terms)
        self._judge_frames = 1  # of each sample, as the last micro-batch had them
        self._judges: JudgePool | None = None
        if judges and group_timeout_s is not None:
            self._judges = JudgePool(
                judges,
                cfg.model,
                group_timeout_s,
                outputs=outputs,
                device=self._device,
                beside=beside,
                forgives=self._forgives,
                launch=launch,
                context_size=context_size,
            )
        self._asked = False
        self.answers: Answers = {}  # of the last `ask`, by judge those about each sample, or frame of one

        # the threads start with the first call
        self._workers = cfg.num_workers
        self._cpu_pool = DaemonPool(cfg.num_workers, "reward")
        self._device_pool = DaemonPool(1, "reward-device")
        self._calls: list[Call] = []  # submitted and not yet collected

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Score images [B, 3, H, W], videos [B, F, 3, H, W] (0..1, CPU) or completions of B prompts, one each; the
        caller no longer writes to `outputs`.

        Raises RewardError where an earlier call has failed meanwhile, so that the job ends without a whole rollout, and
        where a judge has no question.
        """
        assert len(outputs) == len(prompts) > 0, (len(outputs), len(prompts))
        if isinstance(outputs, Tensor):
            assert outputs.ndim in (4, 5) and outputs.shape[-3] == 3, outputs.shape
            assert outputs.device.type == "cpu", outputs.device
        for term in self.terms:
            if isinstance(term.function, ParsedAnswers | PolicyReward):
                continue  # called with the answers, once they are there, or by the policy: see `ask`, `of_policy`
            subjects, prompt_of = seen_by(term.takes, outputs, prompts, term.frames)
            frames = len(prompt_of) // len(prompts)
            for part in self._parts(term, len(prompts)):
                rows = slice(part.start * frames, part.stop * frames)
                call = Call(term, subjects[rows], prompt_of[rows], frames, forgives=self._forgives)
                self._calls.append(call)
                if self._overlap and not term.on_device:
                    self._start(call)
        if self._judges is not None:
            subjects, prompt_of = seen_by("images", outputs, prompts, self._max_judge_frames)
            self._judge_frames = len(prompt_of) // len(prompts)
            self._judges.submit(subjects, prompt_of, self._judge_frames)
        self._raise_failures(self._calls)

    def check_rows(self, rows: Iterable[Row], *, first: bool) -> None:
        """Ask the rewards about rows of the data, before any sample is drawn. `first`: this rank warns.

        Raises ConfigError, with file and row, where one cannot be scored; where `reward.on_error` forgives, only for
        more than `reward.max_error_fraction` of them.
        """
        count, refused = 0, []
        for row in rows:
            count += 1
            objections = [(term.name, term.objection(row.text, row.meta)) for term in self._scored]
            for name, objection in objections:
                if objection is not None:
                    refused.append(f"{row.place}: reward {name!r}: {objection}")
                    break
        if not refused:
            return
        more = f" (and {len(refused) - 1} more of {count} rows)" if len(refused) > 1 else ""
        if not self._forgives or len(refused) > self._max_error_fraction * count:
            raise ConfigError(refused[0] + more)
        if first:
            log.warning("samples of a row have no score: %s%s", refused[0], more)

    @property
    def validates(self) -> bool:
        """True if there are terms in validation, too: those of the policy are computed only in training."""
        return bool(self._scored)

    @property
    def must_ask(self) -> bool:
        """True if judges have not asked yet, so that `ask` must be called before `collect`."""
        return self._judges is not None and not self._asked

    @property
    def judge_s(self) -> float | None:
        """Seconds from questions to answers, of the last `ask`, partly beside the sampling; None without judges."""
        return None if self._judges is None else self._judges.busy_s

    def ask(self) -> None:
        """Have the judges' questions about all submitted images answered, once before each `collect`.

        All ranks of the world call it at the same point, on their main threads: it is a collective.
        """
        if self._judges is None or self._asked:
            return
        prompts, answers, rates = self._judges.ask()
        self._asked, self.answers = True, answers
        if not prompts:
            return  # this rank has only helped others to their answers
        for term in self.terms:
            if term.name in answers:
                judged: Any = answers[term.name]  # of each frame
                self._calls.append(Call(term, judged, prompts, self._judge_frames, forgives=self._forgives))
            elif term.name in rates:
                compared: Any = rates[term.name]  # each sample once, whatever its frames
                self._calls.append(Call(term, compared, prompts[:: self._judge_frames], forgives=self._forgives))

    def collect(self) -> Rows:
        """Wait for all submitted micro-batches: unweighted float32 scores [B] by term, in the order of submission, and
        after those of a RewardWithExtras its extras, as `<term>_<extra>` [B].

        Raises RewardError for a reward that raised, ran longer than `reward.timeout_s`, returned another number of
        scores, other extras than it names, or NaN or infinity. The submitted micro-batches are forgotten in any case.
        Where `reward.on_error` forgives, the rows of a term are NaN for samples on which it raised or returned no
        finite number, and `problem` is the first reason.
        """
        assert not self.must_ask, "ask comes first"
        calls, self._calls = self._calls, []
        self._asked = False
        for call in calls:
            if call.future is None:
                self._start(call)
        self._wait(calls)
        self.spans, self.busy_s = [], 0.0
        for call in calls:
            self.spans.append((call.start, call.end))
            self.busy_s += call.end - call.start

        # also of terms without a call: all ranks gather the same rows
        parts: dict[str, list[Tensor]] = {}
        for term in self._scored:
            for row in term.rows:
                parts[row] = []
        self.problem = None
        refused = dict.fromkeys(parts, 0)
        for call in calls:
            scored, problem = call.outcome()
            self.problem = self.problem or problem
            refused[call.term.name] += call.refused
            for row, values in scored.items():
                parts[row].append(values)
        self.refused = max(refused.values(), default=0)
        return {row: torch.cat(values) if values else torch.zeros(0) for row, values in parts.items()}

    @torch.no_grad()
    def of_policy(self, policy: Policy, samples: Samples, passes: Passes) -> Rows:
        """The terms [B] that the policy gives this rank's samples; a collective of all ranks. See PolicyReward."""
        rows = {}
        for term in self.terms:
            if isinstance(term.function, PolicyReward):
                rows[term.name] = term.function(policy, samples, passes).float().cpu()
        return rows

    def check_gradients(self) -> None:
        """Raise ConfigError for the first term with a weight that has no gradient."""
        for i, term in enumerate(self.terms):
            if term.share.counts and term.gradient is None:
                raise ConfigError(
                    f"reward.functions[{i}]: {term.name!r} has no gradient, and the algorithm differentiates the "
                    "reward; expected such as aesthetic, clip_score, hps_v2 or pickscore, a function that "
                    "phalanx.rewards.differentiable marks, or a weight of 0"
                )

    def with_gradient(self, outputs: Tensor, *, prompts: list[Prompt], step: int) -> Tensor:
        """The weighted reward [k B] of k images [k B, 3, H, W] or videos of each of B prompts, in their order, on the
        device, with a gradient. Raises RewardError for a term that raises, or returns anything else than scores with a
        gradient.
        """
        values, shares = [], []
        prompts = [prompt for prompt in prompts for _ in range(len(outputs) // len(prompts))]
        for term in self.terms:
            if term.gradient is None or not term.share.counts:
                continue
            subjects, prompt_of = seen_by(term.takes, outputs, prompts, term.frames)
            texts, metadata = [p.text for p in prompt_of], [copied(p.meta) for p in prompt_of]
            try:
                scores = term.gradient(subjects, texts, metadata)
            except Exception as error:  # whatever the reward raises
                raise RewardError(f"reward {term.name!r} raised {reason(error)} on {on_prompts(prompts)}") from error
            if not isinstance(scores, Tensor) or scores.shape != (len(prompt_of),) or not scores.requires_grad:
                raise RewardError(
                    f"reward {term.name!r} returned no scores with a gradient on {on_prompts(prompts)}; expected a "
                    f"tensor [{len(prompt_of)}] that is computed from the images by torch"
                )
            values.append(scores.float().to(outputs.device).view(len(prompts), -1).mean(1))
            shares.append(term.share)
        return combine(values, shares, step=step)

    def weighted(self, terms: Rows, step: int | None = None, group_id: Tensor | None = None) -> Tensor:
        """The reward [B] of the terms [B], without those that the policy gives where `terms` lacks them; see
        phalanx.functional.rewards.combine.
        """
        values, shares = [], []
        for term in self.terms:
            if term in self._scored or term.name in terms:
                values.append(terms[term.name])
                shares.append(term.share)
        return combine(values, shares, step=step, group_id=group_id) if values else torch.zeros(0)

    def turn_weight(self, step: int | None = None) -> float:
        """The weight of the rewards that an environment gives for single turns in the sample's reward."""
        return sum(term.share.at(step) for term in self.terms if isinstance(term.function, Environment))

    def _parts(self, term: Term, count: int) -> list[range]:
        """The samples of each call of a term on `count` samples."""
        if not term.per_sample:
            return [range(count)]
        # twice as many as threads, as samples take unequal times, and a thread may still have an earlier micro-batch;
        # where each sample has a time limit, one each, so that no batch of them exceeds reward.timeout_s
        pieces = count if UNJUDGED in term.extras else min(2 * self._workers, count) if self._workers > 1 else 1
        return [range(i * count // pieces, (i + 1) * count // pieces) for i in range(pieces)]

    def _start(self, call: Call) -> None:
        if call.term.on_device:
            call.future = self._device_pool.submit(lambda: self._run_on_device(call))
        else:
            call.future = self._cpu_pool.submit(call.run)

    def _run_on_device(self, call: Call) -> Rows:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread, which begins on the first one
        return call.run()

    def _wait(self, calls: list[Call]) -> None:
        """Wait until all calls are done, one has failed, or one that runs is overdue."""
        pending = {call.future for call in calls if call.future is not None}
        while pending:
            self._raise_failures(calls)
            _, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
        self._raise_failures(calls)

    def _raise_failures(self, calls: list[Call]) -> None:
        """Raise for the first call that has failed or is overdue, without waiting."""
        for call in calls:
            if call.overdue(self._timeout_s):
                raise RewardError(
                    f"reward {call.term.name!r} ran longer than reward.timeout_s={self._timeout_s:g} seconds "
                    f"on {on_prompts(call.prompts)}"
                )
            failure = call.failure()
            if failure is not None:
                raise failure from failure.__cause__


def seen_by(takes: str, outputs: Outputs, prompts: list[Prompt], frames: int) -> tuple[Outputs, list[Prompt]]:
    """The part of B outputs that a reward is given which takes one of TAKES, and the prompt of each.

    For `images`: [B k, 3, H, W], k evenly spaced frames of each video, at most `frames`. For `videos`:
    [B, F, 3, H, W], of one frame where outputs are images. Completions are given as they are, and for `transcripts`
    with all that was said before.
    """
    if takes == "transcripts":
        talks: list[Any] = [transcript(prompt, text) for prompt, text in zip(prompts, outputs, strict=True)]
        return talks, prompts
    if not isinstance(outputs, Tensor):
        return outputs, prompts
    is_video = outputs.ndim == 5
    if takes == "videos":
        return (outputs if is_video else outputs[:, None]), prompts
    if not is_video:
        return outputs, prompts
    chosen = evenly_spaced(outputs.shape[1], frames)
    repeated = [prompts[i // len(chosen)] for i in range(len(prompts) * len(chosen))]
    return outputs[:, chosen].flatten(0, 1), repeated
