"""What tests of one module after the other want: seeded numbers, and an error with its exact message."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, a function of shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def refused(message: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """The block raises an error of this kind with exactly this message."""
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == message
