"""The pause of garbage collection during imports."""

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
