r"""Reward: mathematics, the answer in the last \boxed{...} of a solution, as the data set MATH writes it.

Answers are compared as texts, in a normal form, and as numbers; what then differs is judged by math-verify, unless
`equivalence` is `string`: it computes with both in sympy, so that 2\sqrt{2} is \sqrt{8} and (x-1)(x+1) is x^2-1.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.text import _answers
from phalanx.rewards.text._process import Verifier, with_unjudged


class Math(RewardWithExtras):
    """1 where the answer is metadata's `ground_truth`, else 0; `format_score` for a wrong one.

    answer: where it stands: boxed, answer (tags), line (behind Answer:), hash (behind ####) or whole.
    timeout_s: seconds of the processor that math-verify has for a sample; one that they do not suffice for is wrong,
        and counted by the extra `unjudged`.
    """

    def __init__(
        self,
        equivalence: Literal["math_verify", "string"] = "math_verify",
        answer: str = "boxed",
        format_score: float = 0.0,
        timeout_s: float = 5.0,
    ) -> None:
        if equivalence not in ("math_verify", "string"):
            raise ValueError(f"equivalence={equivalence!r} should be math_verify or string")
        if equivalence == "math_verify" and find_spec("math_verify") is None:
            raise ValueError(
                "equivalence=math_verify needs math-verify, which is not installed; pip install 'phalanx[math]', or "
                "set equivalence to string"
            )
        self._find = _answers.form(answer)
        self._format_score = format_score
        self._verifier = Verifier("math", timeout_s) if equivalence == "math_verify" else None
        self.extras = () if self._verifier is None else Verifier.extras

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> RewardOutput:
        judged = []
        for completion, meta in zip(completions, metadata, strict=True):
            judged.append(self._score(self._find(completion), _answers.truth(meta, "math")))
        output = with_unjudged(judged)
        return output if self.extras else RewardOutput(output.scores)

    def check_row(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a ground truth."""
        _answers.truth(metadata, "math")

    def answer(self, completion: str) -> str | None:
        """The answer of a solution, see GivesAnswers; those that only math-verify finds equal are told apart."""
        answer = self._find(completion)
        return None if answer is None or len(answer) > _answers.LONGEST else _answers.canonical(answer)

    def _score(self, answer: str | None, truth: str) -> tuple[float, float]:
        """The score of an answer, and 1 where math-verify had no verdict."""
        if answer is None or not 0 < len(answer) <= _answers.LONGEST:
            return 0.0, 0.0
        if _answers.same(answer, truth):
            return 1.0, 0.0
        given, wanted = _answers.normalised(answer), _answers.normalised(truth)
        # math-verify would join digits that a blank or a comma parts, and leave out the base of a number
        several = _answers.parted(given, wanted) or _answers.parted(wanted, given)
        bases = {tuple(_answers.bases(given)), tuple(_answers.bases(wanted))} - {()}
        if self._verifier is None or several or len(bases) == 2:
            return self._format_score, 0.0
        right, unjudged = self._verifier.judge(0.0, truth, answer)
        return (1.0 if right else self._format_score), unjudged
