"""Randomness as a function: a stream is named by integers, never by a rank or by what was drawn before."""

import hashlib
import struct

import torch
from torch import Tensor


def fold_in(*names: int | str) -> int:
    """A 63-bit seed from integers (of 64 bits) and words, stable over processes, machines and versions."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        digest.update(struct.pack("<q", name) if isinstance(name, int) else f"{len(name)}:{name}".encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def normal(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Standard normal float32 of `shape` from the stream `seed`.

    A CPU's generator takes the lower 32 bits of the seed, so a pair of streams is equal once in 4e9.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)
