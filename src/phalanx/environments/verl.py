"""Tools of verl: a YAML file of classes with create, execute, calc_reward and release. verl itself is not imported."""

import functools
import inspect
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from phalanx.config.messages import ConfigError, reason
from phalanx.config.registry import resolve_object
from phalanx.config.sources import read
from phalanx.environments.texts import SEEN, Odd
from phalanx.environments.tools import Tool, schema_tool

KEY = "environment.tool_config_path"
_METHODS = ("create", "execute", "calc_reward", "release")


class _Function(BaseModel):
    """The part `function` of a schema."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class _Schema(BaseModel):
    """A tool_schema, with the attributes that verl's classes read."""

    model_config = ConfigDict(extra="allow")
    type: str = "function"
    function: _Function


@dataclass(frozen=True)
class Shared:
    """The tools of a file, which all conversations of a rank share: each of them has a name of its own there."""

    tools: Mapping[str, Any]
    callable: Mapping[str, Tool]


class VerlTools:
    """A conversation with these tools. Its reward is the sum of what calc_reward says of each tool that was called and
    of what execute gave.
    """

    def __init__(self, shared: Shared) -> None:
        self._tools = shared.tools
        self._names: dict[str, str] = {}  # of the tools that have been called, the instances
        self._kwargs: dict[str, Any] = {}
        self._earned = 0.0

    def reset(self, **row: Any) -> None:
        """Keep the row's tools_kwargs, a column of the data, or a part of its extra_info."""
        info = row.get("extra_info")
        kwargs = row.get("tools_kwargs") or (info.get("tools_kwargs") if isinstance(info, dict) else None) or {}
        if not isinstance(kwargs, dict):
            raise ValueError(f"tools_kwargs is of type {type(kwargs).__name__}; expected arguments by names of tools")
        self._kwargs = kwargs

    async def execute(self, arguments: dict[str, Any], name: str) -> Any:
        """Call a tool; the first call of it makes its instance."""
        tool = self._tools[name]
        if name not in self._names:
            kwargs = self._of(name, "create_kwargs")
            made = await _awaited(tool.create(str(uuid.uuid4()), **_taken(tool.create, kwargs)))
            self._names[name] = made[0] if isinstance(made, tuple) else made
        kwargs = self._of(name, "execute_kwargs")
        returned = await _awaited(tool.execute(self._names[name], arguments, **kwargs))
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
        for name, instance in self._names.items():
            reward = await _awaited(self._tools[name].calc_reward(instance, **self._of(name, "calc_reward_kwargs")))
            total += 0.0 if reward is None else float(reward)
        return total

    async def close(self) -> None:
        """Release the instances."""
        for name, instance in self._names.items():
            await _awaited(self._tools[name].release(instance, **self._of(name, "release_kwargs")))

    def _of(self, name: str, part: str) -> dict[str, Any]:
        """The arguments that the row has for a method of a tool."""
        return dict((self._kwargs.get(name) or {}).get(part) or {})


def load_tools(path: str) -> Shared:
    """The tools of a file, made. Raises ConfigError, with the entry, for what cannot be used."""
    content = OmegaConf.to_container(read(path), resolve=True)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}: {path} has no list `tools`; expected entries with class_name, config, tool_schema")
    tools: dict[str, Any] = {}
    callables: dict[str, Tool] = {}
    for i, entry in enumerate(entries):
        key = f"{KEY}: {path}: tools[{i}]"
        tool, schema = _made(entry, key)
        name = schema["function"]["name"]
        if name in tools:
            raise ConfigError(f"{key}: two tools are named {name!r}; rename one of them")
        tools[name] = tool
        callables[name] = schema_tool(schema, functools.partial(VerlTools.execute, name=name), asynchronous=True)
    return Shared(tools, callables)


def _made(entry: Any, key: str) -> tuple[Any, dict[str, Any]]:
    """A tool of an entry, and its schema."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{key} has no class_name; expected the dotted name of a class, config and tool_schema")
    if entry.get("tool_schema") is None:
        raise ConfigError(f"{key} has no tool_schema; expected it in OpenAI's form: {{type, function}}")
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
        raise ConfigError(f"{key}.tool_schema.{place}: {problem['msg']}") from None
    try:
        return kind(entry.get("config") or {}, schema), schema.model_dump(exclude_unset=True)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(f"{key}: {entry['class_name']}(config, tool_schema) raised {reason(error)}") from error


def _taken(create: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of create: by their names, and, for newer classes of verl, all of them as create_kwargs."""
    parameters = inspect.signature(create).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {**kwargs, "create_kwargs": kwargs}
    return {name: value for name, value in {**kwargs, "create_kwargs": kwargs}.items() if name in parameters}


async def _awaited(value: Any) -> Any:
    """The result of a method, whether it is async or not."""
    return await value if isinstance(value, Awaitable) else value
