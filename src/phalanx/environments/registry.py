"""Resolves the section `environment` to classes and tools; mistakes are ConfigErrors that name the key."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import Any

from phalanx.config.arguments import check_arguments
from phalanx.config.environment import EnvironmentConfig
from phalanx.config.messages import ConfigError, cut, nearest, told_as, users_code
from phalanx.config.registry import built_in, known_modules, object_forms, resolve_object
from phalanx.environments.harness import Harness
from phalanx.environments.tools import Tool, function_tool, method_tool

BUILT_IN = "phalanx.zoo.environments"
ADAPTERS = "phalanx.zoo.adapters"  # one module for each library of environments
ADAPTED = {"openenv": "Environment", "verifiers": "Taskset"}  # base classes of environments, by library
COLUMN = "environment"  # column of the data with the name of a row's environment
HOOKS = ("reset", "step", "solve", "get_reward", "close")  # methods of an environment that are not tools
_OF_LOOP = frozenset({"reset", "step", "get_reward", "close"})  # those of a Harness
Key = str | None  # the name of an environment; None if there is only one


@dataclass(frozen=True)
class Kind:
    """An environment: how to make an instance, its tools and its methods."""

    label: str
    make: Callable[[], Any]
    tools: Mapping[str, Tool]
    hooks: frozenset[str]  # those of HOOKS that it has
    whole: bool = False  # step gets the whole message of a turn, not only its text
    judges: bool = False  # get_reward gets all messages of the conversation


def build_kinds(cfg: EnvironmentConfig) -> dict[Key, Kind]:
    """The environments of a configuration by name."""
    if not cfg.path and cfg.kwargs:
        raise ConfigError(
            f"environment.kwargs: {', '.join(cfg.kwargs)} would be arguments of environment.path, which is not set"
        )
    extra: dict[str, Tool] = {}
    for i, path in enumerate(cfg.tools):
        tools = _stateless_tools(path, f"environment.tools[{i}]")
        _add_tools(extra, tools, f"environment.tools[{i}]")
    if cfg.tool_config_path is not None:
        return {None: _with_tools(_import_adapter("verl").load(cfg.tool_config_path), extra, "environment.tools")}
    if not cfg.path:
        return {None: Kind("environment.tools", object, extra, frozenset())}  # functions have no state
    if isinstance(cfg.path, str):
        return {None: _resolve_kind(cfg.path, cfg.kwargs, extra, "environment.path", "environment.kwargs")}
    for name, kwargs in cfg.kwargs.items():
        if name not in cfg.path or not isinstance(kwargs, dict):
            raise ConfigError(
                f"environment.kwargs.{name}: expected keyword arguments of one of the environments in "
                f"environment.path: {', '.join(cfg.path)}"
            )
    kinds: dict[Key, Kind] = {}
    for name, path in cfg.path.items():
        key = f"environment.path.{name}"
        if not isinstance(path, str):
            raise ConfigError(f"{key}: expected {_expected_forms()}, got {path!r}")
        kinds[name] = _resolve_kind(path, cfg.kwargs.get(name, {}), extra, key, f"environment.kwargs.{name}")
    return kinds


def kind_of(row: Mapping[str, Any], kinds: Mapping[Key, Kind]) -> Kind:
    """The environment of a row of the data. Raises ValueError if the row names no known environment."""
    if None in kinds:
        return kinds[None]
    name = row.get(COLUMN)
    if not isinstance(name, str) or name not in kinds:
        hint = nearest(str(name), [str(each) for each in kinds])
        what = f"its column {COLUMN} is {cut(repr(name))}{hint}" if COLUMN in row else f"it has no column {COLUMN}"
        raise ValueError(f"{what}; expected one of {', '.join(map(str, kinds))}, the names in environment.path")
    return kinds[name]


def _resolve_kind(path: str, kwargs: dict[str, Any], extra: dict[str, Tool], key: str, kwargs_key: str) -> Kind:
    """The environment at `path`, with the tools `extra`; `key` and `kwargs_key` name the keys in messages."""
    with users_code(f"{key}={path!r} raised"):  # such as a metaclass, when its class is looked at
        return _kind_of(_resolve_factory(path, key), path, kwargs, extra, key, kwargs_key)


def _kind_of(
    factory: Any, path: str, kwargs: dict[str, Any], extra: dict[str, Tool], key: str, kwargs_key: str
) -> Kind:
    """The environment of a class, or of an async function."""
    label = factory.__name__
    if not isinstance(factory, type):
        check_arguments(factory, ("chat", "row"), kwargs, kwargs_key, label)
        solve = functools.partial(factory, **kwargs)
        return Kind(label, lambda: Harness(solve), extra, _OF_LOOP, whole=True)
    for base in factory.__mro__:
        library = base.__module__.partition(".")[0]
        if ADAPTED.get(library) == base.__name__:
            return _with_tools(_import_adapter(library).load(factory, kwargs, key, kwargs_key), extra, key)
    check_arguments(factory, (), kwargs, kwargs_key, label)
    if getattr_static(factory, "solve", None):
        return Kind(label, lambda: Harness(factory(**kwargs).solve), extra, _OF_LOOP, whole=True)
    hooks = frozenset(name for name in HOOKS if getattr_static(factory, name, None))
    tools = {} if "step" in hooks else {name: method_tool(factory, name, key) for name in _public_methods(factory)}
    if not tools and "step" not in hooks:
        raise ConfigError(
            f"{key}: {label} has neither tools, which are public methods with type hints and a docstring, nor step"
        )
    _add_tools(tools, extra, key)
    if "step" in hooks and extra:
        raise ConfigError(f"{key}: {label} reads turns in step, which never calls environment.tools; leave them out")
    if ":" not in path:
        with told_as(ConfigError, f"{kwargs_key}: {label}: "):
            factory(**kwargs)  # so that mistakes are reported before the job begins
    judges = "get_reward" in hooks and "messages" in inspect.signature(getattr_static(factory, "get_reward")).parameters
    return Kind(label, lambda: factory(**kwargs), tools, hooks, judges=judges)


def _import_adapter(library: str) -> Any:
    return importlib.import_module(f"{ADAPTERS}.{library}")


def _with_tools(kind: Kind, extra: Mapping[str, Tool], key: str) -> Kind:
    """An environment with further tools."""
    tools = dict(kind.tools)
    _add_tools(tools, extra, key)
    return replace(kind, tools=tools)


def _resolve_factory(path: str, key: str) -> Any:
    """The class, or the function solve, that a path or the name of a built-in environment refers to."""
    factory = resolve_object(path, key, "class") if ":" in path else _built_in(path, key)
    solve = getattr_static(factory, "solve", factory) if isinstance(factory, type) else factory
    if not isinstance(solve, type) and not inspect.iscoroutinefunction(solve):
        what = f"{factory.__name__}.solve" if isinstance(factory, type) else f"of type {type(factory).__name__}"
        raise ConfigError(f"{key}={path!r} is {what}; expected a class, or an async function solve(chat, row)")
    return factory


def _built_in(name: str, key: str) -> Any:
    known = known_modules(BUILT_IN)
    if name not in known:
        hint = nearest(name, known) or ";"
        raise ConfigError(
            f"{key}={name!r} is not built in{hint} built in: {', '.join(known)}; or give {_expected_forms()}"
        )
    return built_in(BUILT_IN, name)


def _stateless_tools(path: str, key: str) -> dict[str, Tool]:
    """The tools of an entry of environment.tools."""
    if ":" not in path:
        factory = _built_in(path, key)
        if any(getattr_static(factory, hook, None) for hook in HOOKS):
            raise ConfigError(f"{key}={path!r} is an environment; give it as environment.path")
        with told_as(ConfigError, f"{key}: {factory.__name__}: "):
            instance = factory()
        functions = [getattr(instance, name) for name in _public_methods(factory)]
        return {function.__name__: function_tool(function, key) for function in functions}
    with users_code(f"{key}={path!r} raised"):  # such as a metaclass, when its class is looked at
        function = resolve_object(path, key, "function")
        if not inspect.isfunction(function) and not inspect.ismethod(function):
            what = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
            raise ConfigError(f"{key}={path!r} is {what}; expected a function, as environment.path takes classes")
        return {function.__name__: function_tool(function, key)}


def _add_tools(tools: dict[str, Tool], more: Mapping[str, Tool], key: str) -> None:
    for name, tool in more.items():
        if name in tools:
            raise ConfigError(f"{key}: two tools are named {name!r}; rename one of them")
        tools[name] = tool


def _public_methods(factory: type) -> list[str]:
    """Names of the public methods that are not hooks, in the order of their definition."""
    names: dict[str, None] = {}
    for base in reversed(factory.__mro__[:-1]):
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if inspect.isfunction(function) and not name.startswith("_") and name not in HOOKS:
                names[name] = None
    return list(names)


def _expected_forms() -> str:
    return f"a built-in environment or {object_forms('class')}"
