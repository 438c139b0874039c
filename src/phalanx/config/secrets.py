"""Values that a configuration takes from the environment: jobs use the values, files and logs see the references."""

from dataclasses import asdict, fields, is_dataclass
from typing import Any


class FromEnvironment(str):
    """A text with `${oc.env:NAME}` in it, resolved; `reference` is what the user wrote."""

    reference: str

    @classmethod
    def of(cls, value: str, reference: str) -> "FromEnvironment":
        made = cls(value)
        made.reference = reference
        return made


def mark(value: Any, raw: Any, known: set[str] | None = None) -> Any:
    """`value`, a resolved configuration or a part of it, with its texts from the environment marked as such.

    `raw` is the same before interpolation. `known` collects these texts, so that what refers to them by another key's
    name can be marked in a second round.
    """
    known = set() if known is None else known
    if is_dataclass(value) and isinstance(raw, dict):
        for f in fields(value):
            if f.name in raw:
                setattr(value, f.name, mark(vars(value)[f.name], raw[f.name], known))
    elif isinstance(value, dict) and isinstance(raw, dict):
        return {name: mark(item, raw[name], known) if name in raw else item for name, item in value.items()}
    elif isinstance(value, list) and isinstance(raw, list):
        return [mark(item, given, known) for item, given in zip(value, raw, strict=False)]
    elif value and isinstance(value, str) and isinstance(raw, str) and _from_environment(value, raw, known):
        known.add(str(value))
        return FromEnvironment.of(value, raw)
    return value


def _from_environment(value: str, raw: str, known: set[str]) -> bool:
    return "${" in raw and ("oc.env" in raw or any(text in value for text in known))


def public(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts in which texts from the environment are references again, for files and logs."""
    return dict(_public(asdict(config)))


def _public(value: Any) -> Any:
    if isinstance(value, FromEnvironment):
        return value.reference
    if isinstance(value, dict):
        return {name: _public(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return value
