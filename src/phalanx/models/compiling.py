"""torch.compile of a model's blocks (`model.compile`), and whether that or something else works on the machines of a
job: torch.compile needs a C++ compiler on CPUs and Triton on GPUs.

Ranks that compute in different ways would round differently, so all ranks of a job do the same. Each kind of block is
compiled once, for passes with and without gradients: torch compiles a separate graph for passes without gradients, with
other fusions that may round differently, so that the log-probabilities of rollout and replay would differ. Here a
rollout runs the forward graph of training, and frees what it saves for a backward pass at the end of each block.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import cpp_builder
from torch.fx.experimental import _config as shapes
from torch.utils._pytree import tree_map_only

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


def any_shape() -> None:
    """Settings of torch.compile for graphs that serve all shapes."""
    # Duck shaping assumes that two sizes that are equal at compile time are always equal. When they differ later, a
    # second graph is compiled that also fits the first case, and which of the two runs depends on their order.
    shapes.use_duck_shape = False
    # graphs of one class: the first block and others, with and without a mask, LoRA on and off, a single row
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)


class OneGraph:
    """Compiled blocks; a call of a function that runs them uses the same graphs in both modes."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._cutting = False
        any_shape()
        for block in blocks:
            # Only the forward: FSDP's hooks, which gather its weights, stay outside the graph. Equal blocks share one
            # compilation, for all lengths of texts.
            block.forward = self._cut_graph(torch.compile(block.forward, fullgraph=True, dynamic=True))

    def _cut_graph(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a block's forward to detach its outputs from its autograd graph if no backward pass follows."""

        @wraps(forward)
        def cut(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if not self._cutting:
                return out
            return tree_map_only(Tensor, _leaf_copy, out)

        return cut

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; without gradients, the tensors it returns are detached."""
        if torch.is_grad_enabled():
            return function(*args)
        self._cutting = True
        try:
            with torch.enable_grad():
                out = function(*args)
        finally:
            self._cutting = False
        return tree_map_only(Tensor, Tensor.detach, out)


def _leaf_copy(tensor: Tensor) -> Tensor:
    """A copy without history that requires a gradient as in training, so that the next block has the same graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
