"""Checks of sampling engines, for all kinds of policy: see phalanx.config.engines."""

import inspect
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.engines import KEY
from phalanx.config.messages import ConfigError
from phalanx.config.run import RolloutConfig
from phalanx.types import Rollout

ARGUMENTS = ("policy", "config", "world", "micro_batch_size")
ATTRIBUTES = ("exact", *inspect.get_annotations(Rollout))  # may be set by __init__, so the class need not have them


def check_class(kind: Any, name: str, keyword: str, base: str, beside: Sequence[str] = ()) -> None:
    """Raise ConfigError unless `kind`, the object that `name` refers to, is an engine class: it takes ARGUMENTS and
    `keyword`, and has the methods of Rollout and those named in `beside`. `base`: the class to derive engines from.
    """
    here = f"{KEY}: {name!r}"
    if not isinstance(kind, type):
        raise ConfigError(f"{here} is of type {type(kind).__name__}; expected a class")
    engine: Any = kind
    missing = []
    for member in (*vars(Rollout), *beside):
        if not member.startswith("_") and member not in ATTRIBUTES and member not in dir(kind):
            missing.append(member)
    if inspect.isabstract(kind):
        missing += sorted(vars(kind)["__abstractmethods__"])
    if missing:
        raise ConfigError(f"{here} lacks {', '.join(missing)}; derive it from {base}")
    if "facts" not in dir(kind) or not isinstance(engine.facts, EngineFacts):
        raise ConfigError(
            f"{here} lacks facts = EngineFacts(...) of phalanx.config.engine_facts; derive it from {base}"
        )
    check_call(engine, name, keyword)


def check_call(kind: Any, name: str, *keywords: str) -> None:
    """Raise ConfigError unless a class takes ARGUMENTS and these keywords."""
    try:
        inspect.signature(kind).bind(*ARGUMENTS, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*ARGUMENTS, *(f"{keyword}=..." for keyword in keywords)])
        raise ConfigError(f"{KEY}: {name!r} is constructed as {kind.__name__}({call}): {error}") from None


def made(kind: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """Construct an engine. Raises ConfigError if it lacks an attribute of Rollout."""
    rollout = kind(*args, **options)
    missing = [attribute for attribute in ATTRIBUTES if attribute not in dir(rollout)]
    if missing:
        raise ConfigError(f"{KEY}: {name!r} has no {', '.join(missing)} after __init__; see phalanx.types.Rollout")
    return rollout


def check_installed(config: RolloutConfig) -> None:
    """Raise ConfigError if the library of the configured engine is not installed."""
    facts = config.facts
    if facts.package is not None and find_spec(facts.package.partition(".")[0]) is None:
        remedy = f"{facts.install}; or set" if facts.install else "set"
        raise ConfigError(f"{config:engine}: {facts.package} is not installed; {remedy} {config:engine}=policy")
