"""Rows and functions of a Python program as files that a configuration can name.

A configuration names data files and functions by their paths, and a run's record has digests of these files. So rows
become JSON lines, and the source of a function becomes a module, in a folder named by a hash of the content: equal
objects have equal configurations, and other ranks, `phalanx rerun` and a later evaluation find them there. The program
itself goes on with the very function, see phalanx.config.registry.GIVEN.
"""

import ast
import base64
import inspect
import io
import json
import re
import secrets
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from PIL import Image

from phalanx.config.files import replace_file
from phalanx.config.messages import ConfigError
from phalanx.config.registry import GIVEN

FOLDER = "given"  # below the job's output_dir
FILES = {"data.train_files": "train", "data.val_files": "val"}  # keys of data files, and the names for rows
Rows = Iterable[Mapping[str, Any]]


class Given:
    """The settings of a job as overrides `key=value`, and the files that stand for its rows and functions."""

    def __init__(self, settings: Iterable[tuple[str, Any]]) -> None:
        """settings: dotted keys with values. Raises ConfigError for a value that no configuration can have."""
        self._folder = secrets.token_hex(16)  # stands for the folder, which the settings decide
        self._files, self._functions = dict[str, str](), dict[str, Callable[..., Any]]()
        self.columns = dict[str, set[str]]()  # of the first row of a key's rows
        self._words = []
        for key, value in settings:
            plain = self._plain(str(key), value)
            try:
                text = json.dumps(plain, ensure_ascii=False, default=_path_text)
            except TypeError as error:
                raise ConfigError(
                    f"{key}: {error}; expected values that YAML has, functions, or rows of data"
                ) from None
            self._words.append(f"{key}={text}")

    def words(self, folder: Path = Path()) -> list[str]:
        """The overrides, with the files in this folder."""
        name = json.dumps(str(folder), ensure_ascii=False)[1:-1]
        return [word.replace(self._folder, name) for word in self._words]

    def write(self, folder: Path) -> None:
        """Write the files, unless they are there, and have their paths mean the functions of this program. Every rank
        does so: they may have different file systems. Raises ConfigError.
        """
        for name, text in self._files.items():
            file = folder / name
            try:
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(file, text)
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
        for path, function in self._functions.items():
            GIVEN[path.replace(self._folder, str(folder))] = function

    def _plain(self, key: str, value: Any) -> Any:
        """The value with paths in place of rows and functions."""
        if key in FILES:
            return self._data(key, value)
        if isinstance(value, Mapping):
            return {str(name): self._plain(f"{key}.{name}", inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(key, inner) for inner in value]
        return self._function_path(value) if callable(value) else value

    def _data(self, key: str, value: Any) -> Any:
        """The data files of a key: paths as they are, rows as a file, and named rows as a file each."""
        if value is None or isinstance(value, str | Path):
            return value
        if isinstance(value, Mapping):
            return [self._rows(key, str(name), rows) for name, rows in value.items()]
        if isinstance(value, list | tuple) and all(isinstance(file, str | Path) for file in value):
            return list(value)
        return [self._rows(key, FILES[key], value)]

    def _rows(self, key: str, name: str, rows: Any) -> str:
        if isinstance(rows, str | Path):
            return str(rows)
        if not isinstance(rows, Iterable) or isinstance(rows, bytes):
            raise ConfigError(f"{key}: {type(rows).__name__}; expected rows (dicts), a datasets.Dataset, or files")
        lines = []
        for number, row in enumerate(rows):
            if isinstance(row, Mapping):
                self.columns.setdefault(key, set(row))
            try:
                lines.append(json.dumps(row, ensure_ascii=False, default=_cell_value))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{key}, row {number}: {error}; expected texts, numbers, lists, dicts or images"
                ) from None
        return self._file(f"{name}.jsonl", "\n".join(lines) + "\n")

    def _function_path(self, function: Callable[..., Any]) -> str:
        """A path `module:name` or `path/to/file.py:name` that stands for the function."""
        name = function.__name__ if isinstance(function, FunctionType | type) else type(function).__name__
        module = sys.modules.get(str(function.__module__))
        if module is not None and module.__name__ != "__main__" and vars(module).get(name) is function:
            return f"{module.__name__}:{name}"
        if not name.isidentifier():
            name = "reward"  # of a lambda
        path = f"{self._file(f'{name}.py', source_of(function, name))}:{name}"
        self._functions[path] = function
        return path

    def _file(self, name: str, text: str) -> str:
        """The path of a file with this text."""
        name = f"{FOLDER}/{sha256(text.encode()).hexdigest()[:12]}/{name}"
        self._files[name] = text
        return f"{self._folder}/{name}"


def source_of(function: Callable[..., Any], name: str) -> str:
    """A module that defines the function as `name`, with the imports, functions and plain values that it uses, and a
    comment for each other value; only comments if the function has no source of its own, as one of two lambdas has.
    """
    parts: dict[str, str] = {}
    try:
        _add_definition(function, name, parts)
    except (OSError, TypeError, ValueError) as error:
        code = [each.__code__ for each in _functions(function)]
        digest = sha256(
            repr([(each.co_code, each.co_names, list(map(repr, each.co_consts))) for each in code]).encode()
        )
        return f"# {name} of a Python program, whose source is not here: {error}\n# {digest.hexdigest()}\n"
    head = f"# {name} of a Python program, as `phalanx rerun` finds it\nfrom __future__ import annotations\n"
    return "\n\n".join([head, *parts.values()]) + "\n"


def _add_definition(value: Any, name: str, parts: dict[str, str]) -> None:
    """Add the definition of `name` to `parts`, after what it uses. Raises OSError, TypeError or ValueError without a
    source.
    """
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, FunctionType | BuiltinFunctionType | type) and value.__module__ != "__main__":
        parts[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
    elif isinstance(value, FunctionType):
        text = textwrap.dedent(inspect.getsource(value)).rstrip()
        parts[name] = ""  # a function may call itself
        for inner, each in sorted(_used_values(value).items()):
            try:
                _add_definition(each, inner, parts)
            except (OSError, TypeError, ValueError) as error:  # perhaps it is only the name of an attribute
                parts[inner] = f"# {inner} is not here: {error}"
        del parts[name]  # it comes after what it uses
        parts[name] = f"{name} = {_only_lambda(text)}" if value.__name__ == "<lambda>" else text
    elif isinstance(value, type):
        parts[name] = textwrap.dedent(inspect.getsource(value)).rstrip()
    elif isinstance(value, re.Pattern):
        _add_definition(re, "re", parts)
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
    else:
        parts[name] = f"{name} = {_plain_literal(value, name)}"


def _used_values(function: FunctionType) -> dict[str, Any]:
    """The values from outside of a function whose names its code has."""
    codes, values = [function.__code__], dict(inspect.getclosurevars(function).nonlocals)
    while codes:
        code = codes.pop()
        for name in code.co_names:
            if name in function.__globals__:
                values[name] = function.__globals__[name]
        codes += filter(inspect.iscode, code.co_consts)  # of comprehensions and inner functions
    return values


def _plain_literal(value: Any, name: str) -> str:
    """A plain value as Python writes it. Raises ValueError for others."""
    try:
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"{name} is of type {type(value).__name__}")


def _only_lambda(text: str) -> str:
    """The only lambda in the lines of a statement. Raises ValueError for lines with several, or with none."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
    except SyntaxError:
        raise ValueError("its lines are a part of a statement") from None
    if len(nodes) != 1:
        raise ValueError(f"its lines have {len(nodes)} lambdas")
    return ast.unparse(nodes[0])


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions that a callable consists of: itself, or those of its class."""
    kind = value if isinstance(value, type) else type(value)
    for each in (value, *vars(kind).values()):
        if isinstance(each, FunctionType):
            yield each


def _path_text(value: Any) -> Any:
    """A path as text. Raises TypeError for other values."""
    if isinstance(value, Path):
        return str(value.absolute())
    raise TypeError(f"a value of type {type(value).__name__}")


def _cell_value(value: Any) -> Any:
    """A value of a row that JSON does not have: an image, or the bytes of its file, as a data URL; a number or an array
    of numpy. Raises TypeError for others.
    """
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG")
        value = file.getvalue()
    if isinstance(value, bytes):
        return f"data:image/png;base64,{base64.b64encode(value).decode()}"
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else _path_text(value)
