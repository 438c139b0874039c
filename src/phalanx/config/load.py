"""Typed configuration: dataclasses, a YAML with only the differences, and `key=value` overrides.

OmegaConf merges, converts and resolves `${...}` and `${oc.env:NAME}`. Every mistake is a `ConfigError` of one line that
names the key, its value, and what would be right.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Bounds:
    """What a value must satisfy beyond its type."""

    choices: tuple[str, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    lt: float | None = None

    def complaint(self, value: Any) -> str | None:
        """What `value` should be instead, or None where it is right."""
        if self.choices is not None and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, 1)
            return f"one of {', '.join(self.choices)}" + (f" (did you mean {near[0]}?)" if near else "")
        if self.ge is not None and not value >= self.ge:
            return f"at least {self.ge:g}"
        if self.gt is not None and not value > self.gt:
            return f"greater than {self.gt:g}"
        if self.lt is not None and not value < self.lt:
            return f"less than {self.lt:g}"
        return None


def arg(default: Any, help: str, **bounds: Any) -> Any:
    """A dataclass field with its meaning and, optionally, `choices`, `ge`, `gt`, `lt`."""
    metadata = {"help": help, "bounds": Bounds(**bounds)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def resolve_registry(package: str, name: str, key: str) -> Any:
    """The module or object that `name` stands for: a module of `package`, a dotted module, or `file.py[:Name]`."""
    target, _, attribute = name.partition(":")
    try:
        if target.endswith(".py"):
            path = Path(target).expanduser().resolve()
            if not path.is_file():
                raise ConfigError(f"{key}: {name!r}: no such file")
            spec = importlib.util.spec_from_file_location(f"phalanx_user_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(target if "." in target else f"{package}.{target}")
    except ModuleNotFoundError as error:
        if error.name is None or not (target == error.name or f"{package}.{target}" == error.name):
            raise
        known = known_modules(package)
        near = difflib.get_close_matches(target, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{key}: {name!r} is unknown; {hint}known: {', '.join(known)}, a dotted module, or path/to/file.py"
        ) from None
    if not attribute:
        return module
    if attribute not in vars(module):
        raise ConfigError(f"{key}: {name!r}: {target} has no {attribute!r}")
    return vars(module)[attribute]


def known_modules(package: str) -> list[str]:
    """Names of the modules that lie in a package's folder."""
    folders = importlib.import_module(package).__path__
    return sorted(p.stem for folder in folders for p in Path(folder).glob("*.py") if not p.stem.startswith("_"))


def load(schema: type[T], path: str | None, overrides: list[str]) -> T:
    """Read a YAML file (or none), apply `a.b=value` overrides, and return an instance of `schema`.

    Raises ConfigError, with one line, for a file that cannot be read, an unknown key, a wrong type, a missing value, a
    value out of bounds or an interpolation that cannot be resolved.
    """
    user = OmegaConf.merge(_read(path), _dotlist(overrides))
    assert isinstance(user, DictConfig)
    classes = _section_classes(schema, user)
    for key in _unknown_keys(schema, classes, user):
        raise ConfigError(_unknown_message(key, schema, classes))
    base = OmegaConf.structured(schema)
    for name, section in classes.items():
        base[name] = OmegaConf.structured(section)
    try:
        merged = OmegaConf.merge(base, user)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            help = {row.key: row.help for row in rows(schema, classes)}.get(missing[0], "")
            raise ConfigError(f"{missing[0]} is not set; give {missing[0]}=... ({help})")
        value = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error, user)) from None
    assert isinstance(value, schema)
    _check_bounds(value, "")
    return value


def save(config: Any, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    path.write_text(yaml.safe_dump(asdict(config), sort_keys=False))


def default_of(f: "Field[Any]") -> Any:
    """The default value of a dataclass field, a new one where it is mutable."""
    if f.default_factory is not MISSING:
        return f.default_factory()
    return f.default


@dataclass(frozen=True)
class Row:
    """One leaf of a schema: its dotted key, type, default and meaning."""

    key: str
    type: str
    default: str
    help: str


def rows(schema: type, classes: dict[str, type] | None = None, prefix: str = "") -> Iterator[Row]:
    """All leaves of a schema, for --help and the configuration reference."""
    hints = get_type_hints(schema)
    for f in fields(schema):
        key, hint = prefix + f.name, (classes or {}).get(f.name, hints[f.name])
        if "registry" in f.metadata and not is_dataclass(hint):
            hint = type(default_of(f))
        if is_dataclass(hint):
            yield from rows(hint, None, key + ".")  # type: ignore[arg-type]
            continue
        default = default_of(f)
        text = "required" if default == "???" else "null" if default is None else str(default)
        help = f.metadata["help"]
        bounds: Bounds = f.metadata["bounds"]
        if bounds.choices:
            help += f" [{' | '.join(bounds.choices)}]"
        yield Row(key, _type_name(hint), text, help)
        (element,) = [a for a in get_args(hint) if is_dataclass(a)] or (None,)
        if get_origin(hint) is list and element is not None:
            yield from rows(element, None, key + "[].")  # type: ignore[arg-type]


def help_text(schema: type, description: str, path: str | None, overrides: list[str]) -> str:
    """The text of --help: every key with its type, default and meaning."""
    user = OmegaConf.merge(_read(path), _dotlist(overrides))
    assert isinstance(user, DictConfig)
    lines = [description.strip(), "", "usage: sh train.sh tasks/<task>.py [config.yaml] [key=value ...]", ""]
    section = ""
    for row in rows(schema, _section_classes(schema, user)):
        head = row.key.split(".")[0]
        if head != section:
            lines += ["", head]
            section = head
        lines += [f"  {row.key}: {row.type} = {row.default}", f"      {row.help}"]
    return "\n".join(lines)


def _read(path: str | None) -> DictConfig:
    if path is None:
        return OmegaConf.create({})
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid YAML: {where}") from None
    if isinstance(content, ListConfig):
        raise ConfigError(f"{path}: the top level must be sections (key: value), not a list")
    assert isinstance(content, DictConfig)
    return content


def _dotlist(overrides: list[str]) -> DictConfig:
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"{item!r}: an override is written key=value, e.g. trainer.seed=1")
    try:
        return OmegaConf.from_dotlist(overrides)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"overrides {overrides}: {' '.join(str(error).split())}") from None


def _section_classes(schema: type, user: DictConfig) -> dict[str, type]:
    """The dataclass of each section whose keys depend on a name (`algorithm`)."""
    classes = {}
    for f in fields(schema):
        if "registry" not in f.metadata:
            continue
        section = user[f.name] if f.name in user else {}
        default = default_of(f).name
        try:
            name = section["name"] if isinstance(section, DictConfig) and "name" in section else default
        except OmegaConfBaseException as error:
            raise ConfigError(_one_line(error, user)) from None
        found = resolve_registry(f.metadata["registry"], str(name), f"{f.name}.name")
        names = vars(found)
        if "Config" not in names:
            raise ConfigError(f"{f.name}.name: {name!r} has no Config (a dataclass of its keys)")
        classes[f.name] = names["Config"]
    return classes


def _unknown_keys(schema: type, classes: dict[str, type], user: DictConfig, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    known = {f.name: classes.get(f.name, hints[f.name]) for f in fields(schema)}
    for name in user:
        key = prefix + str(name)
        if name not in known:
            yield key
            continue
        if OmegaConf.is_interpolation(user, name) or OmegaConf.is_missing(user, name):
            continue
        hint, value = known[str(name)], user[name]
        if is_dataclass(hint):
            if isinstance(value, DictConfig):
                yield from _unknown_keys(hint, {}, value, key + ".")  # type: ignore[arg-type]
            elif value is not None:
                raise ConfigError(
                    f"{key}: {value!r} should be a section with keys: {', '.join(f.name for f in fields(hint))}"
                )
        elif get_origin(hint) is list and is_dataclass(get_args(hint)[0]) and isinstance(value, ListConfig):
            for i, element in enumerate(value):
                if isinstance(element, DictConfig):
                    yield from _unknown_keys(get_args(hint)[0], {}, element, f"{key}[{i}].")


def _unknown_message(key: str, schema: type, classes: dict[str, type]) -> str:
    known = [row.key for row in rows(schema, classes)]
    section, _, leaf = key.rpartition(".")
    plain_section = section.split("[")[0]
    siblings = [k for k in known if k.rpartition(".")[0].replace("[]", "") == plain_section]
    near = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in siblings], 1, 0.6)
    if near:
        return f"unknown key {key}; did you mean {section + '.' if section else ''}{near[0]}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf] or difflib.get_close_matches(key, known, 1, 0.5)
    if elsewhere:
        return f"unknown key {key}; did you mean {elsewhere[0]}?"
    names = sorted({k.removeprefix(section + ".").split(".")[0] for k in known if k.startswith(section)})
    return f"unknown key {key}; known here: {', '.join(names)}"


def _one_line(error: OmegaConfBaseException, user: DictConfig) -> str:
    key = error.full_key or ""
    text = (error.msg or str(error)).split("\n")[0]
    return f"{key}: {text}" if key else text


def _check_bounds(section: Any, prefix: str) -> None:
    for f in fields(section):
        key, value = prefix + f.name, vars(section)[f.name]
        if is_dataclass(value):
            _check_bounds(value, key + ".")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for i, element in enumerate(value):
                _check_bounds(element, f"{key}[{i}].")
        elif value is not None and "bounds" in f.metadata:
            complaint = f.metadata["bounds"].complaint(value)
            if complaint:
                raise ConfigError(f"{key}: {value!r} should be {complaint}")


def _type_name(hint: Any) -> str:
    arguments = [a for a in get_args(hint) if a is not type(None)]
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__}[{', '.join(_type_name(a) for a in arguments)}]"
    if arguments:
        return f"{_type_name(arguments[0])} or null"
    return hint.__name__ if isinstance(hint, type) else "any"
