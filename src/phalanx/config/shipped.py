"""Files shipped with the code: train.sh, tasks/, configs/ and assets/, in a checkout or inside the wheel."""

from pathlib import Path
from typing import TypeVar

P = TypeVar("P", str, list[str])

_PACKAGE = Path(__file__).parents[1]
_IN_WHEEL = _PACKAGE / "shipped"  # hatch_build.py puts it there
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parents[1]


def located(path: P) -> P:
    """Resolve a path, or each of several: ~ is the home folder, and `assets/...`, as shipped configurations name files,
    is the shipped file if the working folder does not have it.
    """
    if isinstance(path, dict):
        return {name: located(each) for name, each in path.items()}
    if isinstance(path, list):
        return [located(each) for each in path]
    if path.startswith("assets/") and not Path(path).exists() and (ROOT / path).exists():
        return str(ROOT / path)
    return str(Path(path).expanduser()) if path.startswith("~") else path
