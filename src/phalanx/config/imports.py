"""Modules, files and objects that a configuration names, and what is said where they cannot be had."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from phalanx.config.files import kind
from phalanx.config.messages import ConfigError, cut, nearest, reason


def named_object(path: str, key: str, noun: str = "function") -> tuple[Any, str]:
    """The object that `module:Name` or `path/to/file.py:Name` stands for, and its name. Raises ConfigError, with one
    line, where there is none; `noun` is what it should be.
    """
    target, _, attribute = path.rpartition(":")
    word = noun.capitalize() if noun == "class" else noun  # as such names are written
    expected = f"expected module:{word} or path/to/file.py:{word}"
    if not target or not attribute:
        raise ConfigError(f"{key}={path!r} names no {noun}; {expected}")
    try:
        module = import_file(target, key) if target.endswith(".py") else import_dotted(target, key)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}={path!r}: no module {error.name!r} on the Python path; {expected}") from None
    names = vars(module)
    if attribute not in names:
        hint = nearest(attribute, [name for name, value in names.items() if callable(value)])
        raise ConfigError(f"{key}={path!r}: {target} has no {attribute!r}{hint}")
    return names[attribute], attribute


def import_dotted(name: str, key: str) -> Any:
    """A dotted module. Raises ModuleNotFoundError where there is none, and ConfigError where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{key}: {_import_error(error)}") from error


def import_file(name: str, key: str) -> Any:
    """The module of a user's file. Raises ConfigError where there is none, or where it cannot be imported."""
    path = _file(name, key)
    try:
        return _run_once(path)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(f"{key}: {_import_error(error)}") from error


def _file(name: str, key: str) -> Path:
    """The path of a file of the user's; ConfigError where there is none."""
    try:
        if kind(Path(name)) == "file":
            return Path(name).expanduser().resolve()
    except OSError as error:
        raise ConfigError(f"{key}: {cut(name)}: {error.strerror}") from None
    raise ConfigError(f"{key}: {name!r}: no such file")


def _run_once(path: Path) -> Any:
    """The module of a file, which runs once, as any module does, and again where the file has changed."""
    spec = importlib.util.spec_from_file_location(f"phalanx_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    found = path.stat()
    version = path, found.st_mtime_ns, found.st_size
    if spec.name in sys.modules and vars(sys.modules[spec.name]).get("__version_of_file__") == version:
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module)["__version_of_file__"] = version
    return module


def _import_error(error: BaseException) -> str:
    """The reason why a module cannot be imported, after the line of the user's that asked for it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename not in (__file__, importlib.__file__) and "<frozen" not in f.filename]
    where = f"{own[0].filename}:{own[0].lineno}: " if own else ""
    return where + (str(error) if isinstance(error, ImportError | ConfigError) else reason(error))
