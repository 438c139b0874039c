"""Rewards of texts whose verifiers run in separate processes: math-verify, reasoning-gym, regular expressions."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.rewards import RewardOutput, RewardSet
from phalanx.rewards.verifier import Verifier, VerifierError
from phalanx.types import Prompt
from phalanx.zoo.rewards.text._answers import boxed, normalised, same
from phalanx.zoo.rewards.text.dapo import Dapo
from phalanx.zoo.rewards.text.format import Format
from phalanx.zoo.rewards.text.length import Length
from phalanx.zoo.rewards.text.math import VERDICTS, Math
from phalanx.zoo.rewards.text.reasoning_gym import ReasoningGym
from tests.helpers.rewards import told

HANGS = r"\boxed{9^{9^{9^{9}}}}"  # sympy would compute it


def scores(reward: Callable[..., Any], completions: list[str], truths: list[Any]) -> list[float]:
    found = reward(completions, ["?"] * len(completions), [{"ground_truth": truth} for truth in truths])
    return list(found.scores if isinstance(found, RewardOutput) else found)


# --- answers as texts


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"$\boxed 5$ apples", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and then \boxed{2", None),  # cut by the limit
        (r"\boxed", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


SAME = [
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"-\frac34", "-3/4"),
    (r"\sqrt{2}", r"\sqrt2"),
    ("1018", "$1,018$"),
    ("18", "18.0"),
    ("18", "18."),
    ("0.5", ".5"),
    ("50", r"50\%"),
    ("90", r"90^\circ"),
    ("90", "90\u00b0"),
    ("12", r"12 \text{ apples}"),
    ("yes", r"\text{yes}"),
    ("5", "x = 5"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("7", r"\boxed{7}"),
    ("1 1/2", "3/2"),
    (r"1\frac{1}{2}", "1.5"),
    ("0.50", "1/2"),
    ("2/4", "1/2"),
    ("-5", "\u22125"),
    ("+5", "5"),
    ("32349", "32,349"),
    ("32349", r"32{,}349"),
    ("32349", r"32,\!349"),
    ("32349", r"32\,349"),
    ("3", r"3 \text{ cm}^2"),
]
DIFFERENT = [
    ("12", "1,2"),
    ("1", "-1"),
    ("", ""),
    ("x=5", "y=6"),
    ("1,2", "2,1"),
    ("a", "A"),
    ("nan", "NaN "),
    ("2", "22"),
    (r"5 \text{ or } 6", "56"),
    ("3 4", "34"),
    (r"3\quad 4", "34"),
    ("32, 349", "32349"),
    ("(100,200)", "(100200)"),
    ("1 1/2", "11/2"),
    ("1_8", "18"),
    ("1/0", "2/0"),
]


def test_answers_that_are_the_same() -> None:
    assert [pair for pair in SAME if not same(*pair) or not same(*pair[::-1])] == []
    assert [pair for pair in DIFFERENT if same(*pair)] == []
    assert normalised(r"\leftarrow") == r"\leftarrow"


# --- math


def test_math() -> None:
    """Texts are compared first, then by math-verify; texts without an answer have none."""
    right = [r"\boxed{\sqrt{8}}", r"\boxed{(x-1)(x+1)}", r"\boxed{0.50}", r"\boxed{\{2,1\}}"]
    truths = [r"2\sqrt2", "x^2-1", r"so $\boxed{\frac12}$.", r"\{1,2\}"]
    reward = Math()
    assert scores(reward, right, truths) == [1.0] * 4
    assert scores(Math("string"), right, truths) == [0.0, 0.0, 1.0, 0.0]
    wrong = [r"\boxed{3}", "4", "", r"\boxed{}", "\\boxed{\x00}", "\\boxed{" + "1" * 100_000 + "}", r"\boxed{}}{{"]
    assert scores(reward, wrong, ["4"] * 7) == [0.0] * 7
    parted = [r"\boxed{5 \text{ or } 6}", r"\boxed{3 4}", r"\boxed{32, 349}", r"\boxed{1 1/2}", r"\boxed{1, 2}"]
    assert scores(reward, parted, ["56", "34", "32349", "3/2", "1,2"]) == [0, 0, 0, 1, 1]
    assert scores(Dapo(), ["Answer: 3 4", "Answer: 1 1/2", "Answer: 0.5"], ["34", "3/2", "1/2"]) == [-1, 1, 1]
    assert scores(Math("string", format_score=0.1), [r"\boxed{3}", "3"], [4, 4]) == [0.1, 0]
    assert scores(Math("string", answer="hash"), ["#### 3\nmore", r"\boxed{3}"], [3, 3]) == [1, 0]
    assert scores(Math("string", answer="answer"), ["<answer> 3 </answer>"], ["#### 3"]) == [1]


JUDGED = [  # an answer for MATH-500's kinds of truths, and whether it is right, as docs/evaluation.md has it
    (r"\frac{14}{3}", r"\frac{28}{6}", 1),
    (r"-\frac{35}{9}", r"\frac{-35}{9}", 1),
    (r"\frac{14}{3}", "4.67", 0),
    ("10080", r"10,\!080", 1),
    ("10,080", "10 , 080", 0),
    (r"90^\circ", r"90 \text{ degrees}", 1),
    (r"90^\circ", r"\frac{\pi}{2}", 0),
    ("42", r"x + y = 42", 1),
    ("42", r"42 \text{ or } 43", 0),
    ("42", "42 inches", 1),
    (r"\text{Evelyn}", "evelyn", 1),
    (r"\text{(C)}", "C", 1),
    ("2516_8", "2516_{8}", 1),
    ("2516_8", "2516_9", 0),
    ("2516_8", "2516", 1),
    ("[2,5)", r"\left[ 2, 5 \right)", 1),
    ("[2,5)", "[2,5]", 0),
    ("(2,5)", "[2,5]", 0),
    (r"(-\infty,-1)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,-1)", 1),
    ("(-2,1)", "(1,-2)", 0),
    ("(-2,1)", "-2,1", 1),
    ("1,-2", "-2,1", 1),
    ("1,-2", "-2,2", 0),
    ("-21", "-2,1", 0),
    (r"\{1,2,3\}", r"\{3,2,1\}", 1),
    (r"1 \pm \sqrt{5}", r"1+\sqrt{5}, 1-\sqrt{5}", 1),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix} -2 \\ 1 \end{pmatrix}", 0),
    (r"6 - 5i", "-5i + 6", 1),
    (r"\frac{x+2}{7}", "x+2/7", 0),
    (r"\pi", "3.14", 0),
]


def test_answers_of_math_500() -> None:
    boxes = [rf"so \boxed{{{answer}}}." for _, answer, _ in JUDGED]
    judged = scores(Math(), boxes, [truth for truth, _, _ in JUDGED])
    assert [case for case, score in zip(JUDGED, judged, strict=True) if score != case[2]] == []


def test_an_answer_that_takes_too_long_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    reward = Math(timeout_s=1.0)
    factorial = r"\boxed{(10^9)!}"
    result = reward([HANGS, r"\boxed{\sqrt{4}}", factorial], ["?"] * 3, [{"ground_truth": "2"}] * 3)
    assert list(result.scores) == [0, 1, 0]
    assert result.extras == {"unjudged": [1, 0, 1]}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and messages[0].endswith("the first: no verdict within timeout_s=1")


def test_a_verifier_that_is_killed_costs_only_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, asked = Verifier._ready_process, list[Any]()

    def doomed(verifier: Verifier) -> Any:
        asked.append(ready(verifier))
        if len(asked) == 1:
            threading.Timer(0.5, asked[0].kill).start()
        return asked[-1]

    monkeypatch.setattr(Verifier, "_ready_process", doomed)
    reward = Format("(a+)+b", timeout_s=60)
    result = reward(["a" * 60, "aab", "c"], ["?"] * 3, [{}] * 3)  # the first would take for ever
    assert list(result.scores) == [0, 1, 0] and result.extras == {"unjudged": [1, 0, 0]}
    assert len(set(asked)) == 2


def text_rewards(on_error: str, **kwargs: Any) -> RewardSet:
    entry = RewardFunctionConfig(name="math", kwargs={"timeout_s": 0.5, **kwargs})
    cfg = RewardConfig(functions=[entry], on_error=on_error, num_workers=1)
    return RewardSet(cfg, "cpu", outputs="completions")


@pytest.mark.seldom("fail")
@pytest.mark.quick("skip")
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_no_answer_ends_the_job(on_error: str) -> None:
    prompts = [Prompt(f"q{i}", i, {"ground_truth": "2"}) for i in range(6)]
    reward = text_rewards(on_error)
    reward.submit([r"\boxed{2}", *[HANGS] * 5], prompts)
    assert len(reward._calls) == 6  # together they may take longer than reward.timeout_s, which limits each call
    rows = {name: values.tolist() for name, values in reward.collect().items()}
    assert rows == {"math": [1, 0, 0, 0, 0, 0], "math_unjudged": [0, 1, 1, 1, 1, 1]}
    assert reward.problem is None


def test_verifiers_in_several_threads() -> None:
    """Each has a separate process, so that one that hangs does not delay the others."""
    verifier = Verifier("math", 5.0, VERDICTS)
    pairs = [(str(i), f"{i}.0") for i in range(12)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda pair: verifier.ask(*pair), pairs)) == [True] * 12
    assert 1 <= verifier._idle.qsize() <= 3


def test_a_process_that_is_gone_is_replaced() -> None:
    verifier = Verifier("pattern", 5.0)
    assert verifier.ask("a+", "aaa") is True
    child = verifier._idle.get()
    child.kill()
    child.wait()
    verifier._idle.put(child)
    assert verifier.ask("a+", "b") is False  # in a new one: no answer is to blame for the end of the last one
    assert told(VerifierError, verifier.ask, "(", "b").endswith("missing ), unterminated subpattern at position 0")


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        (None, "math found no ground_truth; expected a text or a number in the data's column ground_truth"),
        (
            [1, 2],
            "math found a ground_truth of type list; expected a text or a number in the data's column ground_truth",
        ),
        (" ", "math found an empty ground_truth; expected a text or a number"),
        (float("nan"), "math found the ground_truth nan; expected a text or a number"),
        ("NaN", "math found the ground_truth NaN; expected a text or a number"),
    ],
)
def test_a_truth_that_is_none(truth: Any, problem: str) -> None:
    assert told(ValueError, scores, Math("string"), [""], [truth]) == problem


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Math(answer="end"), "answer='end' should be one of boxed, answer, line, hash, whole"),
        (lambda: Math(timeout_s=0), "timeout_s=0 should be seconds, above 0 and below 3600"),
        (
            lambda: Format("(a"),
            "pattern='(a' is not a valid regular expression: missing ), unterminated subpattern at position 0",
        ),
    ],
)
def test_mistakes(make: Callable[[], Any], problem: str) -> None:
    assert told(ValueError, make) == problem


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("math", "reasoning_gym"):
        monkeypatch.setattr(f"phalanx.zoo.rewards.text.{module}.find_spec", lambda name: None)
    assert told(ValueError, Math) == (
        "equivalence=math_verify needs math-verify, which is not installed; pip install 'phalanx[math]', or set "
        "equivalence to string"
    )
    assert told(ValueError, ReasoningGym) == (
        "it needs reasoning-gym, which is not installed; pip install 'phalanx[reasoning-gym]'"
    )


# --- dapo, format, length


def test_dapo() -> None:
    completions = [
        "Answer: 34",
        "so\n**Answer:** $34$.",
        "answer:\n34.0",
        "Answer: 3\nAnswer: 34",
        r"Answer: \boxed{34}",
    ]
    reward = Dapo()
    assert scores(reward, completions, [34] * 5) == [1.0] * 5
    wrong = ["34", "Answer: 35", "", "Answer: 34" + " " * 300, "Answer:"]
    found = reward(wrong, ["?"] * 5, [{"ground_truth": "34"}] * 5)
    assert list(found.scores) == [-1.0] * 5 and found.extras == {"accuracy": [0.0] * 5}
    assert scores(Dapo(wrong_score=0), ["Answer: 1", "Answer: 2"], ["1", "1"]) == [1, 0]


GOOD = "<think>a</think>\n<answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "score", "opened"),
    [
        (GOOD, 1, 0),
        (f"  {GOOD}\n", 1, 0),
        ("a</think><answer>b</answer>", 0, 1),
        ("<think>a</think>b", 0, 0),
        ("<think>a<answer>b</answer></think>", 0, 0),
        (GOOD + GOOD, 0, 0),
        (f"first {GOOD}", 0, 0),
        (f"{GOOD} last", 0, 0),
        ("<think>a</think> and <answer>b</answer>", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_tags(text: str, score: float, opened: float) -> None:
    assert scores(Format(), [text], [None]) == [score]
    assert scores(Format(opened=True), [text], [None]) == [opened]


def test_a_pattern_of_the_user() -> None:
    """A search that would practically never end costs only its sample."""
    reward = Format("(a+)+b.*", timeout_s=1.0)
    result = reward(["aaab\n", "caab", "a" * 60, "\x00", "b" * 1_000_000], ["?"] * 5, [{}] * 5)
    assert list(result.scores) == [1, 0, 0, 0, 0] and result.extras == {"unjudged": [0, 0, 1, 0, 0]}


def test_length() -> None:
    texts = ["", "one two", "one two three four"]
    assert scores(Length("words"), texts, [None] * 3) == [0, 2, 4]
    assert scores(Length(), texts, [None] * 3) == [0, 7, 18]
    assert scores(Length("words", target=2), texts, [None] * 3) == [-1, 0, -1]
    assert scores(Length("words", target=4), texts, [None] * 3) == [-1, -0.5, 0]


# --- reasoning-gym


def test_reasoning_gym() -> None:
    """The package's own verifier, on rows converted to JSON and back."""
    import reasoning_gym

    rows = []
    for task in ("chain_sum", "countdown", "leg_counting"):
        entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
        rows.append({"reasoning_gym": {"task": task, "entry": json.loads(json.dumps(entry))}})
    answers = [str(row["reasoning_gym"]["entry"]["answer"]) for row in rows]
    reward = ReasoningGym()
    good = reward([f"<think>?</think><answer> {answer} </answer>" for answer in answers], ["?"] * 3, rows)
    assert list(good.scores) == [1.0] * 3
    bad = reward(["<answer>nonsense</answer>", "no tags", ""], ["?"] * 3, rows)
    assert max(bad.scores) < 0.1
    assert list(ReasoningGym(answer="whole")(answers, ["?"] * 3, rows).scores) == [1.0] * 3


def test_rows_that_reasoning_gym_does_not_know() -> None:
    reward = ReasoningGym()
    assert told(ValueError, reward, ["?"], ["?"], [{"reasoning_gym": {"task": "x"}}]) == (
        "no column reasoning_gym of the form {task, entry}; make the data with tasks/prepare_data.py reasoning_gym=[...]"
    )
    row = {"reasoning_gym": {"task": "chain_some", "entry": {}}}
    assert told(ValueError, reward, ["<answer>1</answer>"], ["?"], [row]) == "Dataset 'chain_some' not registered"
