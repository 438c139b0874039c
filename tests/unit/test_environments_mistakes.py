"""Mistakes in `environment.*` are found by train.sh's check, before any rank starts, in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.config.environment import EnvironmentConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.messages import ConfigError, reason
from phalanx.environments import EnvironmentFailure, Environments
from phalanx.environments.registry import build_kinds, kind_of
from phalanx.run.rules import load_config
from phalanx.tools.inputs import check_lm

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/grpo/quickstart_tools.yaml")
CODE = """
class Meta(type):
    def __call__(cls, *args, **kwargs):
        raise RuntimeError("x")
    @property
    def __signature__(cls):
        raise RuntimeError("no signature")

class Evil(metaclass=Meta):
    def step(self, message): ...

class Typed:
    def __init__(self, size: int = 1, rate: float = 0.5, name: str = "a", pair: tuple[int, int] = (1, 2),
                 weights: dict[str, float] | None = None, lies: int = None, free=None, missing: "Nope" = None): ...
    def step(self, message): ...

class Plain:
    def __init__(self, size: int = 1, rate: float = 0.5, name: str = "a", pair: tuple[int, int] = (1, 2),
                 weights: dict[str, float] | None = None, lies: int = None, free=None): ...
    def step(self, message): ...

def untyped(x): ...
async def solve(chat, row, depth: int = 1): ...
parser = 5
"""
TOOL = {
    "class_name": "CODE:Tool",
    "tool_schema": {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}},
}
VERL = """
class Tool:
    def __init__(self, config, schema): ...
    async def create(self, *a, **k): ...
    async def execute(self, *a, **k): ...
    async def calc_reward(self, *a, **k): ...
    async def release(self, *a, **k): ...
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(CODE)
    return file


def refusal(*keys: str) -> str:
    """The line with which the check refuses the tools' quickstart with other keys."""
    cfg = load_config(LMRLConfig, QUICKSTART, [f"model.path={ROOT}/assets/calculator/base", *keys])
    for name in ("train_files", "val_files"):
        files = vars(cfg.data)[name]
        vars(cfg.data)[name] = [file if file.startswith("/") else str(ROOT / file) for file in files]
    with pytest.raises(ConfigError) as error:
        check_lm(cfg)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["environment.tools=[calculater]"], "environment.tools[0]='calculater' is not built in; did you mean calculator?"),
        (["environment.format=herms"], "environment.format='herms' is unknown; did you mean hermes?"),
        (["environment.format={code}:nope"], "environment.format='{code}:nope': {code} has no 'nope'"),
        (["environment.format={code}:parser"], "environment.format='{code}:parser' is of type int; expected a function"),
        (["environment.tools=[]", "environment.path=pyton"], "environment.path='pyton' is not built in; did you mean python?"),
        (["environment.tools=['{code}:untyped']"], "environment.tools[0]: the tool untyped: "),
        (["environment.kwargs={a: 1}"], "environment.kwargs: a would be arguments of environment.path, which is not set"),
        (["environment.tools=[]", "environment.tool_config_path={code}"], "{code}"),
        (["environment.tools=[]", "environment.path={e1: python, e2: python}"], "data.train_files: "),
    ],
)  # fmt: skip
def test_the_check_refuses_what_ranks_would(keys: list[str], line: str, code: Path) -> None:
    keys = [key.replace("{code}", str(code)) for key in keys]
    assert refusal(*keys).startswith(line.replace("{code}", str(code)))


def kinds(**section: Any) -> Any:
    return build_kinds(EnvironmentConfig(**section))


@pytest.mark.parametrize(
    ("path", "kwargs", "line"),
    [
        ("python", {"unconfined": "maybe"}, "Python: unconfined='maybe' should be a valid boolean"),
        ("python", {"unconfined": "false"}, "Python: unconfined='false' should be a valid boolean"),
        ("python", {"timeout_s": True}, "Python: timeout_s=True should be a valid integer"),
        ("python", {"memory_mb": "lots"}, "Python: memory_mb='lots' should be a valid integer"),
        ("python", {"memory_mb": [1]}, "Python: memory_mb=[1] should be a valid integer"),
        (
            "reasoning_gym",
            {"task": "chain_sum", "attempts": "x"},
            "ReasoningGym: attempts='x' should be a valid integer",
        ),
        ("reasoning_gym", {"task": 5}, "ReasoningGym: task=5 should be a valid string"),
        ("{code}:Plain", {"size": "5"}, "Plain: size='5' should be a valid integer"),
        ("{code}:Plain", {"rate": "x"}, "Plain: rate='x' should be a valid number"),
        ("{code}:Plain", {"name": None}, "Plain: name=None should be a valid string"),
        ("{code}:Plain", {"pair": [1, "b"]}, "Plain: pair.1='b' should be a valid integer"),
        ("{code}:Plain", {"weights": {"a": "b"}}, "Plain: weights='b' should be a valid number"),
        ("{code}:solve", {"depth": False}, "solve: depth=False should be a valid integer"),
    ],
)
def test_arguments_have_the_types_of_the_signature(path: str, kwargs: dict[str, Any], line: str, code: Path) -> None:
    with pytest.raises(ConfigError) as error:
        kinds(path=path.replace("{code}", str(code)), kwargs=kwargs)
    assert str(error.value) == f"environment.kwargs: {line}"


def test_arguments_that_fit_are_accepted_unchanged(code: Path) -> None:
    fitting: dict[str, Any] = {"size": 3, "rate": 2, "name": "b", "pair": [3, 4], "weights": {"a": 1}, "free": object}
    for given in (fitting, {"size": 1e6}, {"weights": None, "lies": None}):
        assert kinds(path=f"{code}:Plain", kwargs=given)
    # a class with a hint that does not exist is not checked
    assert kinds(path=f"{code}:Typed", kwargs={"size": "many"})


def test_a_class_whose_metaclass_raises_is_one_line(code: Path) -> None:
    with pytest.raises(ConfigError) as error:
        kinds(path=f"{code}:Evil")
    line = f"environment.path='{code}:Evil' raised RuntimeError: no signature, at {code}:"
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 5, "c"])
def test_a_row_names_an_environment_by_a_text(name: Any) -> None:
    several = kinds(path={"a": "python", "b": "python"}, kwargs={"a": {"unconfined": True}, "b": {"unconfined": True}})
    with pytest.raises(ValueError, match=r"^its column environment is .*; expected one of a, b, the names in "):
        kind_of({"environment": name}, several)
    assert kind_of({"environment": "b"}, several) is several["b"]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"properties": ["a"]}, "properties should be an object with names of parameters, not ['a']"),
        ({"properties": {1: {}}}, "properties should be an object with names of parameters, not {1: {}}"),
        ({"required": 5}, "required should be a list of names of parameters, not 5"),
        ({"required": "a"}, "required should be a list of names of parameters, not 'a'"),
        ({"required": [["a"]]}, "required should be a list of names of parameters, not [['a']]"),
        ([], "Input should be a valid dictionary"),
    ],
)
def test_a_file_of_tools_with_a_malformed_schema(parameters: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(VERL)
    tool = json.loads(json.dumps(TOOL).replace("CODE", str(tmp_path / "own.py")))
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [tool]}))
    assert kinds(tool_config_path=str(file))
    tool["tool_schema"]["function"]["parameters"] = parameters
    file.write_text(yaml.safe_dump({"tools": [tool]}))
    with pytest.raises(ConfigError) as error:
        kinds(tool_config_path=str(file))
    key = f"environment.tool_config_path: {file}: tools[0].tool_schema.function.parameters"
    assert str(error.value) == f"{key}: {problem}"


LEAKS = """
class Leak:
    def __init__(self, key: str):
        self.key = key

    def look(self, how: str) -> str:
        \"\"\"Look it up.

        Args:
            how: raise or return
        \"\"\"
        text = f"401 for https://api?key={self.key}&x=1"
        if how == "raise":
            raise RuntimeError(text)
        return {"error": text} if how == "data" else text
"""


@pytest.mark.parametrize("how", ["raise", "return", "data"])
@pytest.mark.parametrize("on_error", ["observe", "end", "fail"])
def test_no_secret_reaches_the_model_or_a_message(
    how: str, on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKED_KEY", "sk-verysecret/12 3")
    (tmp_path / "own.py").write_text(LEAKS)
    keys = [f"environment.path={tmp_path}/own.py:Leak", "environment.kwargs.key=${oc.env:LEAKED_KEY}"]
    keys += ["environment.tools=[]", f"environment.on_error={on_error}", "model.path=base"]
    environments = Environments(load_config(LMRLConfig, QUICKSTART, keys).environment)
    talk = environments.open({"prompt": "p"}, 0, 0)
    assert talk.reset().result() == []
    call = {"type": "function", "function": {"name": "look", "arguments": {"how": how}}}
    try:
        turn = talk.hear({"role": "assistant", "content": "", "tool_calls": [call]}).result()
        seen = str(turn.messages) + str(talk.problem)
    except EnvironmentFailure as failure:
        seen = str(failure)
    assert "verysecret" not in seen
    assert "https://api?key=${oc.env:LEAKED_KEY}&x=1" in seen
    environments.close()


def test_no_secret_is_in_the_error_of_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED_KEY", "sk-verysecret12")
    assert load_config(LMRLConfig, QUICKSTART, ["model.path=${oc.env:LEAKED_KEY}"]).model.path == "sk-verysecret12"
    assert reason(RuntimeError("401 ?key=sk-verysecret12")) == "RuntimeError: 401 ?key=${oc.env:LEAKED_KEY}"
