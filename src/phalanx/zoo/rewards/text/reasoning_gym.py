"""Reward: the verifier of a task of reasoning-gym (arXiv 2505.24760), for data made by tasks/prepare_data.py.

Each row has a column `reasoning_gym` with the name of its task and the entry that the verifier needs.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.verifier import Verifier, with_unjudged
from phalanx.zoo.rewards.text import _answers, _grammar

VERDICTS = Path(__file__).with_name("_verdicts.py")


class ReasoningGym(RewardWithExtras):
    """The score in 0..1 that the task's own verifier gives the answer; 0 without one. Some verifiers evaluate the
    answer as Python code; they get only answers that are a list or a formula, as the task asks for. See _grammar.

    answer: where to find it: answer (in tags, as the package does), boxed, line, hash or whole; see the reward math.
    timeout_s: seconds of CPU time per sample for the verifier; an answer that takes longer gets 0, and is counted by
        the extra `unjudged`.
    """

    extras = Verifier.extras

    def __init__(self, answer: str = "answer", timeout_s: float = 10.0) -> None:
        if find_spec("reasoning_gym") is None:
            raise ValueError("it needs reasoning-gym, which is not installed; pip install 'phalanx[reasoning-gym]'")
        self._find = _answers.form(answer)
        self._verifier = Verifier("reasoning_gym", timeout_s, VERDICTS)

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        judged = []
        for completion, meta in zip(completions, metadata, strict=True):
            task, entry = _task_entry(meta)
            answer = self._find(completion)
            if answer is None:
                judged.append((0.0, 0.0))
                continue
            # an answer that is not allowed is scored like a missing one, for which some tasks give 0.01
            allowed = _grammar.allowed(task, answer, entry)
            judged.append(self._verifier.judge(task, answer if allowed else None, entry))
        return with_unjudged(judged)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row that tasks/prepare_data.py has not made."""
        _task_entry(metadata)


def _task_entry(metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The task of a row, and its entry. Raises ValueError if the row has none."""
    row = metadata.get("reasoning_gym")
    if not isinstance(row, dict) or not isinstance(row.get("task"), str) or not isinstance(row.get("entry"), dict):
        raise ValueError(
            "no column reasoning_gym of the form {task, entry}; make the data with tasks/prepare_data.py "
            "reasoning_gym=[...]"
        )
    return row["task"], row["entry"]
