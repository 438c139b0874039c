"""Tasksets of verifiers: their tasks, tools and rewards inside the rank, without harnesses, runtimes and servers."""

import asyncio
import functools
import inspect
import itertools
import json
import threading
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from phalanx.config.messages import ConfigError, reason
from phalanx.environments.registry import Kind
from phalanx.environments.texts import joined
from phalanx.environments.tools import Tool, lenient, schema_of, schema_tool
from phalanx.environments.turn import Message

COLUMN = "task"  # column of the data with the number of a row's task
_MOST = 1000  # number of tasks used of an infinite taskset


class Tasks:
    """The tasks of a taskset, shared by all conversations of a rank and made on demand."""

    def __init__(self, taskset: Any) -> None:
        self.bounded = taskset.bounded
        self.servers: list[Any] = type(taskset).toolsets(taskset.config)
        self._left: Iterator[Any] = iter(taskset) if self.bounded else itertools.islice(taskset, _MOST)
        self._made: list[Any] = []
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Any:
        with self._lock:
            self._made += itertools.islice(self._left, max(0, number + 1 - len(self._made)))
        return self._made[number]

    def drawn(self, seed: int) -> Any:
        """The task that the group's seed selects."""
        if not self.bounded:
            return self[seed % _MOST]
        with self._lock:
            self._made += self._left
        return self._made[seed % len(self._made)]


class Episode:
    """A task in one conversation, with its own tool servers in addition to the shared ones."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._calls: Iterator[str] = iter(())  # ids of the last turn's calls whose answers follow

    async def reset(self, seed: int, prompt: str | list[Message], **row: Any) -> list[Message]:
        """Set up the row's task, or the one that the seed selects. Returns its prompt."""
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        number = row.get(COLUMN)
        self._task = self._tasks.drawn(seed) if number is None else self._tasks[number]
        data = self._task.data
        self._trace = Trace(
            task=TraceTask(type=type(self._task).__name__, data=data),
            agent=AgentInfo.model_construct(config=None),
            state=state_cls(type(self._task))(),
        )
        servers = type(self._task).toolsets(self._task.config)
        for server in servers:
            await server.setup()
            await server.setup_task(data)
        self._servers = [*servers, *self._tasks.servers]
        await self._task.setup(self._trace, None)
        added = _prompt_messages(data)
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._given = len(joined(given, added))
        return added

    def call(self, arguments: dict[str, Any], server: int, name: str) -> Any:
        """The result of a tool, or an awaitable of it."""
        from verifiers.v1.mcp.server import _call_state

        _call_state.set(self._trace.state)
        return getattr(self._servers[server], name)(**arguments)

    async def get_reward(self, messages: list[Message]) -> dict[str, float]:
        """The task's rewards by name, computed on a trace of the conversation."""
        for i, message in enumerate(messages):
            self._add_node(message, sampled=i >= self._given and message["role"] == "assistant")
        last = messages[-1]
        closed = last["role"] == "assistant" and not last.get("tool_calls")
        self._trace.ok = True
        self._trace.stop("agent_completed" if closed else "max_turns")
        await self._task.finalize(self._trace, None)
        await self._task.score(self._trace)
        return {name: reward.value for name, reward in self._trace.rewards.items() if reward is not None}

    def _add_node(self, message: Message, sampled: bool) -> None:
        """Append a message as a node of the trace."""
        from verifiers.v1 import types
        from verifiers.v1.graph import MessageNode

        nodes, role, content = self._trace.nodes, message["role"], message["content"]
        made: Any
        if role == "assistant":
            calls: list[Any] = []
            for call in message.get("tool_calls") or []:
                function = call["function"]
                arguments = json.dumps(function["arguments"])
                calls.append(
                    types.ToolCall(id=f"call_{len(nodes)}_{len(calls)}", name=function["name"], arguments=arguments)
                )
            self._calls = iter([call.id for call in calls])
            made = types.AssistantMessage(content=content, tool_calls=calls or None)
        elif role == "tool":
            number = next(self._calls, f"call_{len(nodes)}")
            made = types.ToolMessage(tool_call_id=number, content=content, name=message.get("name"))
        else:
            made = types.SystemMessage(content=content) if role == "system" else types.UserMessage(content=content)
        parent = len(nodes) - 1 if nodes else None
        nodes.append(MessageNode(message=made, parent=parent, sampled=sampled))


def load(factory: Any, kwargs: dict[str, Any], _: str, key: str) -> Kind:
    """The environment that a taskset defines; `key` names its arguments. Raises ConfigError for an unsuitable one."""
    from verifiers.v1.taskset import Taskset, TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    label = factory.__name__
    config = concrete_type(factory, TasksetConfig, origin=Taskset) or TasksetConfig
    try:
        tasks = Tasks(factory(config(**kwargs)))
        first = tasks[0]
        servers = [*type(first).toolsets(first.config), *tasks.servers]
        for server in tasks.servers:
            asyncio.run(server.setup())
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{key}: {config.__name__}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    except IndexError:
        raise ConfigError(f"{key}: {label} has no task") from None
    except Exception as error:  # whatever the taskset's code raises
        raise ConfigError(f"{key}: {label}: {reason(error)}") from error
    _check_hooks(first, key)
    tools: dict[str, Tool] = {}
    for number, server in enumerate(servers):
        for tool in _server_tools(server, number):
            if tool.name in tools:
                raise ConfigError(f"{key}: two tools of {label} are named {tool.name!r}")
            tools[tool.name] = tool
    return Kind(label, lambda: Episode(tasks), tools, frozenset({"reset", "get_reward"}), judges=True)


def _check_hooks(task: Any, key: str) -> None:
    """Raise ConfigError for a task with a requirement or a hook that is not supported."""
    label = type(task).__name__
    if task.NEEDS_CONTAINER:
        raise ConfigError(f"{key}: {label} needs a container, which environments in a rank do not have")
    for hook in ("reward", "metric"):
        for function in task.hooks(hook):
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is runtime.empty:
                raise ConfigError(
                    f"{key}: {label}.{function.__name__} needs a runtime, which environments in a rank do not have"
                )
    for hook in task.hooks("stop"):
        raise ConfigError(f"{key}: {label}.{hook.__name__} is a @stop, which is not supported")


def _server_tools(server: Any, number: int) -> Iterator[Tool]:
    """The tools of a server, under the names that verifiers gives them."""
    from verifiers.v1.utils.decorators import discover_decorated

    for function in discover_decorated(server, "tool"):
        name = vars(function.__func__)["tool_name"] or function.__name__
        full_name = f"{server.server_name}_{name}" if server.server_name else name
        schema = schema_of(full_name, inspect.getdoc(function) or "", TypeAdapter(function).json_schema())
        asynchronous = inspect.iscoroutinefunction(function)
        run = functools.partial(Episode.call, server=number, name=function.__name__)
        tool = schema_tool(schema, run, asynchronous=asynchronous)
        hints = typing.get_type_hints(function)
        types = {name: lenient(hints[name]) if name in hints else kind for name, kind in tool.types.items()}
        yield replace(tool, types=types)


def _prompt_messages(data: Any) -> list[Message]:
    """The messages of a task's prompt, which begins with its system prompt."""
    prompt = data.prompt or []
    messages: list[Message] = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        role, content = ("user", f"\n\n{message}") if isinstance(message, str) else (message.role, message.content)
        if not isinstance(content, str):
            if any(part.type != "text" for part in content):
                raise ValueError("the task's prompt has parts that are not text")
            content = "\n".join(part.text for part in content)
        messages.append({"role": role, "content": content})
    if data.system_prompt:
        system = {"role": "user", "content": f"\n\n{data.system_prompt}"}
        if messages and messages[0]["role"] == "user":
            first = messages.pop(0)["content"].removeprefix("\n\n")
            system["content"] += f"\n\n{first}"
        messages.insert(0, system)
    return messages
