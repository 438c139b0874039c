r"""Reward: mathematics, by default the answer in the last \boxed{...} of a solution, as in the data set MATH.

Answers are compared as texts in a normal form and as numbers. Unless `equivalence` is `string`, answers that differ are
then compared by math-verify, which uses sympy: 2\sqrt{2} equals \sqrt{8}, and (x-1)(x+1) equals x^2-1.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.verifier import Verifier, with_unjudged
from phalanx.zoo.rewards.text import _answers

VERDICTS = Path(__file__).with_name("_verdicts.py")


class Math(RewardWithExtras):
    """1 if the answer equals the metadata's `ground_truth`, `format_score` for a wrong answer, 0 without an answer.

    answer: where to find it: boxed, answer (in tags), line (after Answer:), hash (after ####) or whole (all text).
    timeout_s: seconds of CPU time per sample for math-verify; an answer that takes longer is wrong, and is counted by
        the extra `unjudged`.
    """

    def __init__(
        self,
        equivalence: Literal["math_verify", "string"] = "math_verify",
        answer: str = "boxed",
        format_score: float = 0.0,
        timeout_s: float = 5.0,
    ) -> None:
        if equivalence == "math_verify" and find_spec("math_verify") is None:
            raise ValueError(
                "equivalence=math_verify needs math-verify, which is not installed; pip install 'phalanx[math]', or "
                "set equivalence to string"
            )
        self._find = _answers.form(answer)
        self._format_score = format_score
        self._verifier = Verifier("math", timeout_s, VERDICTS) if equivalence == "math_verify" else None
        self.extras = () if self._verifier is None else Verifier.extras

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        judged = []
        for completion, meta in zip(completions, metadata, strict=True):
            judged.append(self._grade_answer(self._find(completion), _answers.truth(meta, "math")))
        output = with_unjudged(judged)
        return output if self.extras else RewardOutput(output.scores)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a ground truth."""
        _answers.truth(metadata, "math")

    def answer(self, completion: str) -> str | None:
        """The answer of a solution, see GivesAnswers; answers that are equal only for math-verify differ."""
        answer = self._find(completion)
        return None if answer is None or len(answer) > _answers.LONGEST else _answers.canonical(answer)

    def _grade_answer(self, answer: str | None, truth: str) -> tuple[float, float]:
        """The score of an answer, and 1 if math-verify had no verdict, else 0."""
        if answer is None or not 0 < len(answer) <= _answers.LONGEST:
            return 0.0, 0.0
        if _answers.same(answer, truth):
            return 1.0, 0.0
        given, expected = _answers.written(answer), _answers.written(truth)
        # math-verify would add or multiply numbers with a blank between them, and ignore the base of a number
        several = _answers.parted(given) or _answers.parted(expected)
        bases = {tuple(_answers.bases(given)), tuple(_answers.bases(expected))} - {()}
        if self._verifier is None or several or len(bases) == 2:
            return self._format_score, 0.0
        right, unjudged = self._verifier.judge(expected, given)
        return (1.0 if right else self._format_score), unjudged
