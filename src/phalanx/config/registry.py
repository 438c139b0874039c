"""Names that stand for modules, functions and classes: a package's own, or those of the user's files and modules."""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from phalanx.config.files import kind
from phalanx.config.messages import MOVED, ConfigError, cut, nearest, reason


def known_modules(package: str) -> list[str]:
    """Names of the modules that lie in a package's folder."""
    folders = importlib.import_module(package).__path__
    return sorted(p.stem for folder in folders for p in Path(folder).glob("*.py") if not p.stem.startswith("_"))


def resolve_registry(package: str, name: str, key: str) -> Any:
    """The module that `name` stands for: a module of `package`, a dotted module, or path/to/file.py; `:Name` behind it
    stands for an object in it. Raises ConfigError where there is none, or where it cannot be imported.
    """
    name, _, attribute = name.partition(":")
    target = name if "." in name.lstrip(".") else f"{package}.{name}"
    path = _file(name, key) if name.endswith(".py") else None
    try:
        module = importlib.import_module(target) if path is None else _import_file(path)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        if path is None and isinstance(error, ModuleNotFoundError) and f"{target}.".startswith(f"{error.name}."):
            known = known_modules(package)
            near = nearest(name, known) or ";"
            text = f"{name!r} is unknown{near} known: {', '.join(known)}, a dotted module, or path/to/file.py"
        else:
            text = _import_error(error)
        raise ConfigError(f"{key}: {text}") from error
    if attribute and attribute not in vars(module):
        raise ConfigError(f"{key}: {name!r} has no {attribute!r}")
    return vars(module)[attribute] if attribute else module


def _file(name: str, key: str) -> Path:
    """The path of a file of the user's; ConfigError where there is none."""
    try:
        if kind(Path(name)) == "file":
            return Path(name).expanduser().resolve()
    except OSError as error:
        raise ConfigError(f"{key}: {cut(name)}: {error.strerror}") from None
    raise ConfigError(f"{key}: {name!r}: no such file")


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"phalanx_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def resolve_object(path: str, key: str, what: str) -> Any:
    """The object that `module:name` or `path/to/file.py:name` stands for; messages call it `what`, such as "function".

    Raises ConfigError where there is none, or where the module cannot be imported.
    """
    forms = f"expected {object_forms(what)}"
    target, _, attribute = path.rpartition(":")
    if not target or not attribute:
        raise ConfigError(f"{key}={path!r} names no {what}; {forms}")
    file = _file(target, key) if target.endswith(".py") else None
    try:
        module = importlib.import_module(target) if file is None else _import_file(file)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        if file is None and isinstance(error, ModuleNotFoundError) and f"{target}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key}={path!r}: no module {error.name!r} on the Python path; {forms}") from None
        raise ConfigError(f"{key}: {_import_error(error)}") from error
    names = vars(module)
    if attribute not in names:
        hint = nearest(attribute, [name for name, value in names.items() if callable(value)])
        raise ConfigError(f"{key}={path!r}: {target} has no {attribute!r}{hint}")
    return names[attribute]


def object_forms(what: str) -> str:
    """The forms that `resolve_object` takes, in words."""
    return f"module:{what} or path/to/file.py:{what}"


def _import_error(error: BaseException) -> str:
    """The reason why a module cannot be imported, after the line of the user's that asked for it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename not in (__file__, importlib.__file__) and "<frozen" not in f.filename]
    where = f"{own[0].filename}:{own[0].lineno}: " if own else ""
    if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
        return f"{where}{error.name} is now {MOVED[error.name]}"
    return where + (str(error) if isinstance(error, ImportError | ConfigError) else reason(error))
