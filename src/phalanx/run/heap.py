"""The heap of a rank whose tensors are in CPU memory."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
VARIABLES = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"
LARGE = 2**30  # bytes


def keep_freed_pages() -> None:
    """Make malloc keep freed memory for the next tensor, unless the environment sets thresholds; glibc only.

    By default, malloc returns large blocks to the system at once, and the next tensor waits for new pages that the
    system fills with zeros: a quarter of the time of a VAE's decoding.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in VARIABLES):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGE)
    libc.mallopt(M_TRIM_THRESHOLD, LARGE)
