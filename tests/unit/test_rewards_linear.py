"""Every reward that reads a model's text takes time linear in its length: a rank reads it, and holds Python's lock."""

import re
import time
from collections.abc import Callable

import pytest

from phalanx.config.messages import without_folders
from phalanx.config.registry import known_modules
from phalanx.zoo.rewards import _recall
from phalanx.zoo.rewards.judge.llm_judge import LlmJudge
from phalanx.zoo.rewards.judge.pairwise_judge import PairwiseJudge
from phalanx.zoo.rewards.judge.t2i_compbench import T2iCompbench
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from phalanx.zoo.rewards.text import _answers, _grammar
from phalanx.zoo.rewards.text.dapo import Dapo
from phalanx.zoo.rewards.text.format import TAGS, in_tags
from phalanx.zoo.rewards.text.geo3k import Geo3k
from phalanx.zoo.rewards.text.gsm8k import Gsm8k
from phalanx.zoo.rewards.text.iou import answer, boxes
from phalanx.zoo.rewards.text.math import Math

LENGTH = 100_000  # characters
LIMIT_S = 0.3  # of CPU time; a quadratic parser needs seconds to minutes
ROW = {"ground_truth": "32", "category": "color"}
Parser = Callable[[str], object]


def scored(reward: Callable[..., object]) -> Parser:
    return lambda text: reward([text], ["p"], [ROW])


def judged(judge: object) -> Parser:
    return lambda text: judge.parse(text, "p", ROW)  # type: ignore[attr-defined]


PARSERS: dict[str, dict[str, Parser]] = {
    "judge.llm_judge": {"score": judged(LlmJudge()), "last": judged(LlmJudge(read="last"))},
    "judge.pairwise_judge": {"": judged(PairwiseJudge())},
    "judge.t2i_compbench": {"": judged(T2iCompbench())},
    "judge.unified_reward": {"": judged(UnifiedReward())},
    "judge.vlm_ocr": {"": judged(VlmOcr()), "words": judged(VlmOcr(recall="words"))},
    "text.dapo": {"": scored(Dapo())},
    "text.format": {"": lambda text: in_tags(text, TAGS)},
    "text.geo3k": {"": scored(Geo3k(equivalence="string"))},
    "text.gsm8k": {"strict": scored(Gsm8k()), "flexible": scored(Gsm8k("flexible"))},
    "text.iou": {"": lambda text: boxes(answer(text))},
    "text.math": {"": scored(Math("string"))},
    "text.reasoning_gym": {
        **_answers.FORMS,
        "list": lambda text: _grammar.allowed("n_queens", text, {"answer": "x" * LENGTH}),
        "formula": lambda text: _grammar.allowed("countdown", text, {"answer": "x" * LENGTH}),
    },
    "image.ocr": {"": lambda text: _recall.matched("32", text, "words")},
    "messages": {"": without_folders},
}
# rewards of texts that read no text themselves
OTHERS = ("text.chosen", "text.environment", "text.length", "text.overlong", "text.self_certainty")
UNITS = (
    " ", "\n", "9", "1,000", "1/", "9.9", "-", "!", "[", "[1,2,3,", "{", "}", "\\", "$", "#", "/a", "<answer>", "</answer>",
    "<ANSWER></answer>", "<think>", "</think>", "answer:", "answer\n", "score", "score:9", '"score":', '"score":"1 ',
    '"winner":"', "1 is ", "Alignment Score (1-5): ", "alignment score 1", "\\boxed{", "\\boxed ", "\\text{a}", "\\frac1",
    "é", "1e1",
)  # fmt: skip
FIRST = ("####", "<answer>", '"score":', '{"score": "3', "answer:", "\\boxed{")


def slowest(parse: Parser, units: tuple[str, ...] = UNITS, length: int = LENGTH) -> tuple[float, str]:
    """The longest time of a parser for a text of `length` characters that repeats a unit, and how the text begins."""
    times = []
    for unit in units:
        for first in ("", *FIRST) if unit in (" ", "\n", "9", "}") else ("",):
            text = (first + unit * (length // len(unit)))[:length]
            begin = time.process_time()
            parse(text)
            times.append((time.process_time() - begin, text[:30]))
    return max(times)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of Python's parser, about 1e
def test_a_parser_is_linear(name: str) -> None:
    for how, parse in PARSERS[name].items():
        seconds, text = slowest(parse)
        if seconds >= LIMIT_S:  # once may be a collection of garbage
            seconds, text = slowest(parse)
        assert seconds < LIMIT_S, f"{name} {how} takes {seconds:.1f} s for {text!r}..."


def test_every_reward_of_texts_is_measured() -> None:
    known = {f"{kind}.{name}" for kind in ("text", "judge") for name in known_modules(f"phalanx.zoo.rewards.{kind}")}
    assert known == {name for name in PARSERS if name.startswith(("text", "judge"))} | set(OTHERS)


def test_a_quadratic_parser_is_found() -> None:
    pattern = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
    once, twice = (
        min(slowest(pattern.findall, ("<answer>",), length)[0] for _ in range(3)) for length in (10_000, 20_000)
    )
    assert twice > 3 * once and 25 * twice > LIMIT_S


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<answer>Image 1 is better</answer>", 1.0),
        ("<answer>Image 1 is better</answer> no: <ANSWER>Image 2 is\nbetter</Answer>", 0.0),
        ("<answer><answer>Image 2 is better</answer>", 0.0),
        ("<answer>Image 1 is better</answer></answer><answer>2 is better", 1.0),
        ("</answer>Image 1 is better<answer>", 1.0),
        ("<answer>Neither is better</answer>", 0.5),
        ("Neither is better", None),
    ],
)
def test_the_last_pair_of_tags_has_the_verdict(answer: str, score: float | None) -> None:
    assert PairwiseJudge().parse(answer, "p", {}) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"score": 3}', 0.75),
        ('{"score": "4"}', 1.0),
        ('{"Score" :\n"2.00" , "explanation": ""}', 0.2),
        ('{"score": 1} and {"score": 02}', 0.2),
        ('{"score": 3.5}', None),
        ('{"score": 14}', None),
        ('{"score": 0}', None),
        ('{"score": ' + "9" * 5000 + "}", None),
    ],
)
def test_a_grade_of_t2i_compbench(answer: str, score: float | None) -> None:
    assert T2iCompbench("color").parse(answer, "p", {}) == score
