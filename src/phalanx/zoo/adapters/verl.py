"""Tools of verl: classes with create, execute, calc_reward and release, listed in a YAML file. verl is not imported."""

import functools
import inspect
import uuid
from collections.abc import Awaitable, Mapping
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from phalanx.config.messages import ConfigError, cut, users_code
from phalanx.config.registry import resolve_object
from phalanx.config.sources import read
from phalanx.environments.registry import Kind
from phalanx.environments.texts import SEEN, Odd
from phalanx.environments.tools import Tool, accepted, schema_tool

KEY = "environment.tool_config_path"
_METHODS = ("create", "execute", "calc_reward", "release")


def _check_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of the parameters, unchanged. Raises ValueError if a tool cannot be made of it."""
    for key, kind in (("properties", dict), ("required", list)):
        value = parameters.get(key)
        if value is not None and (not isinstance(value, kind) or not all(isinstance(name, str) for name in value)):
            form = "an object with names of parameters" if kind is dict else "a list of names of parameters"
            raise ValueError(f"{key} should be {form}, not {cut(repr(value))}")
    return parameters


class _Function(BaseModel):
    """The key `function` of a schema."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] = {}


class _Schema(BaseModel):
    """A tool_schema, with the attributes that verl's classes read."""

    model_config = ConfigDict(extra="allow")
    type: str = "function"
    function: _Function


class VerlTools:
    """The tools of a file in one conversation, which has its own instance ids. Its reward is the sum of calc_reward
    over the tools that were called and of the rewards that execute returned.
    """

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools  # shared by all conversations of a rank
        self._instances: dict[str, str] = {}  # instance ids of the tools that have been called, by tool
        self._kwargs: dict[str, Any] = {}
        self._earned = 0.0

    def reset(self, **row: Any) -> None:
        """Store the row's tools_kwargs, a column of the data or a key of its extra_info."""
        info = row.get("extra_info")
        kwargs = row.get("tools_kwargs") or (info.get("tools_kwargs") if isinstance(info, dict) else None) or {}
        if not isinstance(kwargs, dict):
            raise ValueError(f"tools_kwargs is of type {type(kwargs).__name__}; expected arguments by names of tools")
        self._kwargs = kwargs

    async def execute(self, arguments: dict[str, Any], name: str) -> Any:
        """Call a tool. Its first call creates the instance."""
        tool = self._tools[name]
        if name not in self._instances:
            kwargs = self._kwargs_of(name, "create_kwargs")
            # each by name and, for newer classes of verl, all as create_kwargs
            kwargs = accepted(tool.create, {**kwargs, "create_kwargs": kwargs})
            made = await _await_result(tool.create(str(uuid.uuid4()), **kwargs))
            self._instances[name] = made[0] if isinstance(made, tuple) else made
        kwargs = self._kwargs_of(name, "execute_kwargs")
        returned = await _await_result(tool.execute(self._instances[name], arguments, **kwargs))
        response, reward = (*returned, None)[:2] if isinstance(returned, tuple) else (returned, None)
        self._earned += 0.0 if reward is None else float(reward)
        if isinstance(response, str | None):
            return response
        if vars(response).get("image") or vars(response).get("video"):
            raise Odd(f"{name} returned {SEEN}")
        return response.text

    async def get_reward(self) -> float:
        """The sum of the tools' rewards."""
        total = self._earned
        for name, instance in self._instances.items():
            kwargs = self._kwargs_of(name, "calc_reward_kwargs")
            reward = await _await_result(self._tools[name].calc_reward(instance, **kwargs))
            total += 0.0 if reward is None else float(reward)
        return total

    async def close(self) -> None:
        """Release the instances."""
        for name, instance in self._instances.items():
            await _await_result(self._tools[name].release(instance, **self._kwargs_of(name, "release_kwargs")))

    def _kwargs_of(self, name: str, part: str) -> dict[str, Any]:
        """The arguments in the row's tools_kwargs for a method of a tool."""
        return dict((self._kwargs.get(name) or {}).get(part) or {})


def load(path: str) -> Kind:
    """The environment of a file's tools. Raises ConfigError, which names the entry, for a tool that cannot be used."""
    content = OmegaConf.to_container(read(path), resolve=True)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}: {path} has no list `tools`; expected entries with class_name, config, tool_schema")
    tools: dict[str, Any] = {}
    callables: dict[str, Tool] = {}
    for i, entry in enumerate(entries):
        key = f"{KEY}: {path}: tools[{i}]"
        tool, schema = _make_tool(entry, key)
        name = schema["function"]["name"]
        if name in tools:
            raise ConfigError(f"{key}: two tools are named {name!r}; rename one of them")
        tools[name] = tool
        callables[name] = schema_tool(schema, functools.partial(VerlTools.execute, name=name), asynchronous=True)
    return Kind(KEY, lambda: VerlTools(tools), callables, frozenset({"reset", "get_reward", "close"}))


def _make_tool(entry: Any, key: str) -> tuple[Any, dict[str, Any]]:
    """Make the tool of an entry. Returns it and its schema."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{key} has no class_name; expected the dotted name of a class, config and tool_schema")
    if entry.get("tool_schema") is None:
        raise ConfigError(f"{key} has no tool_schema; expected it in OpenAI's format: {{type, function}}")
    path = entry["class_name"]
    if ":" not in path:
        path = ":".join(path.rsplit(".", 1))
    kind = resolve_object(path, f"{key}.class_name", "class")
    missing = [name for name in _METHODS if not callable(inspect.getattr_static(kind, name, None))]
    if missing:
        raise ConfigError(
            f"{key}.class_name={entry['class_name']!r} has no {missing[0]}; expected {', '.join(_METHODS)}"
        )
    try:
        schema = _Schema.model_validate(entry["tool_schema"])
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{key}.tool_schema.{place}: {problem['msg'].removeprefix('Value error, ')}") from None
    with users_code(f"{key}: {entry['class_name']}(config, tool_schema) raised"):
        tool = kind(entry.get("config") or {}, schema)
    return tool, schema.model_dump(exclude_unset=True)


async def _await_result(value: Any) -> Any:
    """The result of a method, which may be async."""
    return await value if isinstance(value, Awaitable) else value
