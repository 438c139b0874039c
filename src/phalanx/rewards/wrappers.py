"""Wrappers of a reward's call, each only where the configuration asks for it: the repetition that finds the sample to
blame, and what `reward.on_error` forgives.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from phalanx.config.messages import place, reason
from phalanx.functional.advantage import LARGEST
from phalanx.rewards.base import ChecksRows, RewardError
from phalanx.rewards.call import Call, Raised, Score, Scored, Term, on_prompts, private, score
from phalanx.types import Outputs


def scorer(term: Term, *, forgives: bool = False, copy: Callable[[Outputs], Outputs] = private) -> Score:
    """How calls of a term are scored: by `score`, within the wrappers that the term needs.

    forgives: neither exceptions of the term's function nor scores that are not finite are failures, and samples of rows
    that its check_row refuses are not passed to it. copy: see `score`.
    """
    scored: Score = partial(score, forgives=forgives, copy=copy)
    if term.per_sample:
        scored = partial(_one_by_one, scored, forgives)
    if forgives:
        scored = partial(_forgive_errors, scored)
        if isinstance(term.reward, ChecksRows):
            scored = partial(_of_checked_rows, scored)
    return scored


def _one_by_one(inner: Score, forgives: bool, call: Call) -> Scored:
    """Repeat a call that failed sample by sample, to find the sample that is to blame: the error names only its prompt,
    or, where errors are forgiven, only its score is missing.
    """
    term, prompts, frames = call.term, call.prompts, call.frames
    single = len(prompts) == frames
    subject = None if single else call.subject
    try:
        return inner(call)
    except RewardError as error:
        if subject is None or isinstance(error.__cause__, SystemExit):
            raise
    rows: dict[str, list[Tensor]] = {row: [] for row in term.rows}
    problem: str | None = None
    feedback: list[str] = []
    for first in range(0, len(prompts), frames):
        sample = slice(first, first + frames)
        try:
            scored = inner(Call(term, subject[sample], prompts[sample], frames))
        except Raised as error:
            if not forgives or error.__cause__ is None:
                raise
            scored = _missing_scores(term, 1, reason(error.__cause__) + place(error.__cause__))
        problem = problem or scored.problem
        for row, values in scored.rows.items():
            rows[row].append(values)
        feedback += scored.feedback or [""]
    return Scored({row: torch.cat(values) for row, values in rows.items()}, problem, feedback=tuple(feedback))


def _forgive_errors(inner: Score, call: Call) -> Scored:
    """Values are NaN for samples without a score, and `problem` says why, as a sentence."""
    try:
        scored = inner(call)
    except Raised as error:
        return _missing_scores(call.term, len(call.prompts) // call.frames, str(error))
    lost = torch.stack([~(values.abs() <= LARGEST) for values in scored.rows.values()]).any(0)  # true for NaN, too
    if not lost.any():
        return replace(scored, problem=None)
    what = f"returned NaN, infinity or more than {LARGEST:g}" if scored.problem is None else "has no score"
    why = "" if scored.problem is None else f": {scored.problem}"
    where = on_prompts([call.prompts[i * call.frames] for i in lost.nonzero().flatten().tolist()])
    rows = {row: values.masked_fill(lost, torch.nan) for row, values in scored.rows.items()}
    return replace(scored, rows=rows, problem=f"reward {call.term.name!r} {what} on {where}{why}")


def _of_checked_rows(inner: Score, call: Call) -> Scored:
    """Samples of rows that the reward's check_row refuses are not passed to it, and their values are NaN."""
    term, frames = call.term, call.frames
    objections = [term.objection(prompt.text, prompt.meta) for prompt in call.prompts[::frames]]
    refused = [i for i, objection in enumerate(objections) if objection is not None]
    if not refused:
        return inner(call)
    where = on_prompts([call.prompts[i * frames] for i in refused])
    problem = f"reward {term.name!r} has no score on {where}: {objections[refused[0]]}"
    rows = _missing_scores(term, len(objections)).rows
    kept = [i for i in range(len(objections)) if i not in refused]
    subject, feedback = call.subject, [""] * len(objections)
    if kept and subject is not None:
        at = [i * frames + k for i in kept for k in range(frames)]
        outputs = subject[at] if isinstance(subject, Tensor) else [subject[i] for i in at]
        scored = inner(Call(term, outputs, [call.prompts[i] for i in at], frames))
        problem = scored.problem or problem
        for row, values in scored.rows.items():
            rows[row][kept] = values
        for i, text in zip(kept, scored.feedback, strict=False):
            feedback[i] = text
    return Scored(rows, problem, len(refused), tuple(feedback))


def _missing_scores(term: Term, count: int, problem: str | None = None) -> Scored:
    """No scores for `count` samples."""
    return Scored({row: torch.full((count,), torch.nan) for row in term.rows}, problem)
