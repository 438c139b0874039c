"""Typed configuration: dataclasses, a YAML with only the differences, and `key=value` overrides.

OmegaConf merges, converts and resolves `${...}` and `${oc.env:NAME}`. Every mistake is a `ConfigError` of one line that
names the key, its value, and what would be right.
"""

import difflib
import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from phalanx.config.words import shown, type_name, words

T = TypeVar("T")
LIST_EXAMPLE = "reward.functions[0].weight=2"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Bounds:
    """What a value must satisfy beyond its type."""

    choices: tuple[str, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    lt: float | None = None
    le: float | None = None

    def complaint(self, value: Any) -> str | None:
        """What `value` should be instead, or None where it is right."""
        if isinstance(value, float) and math.isnan(value):
            return "a number"
        if self.choices is not None and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, 1)
            return f"one of {', '.join(self.choices)}" + (f" (did you mean {near[0]}?)" if near else "")
        if self.ge is not None and not value >= self.ge:
            return f"at least {self.ge:g}"
        if self.gt is not None and not value > self.gt:
            return f"greater than {self.gt:g}"
        if self.lt is not None and not value < self.lt:
            return f"less than {self.lt:g}"
        if self.le is not None and not value <= self.le:
            return f"at most {self.le:g}"
        return None


def arg(default: Any, help: str, *, path: bool = False, **bounds: Any) -> Any:
    """A dataclass field with its meaning and, optionally, choices, ge, gt, lt and le; in a `path`, ~ is the home."""
    metadata = {"help": help, "path": path, "bounds": Bounds(**bounds)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def resolve_registry(package: str, name: str, key: str) -> Any:
    """The module or object that `name` stands for: a module of `package`, a dotted module, or `file.py[:Name]`."""
    target, _, attribute = name.partition(":")
    if target.startswith(".") and not target.endswith(".py"):
        raise ConfigError(f"{key}: {name!r} is no module's name; known: {', '.join(known_modules(package))}")
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
        sought = target if "." in target else f"{package}.{target}"
        if error.name is None or not f"{sought}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not: its traceback says where
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
    try:
        user = _user(schema, path, overrides)
        classes = _section_classes(schema, user)
        _check_keys(schema, schema, classes, user, "")
        base = OmegaConf.structured(schema)
        for name, section in classes.items():
            base[name] = OmegaConf.structured(section)
            wanted: dict[str, Any] = section.DEFAULTS  # type: ignore[attr-defined]
            for key, default in wanted.items():
                OmegaConf.update(base, key, default)
        merged = OmegaConf.merge(base, user)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            help = {row.key: row.help for row in rows(schema, classes)}.get(missing[0], "")
            raise ConfigError(f"{missing[0]} is not set; give {missing[0]}=...: {help}")
        value = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from None
    assert isinstance(value, schema)
    _finish(value, "")
    return value


def save(config: Any, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    # OmegaConf quotes a text such as "1e3", which it would read as a number
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), encoding="utf-8")


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
        text = "required" if default == "???" else _text(default)
        help = f.metadata["help"] if "help" in f.metadata else ""  # a user's own field may be a plain one
        bounds: Bounds = f.metadata["bounds"] if "bounds" in f.metadata else Bounds()
        if bounds.choices:
            help += f" [{' | '.join(bounds.choices)}]"
        yield Row(key, type_name(hint), text, help)
        (element,) = [a for a in get_args(hint) if is_dataclass(a)] or (None,)
        if get_origin(hint) is list and element is not None:
            yield from rows(element, None, key + "[].")  # type: ignore[arg-type]


def help_text(
    schema: type, description: str, path: str | None, overrides: list[str], options: tuple[str, ...] = ()
) -> str:
    """The text of --help: the lines of its `options`, and every key with its type, default and meaning."""
    user = _user(schema, path, overrides)
    usage = "usage: sh train.sh tasks/<task>.py [config.yaml] [key=value ...]"
    lines = [description.strip(), "", usage, *(f"  {line}" for line in options), ""]
    section = ""
    classes = _section_classes(schema, user)
    wanted: dict[str, Any] = {}
    for section_class in classes.values():
        wanted |= section_class.DEFAULTS  # type: ignore[attr-defined]
    for row in rows(schema, classes):
        head = row.key.split(".")[0]
        if head != section:
            lines += ["", head]
            section = head
        default = _text(wanted[row.key]) if row.key in wanted else row.default
        lines += [f"  {row.key}: {row.type} = {default}", f"      {row.help}"]
    return "\n".join(lines)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _user(schema: type, path: str | None, overrides: list[str]) -> DictConfig:
    """The differences that the user wants: the file's, then the overrides in their order."""
    user = _read(path) if path is not None else OmegaConf.create({})
    _drop_empty_sections(schema, user)
    _drop_other_sections(schema, user, overrides)
    for item in overrides:
        key, equals, value = item.partition("=")
        if not key or not equals:
            if item.endswith((".yaml", ".yml")):
                raise ConfigError(f"{item!r}: the configuration file comes first, and there is but one")
            raise ConfigError(f"{item!r}: an override is written key=value, e.g. trainer.seed=1")
        try:
            yaml.safe_load(value)
            user.merge_with_dotlist([item])
        except yaml.MarkedYAMLError as error:
            hint = "; within [ ] or { } an interpolation needs quotes" if "${" in value else ""
            raise ConfigError(f"{item!r}: the value is not valid YAML: {error.problem}{hint}") from None
        except OmegaConfBaseException as error:
            raise ConfigError(f"{item!r}: {_reason(error)}") from None
        except (TypeError, ValueError):  # of OmegaConf, for a word where a list wants a number
            raise ConfigError(f"{item!r}: an element of a list is named by its number, e.g. {LIST_EXAMPLE}") from None
    _drop_empty_sections(schema, user)
    return user


def _read(path: str) -> DictConfig:
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, siblings, 1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        plain = yaml.safe_load(text)
        if plain is not None and not isinstance(plain, dict):
            kind = "a list" if isinstance(plain, list) else repr(plain)
            raise ConfigError(f"{path}: the top level must be sections (key: value), not {kind}")
        content = OmegaConf.create(text)  # reads numbers such as 1e-4, and refuses a key that is there twice
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {error.problem}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    assert isinstance(content, DictConfig)
    return content


def _drop_empty_sections(schema: type, user: DictConfig) -> None:
    """`trainer:` with nothing below it, as where all its lines are comments, changes nothing."""
    hints = get_type_hints(schema)
    for f in fields(schema):
        if f.name not in user or OmegaConf.is_interpolation(user, f.name) or OmegaConf.is_missing(user, f.name):
            continue
        if user[f.name] is None and (is_dataclass(hints[f.name]) or "registry" in f.metadata):
            del user[f.name]
        elif is_dataclass(hints[f.name]) and isinstance(user[f.name], DictConfig):
            _drop_empty_sections(hints[f.name], user[f.name])


def _drop_other_sections(schema: type, user: DictConfig, overrides: list[str]) -> None:
    """The file's section of one algorithm means nothing to another, which an override names: that begins with its own
    defaults.
    """
    for f in fields(schema):
        names = [name for item in overrides if (name := _named(f.name, item)) is not None]
        section = user[f.name] if "registry" in f.metadata and f.name in user else None
        if not names or not isinstance(section, DictConfig):
            continue
        if names[-1] != (section["name"] if "name" in section else default_of(f).name):
            del user[f.name]


def _named(section: str, override: str) -> str | None:
    """The name that an override gives to a section, such as `algorithm.name=cps` or `algorithm={name: cps}`."""
    key, _, text = override.partition("=")
    if key not in (section, f"{section}.name"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError:
        return None  # what is wrong is said where the override is merged
    if key == section:
        value = value["name"] if isinstance(value, dict) and "name" in value else None
    return None if value is None else str(value)


def _section_classes(schema: type, user: DictConfig) -> dict[str, type]:
    """The dataclass of each section whose keys depend on a name (`algorithm`)."""
    classes = {}
    for f in fields(schema):
        if "registry" not in f.metadata:
            continue
        section = user[f.name] if f.name in user else {}
        default = default_of(f).name
        name = section["name"] if isinstance(section, DictConfig) and "name" in section else default
        found = resolve_registry(f.metadata["registry"], str(name), f"{f.name}.name")
        names = vars(found)
        base = type(default_of(f))
        config = names["Config"] if "Config" in names else None
        if not isinstance(config, type) or not issubclass(config, base) or not is_dataclass(config):
            raise ConfigError(
                f"{f.name}.name: {name!r} has no Config, a dataclass of its keys derived from {base.__name__}"
            )
        if "Rule" not in names:
            raise ConfigError(f"{f.name}.name: {name!r} has no class Rule, which is made of its Config")
        classes[f.name] = config
    return classes


def _check_keys(schema: type, part: type, classes: dict[str, type], user: DictConfig, prefix: str) -> None:
    """Raise for the first key of `user` that `part` of `schema` does not know, or whose value is of another type.

    OmegaConf converts and judges each value alone, since its own messages about a whole configuration name no keys
    within lists. What an interpolation stands for is judged when all is merged.
    """
    all_hints, blank = get_type_hints(part), OmegaConf.structured(part)
    hints = {f.name: all_hints[f.name] for f in fields(part)}
    for name in user:
        key = f"{prefix}{name!s}"
        if name not in hints:
            raise ConfigError(_unknown(key, str(name), list(hints), schema, classes))
        if OmegaConf.is_interpolation(user, name) or OmegaConf.is_missing(user, name):
            continue
        hint, value = classes.get(key, hints[str(name)]), user[name]
        if is_dataclass(hint):
            _check_section(schema, hint, classes, value, key)  # type: ignore[arg-type]
            continue
        plain = OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value
        elements: list[Any] = [a for a in get_args(hint) if is_dataclass(a)]
        if elements and isinstance(value, ListConfig):
            for i in range(len(value)):
                if not OmegaConf.is_interpolation(value, i):
                    _check_section(schema, elements[0], classes, value[i], f"{key}[{i}]")
            continue
        try:
            OmegaConf.update(blank, str(name), plain, merge=False)
        except OmegaConfBaseException:
            raise ConfigError(f"{key}: {shown(plain)} should be {words(hint, plain)}") from None


def _check_section(schema: type, part: type, classes: dict[str, type], value: Any, key: str) -> None:
    if not isinstance(value, DictConfig):
        plain = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
        keys = ", ".join(f.name for f in fields(part))
        raise ConfigError(f"{key}: {shown(plain)} should be a section with keys: {keys}")
    _check_keys(schema, part, classes, value, key + ".")


def _unknown(key: str, leaf: str, siblings: list[str], schema: type, classes: dict[str, type]) -> str:
    """What to say of an unknown key: the nearest one beside it, or keys of its name elsewhere, or all beside it."""
    elsewhere = [row.key for row in rows(schema, classes) if row.key.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(leaf, siblings, 1, 0.7 if elsewhere else 0.5)
    if near:
        return f"unknown key {key}; did you mean {key.removesuffix(leaf)}{near[0]}?"
    if elsewhere:
        choice = elsewhere[0] if len(elsewhere) == 1 else f"one of {', '.join(elsewhere)}"
        return f"unknown key {key}; did you mean {choice}?"
    return f"unknown key {key}; known here: {', '.join(siblings)}"


def _one_line(error: OmegaConfBaseException) -> str:
    return f"{error.full_key}: {_reason(error)}" if error.full_key else _reason(error)


def _reason(error: OmegaConfBaseException) -> str:
    text = (error.msg or str(error)).split("\n")[0]
    if isinstance(error, GrammarParseError):
        return f"not a valid interpolation: {text}"
    return text.removeprefix("KeyError raised while resolving interpolation: ").strip('"')  # as of oc.env


def _finish(section: Any, prefix: str) -> None:
    """Check the bounds of all leaves (ConfigError), and expand ~ in paths."""
    for f in fields(section):
        key, value = prefix + f.name, vars(section)[f.name]
        if is_dataclass(value):
            _finish(value, key + ".")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for i, element in enumerate(value):
                _finish(element, f"{key}[{i}].")
        elif value is not None:
            bounds: Bounds = f.metadata["bounds"] if "bounds" in f.metadata else Bounds()
            complaint = bounds.complaint(value)
            if complaint:
                raise ConfigError(f"{key}: {value!r} should be {complaint}")
            if "path" in f.metadata and f.metadata["path"] and value.startswith("~"):
                setattr(section, f.name, str(Path(value).expanduser()))
