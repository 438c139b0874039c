"""Whether torch.compile works on the machines of a job: it needs a C++ compiler, on GPUs also Triton.

Ranks that compile and ranks that do not would round differently, so all ranks of a job do the same.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import cpp_builder

from phalanx.config.messages import reason
from phalanx.config.run import ModelConfig
from phalanx.distributed.collectives import all_gather_object
from phalanx.distributed.mesh import World

log = logging.getLogger(__name__)

C = TypeVar("C", bound=ModelConfig)


def compiles(world: World, key: str, trial: Callable[[torch.device], object]) -> bool:
    """Whether `trial`, which compiles something for the device and runs it, works on all ranks, which call this
    together. If not, one line says so.

    key: what goes uncompiled then, for the line.
    """
    # first the compiler, because a cache may have what is tried, but not what comes later
    for check in (cpp_builder.get_cpp_compiler, partial(trial, world.device)):
        problem = _problem(check)
        problems = all_gather_object(problem) if dist.is_initialized() else [problem]
        for rank, text in enumerate(problems):
            if text:
                if world.lead:
                    line = "%s: all ranks go on without, because torch.compile fails on rank %d: %s"
                    log.warning(line, key, rank, text)
                return False
    return True


def where_it_works(config: C, world: World) -> C:
    """`config` without `compile` if that does not work on all ranks."""
    if not config.compile or compiles(world, "model.compile", _one_operator):
        return config
    return replace(config, compile=False)


def _problem(check: Callable[[], object]) -> str:
    """Why `check` fails here; empty if it works."""
    try:
        check()
    except (dist.DistError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # compilers and their wrappers raise any type
        return reason(error)
    return ""


def _one_operator(device: torch.device) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.sin(x) * 2

    torch.compile(function, fullgraph=True)(torch.ones(64, device=device, requires_grad=True)).sum().backward()
