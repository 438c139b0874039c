"""Whether something works on the machines of a job, such as torch.compile, which needs a C++ compiler on CPUs and
Triton on GPUs.

Ranks that compute in different ways would round differently, so all ranks of a job do the same.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import cpp_builder

from phalanx.config.messages import reason
from phalanx.config.section import copy_with
from phalanx.config.trained_model import ModelConfig
from phalanx.distributed.collectives import all_gather_object
from phalanx.distributed.mesh import World

log = logging.getLogger(__name__)

C = TypeVar("C", bound=ModelConfig)


def works(world: World, line: str, *checks: Callable[[], object]) -> bool:
    """Whether no check raises an error on any rank; all ranks call this together. Otherwise the lead logs `line`, which
    says what all ranks do instead, with the rank and the reason.
    """
    for check in checks:
        problem = _find_problem(check)
        problems = all_gather_object(problem) if dist.is_initialized() else [problem]
        for rank, text in enumerate(problems):
            if text:
                if world.lead:
                    log.warning("%s on rank %d: %s", line, rank, text)
                return False
    return True


def compiles(world: World, key: str, trial: Callable[[torch.device], object]) -> bool:
    """Whether `trial`, which compiles something for the device and runs it, works on all ranks; see `works`.

    key: what goes uncompiled otherwise, for the line.
    """
    line = f"{key}: all ranks go on without, because torch.compile fails"
    checks: list[Callable[[], object]] = [partial(trial, world.device)]
    if (
        world.device.type == "cpu"
    ):  # first the compiler, because a cache may have what is tried, but not what comes later
        checks.insert(0, cpp_builder.get_cpp_compiler)
    return works(world, line, *checks)


def where_it_works(config: C, world: World) -> C:
    """`config` without `compile` if that does not work on all ranks."""
    if not config.compile or compiles(world, f"{config:compile}", _one_operator):
        return config
    return copy_with(config, compile=False)


def _find_problem(check: Callable[[], object]) -> str:
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
