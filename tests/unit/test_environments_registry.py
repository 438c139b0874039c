"""Resolving the section `environment` to classes and tools: levels, names, columns, mistakes."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Environments, Message, Turn
from phalanx.environments.texts import joined

FILE = '''
from phalanx.environments import Turn


class Base:
    def look(self) -> str:
        """Looks."""
        return "nothing"


class Room(Base):
    def __init__(self, doors: int = 1) -> None:
        self.doors = doors

    def reset(self, answer, prompt):
        self.answer = answer

    def open(self, number: int) -> str:
        """Opens a door.

        Args:
            number: which one (choices: [1, 2])
        """
        return f"door {number} of {self.doors}: {self.answer}"

    @staticmethod
    def wait() -> None:
        """Waits."""

    def _hidden(self): ...

    def get_reward(self):
        return True


class Game:
    def reset(self, **row):
        return [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Guess."}]

    def step(self, message: str):
        return eval(message)


class Async(Game):
    async def step(self, message: str):
        return Turn([{"role": "user", "content": "go on"}], 0.5)


class Untyped:
    def look(self, where) -> str:
        """Looks.

        Args:
            where: there
        """


class Undocumented:
    def look(self, where: str) -> str:
        return where


class Undescribed:
    def look(self, where: str) -> str:
        """Looks."""


class Stars:
    def look(self, *where: str) -> str:
        """Looks."""


class Nothing:
    def reset(self, **row): ...


class Prize(Nothing):
    def look(self) -> str:
        """Looks."""

    def get_reward(self):
        return self.prize

    def reset(self, prompt, prize):
        self.prize = prize


class Vault:
    def turn(self, number: int):
        """Turns the dial.

        Args:
            number: where to
        """
        text = [{"role": "tool", "content": "click"}]
        return Turn(text if number < 9 else [], reward=0.25, done=number == 9)


class Judged(Vault):
    def get_reward(self, messages):
        return len([message for message in messages if message.pop("role") == "assistant"])


def double(x: float) -> float:
    """Doubles a number.

    Args:
        x: the number
    """
    return 2 * x


def look() -> str:
    """Looks, too."""
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rooms.py"
    path.write_text(FILE)
    return path


def environments(**keys: Any) -> Environments:
    return Environments(EnvironmentConfig(**({"timeout_s": 60.0, "num_workers": 2} | keys)))


def call(name: str, **arguments: Any) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def names(schemas: list[dict[str, Any]]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


def test_public_methods_are_tools_and_functions_beside_them(file: Path) -> None:
    rooms = environments(path=f"{file}:Room", tools=[f"{file}:double", "calculator"], kwargs={"doors": 3})
    assert names(rooms.tools()) == ["look", "open", "wait", "double", "calculator"]
    assert rooms.tools()[1]["function"] == {
        "name": "open",
        "description": "Opens a door.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "enum": [1, 2], "description": "which one"}},
            "required": ["number"],
        },
    }
    room = rooms.open({"prompt": "x", "answer": "gold", "more": 1}, 0, 0)
    assert room.reset().result(60) == []
    assert room.hear(call("open", number=2)).result(60).messages[0]["content"] == "door 2 of 3: gold"
    assert room.hear(call("double", x=4)).result(60).messages[0]["content"] == "8.0"
    assert room.hear(call("calculator", expression="2*3")).result(60).messages[0]["content"] == "6"
    assert room.hear(call("wait")).result(60).messages[0]["content"] == ""
    assert room.reward().result(60) == 1.0


def test_a_tool_may_give_a_reward_and_end_the_conversation(file: Path) -> None:
    vaults = environments(path=f"{file}:Vault")
    conversation = vaults.open({"prompt": "x"}, 0, 0)
    conversation.reset().result(60)
    assert conversation.hear(call("turn", number=3)).result(60).messages[0]["content"] == "click"
    assert conversation.ended is None
    assert conversation.hear(call("turn", number=9)).result(60) == Turn(done=True)
    assert (conversation.ended, conversation.calls) == ("done", 2)
    assert conversation.reward().result(60) == 0.5
    untouched = vaults.open({"prompt": "x"}, 0, 0)
    untouched.reset().result(60)
    assert untouched.reward().result(60) is None


def test_a_reward_reads_the_messages(file: Path) -> None:
    conversation = environments(path=f"{file}:Judged").open({"prompt": "x"}, 0, 0)
    conversation.reset().result(60)
    messages = [{"role": "user", "content": "x"}, *2 * [{"role": "assistant", "content": "y"}]]
    assert conversation.reward(messages).result(60) == 2
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant"]  # it had copies


def test_functions_need_no_environment(file: Path) -> None:
    tools = environments(tools=[f"{file}:double"])
    assert names(tools.tools()) == ["double"]
    conversation = tools.open({"prompt": "x"}, 0, 0)
    assert conversation.reset().result(60) == []
    assert conversation.hear(call("double", x="1.5")).result(60).messages[0]["content"] == "3.0"
    assert conversation.reward().result(60) is None


def test_the_column_environment_picks_one(file: Path) -> None:
    both = environments(path={"room": f"{file}:Room", "game": f"{file}:Game"}, kwargs={"room": {"doors": 2}})
    assert both.names == ["room", "game"]
    assert (names(both.tools("room")), both.tools("game")) == (["look", "open", "wait"], [])
    room = both.open({"prompt": "x", "environment": "room", "answer": "a"}, 0, 0)
    room.reset().result(60)
    assert room.hear(call("open", number=1)).result(60).messages[0]["content"] == "door 1 of 2: a"
    both.check_row({"prompt": "x", "environment": "game"})
    with pytest.raises(
        ValueError, match=r"^its column environment is 'rom'; did you mean room\?; expected one of room"
    ):
        both.check_row({"environment": "rom"})
    with pytest.raises(ValueError, match=r"^it has no column environment; expected one of room, game, the names in"):
        both.check_row({})


GUESS = [{"role": "user", "content": "again"}]
FORMS: list[tuple[str, Turn]] = [
    ("Turn([{'role': 'user', 'content': 'again'}], 1, True)", Turn(GUESS, 1.0, True)),
    ("'again'", Turn(GUESS)),
    ("[{'role': 'user', 'content': 'again'}]", Turn(GUESS)),
    ("{'role': 'user', 'content': 'again'}", Turn(GUESS)),
    ("{'messages': 'again', 'reward': 0.5}", Turn(GUESS, 0.5)),
    ("{'observations': [{'role': 'user', 'content': 'again'}], 'reward': 1, 'done': True}", Turn(GUESS, 1.0, True)),
    ("('again', 0.5, False)", Turn(GUESS, 0.5)),
    ("('again', None, True, {})", Turn(GUESS, 0.0, True)),
    ("('again', 1, False, True, {})", Turn(GUESS, 1.0, True)),
    ("(None, 1, True)", Turn([], 1.0, True)),
]


@pytest.mark.parametrize(("code", "turn"), FORMS)
def test_forms_of_a_step(file: Path, code: str, turn: Turn) -> None:
    game = environments(path=f"{file}:Game").open({"prompt": "x"}, 0, 0)
    assert len(game.reset().result(60)) == 2
    assert game.hear({"role": "assistant", "content": code}).result(60) == turn
    assert game.ended == ("done" if turn.done else None)
    assert game.reward().result(60) == turn.reward


ODD: list[tuple[str, str]] = [
    ("None", "step returned a NoneType; expected a Turn, a text, a list of messages, a dict with"),
    ("3", "step returned a int; expected a Turn"),
    ("('again', 1)", "step returned 2 values; expected a Turn"),
    ("{'text': 1}", "step returned a dict with text; expected a Turn"),
    ("('again', 'much', True)", "step returned the reward 'much'; expected a number"),
    ("('again', float('nan'), True)", "step returned the reward nan; expected a finite number"),
    ("('again', 1, 'yes')", "step returned 'yes' for done; expected true or false"),
    ("(7, 1, True)", "step returned a int; expected None, a text or a list of messages"),
    ("['again']", "step returned the message 'again'; expected a dict with role and content"),
    ("[{'role': 'user', 'content': []}]", "step returned a message with a content of type list; expected a text"),
    (
        "[{'role': 'user', 'content': 'x', 'seen': {1}}]",
        "step returned a message that JSON cannot represent: Object of type set",
    ),
]


@pytest.mark.parametrize(("code", "problem"), ODD)
def test_other_forms_of_a_step_end_the_sample(file: Path, code: str, problem: str) -> None:
    game = environments(path=f"{file}:Game").open({"prompt": "x"}, 0, 0)
    game.reset().result(60)
    assert game.hear({"role": "assistant", "content": code}).result(60) == Turn(done=True)
    assert game.ended == "error"
    assert game.problem is not None
    assert game.problem.startswith(f"environment Game: {problem}")
    assert game.reward().result(60) is None


def test_an_async_step_and_its_sum_of_rewards(file: Path) -> None:
    game = environments(path=f"{file}:Async").open({"prompt": "x"}, 0, 0)
    game.reset().result(60)
    for _ in range(3):
        assert game.hear({"role": "assistant", "content": ""}).result(60).messages[0]["content"] == "go on"
    assert game.reward().result(60) == 1.5


@pytest.mark.parametrize("prize", ["much", [1], {"a": None}, {1: 2}, float("inf")])
def test_odd_rewards_are_failures(file: Path, prize: Any) -> None:
    conversation = environments(path=f"{file}:Prize").open({"prompt": "x", "prize": prize}, 0, 0)
    conversation.reset().result(60)
    assert conversation.reward().result(60) is None
    assert conversation.failures == 1
    assert conversation.problem is not None
    assert conversation.problem.startswith("environment Prize: get_reward returned ")


def test_a_reset_that_lacks_a_column_fails(file: Path) -> None:
    conversation = environments(path=f"{file}:Room").open({"prompt": "x"}, 0, 0)
    assert conversation.reset().result(60) == []
    assert conversation.ended == "error"
    assert conversation.problem is not None
    assert "missing 1 required positional argument: 'answer'" in conversation.problem


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"path": "calculater"}, "environment.path='calculater' is not built in; did you mean calculator? built in: "),
    ({"path": "FILE:Rome"}, "has no 'Rome'; did you mean Room?"),
    ({"path": "FILE:double"}, "is of type function; expected a class, or an async function"),
    ({"path": "FILE:Nothing"}, "environment.path: Nothing has neither tools, which are public methods"),
    ({"path": "FILE:Untyped"}, "environment.path: the tool Untyped.look: Argument where is missing a type hint"),
    ({"path": "FILE:Undocumented"}, "environment.path: the tool Undocumented.look: Cannot generate JSON schema"),
    ({"path": "FILE:Undescribed"}, "has no description for the argument 'where'; expected type hints, and a docstring"),
    ({"path": "FILE:Stars"}, "environment.path: the tool Stars.look has the parameter *where: str"),
    ({"path": "FILE:Room", "kwargs": {"door": 1}}, "environment.kwargs: Room(**kwargs): got an unexpected keyword"),
    ({"path": "FILE:Room", "tools": ["FILE:look"]}, "environment.path: two tools are named 'look'"),
    ({"path": "FILE:Game", "tools": ["FILE:look"]}, "environment.path: Game reads turns in step, which never calls"),
    ({"tools": ["FILE:Room"]}, "is a class; expected a function, as environment.path takes classes"),
    ({"tools": ["FILE:double", "FILE:double"]}, "environment.tools[1]: two tools are named 'double'"),
    ({"path": {"a": 3}}, "environment.path.a: expected a built-in environment or module:Class or"),
    (
        {"path": {"a": "FILE:Room"}, "kwargs": {"b": {}}},
        "environment.kwargs.b: expected keyword arguments of one of the environments",
    ),
    (
        {"path": "python", "kwargs": {"timeout_s": 0}},
        "environment.kwargs: Python: timeout_s=0 should be greater than or",
    ),
]


@pytest.mark.parametrize(("keys", "message"), MISTAKES)
def test_mistakes_are_told_in_one_line(file: Path, keys: dict[str, Any], message: str) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(each) for each in value]
        return value.replace("FILE", str(file)) if isinstance(value, str) else value

    path = keys.get("path")
    given = {key: filled(value) for key, value in keys.items()}
    if isinstance(path, dict):
        given["path"] = {name: filled(value) for name, value in path.items()}
    with pytest.raises(ConfigError) as error:
        environments(**given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_text_of_reset_joins_the_last_message_of_the_user() -> None:
    prompt = [{"role": "user", "content": "Go."}]
    assert joined(prompt, [{"role": "user", "content": " Now."}]) == [{"role": "user", "content": "Go. Now."}]
    system = [{"role": "system", "content": "Be quick."}]
    assert joined(prompt, system) == [*prompt, *system]
    assert joined(prompt, []) == prompt
    assert prompt == [{"role": "user", "content": "Go."}]
