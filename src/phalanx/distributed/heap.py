"""The heap of a rank whose tensors are on the CPU."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
VARIABLES = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"
LARGE = 2**30  # bytes


def keep_freed_pages() -> None:
    """Have malloc keep freed memory for the next tensor, unless the environment sets thresholds; glibc only.

    It would give large blocks back to the system at once, and the next tensor would wait for new pages, which the
    system fills with zeros first: a quarter of a VAE's decoding.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in VARIABLES):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGE)
    libc.mallopt(M_TRIM_THRESHOLD, LARGE)
