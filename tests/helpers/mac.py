"""Makes a process look like one on macOS: python tests/helpers/mac.py tasks/train_grpo.py config.yaml key=value ...

sys.platform is darwin, there is no /proc, /sys or /dev/shm, `os` lacks what only Linux has, libc lacks its calls, and the
address space cannot be limited, and gloo makes all its connections at once. Libraries that are loaded before stay those of Linux.
"""

import ctypes
import os
import platform
import resource
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDERS = ("/proc", "/sys", "/dev/shm")
SYMBOLS = ("prctl", "mallopt", "malloc_trim", "personality", "syscall")
OPENING = ("open", "os.listdir", "os.scandir")
NAMES = (
    "O_PATH", "O_TMPFILE", "O_DIRECT", "copy_file_range", "eventfd", "fdatasync", "getrandom", "getresuid", "memfd_create",
    "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_getscheduler", "sched_setaffinity",
    "setresuid", "splice",
)  # fmt: skip


def absent(path: Any) -> bool:
    """Whether a path is in one of the folders that macOS does not have."""
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)


def missing(path: Any) -> FileNotFoundError:
    return FileNotFoundError(2, "No such file or directory", os.fspath(path))


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.putenv" and arguments[0] == b"TORCH_GLOO_LAZY_INIT":
        raise RuntimeError("UV transport does not support lazy init")  # gloo's transport on macOS, when it is made
    if event in OPENING and absent(arguments[0]):
        raise missing(arguments[0])


def _without(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of `os`, for which files in those folders do not exist."""

    def called(path: Any, *args: Any, **kwargs: Any) -> Any:
        if absent(path):
            raise missing(path)
        return function(path, *args, **kwargs)

    return called


class _Libc(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in SYMBOLS:
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def become_mac() -> None:
    """Change this process for good."""
    limited = resource.setrlimit

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        limited(kind, limits)

    for name in NAMES:
        if name in vars(os):
            delattr(os, name)
    for name in ("stat", "lstat", "readlink", "access"):
        vars(os)[name] = _without(vars(os)[name])
    vars(resource)["setrlimit"] = setrlimit
    vars(ctypes)["CDLL"] = _Libc
    vars(platform)["libc_ver"] = lambda *_, **__: ("", "")
    sys.platform = "darwin"
    sys.addaudithook(_audit)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        from phalanx import sandbox  # loaded here, where libraries may still find out what this machine is

        sys.path[0] = str(Path(sys.argv[1]).parent)
        sandbox.command = lambda script, *words: [sys.executable, "-P", __file__, str(script), *words]
    become_mac()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
