"""Tools of verl: a file in its format, the data's tools_kwargs, rewards, release, mistakes."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Environments, Message

# classes with verl's two forms of create and execute
CLASSES = """
import json
from types import SimpleNamespace


class Base:
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        assert json.dumps(tool_schema.model_dump(exclude_unset=True, exclude_none=True))
        self.instances = {}

    async def release(self, instance_id, **kwargs):
        RELEASED.append((self.name, self.instances.pop(instance_id)["answers"], kwargs))


RELEASED = []


class Check(Base):
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self.instances[instance_id] = {"truth": ground_truth, "answers": []}
        return instance_id, SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **kwargs):
        instance = self.instances[instance_id]
        right = parameters["answer"] == instance["truth"]
        if parameters["answer"] == "draw":
            return SimpleNamespace(text="", image=["pixels"]), 0.0, {}
        instance["answers"].append(parameters["answer"])
        return SimpleNamespace(text=f"right: {right}", image=None), 0.0 if right else -0.05, {}

    async def calc_reward(self, instance_id, **kwargs):
        instance = self.instances[instance_id]
        return float(instance["answers"][-1] == instance["truth"])


class Search(Base):
    def create(self, instance_id):
        self.instances[instance_id] = {"answers": []}
        return instance_id

    def execute(self, instance_id, parameters, top=1):
        return f"{self.config['source']}: {parameters['query']} {top}"

    def calc_reward(self, instance_id):
        return None


class Broken(Search):
    def __init__(self, config, tool_schema):
        raise KeyError("source")


class Half:
    def create(self): ...
    def execute(self): ...
"""
FILE = """
tools:
  - class_name: FILE:Check
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check
        description: Checks an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: The answer}
          required: [answer]
  - class_name: FILE:Search
    config: {source: wiki}
    tool_schema:
      type: function
      function:
        name: search
        description: Searches.
        parameters:
          type: object
          properties:
            query: {type: string, description: The query}
            pages: {type: integer, description: How many}
          required: [query]
"""


def environments(folder: Path, content: str = FILE) -> Environments:
    classes, file = folder / "verl_tools.py", folder / "tools.yaml"
    classes.write_text(CLASSES)
    file.write_text(content.replace("FILE", str(classes)))
    return Environments(EnvironmentConfig(tool_config_path=str(file), timeout_s=60.0, num_workers=2))


def call(name: str, **arguments: Any) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("nested", [False, True])
def test_a_conversation_with_tools_of_verl(tmp_path: Path, nested: bool) -> None:
    tools = environments(tmp_path)
    assert [schema["function"]["name"] for schema in tools.tools()] == ["check", "search"]
    assert tools.tools()[0]["function"]["parameters"]["required"] == ["answer"]
    kwargs = {
        "check": {"create_kwargs": {"ground_truth": "5"}, "release_kwargs": {"why": "over"}},
        "search": {"execute_kwargs": {"top": 3}},
    }
    row = {"extra_info": {"tools_kwargs": kwargs}} if nested else {"tools_kwargs": kwargs}
    conversations = [tools.open({"prompt": "x", **row}, 0, i) for i in range(2)]
    answers = ("4", 5)
    for conversation, answer in zip(conversations, answers, strict=True):
        assert conversation.reset().result(60) == []
        text = conversation.hear(call("check", answer=answer)).result(60).messages[0]["content"]
        assert text == f"right: {answer == 5}"
        text = conversation.hear(call("search", query="ducks")).result(60).messages[0]["content"]
        assert text == "wiki: ducks 3"
        text = conversation.hear(call("search", query="ducks", pages="two")).result(60).messages[0]["content"]
        assert text.startswith("error: search: pages: Input should be a valid integer")
    assert [conversation.reward().result(60) for conversation in conversations] == [-0.05, 1.0]
    assert [conversation.problem for conversation in conversations] == [None, None]
    text = conversations[0].hear(call("check", answer="draw")).result(60).messages[0]["content"]
    assert text.endswith("check returned an image; the model sees only those of the prompt, expected a text")
    for conversation in conversations:
        conversation.close()
    tools.close()
    from phalanx_user_verl_tools import RELEASED  # type: ignore[import-not-found]

    assert sorted(answers for name, answers, _ in RELEASED if name == "check") == [["4"], ["5"]]
    assert [kwargs for name, _, kwargs in RELEASED if name == "check"] == [{"why": "over"}] * 2
    RELEASED.clear()


MISTAKES: list[tuple[str, str]] = [
    ("a: 1", "has no list `tools`; expected entries with class_name, config, tool_schema"),
    ("tools: [{config: {}}]", "tools[0] has no class_name; expected the dotted name of a class"),
    ("tools: [{class_name: 'FILE:Check'}]", "tools[0] has no tool_schema; expected it in OpenAI's format"),
    (FILE.replace("FILE:Search", "FILE:Serch"), "tools[1].class_name="),
    (FILE.replace("FILE:Check", "verl.tools.gsm8k_tool.Gsm8kTool"), "no module 'verl' on the Python path"),
    (FILE.replace("FILE:Search", "FILE:Half"), "has no calc_reward; expected create, execute, calc_reward, release"),
    (FILE.replace("FILE:Search", "FILE:Broken"), "(config, tool_schema) raised KeyError: 'source'"),
    (FILE.replace("name: search", "title: search"), "tools[1].tool_schema.function.name: Field required"),
    (FILE.replace("name: search", "name: check"), "tools[1]: two tools are named 'check'; rename one of them"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_mistakes_name_the_entry(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        environments(tmp_path, content)
    assert str(error.value).startswith("environment.tool_config_path: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
