"""Answers of a policy are data: none is run as code, and verifiers have no secrets, network or files."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx import sandbox
from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.rewards import RewardSet
from phalanx.rewards.verifier import Verifier
from phalanx.types import Prompt
from phalanx.zoo.rewards.text import _grammar
from phalanx.zoo.rewards.text.reasoning_gym import ReasoningGym
from tests.helpers.rewards import scored

EVALUATING = sorted((*_grammar.LISTS, *_grammar.FORMULAS))
# Modules of reasoning-gym that evaluate text, but only text of the data: generators of questions, and verifiers that
# evaluate the row.
OF_DATA = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "generators_00_49", "generators_50_99", "number_sorting"}
OF_DATA |= {"propositional_logic"}  # has its own parse_expr


def entry_of(task: str) -> dict[str, Any]:
    import reasoning_gym

    return json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=3)[0]))


def judge(task: str, *answers: str) -> list[float]:
    row = {"reasoning_gym": {"task": task, "entry": entry_of(task)}}
    result = ReasoningGym(answer="whole", timeout_s=5.0)(list(answers), ["?"] * len(answers), [row] * len(answers))
    return list(result.scores)


def test_all_tasks_that_evaluate_answers_are_known() -> None:
    import reasoning_gym

    package = Path(reasoning_gym.__file__).parent
    evaluating = set()
    for path in package.rglob("*.py"):
        if re.search(r"\b(eval|exec|parse_expr|sympify|parse_latex)\(", path.read_text()):
            evaluating.add(path.stem)
    assert evaluating - OF_DATA == set(EVALUATING)


@pytest.mark.parametrize("task", EVALUATING)
def test_no_answer_runs(task: str, tmp_path: Path) -> None:
    touch = tmp_path / "ran"
    answers = [
        f"__import__('os').system('touch {touch}')",
        f"[open({str(touch)!r}, 'w')]",
        f"().__class__.__base__.__subclasses__()[0] or open({str(touch)!r}, 'w')",
        f"x**2 + __import__('pathlib').Path({str(touch)!r}).touch()",
        "oracle_answer",
        "[oracle_answer]",
        "self",
        "9**9**9",
        "9**(9**9)",
        "((((9**9)**9)**9)**9)**9",
        "[0]*10**9",
        "(" * 50_000 + ")" * 50_000,
        "[" * 50_000 + "]" * 50_000,
        "-" * 100_000 + "1",
        "1+" * 50_000 + "1",
    ]
    begin = time.monotonic()
    assert max(judge(task, *answers)) <= 0.01  # the score of puzzle24 and countdown for anything that is not a formula
    assert time.monotonic() - begin < 240
    assert not touch.exists()


@pytest.mark.quick("countdown", "simple_integration")
@pytest.mark.parametrize("task", EVALUATING)
def test_right_answers_are_still_right(task: str) -> None:
    assert judge(task, str(entry_of(task)["answer"])) == [1.0]


@pytest.mark.parametrize(
    ("answer", "allowed"),
    [
        ("3*(4 + 5) - 1/2", True),
        ("x**3/3 + 2*x*exp(-x) + C", True),
        ("sin(x)**2", True),
        ("+".join(["123"] * 250), True),
        ("2**500", True),
        ("2**10000", False),
        ("2**2**2**2**2**2", False),
        ("x.real", False),
        ("f(x)", False),
        ("x if y else z", False),
        ("lambda: 0", False),
        ("True", False),
        ("1e999", False),
        ("1j", False),
        ("'a'", False),
        ("[1]", False),
        ("(x := 3)", False),
        ("exp", False),
        ("log(x, 2)", False),
        ("", False),
    ],
)
def test_formulas(answer: str, allowed: bool) -> None:
    assert _grammar.is_formula(answer) is allowed


ATTEMPTS = """
import os, runpy, socket, sys
print(runpy.run_path(sys.argv[1])["confine"]())
folder = sys.argv[2]
def attempt(call):
    try:
        return call()
    except (OSError, MemoryError):
        return "refused"
print(attempt(lambda: open(folder + "/new", "w")), attempt(lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR)))
print(attempt(lambda: open(folder + "/secret").read()), attempt(lambda: open(f"/proc/{os.getppid()}/environ").read()))
print(attempt(lambda: os.unlink(folder + "/secret")), attempt(lambda: os.mkdir(folder + "/new")))
print(attempt(lambda: socket.socket()), attempt(os.fork), attempt(lambda: os.kill(os.getppid(), 0)))
print(attempt(lambda: os.execv("/bin/true", ["true"])), attempt(lambda: b"x" * 2**33))
import decimal, colorsys  # modules of Python may be read
print(sum(range(10)))
"""


def test_the_confinement(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    command = [sys.executable, "-P", "-c", ATTEMPTS, str(sandbox.__file__), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    missing, *lines = result.stdout.splitlines()
    if missing != "[]":
        pytest.skip(f"this machine has no {missing}")
    assert lines == [*["refused refused"] * 3, "refused refused refused", "refused refused", "45"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_a_verifier_has_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"HF_TOKEN": "secret", "LC_ALL": "C.UTF-8", "PYTHONPATH": ":.", "PYTHONHASHSEED": "3"}.items():
        monkeypatch.setenv(name, value)
    shows = tmp_path / "shows"
    shows.write_text(f"#!{sys.executable}\nimport os\nprint(*os.environ)\n")
    shows.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shows))
    child = Verifier("pattern", 5.0)._start_process()
    names = set(child.communicate()[0].split())
    assert names >= {"LC_ALL", "PATH", "PYTHONHASHSEED"}
    assert {name for name in names if not name.startswith("LC_")} <= {
        "PATH",
        "LANG",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "ARROW_DEFAULT_MEMORY_POOL",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONHOME",
        "PYTHONHASHSEED",
    }


def test_a_verifier_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the verifier pattern did not start: its process ended with 1"):
        Verifier("pattern", 5.0).judge("a", "a")


# --- time, which is linear in the length of a text

TEXTS = {
    "answer tags": "<answer>",
    "closed tags": "<answer></answer>",
    "boxes": r"\boxed{",
    "braces": "{",
    "box words": r"\boxed ",
    "parentheses": "(",
    "digits": "1",
    "commas": ",",
    "digits and commas": "1,",
    "marks": "####",
    "marks with spaces": "#### ",
    "spaces": " ",
    "lines": "Answer:\n",
    "answers with spaces": "Answer ",
    "think": "<think>",
    "signs": "-",
    "dollars": "$",
    "points": ".",
    "fractions": "1/",
    "text": r"\text{",
    "words": r"\text{a} ",
    "stars": "*",
    "exponents": "1e",
}
REWARDS = [
    ("gsm8k", {}),
    ("gsm8k", {"method": "flexible"}),
    ("math", {"equivalence": "string"}),
    *[("math", {"equivalence": "string", "answer": form}) for form in ("answer", "line", "hash", "whole")],
    ("dapo", {}),
    ("format", {}),
    ("length", {"unit": "words"}),
]


@pytest.mark.parametrize(("name", "kwargs"), REWARDS)
def test_time_is_linear_in_the_length(name: str, kwargs: dict[str, Any]) -> None:
    cfg = RewardConfig(functions=[RewardFunctionConfig(name=name, kwargs=kwargs)], num_workers=1)
    reward = RewardSet(cfg, "cpu", outputs="completions")
    for label, unit in TEXTS.items():
        for ending in ("", " 1", r"\boxed{" + unit * 100 + "}"):
            seconds = []
            for length in (50_000, 100_000):
                text = unit * (length // len(unit)) + ending
                tries = []
                for _ in range(2):  # garbage collection may take a second in one of them
                    begin = time.process_time()
                    scored(reward, ([text], [Prompt("?", 0, {"ground_truth": "1"})]))
                    tries.append(time.process_time() - begin)
                seconds.append(min(tries))
            # a quarter of a second is negligible compared with the many seconds of a quadratic algorithm
            assert seconds[1] < 3 * seconds[0] + 0.25, (label, ending[:10], seconds)
