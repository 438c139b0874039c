"""Files that come with the code: train.sh, tasks/, configs/ and assets/, in a checkout or inside the wheel."""

from pathlib import Path
from typing import TypeVar

P = TypeVar("P", str, list[str])

_PACKAGE = Path(__file__).parents[1]
_IN_WHEEL = _PACKAGE / "shipped"  # hatch_build.py puts it there
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parents[1]


def located(path: P) -> P:
    """A path, or each of several, as it is to be opened: ~ is the home, and what the working folder has not of
    `assets/...`, as the shipped configurations call it, is the shipped one.
    """
    if isinstance(path, dict):
        return {name: located(each) for name, each in path.items()}
    if isinstance(path, list):
        return [located(each) for each in path]
    if path.startswith("assets/") and not Path(path).exists() and (ROOT / path).exists():
        return str(ROOT / path)
    return str(Path(path).expanduser()) if path.startswith("~") else path
