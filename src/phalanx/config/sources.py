"""The user's input, a YAML file and `key=value` overrides, and differences between configurations."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from phalanx.config.files import kind, read_bytes
from phalanx.config.messages import ConfigError, cut, nearest
from phalanx.config.moved import move_keys
from phalanx.config.secrets import public

MOST_DEPTH = 50  # nesting of sections and lists: libraries recurse, and no sensible configuration comes near
MOST_VALUES = 100_000  # of a file, which a few nested aliases exceed
LONG = 100  # characters; a longer text counts as several values


def read(path: str) -> DictConfig:
    """The content of a YAML file. Raises ConfigError if it cannot be read or is not valid."""
    file = Path(path)
    try:
        if kind(file) is None:
            siblings = [str(p) for p in file.parent.iterdir()] if file.parent.is_dir() else []
            raise ConfigError(f"{path}: no such configuration file{nearest(str(file), siblings)}")
        text = read_bytes(file).decode("utf-8-sig")
        plain = parse_yaml(text)
        if plain is not None and not isinstance(plain, dict):
            form = "a list" if isinstance(plain, list) else repr(plain)
            raise ConfigError(f"{path}: the top level must be sections (key: value), not {form}")
        content = OmegaConf.create(text)  # reads numbers such as 1e-4 and refuses duplicate keys
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{cut(path)}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {error.problem}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    assert isinstance(content, DictConfig)
    return content


def override(file: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A copy of the file's content to which the `key=value` overrides are applied in order. Raises ConfigError."""
    user = copy.deepcopy(file)
    for item in overrides:
        key, equals, value = item.partition("=")
        quoted = cut(repr(item))
        if "" in key.split(".") or not equals:
            if item.endswith((".yaml", ".yml")):
                raise ConfigError(f"{quoted}: the configuration file comes first, and there is only one")
            raise ConfigError(f"{quoted}: an override is written key=value, e.g. trainer.seed=1")
        if key.count(".") + key.count("[") > MOST_DEPTH:
            raise ConfigError(f"{quoted}: the key is nested more than {MOST_DEPTH} deep")
        try:
            if parse_yaml(value) is True and isinstance(OmegaConf.select(user, key), DictConfig):
                continue  # a section that is there is switched on
            user.merge_with_dotlist([item])
        except yaml.MarkedYAMLError as error:
            inner = "an interpolation needs" if "${" in value else "other texts than words need"
            hint = f"; within [ ] or {{ }} {inner} quotes" if "but got" in str(error.problem) else ""
            plain = re.fullmatch(r"\[([^][{},\"']+)\]", value)
            hint += f", as in {key}={json.dumps([plain[1]], ensure_ascii=False)}" if plain and hint else ""
            raise ConfigError(f"{quoted}: the value is not valid YAML: {error.problem}{hint}") from None
        except OmegaConfBaseException as error:
            before = OmegaConf.select(user, key, throw_on_missing=False)
            if isinstance(before, DictConfig | ListConfig):
                form = "a section" if isinstance(before, DictConfig) else "a list"
                raise ConfigError(f"{key}: expected {form}, got {cut(value)}") from None
            raise ConfigError(f"{quoted}: {reason(error)}") from None
        except (TypeError, ValueError):  # OmegaConf's, if a list is indexed by a word
            example = "reward.functions[0].weight=2"
            raise ConfigError(f"{quoted}: an element of a list is selected by its index, e.g. {example}") from None
    return user


def one_line(error: OmegaConfBaseException) -> str:
    """OmegaConf's error as one line, with its key."""
    return f"{error.full_key}: {reason(error)}" if error.full_key else reason(error)


def reason(error: OmegaConfBaseException) -> str:
    """OmegaConf's error as one line, without its key."""
    text = (error.msg or str(error)).split("\n")[0]
    if isinstance(error, GrammarParseError):
        return f"not a valid interpolation: {cut(text)}"
    return text.removeprefix("KeyError raised while resolving interpolation: ").strip('"')  # of oc.env, for example


class _Loader(yaml.SafeLoader):
    """A loader whose errors name the position of a scalar that cannot be converted, such as month 99 or `!!int x`."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise ConstructorError(problem=str(error).partition(";")[0], problem_mark=node.start_mark) from None
        except (AttributeError, IndexError, KeyError):  # the text does not have the form of its tag
            problem = f"{node.value!r} is not a value of the tag {node.tag!r}"
            raise ConstructorError(problem=problem, problem_mark=node.start_mark) from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML text, of bounded depth and size after its aliases are replaced. Raises yaml.MarkedYAMLError."""
    try:
        _check_size(text)
    except ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n"), len(before) - before.rfind("\n") - 1
        mark = yaml.Mark("", error.position, line, column, None, None)
        problem = f"the character #x{ord(text[error.position]):02x} is not allowed"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark) from None
    return yaml.load(text, _Loader)


def _check_size(text: str) -> None:
    """Raise yaml.MarkedYAMLError for a text whose values are nested too deeply or too many."""
    sections = [_Section(None)]  # those that are open
    anchors: dict[str, _Section] = {}
    for event in yaml.parse(text):  # it does not recurse, unlike yaml.load
        problem: str | None = None
        value: _Section | None = None
        if isinstance(event, yaml.CollectionStartEvent):
            sections.append(_Section(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            value = sections.pop()
            value.values, value.depth = value.values + 1, value.depth + 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in [section.anchor for section in sections]:
                problem = f"the alias {event.anchor!r} is within its own value"
            value = replace(anchors.get(event.anchor, _Section(None)), anchor=None)
        elif isinstance(event, yaml.ScalarEvent):
            value = _Section(event.anchor, values=1 + len(event.value) // LONG)
        if value is not None:
            if value.anchor is not None:
                anchors[value.anchor] = value
            sections[-1].values += value.values
            sections[-1].depth = max(sections[-1].depth, value.depth)
        if len(sections) - 1 + sections[-1].depth > MOST_DEPTH:
            problem = f"nested more than {MOST_DEPTH} deep"
        elif sections[-1].values > MOST_VALUES:
            problem = f"more than {MOST_VALUES} values, counting those of aliases each time"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


@dataclass
class _Section:
    """The number of values in a part of the text, and its depth."""

    anchor: str | None
    values: int = 0
    depth: int = 0


def changed(before: Path, config: Any) -> list[str]:
    """Keys whose values differ from those of a saved configuration, with both values if these are short. Of `trainer`,
    only the seed is compared. Raises ConfigError for a file that cannot be read.
    """
    saved: Any = OmegaConf.to_container(read(str(before)))
    move_keys(type(config), saved)
    # written and read as YAML, like the saved one, because a number may be read back with a different type
    now: Any = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(public(config)))))
    return sorted(_changed_values(saved, now, config))


def _changed_values(before: dict[str, Any], now: dict[str, Any], config: Any, prefix: str = "") -> list[str]:
    lines = []
    for key in before.keys() & now.keys():  # keys in only one of them belong to another version or algorithm
        one, other, name = before[key], now[key], f"{prefix}{key}"
        part = vars(config)[key]
        if isinstance(one, dict) and isinstance(other, dict) and is_dataclass(part):
            lines += _changed_values(one, other, part, f"{name}.")
        elif one != other and (prefix != "trainer." or key == "seed"):
            values = f" {one} -> {other}"
            lines.append(name + (values if len(values) < 200 else ""))
    return lines
