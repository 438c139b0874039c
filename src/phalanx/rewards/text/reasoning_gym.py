"""Reward: the verifier of a task of reasoning-gym (arXiv 2505.24760), for rows that tasks/prepare_data.py has made.

Each row has a column `reasoning_gym`: the name of its task, and the entry with all that the verifier wants.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from phalanx.rewards.base import RewardOutput
from phalanx.rewards.text import _answers
from phalanx.rewards.text._process import Verifier, VerifierError, scored


class ReasoningGym:
    """The task's own score in 0..1 of the answer, 0 without one.

    answer: where it stands: answer (tags, as the package itself reads it), boxed, line, hash or whole.
    timeout_s: seconds that the verifier has for a sample, which has no score where they do not do.
    """

    def __init__(self, answer: str = "answer", timeout_s: float = 10.0) -> None:
        if find_spec("reasoning_gym") is None:
            raise ValueError("it needs reasoning-gym, which is not installed; pip install 'phalanx[reasoning-gym]'")
        self._find = _answers.form(answer)
        self._verifier = Verifier("reasoning_gym", timeout_s)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> RewardOutput:
        rows = [_row(meta) for meta in metadata]
        return scored([self._score(text, *row) for text, row in zip(completions, rows, strict=True)])

    def _score(self, text: str, task: str, entry: dict[str, Any]) -> float | VerifierError:
        answer = self._find(text)
        if answer is None:
            return 0.0
        try:
            return float(self._verifier.ask(task, answer, entry))
        except VerifierError as error:
            return error


def _row(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The task of a row, and its entry. ValueError where it has none."""
    row = metadata["reasoning_gym"] if "reasoning_gym" in metadata else None
    if not isinstance(row, dict) or not isinstance(row.get("task"), str) or not isinstance(row.get("entry"), dict):
        raise ValueError(
            "no column reasoning_gym of the form {task, entry}; make the data with tasks/prepare_data.py "
            "reasoning_gym=[...]"
        )
    return row["task"], row["entry"]
