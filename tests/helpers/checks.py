"""Helpers of many tests: seeded numbers, waiting, and checks of errors, warnings and output."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from phalanx.functional.aggregation import Sums
from phalanx.types import Metrics


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, a function of shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree_as_sums(found: Tensor, expected: Tensor, roundings: int = 64) -> None:
    """Check sums of the same float32 numbers in two orders, such as gradients of a packed and of a padded pass.

    Which order a processor's kernels take is not known. Each of the roundings on the way to a value, of which `roundings`
    may add up, is at most an eps of the terms, and these are of the size of the largest value.
    """
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=roundings * eps * float(expected.abs().max()))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as `condition` is true; the default limit is far more than a busy machine needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STARTING = ("starting ", "loading ", "joining ", "laying out ", "encoding ", "validating ")


def mistakes(said: str) -> str:
    """A job's stderr without the lines about the progress of its start."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.startswith(STARTING))


@contextmanager
def refused(message: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Check that the block raises an error of this kind with exactly this message."""
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == message


def heard(logger: str, level: int = logging.WARNING) -> list[str]:
    """The messages that a logger gets from here on, in a forked rank, where the test's caplog gets none."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return said


def reduced(metrics: Metrics, weight: Tensor) -> dict[str, float]:
    """The metrics of one micro-batch with these weights."""
    sums = Sums()
    sums.add(metrics, weight)
    return sums.values()
