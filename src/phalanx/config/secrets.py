"""Values from the environment in a configuration: jobs use them, files, logs and messages see the references.

The resolver of `${oc.env:NAME}` notes every value that it hands out. A text of the configuration that came through an
interpolation goes to files as the user wrote it; elsewhere such values are known by what they are and not by where they
stand, so that an exception's text, or a dict that `${oc.create:...}` made, shows none.
"""

import os
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import quote

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

SHORTEST = 6  # characters of a value that is looked for within other texts: shorter ones are in any text by chance
_names: dict[str, str] = {}  # values that this process has taken from the environment, and their variables


def _env(name: str, *default: Any) -> str | None:
    """OmegaConf's `oc.env`, which notes the value."""
    value = oc.env(name, *default)
    if value and name in os.environ:
        _names[value] = name
    return value


try:
    OmegaConf.register_resolver("oc.env", _env, replace=True)
except TypeError:  # OmegaConf 2.3, in which this is the name of an older function
    OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def hide(text: str) -> str:
    """A text with references in place of values from the environment, also where these are quoted or escaped.

    Values of fewer than SHORTEST characters stay, and paths that exist: a message about a file names it.
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
    """A text with a value from the environment in it; `reference` is what the user wrote."""

    reference: str

    @classmethod
    def of(cls, value: str, reference: str) -> "FromEnvironment":
        made = cls(value)
        made.reference = reference
        return made


class SectionFromEnvironment(dict[str, Any]):
    """A dict that an interpolation made, with values from the environment in it; `reference` is what the user wrote."""

    reference = ""  # of a copy: its texts are known by their values


class ListFromEnvironment(list[Any]):
    """As SectionFromEnvironment, a list."""

    reference = ""


def mark(value: Any, raw: Any, known: set[str] | None = None) -> Any:
    """`value`, a resolved configuration or a part of it, with its parts from the environment marked as such.

    `raw` is the same before interpolation. `known` collects the texts of these parts, so that what refers to them by
    another key's name can be marked in a second round.
    """
    known = set() if known is None else known
    if is_dataclass(value):
        for f in fields(value):
            # an interpolation may be a whole section: its parts are marked, and each gets a reference by its value
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
        return _marked(value, raw, known)
    return value


def _from_environment(value: Any, raw: str, known: set[str]) -> bool:
    texts = "\n".join(_texts(value))
    return bool(texts) and "${" in raw and ("oc.env" in raw or any(text in texts for text in known))


def _texts(value: Any) -> list[str]:
    """The texts in a value, at any depth; numbers in dicts and lists as texts."""
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


def _marked(value: Any, raw: str, known: set[str]) -> Any:
    """A text, dict or list with `raw` as its reference; its texts that lie within a value of the environment count as
    values from then on, as do the parts of a variable that holds a whole section.
    """
    for text in _texts(value):
        known.add(text)
        for taken, name in list(_names.items()):
            if text in taken:
                _names.setdefault(text, name)
    if isinstance(value, str):
        return FromEnvironment.of(value, raw)
    made: Any = SectionFromEnvironment(value) if isinstance(value, dict) else ListFromEnvironment(value)
    made.reference = raw
    return made


def public(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts in which values from the environment are references, for files and logs."""
    return dict(_public(config))


def _public(value: Any) -> Any:
    if isinstance(value, FromEnvironment | SectionFromEnvironment | ListFromEnvironment) and value.reference:
        return value.reference
    if isinstance(value, str):
        return hide(value)
    if is_dataclass(value):
        return {f.name: _public(vars(value)[f.name]) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _public(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return value
