"""Environment: a task of reasoning-gym, with a new problem for each group of samples."""

import json
from functools import cache
from typing import Any

from pydantic import PositiveInt

from phalanx.config.messages import cut, nearest, reason
from phalanx.environments.turn import Turn
from phalanx.zoo.rewards.text.reasoning_gym import ReasoningGym as Verifier

_shared_verifier = cache(Verifier)  # all samples share its processes


class ReasoningGym:
    """The problem, generated from the group's seed, follows the data's prompt. Each turn is an answer to it, until one
    gets the full score or no attempts are left. The reward is the best score of the task's verifier.

    task: its name, such as chain_sum.
    settings: arguments of the task, such as {min_terms: 2}.
    attempts: turns of the model; after a wrong answer, the model is told how many attempts are left.
    answer, timeout_s: where to find the answer, and the verifier's time limit, as in the reward reasoning_gym.
    """

    def __init__(
        self,
        task: str,
        settings: dict[str, Any] | None = None,
        attempts: PositiveInt = 1,
        answer: str = "answer",
        timeout_s: float = 10.0,
    ) -> None:
        self._task, self._settings, self._attempts = task, settings or {}, attempts
        self._verifier = _shared_verifier(answer, timeout_s)
        self._best = 0.0
        check_task(task, json.dumps(self._settings))

    def reset(self, seed: int) -> str:
        """Generate the problem, which is appended to the prompt."""
        self._entry = _make_problem(self._task, self._settings, seed)
        return "\n\n" + str(self._entry["question"])

    def step(self, message: str) -> Turn:
        """Score an answer."""
        row = {"reasoning_gym": {"task": self._task, "entry": self._entry}}
        score = float(next(iter(self._verifier([message], [""], [row]).scores)))
        gained, self._best = max(score - self._best, 0.0), max(score, self._best)
        self._attempts -= 1
        if score >= 1 or self._attempts == 0:
            return Turn(reward=gained, done=True)
        left = f"{self._attempts} attempt{'s' if self._attempts > 1 else ''}"
        return Turn([{"role": "user", "content": f"This is not the right answer; you have {left} left."}], gained)


@cache
def check_task(task: str, settings: str) -> None:
    """Raise ValueError for an unknown task, invalid settings (JSON), or a task whose problems do not survive JSON."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"there is no task {cut(task, 60)!r}{nearest(task, list(DATASETS))}")
    try:
        entry = _make_problem(task, json.loads(settings), 0)
        plain = json.loads(json.dumps(entry))
        score = reasoning_gym.get_score_answer_fn(task)
        survives = score(entry["answer"], plain) == score(entry["answer"], entry)
    except Exception as error:  # tasks refuse settings with different exceptions
        raise ValueError(f"task {task} with {settings}: {reason(error)}") from error
    if not survives:
        raise ValueError(f"task {task}: its verifier does not accept problems that were converted to JSON and back")


def _make_problem(task: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """The problem of a task for a seed."""
    import reasoning_gym

    # some tasks pass the seed to a generator that accepts 32 bits
    entry: dict[str, Any] = reasoning_gym.create_dataset(task, **settings, seed=seed % 2**31, size=1)[0]
    return entry
