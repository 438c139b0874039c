"""Tasksets of verifiers inside the rank: the one that its own command generates, state, prompts, rewards, mistakes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.cli.init import main

from phalanx.config import ConfigError
from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Environments
from tests.helpers.conversing import call, converse, say

OTHERS = """
import asyncio

import verifiers.v1 as vf


class Basket(vf.State):
    goods: list[str] = []


class Tools(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.limit = task.limit

    @vf.tool(name="put")
    async def put_in(self, good: str, times: int = 1) -> list[str]:
        \"\"\"Puts a good into the basket.\"\"\"
        await asyncio.sleep(0)
        self.state.goods += [good] * times
        return self.state.goods[: self.limit]


class Data(vf.TaskData):
    limit: int = 2


class Shop(vf.Task[Data, Basket]):
    async def setup(self, trace, runtime):
        trace.state.goods = ["bread"]

    @vf.reward(weight=0.5)
    async def filled(self, trace: vf.Trace) -> float:
        return float(len(trace.state.goods))

    @vf.reward
    async def told(self, task, trace) -> dict[str, float]:
        calls = [call.id for message in trace.assistant_messages for call in message.tool_calls or []]
        assert calls == [message.tool_call_id for message in trace.tool_messages]
        return {"turns": trace.num_turns, "cut": trace.is_truncated, "last": "done" in trace.last_reply}

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]


class Shops(vf.Taskset[Shop, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            prompt = [vf.UserMessage(content=f"Shop {number}."), vf.AssistantMessage(content="Yes?"), vf.UserMessage(content="Buy.")]
            yield Shop(Data(prompt=prompt, system_prompt="Be brief."))
            number += 1


class Boxed(vf.Task[Data]):
    NEEDS_CONTAINER = True


class Run(vf.Task[Data]):
    @vf.reward
    async def passes(self, trace, runtime) -> float:
        return 1.0


class Stopped(vf.Task[Data]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


def of(kind):
    class Some(vf.Taskset[kind, vf.TasksetConfig]):
        def load(self):
            return [] if kind is Shop else [kind(Data())]

    return Some


BoxedSet, RunSet, StoppedSet, Empty = map(of, (Boxed, Run, Stopped, Shop))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "environments" / "addition"))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "addition"]:
        del sys.modules[name]


def environments(path: str, **kwargs: Any) -> Environments:
    return Environments(EnvironmentConfig(path=path, kwargs=kwargs, num_workers=2))


def test_the_taskset_that_its_command_makes(folder: Path) -> None:
    """Only the two methods that the command leaves open are filled in."""
    main(["addition", "--path", "environments", "-T"])
    file = folder / "environments" / "addition" / "addition" / "taskset.py"
    head, raised, rest = file.read_text().partition('raise NotImplementedError("Score')
    assert raised
    head += "return float(str(self.data.idx + 7) in trace.last_reply)" + rest[rest.index("\n") :]
    head, raised, _ = head.partition("raise NotImplementedError(")
    assert raised
    tasks = '[AdditionTask(AdditionData(prompt=f"{i} + 7?"), self.config.task) for i in range(self.config.num_tasks)]'
    file.write_text(f"{head}return {tasks}\n")
    addition = environments("addition:AdditionTaskset", num_tasks=3)
    tool = addition.tools()[0]["function"]
    assert (tool["name"], tool["parameters"]["required"]) == ("addition_echo", ["text"])
    assert tool["description"] == "Return the given text unchanged (replace with a real tool)."
    for row, number, answer, reward in (({}, 1, "It is 8.", 1.0), ({"task": 2}, 2, "It is 8.", 0.0)):
        conversation = addition.open({"prompt": "Add.", **row}, 1, 1)
        turns = [call("addition_echo", text=8), call("addition_echo"), say(answer)]
        messages = converse(conversation, "Add.", turns)
        assert [message["content"] for message in messages] == [
            f"Add.\n\n{number} + 7?",
            "",
            "8",
            "",
            "error: addition_echo needs text; its parameters: text",
            answer,
        ]
        assert conversation.reward(messages).result(5) == {"reward": reward}
        conversation.close()
    assert addition.check() is None
    addition.close()


def test_state_prompts_and_rewards_by_their_names() -> None:
    shops = environments("others.py:Shops")
    conversation = shops.open({"prompt": "Well.", "task": 3}, 0, 0)
    added = conversation.reset().result(5)
    assert [message["content"] for message in added] == ["\n\nBe brief.\n\nShop 3.", "Yes?", "Buy."]
    messages = [{"role": "user", "content": "Well.\n\nBe brief.\n\nShop 3."}, *added[1:]]
    for turn, answer in ((call("put", good="fig", times=3), '["bread", "fig"]'), (call("put", good="nut"), None)):
        heard = conversation.hear(turn).result(5).messages
        assert answer is None or heard[0]["content"] == answer
        messages += [turn, *heard]
    assert conversation.reward(messages).result(5) == {"filled": 2.5, "turns": 2.0, "cut": 1.0, "last": 0.0}
    other = shops.open({"prompt": "Well."}, 1007, 0)
    messages = converse(other, "", [say("done")])
    assert "Shop 7." in messages[0]["content"]  # one of the first thousand
    shops.close()


MISTAKES = [
    ("BoxedSet", {}, "environment.kwargs: Boxed needs a container"),
    ("RunSet", {}, "environment.kwargs: Run.passes needs a runtime"),
    ("StoppedSet", {}, "environment.kwargs: Stopped.enough is a @stop"),
    ("Empty", {}, "environment.kwargs: Some has no task"),
    ("Shops", {"tasks": 3}, "environment.kwargs: TasksetConfig.tasks: Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("name", "kwargs", "problem"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_mistakes_are_told_in_a_line(name: str, kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        environments(f"others.py:{name}", **kwargs)
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)
