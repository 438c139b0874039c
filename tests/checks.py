"""What tests of one module after the other want: seeded numbers, and an error with its exact message."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, a function of shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as it holds; it has far longer than a busy machine needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STARTING = ("starting ", "loading ", "joining ", "laying out ", "encoding ", "validating ")


def mistakes(said: str) -> str:
    """What a job said on stderr, without the lines that tell how far its start has come."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith(STARTING))


@contextmanager
def refused(message: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """The block raises an error of this kind with exactly this message."""
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == message


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """The warnings that a logger gives in the block: in a forked rank, where caplog of the test hears nothing."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger(logger).addHandler(listener)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(listener)
