"""Randomness as a function: a stream is known by its name, not by a rank or by earlier draws."""

import hashlib
import struct

import torch
from torch import Tensor


def fold_in(*names: int | str) -> int:
    """A 63-bit seed from 64-bit integers and words, the same in all processes and versions."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        if isinstance(name, int):
            digest.update(struct.pack("<q", name))
        else:
            # with its length, so that ("ab", "c") and ("a", "bc") differ
            digest.update(f"{len(name)}:{name}".encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def normal(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Standard normal float32 values of `shape` from the stream `seed`.

    A CPU's generator takes the lower 32 bits of the seed, so two streams are equal once in 4e9 pairs.
    """
    if device.type == "meta":  # shapes alone, for a plan
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)
