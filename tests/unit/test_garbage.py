"""The pause of garbage collection during imports, and what outlives a world."""

import subprocess
import sys

import pytest

JOB = """
import gc, sys
from dataclasses import dataclass
from phalanx.run.cli import parse, run

@dataclass
class Empty:
    pass

def build(_):
    first = gc.isenabled()
    if "world" in sys.argv:
        from phalanx.config.run import ParallelConfig
        from phalanx.run.world import start_world
        start_world(ParallelConfig())
    second = gc.isenabled()
    return lambda: print(first, second, gc.isenabled())

config = parse(Empty, "", [])
print(gc.isenabled())
run(build, config)
"""


@pytest.mark.parametrize("world", [True, False])
def test_garbage_is_left_alone_only_while_libraries_are_loaded(world: bool) -> None:
    """Until the world starts, before weights are loaded; in a job without a world, until it is built."""
    words = ["world"] if world else []
    done = subprocess.run([sys.executable, "-c", JOB, *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", str(world), "True"]


WORLDS = """
import gc, os, weakref
import torch.distributed as dist
from phalanx.config.run import ParallelConfig
from phalanx.run.world import start_world, stop_world

groups = []
for _ in range(2):
    start_world(ParallelConfig())
    groups.append(weakref.ref(dist.group.WORLD))
    stop_world()
    gc.collect()
print(*(group() is not None for group in groups), flush=True)
if os.fork() == 0:
    start_world(ParallelConfig())
    stop_world()
    print("forked", flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.full
def test_process_groups_are_freed_when_the_next_world_is_left() -> None:
    """And never by a daemon thread that still refers to the job while the interpreter ends, which would abort it."""
    done = subprocess.run([sys.executable, "-c", WORLDS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "forked"]
