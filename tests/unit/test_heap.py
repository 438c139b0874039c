"""When garbage is collected, and that a rank on a CPU keeps what it frees for the next tensor."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from phalanx.distributed.heap import keep_freed_pages
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

JOB = """
import gc, sys
from dataclasses import dataclass
from phalanx.cli import parse, run

@dataclass
class Empty:
    pass

def build(_):
    first = gc.isenabled()
    if "world" in sys.argv:
        from phalanx.config.run import ParallelConfig
        from phalanx.distributed.mesh import start
        start(ParallelConfig())
    second = gc.isenabled()
    return lambda: print(first, second, gc.isenabled())

config = parse(Empty, "", [])
print(gc.isenabled())
run(build, config)
"""


def faults(*words: str, **environment: str) -> int:
    """Pages that ten times two tensors of 40 MB wait for."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *words], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's thresholds are glibc's")
def test_freed_pages_are_kept() -> None:
    all_of_them = 10 * 2 * 40_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults("keep") < all_of_them / 4
    own = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    assert faults("keep", **own) > all_of_them / 2


@pytest.mark.parametrize("world", [True, False])
def test_garbage_is_left_alone_only_while_libraries_are_loaded(world: bool) -> None:
    """Until there is a world, before weights are loaded; of a job without one until it is built."""
    words = ["world"] if world else []
    done = subprocess.run([sys.executable, "-c", JOB, *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", str(world), "True"]
