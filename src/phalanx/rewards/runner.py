"""Runs the rewards beside the rollout: worker threads score a micro-batch while the next one is sampled.

Scoring has three steps: `submit` takes a sampled micro-batch and queues a call of each reward; `ask` has the reward
model answer the judges' questions about all micro-batches; `collect` waits for the calls and returns the scores.

Threads are used rather than processes because onnxruntime, PIL and torch release the GIL while they compute, and
because images need not be sent to another process.
"""

import copy
import logging
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from phalanx.config.messages import ConfigError, users_code
from phalanx.config.reward import RewardConfig
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.passes import Passes
from phalanx.functional.advantage import combine
from phalanx.functional.frames import evenly_spaced
from phalanx.rewards.base import UNJUDGED, OfEnvironment, PolicyReward, RewardError, transcript
from phalanx.rewards.call import Call, DaemonPool, Rows, Term, on_prompts
from phalanx.rewards.judge import ParsedAnswers
from phalanx.rewards.judge_pool import Answers, JudgePool
from phalanx.rewards.registry import build_terms, judged_frames
from phalanx.rewards.wrappers import scorer
from phalanx.types import Outputs, Policy, Prompt, Samples, copied

log = logging.getLogger(__name__)
_POLL_S = 0.05  # seconds between checks for overdue calls


class RewardSet:
    """All reward terms of one rank.

    Calls of CPU rewards start in `submit` (with `reward.overlap`) or in `collect`, on `reward.num_workers` threads, and
    are split over them if each score depends only on its own sample (Term.per_sample). Calls of DeviceRewards start in
    `collect` and run one at a time. Judges need `ask` in between.

    After `collect`, `busy_s` has the seconds that rewards worked, without those of the reward model (`judge_s`), and
    `spans` the (start, end) of each call by time.perf_counter.
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
        """Resolve and load the rewards. Raises ConfigError, in one line, for an entry that cannot be used.

        group_timeout_s: time limit of collectives between the ranks, which judges need; None: judges are refused.
        outputs: what the job generates, "images" (or videos) or "completions"; rewards of the other are refused.
        beside: the reward model answers from `submit` on, which all ranks of the world must then call equally often.
        launch: this rank's place in that world; None: the launcher's.
        context_size: neighbouring ranks that hold the same samples, which are dealt out to them one by one.
        """
        unparseable_score = None if group_timeout_s is None else cfg.model.unparseable_score
        self.terms = build_terms(cfg.functions, device, unparseable_score, outputs)
        self.of_policies = [term for term in self.terms if isinstance(term.function, PolicyReward)]
        self._scored = [term for term in self.terms if term not in self.of_policies]
        self.busy_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.problem: str | None = None  # the first failure that the last `collect` forgave
        self.feedback: list[str] = []  # of the last `collect`: what rewards say about each sample; empty if none does
        self.refused = 0  # samples of the last `collect` whose rows a reward's check_row refuses
        self._cfg, self._forgives = cfg, cfg.on_error != "fail"
        of_rank = torch.device(device)
        if of_rank.type == "cuda" and of_rank.index is None:
            of_rank = torch.device("cuda", torch.cuda.current_device())
        self._score = {term.name: scorer(term, forgives=self._forgives) for term in self._scored}

        # all judges of a job ask the same model about the same frames
        judges = {term.name: term.function.judge for term in self.terms if isinstance(term.function, ParsedAnswers)}
        self._max_judge_frames = judged_frames(self.terms)
        self._judge_frames = 1  # frames per sample of the last micro-batch
        self.judges: JudgePool | None = None
        if judges and group_timeout_s is not None:
            self.judges = JudgePool(
                judges,
                cfg.model,
                group_timeout_s,
                outputs=outputs,
                device=of_rank,
                beside=beside,
                forgives=self._forgives,
                launch=launch,
                context_size=context_size,
            )
        self._asked = False
        self.answers: Answers = {}  # of the last `ask`: by judge, those about each sample or frame

        self._cpu_pool = DaemonPool(cfg.num_workers, "reward")
        self._device_pool = DaemonPool(1, "reward-device", of_rank)
        self._calls: list[Call] = []  # submitted and not yet collected

    def another(self) -> "RewardSet":
        """The same rewards for another job in this process, with a queue of its own."""
        other = copy.copy(self)
        other._calls, other.judges = [], None if self.judges is None else self.judges.another()
        return other

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Queue the scoring of images [B, 3, H, W], videos [B, F, 3, H, W] (0..1, on the CPU) or B completions, one for
        each of B prompts. The caller must not modify `outputs` afterwards.

        Raises RewardError if an earlier call has failed in the meantime, so that the job ends before the rollout is
        complete, and if a judge has no question for a sample.
        """
        assert len(outputs) == len(prompts) > 0, (len(outputs), len(prompts))
        made = "completions"
        if isinstance(outputs, Tensor):
            assert outputs.ndim in (4, 5) and outputs.shape[-3] == 3, outputs.shape
            assert outputs.device.type == "cpu", outputs.device
            made = "images" if outputs.ndim == 4 else "videos"
        for term in self._scored:
            if isinstance(term.function, ParsedAnswers):
                continue  # called in `ask`, with the answers
            subjects, prompt_of = outputs, prompts
            if term.takes != made:
                subjects, prompt_of = seen_by(term.takes, outputs, prompts, term.frames)
            frames = len(prompt_of) // len(prompts)
            for first, end in self._call_parts(term, len(prompts)) if term.per_sample else [(0, len(prompts))]:
                rows = slice(first * frames, end * frames)
                call = Call(term, subjects[rows], prompt_of[rows], frames)
                self._calls.append(call)
                if self._cfg.overlap and not term.on_device:  # else it starts in `collect`
                    call.task = self._cpu_pool.submit(partial(self._score[term.name], call))
        if self.judges is not None:
            subjects, prompt_of = seen_by("images", outputs, prompts, self._max_judge_frames)
            self._judge_frames = len(prompt_of) // len(prompts)
            self.judges.submit(subjects, prompt_of, self._judge_frames)
        self._raise_failures(self._calls)

    def check_rows(self, rows: Iterable[Prompt], *, first: bool) -> None:
        """Let the rewards check rows of the data before any sample is drawn. `first`: this rank logs the warning.

        Raises ConfigError, with file and row, if samples of a row could not be scored; where `reward.on_error` forgives
        errors, only for more than `reward.max_error_fraction` of the rows.
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
        if not self._forgives or len(refused) > self._cfg.max_error_fraction * count:
            raise ConfigError(refused[0] + more)
        if first:
            log.warning("samples of a row have no score: %s%s", refused[0], more)

    @property
    def validates(self) -> bool:
        """Whether there are terms in validation; PolicyRewards are computed only in training."""
        return bool(self._scored)

    @property
    def must_ask(self) -> bool:
        """Whether `ask` must be called before `collect`, because there are judges that have not asked yet."""
        return self.judges is not None and not self._asked

    def ask(self) -> None:
        """Have the judges' questions about all submitted samples answered, once before each `collect`.

        A collective: all ranks of the world call it at the same point, on their main threads.
        """
        if self.judges is None or self._asked:
            return
        prompts, answers, rates = self.judges.ask()
        self._asked, self.answers = True, answers
        if not prompts:
            return  # this rank has only answered questions of others
        for term in self.terms:
            if term.name in answers:
                judged: Any = answers[term.name]  # one per frame
                self._calls.append(Call(term, judged, prompts, self._judge_frames))
            elif term.name in rates:
                compared: Any = rates[term.name]  # one per sample, however many frames it has
                self._calls.append(Call(term, compared, prompts[:: self._judge_frames]))

    def collect(self) -> Rows:
        """Wait for the scores of all submitted micro-batches. Returns unweighted float32 scores [B] by term, in the
        order of submission, and after those of a RewardWithExtras its extras [B] as `<term>_<extra>`.

        Raises RewardError if a reward raised, ran longer than `reward.timeout_s`, or returned a wrong number of scores,
        unexpected extras, NaN or infinity; the submitted micro-batches are dropped in any case. Where `reward.on_error`
        forgives errors, a term's rows are NaN for samples on which it raised or returned no finite number, and
        `problem` is the first reason.
        """
        assert self.judges is None or self._asked, "ask comes first"
        calls, self._calls = self._calls, []
        self._asked = False
        for call in calls:
            if call.task is None:
                pool = self._device_pool if call.term.on_device else self._cpu_pool
                call.task = pool.submit(partial(self._score[call.term.name], call))
        tasks = [call.task for call in calls if call.task is not None]
        pending: set[Any] = set(tasks)
        while pending:
            self._raise_failures(calls)
            _, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
        self._raise_failures(calls)
        self.spans = [(task.start, task.end) for task in tasks]
        self.busy_s = sum(end - start for start, end in self.spans)

        # terms without a call have rows, too, because all ranks must gather the same ones
        parts: dict[str, list[Tensor]] = {row: [] for term in self._scored for row in term.rows}
        self.problem = None
        refused, feedback = dict.fromkeys(parts, 0), dict[str, list[str]]()
        for call, task in zip(calls, tasks, strict=True):
            scored = task.result()
            self.problem = self.problem or scored.problem
            refused[call.term.name] += scored.refused
            feedback.setdefault(call.term.name, []).extend(scored.feedback or [""] * len(call.prompts[:: call.frames]))
            for row, values in scored.rows.items():
                parts[row].append(values)
        self.feedback = []
        for texts in zip(*feedback.values(), strict=True):
            self.feedback.append("\n".join(filter(None, texts)))
        self.refused = max(refused.values(), default=0)
        return {row: torch.cat(values) if values else torch.zeros(0) for row, values in parts.items()}

    @torch.no_grad()
    def of_policy(self, policy: Policy, samples: Samples, passes: Passes) -> Rows:
        """The terms [B] of PolicyRewards for this rank's samples; a collective of all ranks."""
        return {term.name: term.function(policy, samples, passes).float().cpu() for term in self.of_policies}

    def check_gradients(self) -> None:
        """Raise ConfigError for the first term with a nonzero weight that is not differentiable."""
        for i, term in enumerate(self.terms):
            if term.share.counts and term.gradient is None:
                raise ConfigError(
                    f"reward.functions[{i}]: {term.name!r} has no gradient, and the algorithm differentiates the "
                    "reward; expected a reward such as aesthetic, clip_score, hps_v2 or pickscore, a function marked "
                    "with phalanx.rewards.differentiable, or a weight of 0"
                )

    def with_gradient(self, outputs: Tensor, *, prompts: list[Prompt], step: int) -> Tensor:
        """The differentiable weighted reward [k B] of k images [k B, 3, H, W] or videos of each of B prompts, in the
        prompts' order, on the device. Raises RewardError if a term raises or returns no differentiable scores.
        """
        values, shares = [], []
        prompts = [prompt for prompt in prompts for _ in range(len(outputs) // len(prompts))]
        for term in self.terms:
            if term.gradient is None or not term.share.counts:
                continue
            subjects, prompt_of = seen_by(term.takes, outputs, prompts, term.frames)
            texts, metadata = [p.text for p in prompt_of], [copied(p.meta) for p in prompt_of]
            with users_code(f"reward {term.name!r} raised", f" on {on_prompts(prompts)}", RewardError):
                scores = term.gradient(subjects, texts, metadata)
            if not isinstance(scores, Tensor) or scores.shape != (len(prompt_of),) or not scores.requires_grad:
                raise RewardError(
                    f"reward {term.name!r} returned no scores with a gradient on {on_prompts(prompts)}; expected a "
                    f"tensor [{len(prompt_of)}] that is computed from the images by torch"
                )
            values.append(scores.float().to(outputs.device).view(len(prompts), -1).mean(1))
            shares.append(term.share)
        return combine(values, shares, step=step)

    def weighted(self, terms: Rows, step: int | None = None, group_id: Tensor | None = None) -> Tensor:
        """The reward [B] from its terms [B], see phalanx.functional.advantage.combine; PolicyRewards may be missing."""
        shares = {term.name: term.share for term in self.terms if term in self._scored or term.name in terms}
        values = [terms[name] for name in shares]
        return combine(values, list(shares.values()), step=step, group_id=group_id) if values else torch.zeros(0)

    def turn_weight(self, step: int | None = None) -> float:
        """The weight in the sample's reward of the rewards that an environment gives for single turns."""
        return sum(term.share.at(step) for term in self.terms if isinstance(term.function, OfEnvironment))

    def _call_parts(self, term: Term, count: int) -> list[tuple[int, int]]:
        """The parts, from one sample to before another, into which a call on `count` samples is split."""
        # Twice as many as threads, because samples take unequal times and threads may be busy with an earlier
        # micro-batch. Where each sample has a time limit, one call per sample: several could exceed reward.timeout_s.
        workers = self._cfg.num_workers
        pieces = count if UNJUDGED in term.extras else min(2 * workers, count) if workers > 1 else 1
        return list(pairwise(i * count // pieces for i in range(pieces + 1)))

    def _raise_failures(self, calls: list[Call]) -> None:
        """Raise RewardError for the first call that has failed or is overdue, without waiting."""
        limit_s = self._cfg.timeout_s
        for call in calls:
            if call.task is None:
                continue
            if call.task.done():
                call.task.result()  # raises what the call has raised
            elif 0 < call.task.start < time.perf_counter() - limit_s:  # time in the queue does not count
                raise RewardError(
                    f"reward {call.term.name!r} ran longer than reward.timeout_s={limit_s:g} seconds on "
                    f"{on_prompts(call.prompts)}"
                )


def seen_by(takes: str, outputs: Outputs, prompts: list[Prompt], frames: int) -> tuple[Outputs, list[Prompt]]:
    """The input for a reward that takes `takes`, one of TAKES, from B outputs, and the prompt of each item.

    For `images`: [B k, 3, H, W], with k evenly spaced frames of each video, at most `frames`. For `videos`:
    [B, F, 3, H, W], with F = 1 if the outputs are images. For `completions`: the outputs. For `transcripts`: lists of
    messages that end with the completion.
    """
    if takes == "transcripts":
        talks: list[Any] = [transcript(prompt, text) for prompt, text in zip(prompts, outputs, strict=True)]
        return talks, prompts
    if not isinstance(outputs, Tensor) or (outputs.ndim == 4) == (takes == "images"):
        return outputs, prompts
    if takes == "videos":
        return outputs[:, None], prompts
    chosen = evenly_spaced(outputs.shape[1], frames)
    repeated = [prompts[i // len(chosen)] for i in range(len(prompts) * len(chosen))]
    return outputs[:, chosen].flatten(0, 1), repeated
