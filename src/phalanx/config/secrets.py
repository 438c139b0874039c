"""Values of environment variables in a configuration: jobs use them, but files, logs and messages get references.

The resolver of `${oc.env:NAME}` records every value that it returns. Text of the configuration that came from an
interpolation is written to files as the user wrote it. Everywhere else such values are recognized by their content, not
by their key, so that neither an exception's message nor a dict made by `${oc.create:...}` reveals one.
"""

import os
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import quote

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

SHORTEST = 6  # characters: shorter values are not replaced within other texts, where they may occur by chance
_names: dict[str, str] = {}  # values that this process has read from the environment, with their variables' names


def _recorded_variable(name: str, *default: Any) -> str | None:
    """OmegaConf's `oc.env`, which also records the value."""
    value = oc.env(name, *default)
    if value and name in os.environ:
        _names[value] = name
    return value


try:
    OmegaConf.register_resolver("oc.env", _recorded_variable, replace=True)
except TypeError:  # OmegaConf 2.3, where an older function has this name
    OmegaConf.register_new_resolver("oc.env", _recorded_variable, replace=True)


def hide(text: str) -> str:
    """Replace values from the environment in a text by references, including quoted and escaped ones.

    Values of fewer than SHORTEST characters stay, and so do existing paths, because a message about a file names it.
    """
    for value, name in _longest_first():
        if len(value) < SHORTEST or os.path.exists(value):
            continue
        for form in (value, repr(value)[1:-1], quote(value), quote(value, safe=""), " ".join(value.split())):
            text = text.replace(form, f"${{oc.env:{name}}}")
    return text


def _longest_first() -> list[tuple[str, str]]:
    return sorted(_names.items(), key=lambda item: -len(item[0]))


class FromEnvironment(str):
    """A text that contains a value from the environment; `reference` is the text that the user wrote."""

    reference: str

    @classmethod
    def of(cls, value: str, reference: str) -> "FromEnvironment":
        made = cls(value)
        made.reference = reference
        return made


class SectionFromEnvironment(dict[str, Any]):
    """A dict from an interpolation that contains values from the environment; `reference` is the user's text."""

    reference = ""  # in a copy: its texts are recognized by their values


class ListFromEnvironment(list[Any]):
    """Like SectionFromEnvironment, for a list."""

    reference = ""


def mark(value: Any, raw: Any, known: set[str] | None = None) -> Any:
    """Mark the parts of a resolved configuration, or of a part of one, that come from the environment.

    raw: the same part before interpolation. known: collects the texts of the marked parts, so that a second pass can
    mark the keys that refer to them by another key's name.
    """
    known = set() if known is None else known
    if is_dataclass(value):
        for f in fields(value):
            # an interpolation may stand for a whole section: each part gets a reference according to its value
            given = raw.get(f.name) if isinstance(raw, dict) else raw
            part = mark(vars(value)[f.name], given, known)
            if isinstance(raw, str) and isinstance(part, FromEnvironment):
                part.reference = _by_value(part)
            setattr(value, f.name, part)
    elif isinstance(value, dict) and isinstance(raw, dict):
        return {name: mark(item, raw.get(name), known) for name, item in value.items()}
    elif isinstance(value, list) and isinstance(raw, list):
        return [mark(item, given, known) for item, given in zip(value, raw, strict=False)]
    elif isinstance(raw, str) and _from_environment(value, raw, known):
        return _marked_value(value, raw, known)
    return value


def _from_environment(value: Any, raw: str, known: set[str]) -> bool:
    texts = "\n".join(_texts(value))
    return bool(texts) and "${" in raw and ("oc.env" in raw or any(text in texts for text in known))


def _texts(value: Any) -> list[str]:
    """All texts in a value, at any depth, with numbers in dicts and lists as texts."""
    if isinstance(value, str):
        return [value] if value else []
    texts = []
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        texts += [str(item)] if isinstance(item, int | float) and not isinstance(item, bool) else _texts(item)
    return texts


def _by_value(text: str) -> str:
    for value, name in _longest_first():
        text = text.replace(value, f"${{oc.env:{name}}}")
    return str(text)


def _marked_value(value: Any, raw: str, known: set[str]) -> Any:
    """A text, dict or list with `raw` as its reference. Its texts that are part of an environment variable's value are
    recorded as values too, such as the parts of a variable that contains a whole section.
    """
    for text in _texts(value):
        known.add(text)
        for known_value, name in list(_names.items()):
            if text in known_value:
                _names.setdefault(text, name)
    if isinstance(value, str):
        return FromEnvironment.of(value, raw)
    made: Any = SectionFromEnvironment(value) if isinstance(value, dict) else ListFromEnvironment(value)
    made.reference = raw
    return made


def public(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts for files and logs, with references in place of values from the environment."""
    return dict(_public_value(config))


def _public_value(value: Any) -> Any:
    if isinstance(value, FromEnvironment | SectionFromEnvironment | ListFromEnvironment) and value.reference:
        return value.reference
    if isinstance(value, str):
        return hide(value)
    if is_dataclass(value):
        return {f.name: _public_value(vars(value)[f.name]) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _public_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_public_value(item) for item in value]
    return value
