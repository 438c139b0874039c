"""Environments of OpenEnv: the class that its server would run, inside the rank, with its actions as tools."""

import inspect
import json
import typing
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ValidationError

from phalanx.config.arguments import check_arguments
from phalanx.config.messages import ConfigError, users_code
from phalanx.environments.registry import Kind
from phalanx.environments.tools import Tool, accepted, lenient, schema_of, schema_tool
from phalanx.environments.turn import Turn

_SEEDS = 2**31  # numpy and others accept 32 bits


class Episode:
    """An environment of OpenEnv in one conversation."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def reset(self, **row: Any) -> str:
        """The first observation. The environment gets the group's seed and those columns of the data that it takes."""
        reset = self._environment.reset
        row["seed"] = row["seed"] % _SEEDS
        for name in {"prompt", "sample_seed"} - inspect.signature(reset).parameters.keys():
            row.pop(name, None)  # an environment that takes any columns of the data does not expect these
        text = _observation_text(reset(**accepted(reset, row)))
        return f"\n\n{text}" if text else ""

    def act(self, action: Any) -> Turn:
        """Take a step, and return its observation, reward and end as a turn."""
        observation = self._environment.step(action)
        answer = {"role": "tool", "content": _observation_text(observation)}
        return Turn([answer], 0.0 if observation.reward is None else float(observation.reward), observation.done)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()


def load(factory: Any, kwargs: dict[str, Any], key: str, kwargs_key: str) -> Kind:
    """The environment that a class defines. Raises ConfigError for an unsuitable class."""
    label = factory.__name__
    check_arguments(factory, (), kwargs, kwargs_key, label)
    if not factory.SUPPORTS_CONCURRENT_SESSIONS:
        raise ConfigError(
            f"{key}: {label}.SUPPORTS_CONCURRENT_SESSIONS is false, but each sample needs its own instance; set it to "
            "true in the class, or in a subclass, if its instances share no state"
        )
    if factory.REQUIRES_SINGLE_THREAD_EXECUTOR:
        raise ConfigError(f"{key}: {label} needs one thread for all its calls, which is not supported")
    is_mcp = any(base.__name__ == "MCPEnvironment" for base in factory.__mro__)
    tools = _of_mcp(factory, kwargs, key) if is_mcp else _of_action(factory, key)
    return Kind(label, lambda: Episode(factory(**kwargs)), tools, frozenset({"reset", "close"}))


def _of_mcp(factory: Any, kwargs: dict[str, Any], key: str) -> dict[str, Tool]:
    """The tools of an environment's MCP server, which runs in this process."""
    from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

    with users_code(f"{key}: {factory.__name__}:"):
        environment = factory(**kwargs)
        listed = environment.step(ListToolsAction())
        environment.close()
    if not listed.tools:
        raise ConfigError(f"{key}: {factory.__name__} lists no tools: {listed.metadata.get('error', 'it has none')}")
    tools = {}
    for each in listed.tools:

        def run(episode: Episode, arguments: dict[str, Any], name: str = each.name) -> Turn:
            return episode.act(CallToolAction(tool_name=name, arguments=arguments))

        tools[each.name] = schema_tool(schema_of(each.name, each.description, each.input_schema), run)
    return tools


def _of_action(factory: Any, key: str) -> dict[str, Tool]:
    """The tool `step`, whose parameters are the fields of the class's Action."""
    from openenv.core.env_server.types import Action

    candidates: list[Any] = [typing.get_type_hints(factory.step).get("action")]
    for base in factory.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            candidates += typing.get_args(generic)
    action: Any = next((each for each in candidates if isinstance(each, type) and issubclass(each, Action)), Action)
    if not action.model_fields.keys() - {"metadata"}:
        raise ConfigError(
            f"{key}: {factory.__name__}.step has no action type; expected step(self, action: MyAction), where MyAction "
            "derives from openenv's Action and has fields"
        )
    schema = action.model_json_schema()
    schema["properties"].pop("metadata", None)
    description = inspect.getdoc(action) or f"A step of {factory.__name__}."

    def run(episode: Episode, arguments: dict[str, Any]) -> Turn:
        try:
            made = action(**arguments)
        except ValidationError as error:  # of a check of several fields; each single one has been checked
            return Turn([{"role": "tool", "content": f"error: {error.errors()[0]['msg']}"}])
        return episode.act(made)

    types = {}
    for name, field in action.model_fields.items():
        if name != "metadata":
            types[name] = lenient(Annotated[field.annotation, field])
    return {"step": replace(schema_tool(schema_of("step", description, schema), run), types=types)}


def _observation_text(observation: Any) -> str:
    """An observation as the model reads it: its text if that is the only field, otherwise its fields as JSON."""
    if type(observation).__name__ == "CallToolObservation":
        if observation.error is not None:
            return f"error: {observation.error.message}"
        content = observation.result.content if not isinstance(observation.result, dict) else []
        return "\n".join(block.text for block in content if block.type == "text")
    fields = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"}, exclude_none=True)
    if len(fields) == 1 and isinstance(next(iter(fields.values())), str):
        return str(next(iter(fields.values())))
    return json.dumps(fields, ensure_ascii=False) if fields else ""
