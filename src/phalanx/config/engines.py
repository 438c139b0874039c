"""Sampling engines as seen by a configuration: the class that `rollout.engine` names, and its facts."""

import importlib
from collections.abc import Mapping
from typing import Any

from phalanx.config.engine_facts import EngineFacts as EngineFacts  # engines of users import it from here
from phalanx.config.registry import resolve_object

KEY = "rollout.engine"
BLOCK_ENGINES = {"policy": "phalanx.rollout.lm.in_blocks:BlockDiffusionRollout"}  # for block diffusion
FORMS = ("module:Class", "path/to/file.py:Class")


def engine_class(engine: str, names: Mapping[str, str], key: str = KEY) -> Any:
    """The class of an engine: one of `names`, module:Class or path/to/file.py:Class. Raises ConfigError, with one line
    that begins with `key`, if there is none.
    """
    return resolve_object(names.get(engine, engine), key, "class")


def is_session(kind: Any) -> bool:
    """Whether a class only draws tokens: it has the methods of phalanx.rollout.lm.session.Session, not of Rollout."""
    members = dir(kind)
    return {"add", "step", "close"} <= set(members) and "sample" not in members


def facts_of(kind: Any) -> EngineFacts:
    """The facts of an engine's class. A session may state none: then the policy recomputes its log-probs."""
    facts: EngineFacts = kind.facts if "facts" in dir(kind) else EngineFacts(exact=False)
    return facts


def check_engine_class(config: Any) -> None:
    """Raise ConfigError if the section `rollout`, `config`, names a custom class that cannot be used as an engine."""
    if ":" in config.engine and config.REGISTRY:
        package = importlib.import_module(config.REGISTRY)
        kind = engine_class(config.engine, config.ENGINES, f"{config:engine}")
        package.check_entry(kind, config.engine)
