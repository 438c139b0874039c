"""Lines of `make gpu-smoke`'s table, and the conversion of an error to a line."""

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

PASS, FAIL, NONE = "PASS", "FAIL", "-"
CUDA_ONLY = "CUDA alone has it"


@dataclass(frozen=True)
class Line:
    """The result of one measurement: a number with its unit, and PASS, FAIL, or - if it could not be made here."""

    name: str
    state: str
    value: float | None = None
    unit: str = ""
    note: str = ""


def judged(name: str, good: bool, value: float | None = None, unit: str = "", note: str = "") -> Line:
    """A line that passes if `good`."""
    return Line(name, PASS if good else FAIL, value, unit, note)


def nothing(name: str, reason: str) -> Line:
    """A line that neither passes nor fails."""
    return Line(name, NONE, note=reason)


def tried(name: str, look: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """The lines of `look`. An error becomes another line, named `name`, so that later measurements still run."""
    try:
        yield from look()
    except (Exception, SystemExit) as error:  # kernels, libraries and rejected configurations raise many types
        traceback.print_exc()
        yield Line(name, FAIL, note=said(error))
    free()


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def free() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def clock() -> float:
    """Seconds, after waiting for the device to finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], times: int = 1) -> float:
    """The average time of a call in seconds."""
    start = clock()
    for _ in range(times):
        function()
    return (clock() - start) / times
