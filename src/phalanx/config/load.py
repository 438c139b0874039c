"""Typed configuration: dataclasses with defaults, a YAML file that overrides them, and `key=value` overrides.

OmegaConf merges, converts and resolves `${...}` and `${oc.env:NAME}`. Every mistake raises `ConfigError` with one line
that names the key, the expected value and the given one.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phalanx.config.fields import PLAIN
from phalanx.config.fields import arg as arg  # algorithms of users import it from here
from phalanx.config.files import replace_file
from phalanx.config.messages import ConfigError, bare, element_of, shown, type_name
from phalanx.config.moved import move_keys
from phalanx.config.registry import resolve_registry
from phalanx.config.secrets import mark, public
from phalanx.config.shipped import located
from phalanx.config.sources import one_line, override, read
from phalanx.config.unknown_keys import check_keys
from phalanx.config.validate import hints_of, is_section, validated

T = TypeVar("T")
USAGE = "usage: sh train.sh tasks/<task>.py (or phalanx <command>) [config.yaml] [key=value ...]"


# --- a configuration from a file and overrides


def load(schema: type[T], path: str | None, overrides: list[str]) -> T:
    """Read a YAML file (or none), apply `a.b=value` overrides, and return an instance of `schema`.

    Raises ConfigError, with one line, for a file that cannot be read, an unknown key, a wrong type, a missing value, a
    value out of bounds, or an interpolation that cannot be resolved. Rules across keys are checked by
    phalanx.run.rules.load_config and before a job starts.
    """
    return build(schema, _user_values(schema, path, overrides))


def build(schema: type[T], user: DictConfig) -> T:
    """An instance of `schema` from the user's values. Raises ConfigError like `load`, but does not check the rules."""
    try:
        named = _with_named_sections(schema, user)
        given: Any = OmegaConf.to_container(user)
        move_keys(named, given)
        check_keys(named, given, lambda: [row.key for row in rows(named)])
        # values are converted before others refer to them
        converted = validated(named, _given_values(named, given, interpolated=False))
        config = OmegaConf.merge(_defaults(named), converted, _given_values(named, given, interpolated=True))
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            help = {row.key: row.help for row in rows(named)}.get(missing[0], "")
            raise ConfigError(f"{missing[0]} is not set; give {missing[0]}=...: {help}")
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    except RecursionError:
        raise ConfigError("an interpolation is nested too deeply") from None
    value = _build_sections(named, validated(named, values))
    raw, known = OmegaConf.to_container(config), set[str]()
    for _ in range(2):  # the second pass finds texts that refer to another key
        mark(value, raw, known)
    return schema(**vars(value))


def save(config: Any, path: Path) -> None:
    """Write the resolved configuration as YAML; values from environment variables stay references to them."""
    # OmegaConf quotes a text such as "1e3", which it would otherwise read back as a number
    replace_file(path, OmegaConf.to_yaml(OmegaConf.create(public(config))))


def _user_values(schema: type, path: str | None, overrides: list[str]) -> DictConfig:
    """The values that the user sets: those of the file, then the overrides in their order."""
    file = read(path) if path is not None else OmegaConf.create({})
    user = override(file, overrides)
    for section, default in _named_sections(schema).items():
        # Keys of the file's algorithm do not apply to another one, which starts from its own defaults.
        given = OmegaConf.select(file, section)
        if given is not None and _chosen_name(default, given) != _chosen_name(default, OmegaConf.select(user, section)):
            del given._get_parent()[given._key()]
            user = override(file, overrides)
    return user


# --- reading a schema


def _named_sections(schema: Any) -> dict[str, Any]:
    """Sections whose keys depend on a name (`algorithm`, `writer.algorithm`), with their classes."""
    sections, hints = {}, hints_of(schema)
    for f in fields(schema):
        if "registry" in f.metadata:
            sections[f.name] = hints[f.name]
        elif is_dataclass(hints[f.name]):
            sections |= {f"{f.name}.{key}": kind for key, kind in _named_sections(hints[f.name]).items()}
    return sections


def _defaults(schema: Any) -> DictConfig:
    """The defaults of a schema, with the algorithm's DEFAULTS for other sections applied."""
    base = OmegaConf.structured(schema)
    for section, kind in _named_sections(schema).items():
        before, dot, _ = section.rpartition(".")
        for key, default in kind.DEFAULTS.items():
            try:
                OmegaConf.update(base, f"{before}{dot}{key}", default)
            except OmegaConfBaseException:
                name = kind.__module__.rpartition(".")[2]
                raise ConfigError(f"{section}.name: {name} is for jobs with {key}, and this one has none") from None
    return base


def _chosen_name(default: Any, given: Any) -> str:
    """The name in a section such as `algorithm`: the `given` one if it is set, else that of the `default` class."""
    if isinstance(given, DictConfig) and "name" in given:
        return str(given["name"])
    return str(default.name)


def _with_named_sections(schema: type, user: DictConfig, prefix: str = "") -> type:
    """The schema with the keys of the modules that the user names, such as an algorithm.

    prefix: the dotted key of the section that `schema` describes, with a trailing dot; empty for the whole job.
    """
    sections: list[tuple[str, Any]] = []
    for f in fields(schema):
        key, hint = f"{prefix}{f.name}", hints_of(schema)[f.name]
        if "registry" in f.metadata:
            given = OmegaConf.select(user, key)
            name = _chosen_name(hint, given)
            config = _config_of(f.metadata["registry"], name, f"{key}.name", hint)
            above = OmegaConf.select(user, prefix.rstrip(".")) if prefix else user
            if isinstance(above, DictConfig | None) and isinstance(given, DictConfig | None):
                OmegaConf.update(user, f"{key}.name", name)  # the job's default may differ from the class's
            sections.append((f.name, config))
        elif is_section(hint) and _named_sections(hint):
            sections.append((f.name, _with_named_sections(hint, user, f"{key}.")))
    return _derived_schema(schema, *sections) if sections else schema


@cache
def _derived_schema(schema: type, *sections: tuple[str, Any]) -> type:
    """The schema with other classes for some of its sections."""
    metadata = {f.name: f.metadata for f in fields(schema)}
    made = [(name, kind, field(default_factory=kind, metadata=metadata[name])) for name, kind in sections]
    return make_dataclass(schema.__name__, made, bases=(schema,))


def _config_of(registry: str, name: str, key: str, base: type) -> Any:
    """The class Config of a registry's module, after the registry's package has checked the module."""
    module = resolve_registry(registry, name, key)
    names, package = vars(module), vars(importlib.import_module(registry))
    config = names.get("Config")
    base = [kind for kind in base.__mro__ if is_dataclass(kind)][-1]  # jobs derive from it to change the default name
    if not isinstance(config, type) or not issubclass(config, base) or not is_dataclass(config):
        raise ConfigError(f"{key}: {name!r} has no Config, a dataclass of its keys derived from {base.__name__}")
    if "Algorithm" not in names:
        raise ConfigError(f"{key}: {name!r} has no class Algorithm, which is made of its Config")
    if "check_entry" in package:
        package["check_entry"](module, name)
    return config


@dataclass(frozen=True)
class Row:
    """One leaf of a schema: its dotted key, type, default and help text."""

    key: str
    type: str
    default: str
    help: str


def rows(schema: Any, prefix: str = "", defaults: Any = None) -> Iterator[Row]:
    """Iterate over all leaves of a schema, for --help and the configuration reference."""
    defaults = OmegaConf.to_container(_defaults(schema)) if defaults is None else defaults
    hints = hints_of(schema)
    for f in fields(schema):
        key, hint, default = prefix + f.name, hints[f.name], defaults[f.name]
        if is_dataclass(hint):
            yield from rows(hint, f"{key}.", default)
            continue
        meta = PLAIN | f.metadata
        if is_dataclass(bare(hint)):  # a section that a job need not have
            yield Row(key, "section or null", "null", meta["help"])
            yield from rows(bare(hint), f"{key}.")
            continue
        choices = (*meta["choices"], *meta["forms"])
        text = default if isinstance(default, str) else shown(default)
        yield Row(
            key,
            type_name(hint),
            "required" if text == "???" else text,
            meta["help"] + (f" [{' | '.join(choices)}]" if choices else ""),
        )
        if is_dataclass(element_of(hint)):
            yield from rows(element_of(hint), f"{key}[].")


def rows_of(schema: type, path: str | None, overrides: list[str]) -> Iterator[Row]:
    """`rows`, with the keys of the modules that a file and overrides name, such as an algorithm."""
    return rows(_with_named_sections(schema, _user_values(schema, path, overrides)))


def help_text(
    schema: type, description: str, path: str | None, overrides: list[str], options: tuple[str, ...] = ()
) -> str:
    """The text of --help: the lines in `options`, then every key with its type, default and help text."""
    lines = [description.strip(), "", USAGE, *(f"  {line}" for line in options), ""]
    unused = {f"{f.name}.{key}" for f in fields(schema) if "unused" in f.metadata for key in f.metadata["unused"]}
    section = ""
    for row in rows_of(schema, path, overrides):
        if row.key in unused:
            continue
        head = row.key.split(".")[0]
        if head != section:
            lines += ["", head]
            section = head
        lines += [f"  {row.key}: {row.type} = {row.default}", f"      {row.help}"]
    return "\n".join(lines)


# --- values


def _given_values(schema: Any, values: dict[str, Any], interpolated: bool) -> dict[str, Any]:
    """The values that the user sets, without missing ones and empty sections, such as `trainer:` with only comments.

    interpolated: whether those that contain an interpolation are returned, or the others.
    """
    given: dict[str, Any] = {}
    hints = hints_of(schema)
    for name, item in values.items():
        inner, optional = is_dataclass(bare(hints[name])), bare(hints[name]) is not hints[name]
        if inner and optional and isinstance(item, bool):
            item = {} if item else None
        if inner and isinstance(item, dict):
            given[name] = _given_values(bare(hints[name]), item, interpolated)
        elif item != "???" and (item is not None or optional or not inner) and ("${" in str(item)) is interpolated:
            given[name] = item
    return given


def _build_sections(hint: Any, value: Any) -> Any:
    """The sections that validated values stand for, with their paths located."""
    element = element_of(hint)
    if is_dataclass(element) and isinstance(value, list):
        return [_build_sections(element, item) for item in value]
    if not is_dataclass(bare(hint)) or not isinstance(value, dict):
        return value
    schema, hints, made = bare(hint), hints_of(bare(hint)), {}
    for f in fields(schema):
        if f.name in value:
            made[f.name] = _build_sections(hints[f.name], value[f.name])
            if "path" in f.metadata and f.metadata["path"] and made[f.name] is not None:
                made[f.name] = located(made[f.name])
    return schema(**made)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Map the dotted keys of a configuration to its values as strings."""
    values: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = str(value)
    return values
