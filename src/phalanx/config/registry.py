"""Resolution of names to modules, functions and classes: built-in ones, or those of the user's files and modules."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from phalanx.config.files import kind
from phalanx.config.messages import ConfigError, cut, nearest, reason

GIVEN: dict[
    str, Any
] = {}  # functions and classes of the running program, by the path that a configuration has for each


def known_modules(package: str) -> list[str]:
    """Names of the modules in a package's folder, without private ones."""
    folders = importlib.import_module(package).__path__
    return sorted(p.stem for folder in folders for p in Path(folder).glob("*.py") if not p.stem.startswith("_"))


def built_in(package: str, name: str) -> Any:
    """The object of a module of `package` that has the module's name: a class in CamelCase, or a function."""
    names = vars(importlib.import_module(f"{package}.{name}"))
    camel = "".join(map(str.capitalize, name.split("_")))
    return names[camel] if camel in names else names[name]


def resolve_registry(package: str, name: str, key: str) -> Any:
    """Resolve `name`: a module of `package`, a dotted module or path/to/file.py; with `:Name` added, an object in it.

    Raises ConfigError if there is none, or if the module cannot be imported.
    """
    name, _, attribute = name.partition(":")
    try:
        if name.endswith(".py"):
            module = import_file(name, key)
        else:
            module = import_dotted(name if "." in name.lstrip(".") else f"{package}.{name}", key)
    except ModuleNotFoundError as error:
        known = known_modules(package)
        near = nearest(name, known) or ";"
        text = f"{name!r} is unknown{near} known: {', '.join(known)}, a dotted module, or path/to/file.py"
        raise ConfigError(f"{key}: {text}") from error
    if attribute and attribute not in vars(module):
        raise ConfigError(f"{key}: {name!r} has no {attribute!r}")
    return vars(module)[attribute] if attribute else module


def object_forms(noun: str) -> str:
    """The forms that `resolve_object` accepts, in words."""
    word = noun.capitalize() if noun == "class" else noun  # class names begin with a capital
    return f"module:{word} or path/to/file.py:{word}"


def resolve_object(path: str, key: str, noun: str) -> Any:
    """Resolve `module:name` or `path/to/file.py:name`. noun: the expected kind of object, "class" or "function".

    Raises ConfigError if there is no such object, or if the module cannot be imported.
    """
    if path in GIVEN:
        return GIVEN[path]
    target, _, attribute = path.rpartition(":")
    expected = f"expected {object_forms(noun)}"
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
    return names[attribute]


def import_dotted(name: str, key: str) -> Any:
    """Import a dotted module. Raises ModuleNotFoundError if there is none, and ConfigError if its import fails."""
    try:
        if name.startswith("."):  # importlib would need the package that it is relative to
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{key}: {_import_error(error)}") from error


def import_file(name: str, key: str) -> Any:
    """Import a user's file as a module. Raises ConfigError if it does not exist or its import fails."""
    path = _file(name, key)
    try:
        return _run_once(path)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(f"{key}: {_import_error(error)}") from error


def _file(name: str, key: str) -> Path:
    """The absolute path of a user's file. Raises ConfigError if it does not exist."""
    try:
        if kind(Path(name)) == "file":
            return Path(name).expanduser().resolve()
    except OSError as error:
        raise ConfigError(f"{key}: {cut(name)}: {error.strerror}") from None
    raise ConfigError(f"{key}: {name!r}: no such file")


def _run_once(path: Path) -> Any:
    """Import a file, which runs only once like any module, and again if the file has changed."""
    spec = importlib.util.spec_from_file_location(f"phalanx_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    stat = path.stat()
    version = path, stat.st_mtime_ns, stat.st_size
    if spec.name in sys.modules and vars(sys.modules[spec.name]).get("__version_of_file__") == version:
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module)["__version_of_file__"] = version
    return module


def _import_error(error: BaseException) -> str:
    """The reason why a module cannot be imported, preceded by the line of the user's code that caused it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = [] if isinstance(error, SystemExit) else traceback.extract_tb(error.__traceback__)
    where = ""
    for frame in frames:
        if frame.filename not in (__file__, importlib.__file__) and "<frozen" not in frame.filename:
            where = f"{frame.filename}:{frame.lineno}: "
            break
    return where + (str(error) if isinstance(error, ImportError | ConfigError) else reason(error))
