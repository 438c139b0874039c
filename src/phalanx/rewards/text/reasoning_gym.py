"""Reward: the verifier of a task of reasoning-gym (arXiv 2505.24760), for rows that tasks/prepare_data.py has made.

Each row has a column `reasoning_gym`: the name of its task, and the entry with all that the verifier wants.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.text import _answers, _grammar
from phalanx.rewards.text._process import Verifier, with_unjudged


class ReasoningGym(RewardWithExtras):
    """The task's own score in 0..1 of the answer, 0 without one. Some verifiers evaluate the answer as code of Python:
    one that is no list or formula, as the task asks for, never reaches them. See _grammar.

    answer: where it stands: answer (tags, as the package itself reads it), boxed, line, hash or whole.
    timeout_s: seconds of the processor that the verifier has for a sample; one that they do not suffice for gets 0, and
        is counted by the extra `unjudged`.
    """

    extras = Verifier.extras

    def __init__(self, answer: str = "answer", timeout_s: float = 10.0) -> None:
        if find_spec("reasoning_gym") is None:
            raise ValueError("it needs reasoning-gym, which is not installed; pip install 'phalanx[reasoning-gym]'")
        self._find = _answers.form(answer)
        self._verifier = Verifier("reasoning_gym", timeout_s)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> RewardOutput:
        judged = []
        for completion, meta in zip(completions, metadata, strict=True):
            task, entry = _row(meta)
            answer = self._find(completion)
            if answer is None:
                judged.append((0.0, 0.0))
                continue
            # what the task does not allow is scored as no answer at all, which some tasks give 0.01
            allowed = _grammar.allowed(task, answer, entry)
            judged.append(self._verifier.judge(0.0, task, answer if allowed else None, entry))
        return with_unjudged(judged)

    def check_row(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raise ValueError for a row that tasks/prepare_data.py has not made."""
        _row(metadata)


def _row(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The task of a row, and its entry. ValueError if it has none."""
    row = metadata["reasoning_gym"] if "reasoning_gym" in metadata else None
    if not isinstance(row, dict) or not isinstance(row.get("task"), str) or not isinstance(row.get("entry"), dict):
        raise ValueError(
            "no column reasoning_gym of the form {task, entry}; make the data with tasks/prepare_data.py "
            "reasoning_gym=[...]"
        )
    return row["task"], row["entry"]
