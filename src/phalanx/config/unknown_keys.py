"""Messages about keys that a configuration does not have."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from phalanx.config.aliases import alias
from phalanx.config.messages import UnknownKeys, bare, close, element_of
from phalanx.config.validate import hints_of

Keys = Callable[[], list[str]]


def check_keys(schema: type, values: Any, keys: Keys) -> None:
    """Raise UnknownKeys for keys of `values` that the schema does not have.

    keys: returns all keys of the schema, which takes a while.
    """
    unknown = list(_unknown_keys(schema, values, "", cache(keys)))
    if len(unknown) == 1:
        raise UnknownKeys(f"unknown key {unknown[0][0]}; {unknown[0][1]}", 1)
    if unknown:
        raise UnknownKeys("\n  ".join([f"{len(unknown)} unknown keys", *map(": ".join, unknown)]), len(unknown))


def _unknown_keys(hint: Any, value: Any, key: str, keys: Keys) -> Iterator[tuple[str, str]]:
    """The unknown keys at and below `key`, each with a message."""
    element = element_of(hint)
    if is_dataclass(element) and isinstance(value, list):
        for i, item in enumerate(value):
            yield from _unknown_keys(element, item, f"{key}[{i}]", keys)
    if not is_dataclass(bare(hint)) or not isinstance(value, dict):
        return
    hints = hints_of(bare(hint))
    for name, item in value.items():
        inner = f"{key}.{name}" if key else str(name)
        if name in hints:
            yield from _unknown_keys(hints[name], item, inner, keys)
            continue
        known = keys()
        # keys of other trainers, with or without Hydra's leading +
        messages = {leaf: alias(leaf.lstrip("+"), known) for leaf in _leaves(inner, item)}
        if any(messages.values()):
            yield from ((leaf, message or "there is no such key here") for leaf, message in messages.items())
        else:
            yield inner, _key_hint(inner, str(name), list(hints), known)


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The dotted keys of a value's leaves."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key


def _key_hint(key: str, leaf: str, siblings: list[str], known: list[str]) -> str:
    """The message about an unknown key: a similar sibling, keys of the same name in other sections, the key that TRL
    calls so, or else all siblings.
    """
    if ":" in leaf and leaf.partition(":")[0] in siblings:
        return f"YAML needs a blank after the colon: {leaf.replace(':', ': ', 1)}"
    elsewhere = [other for other in known if other.rpartition(".")[2] == leaf]
    near = close(leaf, siblings, 0.7 if elsewhere else 0.5)
    if leaf in known:
        sections = leaf.replace(".", ": {")
        return f"in a file each part of it is a separate section, as in {{{sections}: …"
    if near:
        return f"did you mean {key.removesuffix(leaf)}{near}?"
    if elsewhere:
        return f"did you mean {'one of ' if elsewhere[1:] else ''}{', '.join(elsewhere)}?"
    return alias(leaf, known) or f"known here: {', '.join(siblings)}"
