"""Lines of `make gpu-smoke`'s table, and how an error becomes one."""

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
    """What came of one look: a number with its unit, and PASS, FAIL, or - where there is nothing to tell."""

    name: str
    state: str
    value: float | None = None
    unit: str = ""
    note: str = ""


def judged(name: str, good: bool, value: float | None = None, unit: str = "", note: str = "") -> Line:
    """A line that passes where it is `good`."""
    return Line(name, PASS if good else FAIL, value, unit, note)


def nothing(name: str, reason: str) -> Line:
    """A line that neither passes nor fails."""
    return Line(name, NONE, note=reason)


def tried(name: str, look: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """The lines of a look; an error of it is one more, named `name`, and the looks after it go on."""
    try:
        yield from look()
    except (Exception, SystemExit) as error:  # whatever a kernel, a library or a refused configuration raises
        traceback.print_exc()
        yield Line(name, FAIL, note=said(error))
    free()


def said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def free() -> None:
    """Give back the memory of what is no longer needed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def clock() -> float:
    """Seconds, once the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], times: int = 1) -> float:
    """Of a call, on average."""
    start = clock()
    for _ in range(times):
        function()
    return (clock() - start) / times
