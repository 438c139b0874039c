"""Phalanx: reinforcement learning of flow, language and block-diffusion models under plain torchrun."""

import importlib
import os
from typing import Any

__version__ = "0.2.0"
CALLS = ("train", "sft", "evaluate", "RunResult")  # of phalanx.tools.from_python, imported when they are first used


def make_products_exact(cpuinfo: str = "/proc/cpuinfo") -> None:
    """On Intel's processors, let a row of a matrix product depend on that row only, not on its place or its neighbours.

    MKL chooses kernels by the number of rows, and with AVX2 multiplies the last one to three rows of a matrix by
    another kernel than the rest, which rounds differently. A replay has the rows of a rollout in another order. MKL's
    strict mode has one kernel for all rows; it needs AVX2 or AVX-512. MKL reads the variable at its first product,
    which is later than the first import of phalanx. Other processors keep their mode: MKL has no strict one for them,
    and there are versions of MKL whose AUTO is an illegal instruction there.
    """
    try:
        with open(cpuinfo) as file:
            intel = "GenuineIntel" in file.read(256)  # the second line; the file has a section per core
    except OSError:
        return
    if intel:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


make_products_exact()


def __getattr__(name: str) -> Any:
    if name in CALLS:
        importlib.import_module("phalanx.run.cli")  # it silences libraries, which read at import whether they print
        return vars(importlib.import_module("phalanx.tools.from_python"))[name]
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *CALLS])
