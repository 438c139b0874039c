"""Users' own loops: turns, rewards, ends from both sides, forks, time limits."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Conversation, Environments, Message, Turn

FILE = """
import asyncio, time
from phalanx.environments import ConversationEnded


async def ask_again(chat, row, times=2):
    messages = [{"role": "user", "content": row["prompt"]}] if isinstance(row["prompt"], str) else list(row["prompt"])
    total = 0
    for i in range(times):
        reply = await chat(messages)
        total += len(reply["content"])
        messages += [reply, {"role": "user", "content": f"again {i}"}]
    return total


class Loop:
    def __init__(self, scale=1.0):
        self.scale = scale

    async def solve(self, chat, row):
        messages, count = list(row["prompt"]), 0
        try:
            while True:
                reply = await chat(messages)
                count += "tool_calls" in reply
                messages += [{"role": "assistant", "content": reply["content"]}, {"role": "tool", "content": "ok"}]
        except ConversationEnded:
            return {"calls": self.scale * count}


async def fork(chat, row):
    reply = await chat(row["prompt"])
    await chat([{"role": "user", "content": "a summary"}])


async def together(chat, row):
    await asyncio.gather(chat(row["prompt"]), chat(row["prompt"]))


async def silent(chat, row):
    return 1.0


async def sleep(chat, row):
    await chat(row["prompt"])
    await asyncio.sleep(1e6)


async def block(chat, row):
    await chat(row["prompt"])
    time.sleep(1e6)


async def spin(chat, row):
    await chat(row["prompt"])
    while True:
        pass


async def broken(chat, row):
    await chat(row["prompt"])
    raise KeyError("no such thing")


async def leave(chat, row):
    await chat(row["prompt"])
    raise SystemExit(3)


ENDED = []


async def odd(chat, row):
    try:
        reply = await chat(row["prompt"])
        await chat([*row["prompt"], reply, {"role": "user", "content": 1}])
    finally:
        ENDED.append(1)


class Plain:
    def solve(self, chat, row): ...
"""
PROMPT: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "loops.py"
    path.write_text(FILE)
    return path


def opened(file: Path, name: str, prompt: Any = PROMPT, **keys: Any) -> Conversation:
    environments = Environments(EnvironmentConfig(path=f"{file}:{name}", timeout_s=60.0, num_workers=2, **keys))
    return environments.open({"prompt": prompt}, 0, 0)


def hear(conversation: Conversation, text: str, **more: Any) -> Turn:
    return conversation.hear({"role": "assistant", "content": text, **more}).result(60)


@pytest.mark.parametrize("prompt", [PROMPT, "Hi."])
def test_a_loop_asks_for_turns_and_returns_a_reward(file: Path, prompt: Any) -> None:
    conversation = opened(file, "ask_again", prompt, kwargs={"times": 3})
    assert conversation.reset().result(60) == []
    assert hear(conversation, "one") == Turn([{"role": "user", "content": "again 0"}])
    assert hear(conversation, "three") == Turn([{"role": "user", "content": "again 1"}])
    assert hear(conversation, "five") == Turn(done=True)
    assert conversation.ended == "done"
    assert conversation.reward().result(60) == 12
    conversation.close()


def test_a_loop_is_told_that_there_is_no_further_turn(file: Path) -> None:
    conversation = opened(file, "Loop", kwargs={"scale": 0.5})
    assert conversation.reset().result(60) == []
    assert hear(conversation, "one", tool_calls=[{}]) == Turn([{"role": "tool", "content": "ok"}])
    assert hear(conversation, "two", tool_calls=[{}], error="malformed").messages
    assert conversation.ended is None
    assert conversation.reward().result(60) == {"calls": 1.0}

    conversation = opened(file, "ask_again")
    conversation.reset().result(60)
    hear(conversation, "one")
    assert conversation.reward().result(60) == 0


PROBLEMS = [
    ("fork", "step raised Forked: the messages passed to chat differ from the conversation at index 0"),
    ("broken", "step raised KeyError: 'no such thing', at "),
    ("leave", "step raised RuntimeError: solve ended by SystemExit: 3"),
]


@pytest.mark.parametrize(("name", "problem"), PROBLEMS)
def test_what_a_loop_raises_ends_the_sample(file: Path, name: str, problem: str) -> None:
    conversation = opened(file, name)
    conversation.reset().result(60)
    assert hear(conversation, "one") == Turn(done=True)
    assert conversation.ended == "error"
    assert conversation.problem is not None
    assert conversation.problem.startswith(f"environment {name}: {problem}")
    assert conversation.reward().result(60) is None


@pytest.mark.parametrize(
    ("name", "problem"), [("together", "Forked: chat was called while another"), ("silent", "ValueError")]
)
def test_a_loop_that_does_not_begin(file: Path, name: str, problem: str) -> None:
    conversation = opened(file, name)
    conversation.reset().result(60)
    if conversation.ended is None:  # of two concurrent calls, the second one is refused
        hear(conversation, "one")
    assert conversation.ended == "error"
    assert conversation.problem is not None
    assert problem in conversation.problem


def test_a_loop_ends_with_its_sample(file: Path) -> None:
    environments = Environments(EnvironmentConfig(path=f"{file}:odd", max_error_fraction=1))
    conversation = environments.open({"prompt": PROMPT}, 0, 0)
    conversation.reset().result(60)
    assert hear(conversation, "one") == Turn(done=True)
    assert conversation.problem is not None
    assert "a content of type int; expected a text" in conversation.problem
    conversation.close()
    environments.close()
    from phalanx_user_loops import ENDED  # type: ignore[import-not-found]

    assert ENDED == [1]


@pytest.mark.parametrize("name", ["sleep", "block"])
def test_a_loop_that_hangs_ends_its_sample_only(file: Path, name: str) -> None:
    cfg = EnvironmentConfig(path={"a": f"{file}:{name}", "b": f"{file}:Loop"}, timeout_s=60.0, num_workers=2)
    environments = Environments(cfg)
    conversation = environments.open({"prompt": PROMPT, "environment": "a"}, 0, 0)
    conversation.reset().result(60)
    environments._pool._timeout_s = 0.5
    assert hear(conversation, "one") == Turn(done=True)
    assert conversation.ended == "timeout"
    environments._pool._timeout_s = 60
    after = environments.open({"prompt": PROMPT, "environment": "b"}, 0, 0)
    after.reset().result(60)
    assert hear(after, "one").messages == [{"role": "tool", "content": "ok"}]


def test_loops_beside_one_that_never_ends_go_on(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = EnvironmentConfig(path={"a": f"{file}:spin", "b": f"{file}:Loop"}, timeout_s=60.0, num_workers=2)
    environments = Environments(cfg)
    blocking, beside = [environments.open({"prompt": PROMPT, "environment": name}, 0, 0) for name in "ab"]
    for conversation in (blocking, beside):
        conversation.reset().result(60)
    environments._pool._timeout_s = 1.5  # of both, and anew for the one beside, once it can go on
    first, second = [each.hear({"role": "assistant", "content": "one"}) for each in (blocking, beside)]
    assert first.result(60) == Turn(done=True) and blocking.ended == "timeout"
    assert second.result(60).messages == [{"role": "tool", "content": "ok"}] and beside.ended is None
    (line,) = [record.message for record in caplog.records if record.name == "phalanx.environments.pool"]
    assert f"an async function at {file}:" in line and line.endswith(
        "expected await, or asyncio.to_thread for blocking calls"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "FILE:Plain"}, "is Plain.solve; expected a class, or an async function solve(chat, row)"),
        (
            {"path": "FILE:ask_again", "kwargs": {"time": 2}},
            "ask_again(chat, row, **kwargs): got an unexpected keyword",
        ),
        ({"path": "FILE:Loop", "kwargs": {"size": 2}}, "Loop(**kwargs): got an unexpected keyword argument 'size'"),
    ],
)
def test_mistakes(file: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Environments(EnvironmentConfig(**{**keys, "path": keys["path"].replace("FILE", str(file))}))
    assert message in str(error.value)
