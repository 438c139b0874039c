"""Environments of OpenEnv inside the rank: the one that its own command generates, one of MCP tools, mistakes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openenv.cli.__main__ import app
from typer.testing import CliRunner

from phalanx.config import ConfigError
from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Environments
from tests.helpers.conversing import call, converse, say

OTHERS = """
from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=0, le=9)
    note: str = ""


class Hint(Observation):
    text: str = ""


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = []

    def __init__(self, tries: int = 3):
        super().__init__()
        self.left = tries

    def reset(self, seed=None, secret=None):
        assert 0 <= seed < 2**31
        self.secret = secret
        return Hint(text="Guess.")

    def step(self, action, timeout_s=None):
        self.left -= 1
        hit = action.number == self.secret
        return Hint(text=f"{hit} {action.note!r}", reward=1.0 if hit else -0.1, done=hit or self.left == 0)

    @property
    def state(self):
        return State()

    def close(self):
        self.closed.append(self.secret)


class Single(Game):
    SUPPORTS_CONCURRENT_SESSIONS = False


class OneThread(Game):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class Untyped(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None):
        return Hint()

    def step(self, action):
        return Hint()

    @property
    def state(self):
        return State()


class Notes(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server, notes = FastMCP("notes"), []

        @server.tool()
        def add(note: str) -> int:
            \"\"\"Keeps a note.\"\"\"
            notes.append(note)
            return len(notes)

        @server.tool()
        def read(number: int) -> str:
            \"\"\"Reads a note.\"\"\"
            return notes[number]

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        assert "prompt" not in kwargs and kwargs["answer"] == "a"
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "echo_env"]:
        del sys.modules[name]


def environments(path: str, **kwargs: Any) -> Environments:
    return Environments(EnvironmentConfig(path=path, kwargs=kwargs, num_workers=2))


def test_the_environment_that_its_command_makes() -> None:
    made = CliRunner().invoke(app, ["init", "echo_env"])
    assert made.exit_code == 0, made.output
    echo = environments("echo_env.server.echo_env_environment:EchoEnvironment")
    assert echo.tools()[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"message": {"type": "string", "title": "Message", "description": "Message to echo back"}},
        "required": ["message"],
    }
    conversation = echo.open({"prompt": "Say hello."}, 2**60, 1)
    messages = converse(
        conversation, "Say hello.", [call("step", message="hello"), call("step", text="x"), say("It did.")]
    )
    assert [message["content"] for message in messages] == [
        'Say hello.\n\n{"echoed_message": "Echo Env environment ready!", "message_length": 0}',
        "",
        '{"echoed_message": "hello", "message_length": 5}',
        "",
        "error: step needs message; its parameters: message",
        "It did.",
    ]
    assert (conversation.ended, conversation.calls, conversation.mistakes) == ("done", 1, 1)
    assert conversation.reward(messages).result(5) == 0.5
    conversation.close()
    assert echo.check() is None
    echo.close()


def test_an_observation_that_is_done_ends_the_conversation() -> None:
    games = environments("others.py:Game", tries=2)
    conversation = games.open({"prompt": "Play.", "secret": 4}, 3, 1)
    messages = converse(
        conversation, "Play.", [call("step", number=12), call("step", number="3", note=5), call("step", number=4)]
    )
    assert [message["content"] for message in messages if message["role"] != "assistant"] == [
        "Play.\n\nGuess.",
        "error: step: number: Input should be less than or equal to 9",
        "False '5'",
    ]
    assert conversation.ended == "done"
    assert conversation.reward(messages).result(5) == pytest.approx(0.9)
    conversation.close()
    games.close()
    assert sys.modules["phalanx_user_others"].Game.closed == [4]


def test_tools_of_an_mcp_server() -> None:
    notes = environments("others.py:Notes")
    assert [schema["function"]["name"] for schema in notes.tools()] == ["add", "read"]
    one, other = (notes.open({"prompt": "x", "answer": "a"}, 0, i) for i in range(2))
    messages = converse(one, "x", [call("add", note="pear"), call("read", number=0), call("read", number=7)])
    assert [message["content"] for message in messages[2::2]] == ["1", "pear", messages[-1]["content"]]
    assert messages[-1]["content"].startswith("error: ")
    assert converse(other, "x", [call("add", note="fig")])[-1]["content"] == "1"  # of its own
    assert one.reward().result(5) == 0
    notes.close()


MISTAKES = [
    (
        "Single",
        {},
        "environment.path: Single.SUPPORTS_CONCURRENT_SESSIONS is false, but each sample needs its own instance",
    ),
    ("OneThread", {}, "environment.path: OneThread needs one thread for all its calls"),
    ("Untyped", {}, "environment.path: Untyped.step has no action type; expected step(self, action: MyAction)"),
    (
        "Game",
        {"trys": 1},
        "environment.kwargs: Game(**kwargs): got an unexpected keyword argument 'trys'; its kwargs: tries",
    ),
]


@pytest.mark.parametrize(("name", "kwargs", "problem"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_mistakes_are_told_in_a_line(name: str, kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        environments(f"others.py:{name}", **kwargs)
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)
