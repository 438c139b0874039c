"""Built-in tools and environments: what they compute, and attacks on the one that runs code."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Conversation, Environments, Turn
from phalanx.zoo.environments.calculator import Calculator
from phalanx.zoo.environments.python import Python


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("343*47-12", "16109"),
        ("(3 + 4) * 2 ** 5", "224"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("7 / 2", "3.5"),
        ("sqrt(2) * pi", "4.442882938158366"),
        ("max(1, 2, gcd(12, 18))", "6"),
        ("1/0", "error: division by zero"),
        ("2 +", "error: this is no arithmetic expression"),
        ("9**9**9", "error: a number is too large"),
        ("9**9**9**9", "error: a number is too large"),
        ("round(-15, -1) + round(2.567, 2) + round(2.5)", "-15.43"),
        ("round(5, -99999999)", "0"),
        ("round(5, 1.5)", "error: 'float' object cannot be interpreted as an integer"),
        ("(2**4000)*(2**4000)", "error: a number is too large"),
        ("(-8)**0.5", "error: the result is no real number"),
        ("sqrt(-1)", "error: math domain error"),
        ("10.0**400", "error: (34, 'Numerical result out of range')"),
        ("'a'*10", "error: \"'a'\" is not known; known: numbers"),
        ("__import__('os')", "error: \"__import__('os')\" is not known; known: numbers"),
        ("(1).real", "error: '1 .real' is not known"),
        ("[1]*9", "error: '[1]' is not known"),
        ("max(1, key=2)", "error: functions take no keywords"),
        ("1" * 501, "error: the expression has 501 characters; at most 500 are allowed"),
        ("-" * 450 + "1", "1"),
    ],
)
def test_the_calculator_computes_and_runs_nothing(expression: str, value: str) -> None:
    start = time.thread_time()
    assert Calculator().calculator(expression).startswith(value)
    assert time.thread_time() - start < 1


PYTHON = Python()


def test_python_prints_and_shows_the_last_value() -> None:
    assert PYTHON.python("x = 2\nprint('so')\nx + 3") == "so\n5\n"
    assert PYTHON.python("import math\nmath.factorial(5)") == "120\n"
    assert PYTHON.python("x = 1") == ""
    assert PYTHON.python("x").endswith("NameError: name 'x' is not defined\n"), "calls share nothing"
    failed = PYTHON.python("def f():\n    return 1 / 0\nf()")
    assert failed.startswith('Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    f()')
    assert failed.endswith("ZeroDivisionError: division by zero\n")
    assert PYTHON.python("f(").endswith("SyntaxError: '(' was never closed\n")
    assert PYTHON.python("raise SystemExit(3)") == "error: it ended with status 3"
    assert PYTHON.python("input()").endswith("EOFError: EOF when reading a line\n")
    assert PYTHON.python("'ä' + chr(0xd800)") == "'ä\\ud800'\n"
    assert PYTHON.python("#" * 100_001) == "error: the code has 100001 characters; at most 100000 are allowed"


def test_sets_print_in_the_same_order_each_time() -> None:
    code = "print({str(i) for i in range(50)})"
    assert PYTHON.python(code) == PYTHON.python(code)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['ls'])",
        "import os\nos.execv('/bin/ls', ['ls'])",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "import os\nos.kill(os.getppid(), 9)",
        "open('ESCAPE', 'w').write('x')",
        "import os\nos.remove('HERE')",
        "import os\nos.listdir('/')",
        "open('HERE').read()",
        "open('/proc/self/environ').read()",
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
    ],
)
def test_python_cannot_leave_its_process(code: str, tmp_path: Path) -> None:
    here, escape = tmp_path / "secret", tmp_path / "escape"
    here.write_text("secret")
    text = PYTHON.python(code.replace("HERE", str(here)).replace("ESCAPE", str(escape)))
    assert "PermissionError: [Errno " in text
    assert here.read_text() == "secret"
    assert not escape.exists()


def test_python_sees_no_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    text = PYTHON.python("import os\nprint(dict(os.environ))")
    assert "PATH" in text
    assert "secret" not in text


def children() -> set[str]:
    """The processes that the main thread has started and that have not ended, where the kernel lists them."""
    file = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(file.read_text().split()) if file.exists() else set()


LATE = "error: it was stopped at its time limit of 1 seconds"


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("while True: pass", LATE),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", LATE),
        ("import time\ntime.sleep(1e6)", LATE),
        ("import os, time\nos.close(1), os.close(2)\ntime.sleep(1e6)", LATE),
        ("while True: print('x' * 1000)", "error: it printed too much, and was stopped"),
        ("x = [0] * 10**10", "MemoryError\n"),
        ("import ctypes\nctypes.string_at(0)", "error: its process was ended by SIGSEGV"),
    ],
)
def test_python_has_limits(code: str, end: str) -> None:
    start, before = time.perf_counter(), children()
    assert Python(timeout_s=1).python(code).endswith(end)
    assert time.perf_counter() - start < 60
    assert children() <= before, "no process stays behind"


def answer(conversation: Conversation, text: str) -> Turn:
    return conversation.hear({"role": "assistant", "content": f"<answer>{text}</answer>"}).result(30)


def test_reasoning_gym_has_a_problem_for_each_group() -> None:
    cfg = EnvironmentConfig(path="reasoning_gym", kwargs={"task": "chain_sum", "attempts": 2}, num_workers=2)
    environments = Environments(cfg)
    assert environments.tools() == []
    problems = []
    for seed in (3, 3, 2**62 + 4):
        conversation = environments.open({"prompt": "Solve."}, seed, 0)
        problems.append(conversation.reset().result(30)[0]["content"])
    assert problems[0] == problems[1] != problems[2]
    assert problems[0].startswith("\n\nState the final answer to the following arithmetic problem: ")
    value = eval(problems[2].partition(": ")[2].removesuffix(" ="))
    wrong = answer(conversation, str(value + 1))
    assert not wrong.done
    assert wrong.messages[0]["content"] == "This is not the right answer; you have 1 attempt left."
    right = answer(conversation, str(value))
    assert right.done
    assert wrong.reward + right.reward == 1
    assert conversation.reward().result(30) == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "environment.kwargs: ReasoningGym(**kwargs): missing a required argument: 'task'"),
        (
            {"task": "chainsum"},
            "environment.kwargs: ReasoningGym: there is no task 'chainsum'; did you mean chain_sum?",
        ),
        ({"task": "chain_sum", "settings": {"terms": 2}}, "environment.kwargs: ReasoningGym: task chain_sum with "),
        ({"task": "chain_sum", "attempts": 0}, "environment.kwargs: ReasoningGym: attempts=0 should be greater than 0"),
    ],
)
def test_reasoning_gym_names_mistakes(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Environments(EnvironmentConfig(path="reasoning_gym", kwargs=kwargs))
    assert str(error.value).startswith(message)
