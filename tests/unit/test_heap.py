"""A rank on a CPU keeps freed memory for the next tensor."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from phalanx.run.heap import keep_freed_pages
if "keep" in sys.argv:
    keep_freed_pages()
def use():
    torch.ones(10_000_000), torch.ones(10_000_000)
for _ in range(10):  # until the heap is large enough
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str, **environment: str) -> int:
    """Page faults while two tensors of 40 MB are created ten times."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *words], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's thresholds are glibc's")
def test_freed_pages_are_kept() -> None:
    all_of_them = 10 * 2 * 40_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults("keep") < all_of_them / 4
    own = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    assert faults("keep", **own) > all_of_them / 2
