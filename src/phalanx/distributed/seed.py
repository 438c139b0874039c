"""Random streams identified by names, independently of ranks and of earlier draws."""

import hashlib
import struct

import torch
from torch import Tensor


def fold_in(*names: int | str) -> int:
    """Derive a 63-bit seed from 64-bit integers and strings; it is the same in all processes and versions."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        if isinstance(name, int):
            digest.update(struct.pack("<q", name))
        else:
            # the length makes ("ab", "c") and ("a", "bc") differ
            digest.update(f"{len(name)}:{name}".encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def normal(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Standard normal float32 values of `shape` from the stream `seed`.

    The CPU generator uses only the lower 32 bits of the seed, so that one in 4e9 pairs of streams is equal.
    """
    if device.type == "meta":  # a plan needs only shapes
        return torch.empty(shape, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)
