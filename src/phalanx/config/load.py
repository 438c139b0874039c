"""Typed configuration: dataclasses with defaults, a YAML file that overrides them, and `key=value` overrides.

OmegaConf merges, converts and resolves `${...}` and `${oc.env:NAME}`. Every mistake raises `ConfigError` with one line
that names the key, the expected value and the given one.
"""

import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from phalanx.config.fields import FREE, LIMITS, PLAIN
from phalanx.config.fields import arg as arg  # algorithms of users import it from here
from phalanx.config.files import replace_file
from phalanx.config.messages import ConfigError, cut, element_of, expected, nearest, shown, type_name
from phalanx.config.registry import resolve_registry
from phalanx.config.secrets import mark, public
from phalanx.config.shipped import located
from phalanx.config.sources import one_line, override, read
from phalanx.config.unknown_keys import check_keys

T = TypeVar("T")
USAGE = "usage: sh train.sh tasks/<task>.py (or phalanx <command>) [config.yaml] [key=value ...]"


PLACES = ("output_dir", "output_file", "checkpoint", "baseline")  # paths that must not be empty (the current folder)
MOST = 1e9  # limit of the absolute value of a number whose key sets no other limit
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8


# --- a configuration from a file and overrides


def load(schema: type[T], path: str | None, overrides: list[str]) -> T:
    """Read a YAML file (or none), apply `a.b=value` overrides, and return an instance of `schema`.

    Raises ConfigError, with one line, for a file that cannot be read, an unknown key, a wrong type, a missing value, a
    value out of bounds, or an interpolation that cannot be resolved. Rules across keys are checked by
    phalanx.run.rules.load_config and before a job starts.
    """
    return build(schema, _user(schema, path, overrides))


def build(schema: type[T], user: DictConfig) -> T:
    """An instance of `schema` from the user's values. Raises ConfigError like `load`, but does not check the rules."""
    try:
        named = _with_named_sections(schema, user)
        config = _defaults(named)
        check_keys(named, OmegaConf.to_container(user), lambda: [row.key for row in rows(named)], _hints)
        _assign(config, named, named, OmegaConf.to_container(user), "")
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            help = {row.key: row.help for row in rows(named)}.get(missing[0], "")
            raise ConfigError(f"{missing[0]} is not set; give {missing[0]}=...: {help}")
        value = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    except RecursionError:
        raise ConfigError("an interpolation is nested too deeply") from None
    _finish(value, "")
    raw, known = OmegaConf.to_container(config), set[str]()
    for _ in range(2):  # the second pass finds texts that refer to another key
        mark(value, raw, known)
    return schema(**vars(value))


def save(config: Any, path: Path) -> None:
    """Write the resolved configuration as YAML; values from environment variables stay references to them."""
    # OmegaConf quotes a text such as "1e3", which it would otherwise read back as a number
    replace_file(path, OmegaConf.to_yaml(OmegaConf.create(public(config))))


def _user(schema: type, path: str | None, overrides: list[str]) -> DictConfig:
    """The values that the user sets: those of the file, then the overrides in their order."""
    file = read(path) if path is not None else OmegaConf.create({})
    user = override(file, overrides)
    for section in _registries(schema):
        # Keys of the file's algorithm do not apply to another one, which starts from its own defaults.
        given, default = OmegaConf.select(file, section), _section(schema, section)
        if given is not None and _name(default, given) != _name(default, OmegaConf.select(user, section)):
            del given._get_parent()[given._key()]
            user = override(file, overrides)
    return user


# --- reading a schema


def _hints(schema: Any) -> dict[str, Any]:
    """The type of each field; for a section whose keys depend on a name, the class of its default."""
    hints = get_type_hints(schema)
    return {f.name: f.default_factory if "registry" in f.metadata else hints[f.name] for f in fields(schema)}


def _registries(schema: Any) -> dict[str, str]:
    """Sections whose keys depend on a name (`algorithm`, `writer.algorithm`), with the packages of their modules."""
    sections, hints = {}, _hints(schema)
    for f in fields(schema):
        if "registry" in f.metadata:
            sections[f.name] = f.metadata["registry"]
        elif is_dataclass(hints[f.name]):
            sections |= {f"{f.name}.{key}": package for key, package in _registries(hints[f.name]).items()}
    return sections


def _section(schema: Any, key: str) -> Any:
    """The class of the section with this dotted key."""
    for name in key.split("."):
        schema = _hints(schema)[name]
    return schema


def _defaults(schema: Any) -> DictConfig:
    """The defaults of a schema, with the algorithm's DEFAULTS for other sections applied."""
    base = OmegaConf.structured(schema)
    for section in _registries(schema):
        before, dot, _ = section.rpartition(".")
        for key, default in _section(schema, section).DEFAULTS.items():
            try:
                OmegaConf.update(base, f"{before}{dot}{key}", default)
            except OmegaConfBaseException:
                name = _section(schema, section).__module__.rpartition(".")[2]
                raise ConfigError(f"{section}.name: {name} is for jobs with {key}, and this one has none") from None
    return base


def _name(default: Any, given: Any) -> str:
    """The name in a section such as `algorithm`: the `given` one if it is set, else that of the `default` class."""
    if isinstance(given, DictConfig) and "name" in given:
        return str(given["name"])
    return str(default.name)


def _with_named_sections(schema: type, user: DictConfig, prefix: str = "") -> type:
    """The schema with the keys of the modules that the user names, such as an algorithm.

    prefix: the dotted key of the section that `schema` describes, with a trailing dot; empty for the whole job.
    """
    sections: list[tuple[str, Any, Any]] = []
    for f in fields(schema):
        key, hint = f"{prefix}{f.name}", _hints(schema)[f.name]
        if "registry" in f.metadata:
            given = OmegaConf.select(user, key)
            name = _name(hint, given)
            config = _config_of(f.metadata["registry"], name, f"{key}.name", hint)
            above = OmegaConf.select(user, prefix.rstrip(".")) if prefix else user
            if isinstance(above, DictConfig | None) and isinstance(given, DictConfig | None):
                OmegaConf.update(user, f"{key}.name", name)  # the job's default may differ from the class's
            sections.append((f.name, config, field(default_factory=config, metadata=f.metadata)))
        elif is_dataclass(hint) and _registries(hint):
            inner = _with_named_sections(_section(schema, f.name), user, f"{key}.")
            sections.append((f.name, inner, field(default_factory=inner, metadata=f.metadata)))
    return make_dataclass(schema.__name__, sections, bases=(schema,)) if sections else schema


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
    hints = _hints(schema)
    for f in fields(schema):
        key, hint, default = prefix + f.name, hints[f.name], defaults[f.name]
        if is_dataclass(hint):
            yield from rows(hint, f"{key}.", default)
            continue
        meta = PLAIN | f.metadata
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


def help_text(
    schema: type, description: str, path: str | None, overrides: list[str], options: tuple[str, ...] = ()
) -> str:
    """The text of --help: the lines in `options`, then every key with its type, default and help text."""
    lines = [description.strip(), "", USAGE, *(f"  {line}" for line in options), ""]
    unused = {f"{f.name}.{key}" for f in fields(schema) if "unused" in f.metadata for key in f.metadata["unused"]}
    section = ""
    for row in rows(_with_named_sections(schema, _user(schema, path, overrides))):
        if row.key in unused:
            continue
        head = row.key.split(".")[0]
        if head != section:
            lines += ["", head]
            section = head
        lines += [f"  {row.key}: {row.type} = {row.default}", f"      {row.help}"]
    return "\n".join(lines)


# --- checks


def _assign(base: DictConfig, root: type, hint: Any, value: Any, key: str) -> None:
    """Set `key` of `base` to a value given by the user, one leaf at a time.

    Raises ConfigError for the first value of a wrong type. OmegaConf converts and checks each leaf separately, because
    its messages about a whole configuration do not name keys within lists. Interpolations are checked after all values
    are set.
    """
    if is_dataclass(hint) and not (isinstance(value, str) and "${" in value):
        hints = _hints(hint)
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: expected a section, got {shown(value)}; its keys: {', '.join(hints)}")
        for name, item in value.items():
            inner = f"{key}.{name}" if key else str(name)
            # an empty section, such as `trainer:` with only comments below it, changes nothing
            if item != "???" and (item is not None or not is_dataclass(hints[name])):
                _assign(base, root, hints[name], item, inner)
        return
    element = element_of(hint)
    try:
        if is_dataclass(element) and isinstance(value, list):
            OmegaConf.update(base, key, [element] * len(value))
            for i, item in enumerate(value):
                _assign(base, root, element, item, f"{key}[{i}]")
        else:
            # peft accepts one word in place of a list of names, and verl one file in place of a list
            is_single = key.endswith("target_modules") and value == "all-linear"
            is_single |= key in ("data.train_files", "data.val_files") and isinstance(value, str)
            # OmegaConf would convert any number to a boolean and a list to a string
            number_for_truth = bool in (hint, *get_args(hint)) and type(value) is int and value not in (0, 1)
            items = value if element is not None and isinstance(value, list) else ()
            if number_for_truth or any(isinstance(item, list | dict) for item in items):
                raise ValidationError
            OmegaConf.update(base, key, [value] if is_single else value)
    except OmegaConfBaseException:
        example = f"; write [{value}]" if type(value) is element else ""
        raise ConfigError(f"{key}: expected {expected(hint)}, got {shown(value)}{example}") from None


def _finish(section: Any, prefix: str) -> None:
    """Check the bounds of all leaves (ConfigError), and locate paths."""
    for f in fields(section):
        key, value, meta = prefix + f.name, vars(section)[f.name], PLAIN | f.metadata
        if is_dataclass(value):
            _finish(value, f"{key}.")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for i, element in enumerate(value):
                _finish(element, f"{key}[{i}].")
        elif value is not None:
            _check(value, meta, key)
            if f.name in PLACES and not value.strip():
                raise ConfigError(f"{key}: expected a path, got {value!r}")
            if meta["path"]:
                setattr(section, f.name, located(value))


def _check(value: Any, meta: dict[str, Any], key: str) -> None:
    """Raise ConfigError for the first value out of bounds, including those in a list or a free-form section."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check(item, FREE, f"{key}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check(item, FREE if meta is FREE else PLAIN, f"{key}[{i}]")
    elif value is not None:
        complaint = _complaint(value, meta)
        if complaint:
            near = nearest(str(value), meta["choices"])
            raise ConfigError(f"{key}: expected {complaint}, got {cut(repr(value))}{near}")


def _complaint(value: Any, meta: dict[str, Any]) -> str | None:
    """The expected values, in words, if `value` is not one of them; else None."""
    if isinstance(value, str) and _CONTROL.search(value):
        return "text in UTF-8 without control characters"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if meta["choices"] and value not in meta["choices"] and not (meta["forms"] and ":" in value):
        return f"one of {', '.join((*meta['choices'], *meta['forms']))}"
    if not isinstance(value, int | float):
        return None
    limits = meta["limits"]
    if "lt" not in limits:
        limits = {"le": MOST} | limits
    for name, limit in ({"ge": -MOST} | limits).items():
        holds, words = LIMITS[name]
        if not holds(value, limit):
            return f"{words} {limit:g}"
    return None


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Map the dotted keys of a configuration to its values as strings."""
    values: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = str(value)
    return values
