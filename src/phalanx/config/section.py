"""Sections of a configuration that know their own dotted names, for messages."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

from phalanx.config.messages import ConfigError


class Section:
    """The base class of sections that a job may have twice: `f"{cfg.optim:lr}"` is optim.lr, and writer.optim.lr in the
    writer of a joint run.

    NAME: the section's name in a job with one policy. Other names are no part of the value: comparisons, files and
    signatures ignore them; copies keep them, those of `dataclasses.replace` only by `copy_with`.
    """

    __slots__ = ("_names",)
    _names: dict[str, str]
    NAME: ClassVar[str] = ""

    def __init_subclass__(cls, name: str | None = None) -> None:
        """name: NAME, unless that of the base class."""
        super().__init_subclass__()
        if name is not None:
            cls.NAME = name

    @property
    def names(self) -> dict[str, str]:
        """The section's dotted name, as that of the key "", and those of keys that have another name."""
        try:
            return self._names
        except AttributeError:
            return {"": self.NAME}

    def rename_keys(self, section: str, **keys: str) -> Self:
        """Give the section another dotted name, and `keys` names of their own; returns the section."""
        self._names = {"": section, **keys}
        return self

    def __format__(self, key: str) -> str:
        """The dotted name of a key of this section, or of one of the same policy: `f"{cfg.model:.optim.lr}"`. With = or
        a colon after the key, its value follows: `f"{cfg.optim:lr=}"` is optim.lr=0.001, and `f"{cfg.optim:lr:}"`
        optim.lr: 0.001.
        """
        leaf, name = key.rstrip("=:"), self.names[""]
        if not leaf:
            return str(self)
        if leaf.startswith("."):
            return name.removesuffix(self.NAME) + leaf[1:]
        known = self.names.get(leaf, f"{name}.{leaf}" if name else leaf)
        return known if leaf == key else f"{known}{'=' if key.endswith('=') else ': '}{vars(self)[leaf]}"


S = TypeVar("S", bound=Section)


def copy_with(section: S, **changes: Any) -> S:
    """A copy with other values and the same names."""
    copy = replace(section, **changes)  # type: ignore[type-var]
    copy._names = section.names
    return copy


@contextmanager
def reported_by(
    sections: Mapping[str, Any], kind: type[Exception] = ValueError, told_as: type[Exception] = ConfigError
) -> Iterator[None]:
    """Within this context, errors of `kind` that begin with a key as in a job with one policy begin with its name in
    these sections instead; they become errors of `told_as`.

    Modules that know only a value of a section, such as the path of a folder, need not know the section for messages.
    """
    try:
        yield
    except kind as error:
        key, colon, text = str(error).partition(": ")
        name, _, leaf = key.partition(".")
        if leaf and isinstance(sections.get(name), Section):
            key = f"{sections[name]:{leaf}}"
        raise told_as(f"{key}{colon}{text}") from error
