"""CUDA graphs of decoding steps: the host launches a step at once, instead of each of its hundreds of kernels."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

LEAST = 256  # columns of the smallest graph; larger ones have up to a quarter more than are in use
# operators whose result has a size that depends on values, or is a number
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}

# of the number of columns that it sees, which is a constant of a graph, inputs [3, n, Q] and numbers [n]
Step = Callable[..., Tensor]


class CannotCapture(RuntimeError):
    """A step depends on the host."""


class _OnDevice(TorchDispatchMode):
    """Within this context, an operator for which the host would wait, or which reads the host's memory, is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **kwargs or {}), func._schema.name.rpartition("::")[2]
        used = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        masks = False
        if name.startswith(("index", "_index")):
            masks = any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))
        if name in WAITING or masks or any(leaf.device.type != "cuda" and leaf.dim() for leaf in used):
            raise CannotCapture(f"{name} waits for the host")
        return out


class StepGraphs:
    """A step whose graphs, one for each shape, are made at its first call, and replayed at the others.

    A graph reads and writes the memory that the step used when it was made, so graphs must not outlive that: `forget`.
    A step that cannot be captured runs as it is, from then on.
    """

    def __init__(self, step: Step, device: torch.device, root: Any) -> None:
        """root: what the step calls, which may be sharded."""
        self._step, self._device, self._root, self._checked, self._works = step, device, root, False, True
        self.forget()

    def forget(self) -> None:
        """Free all graphs."""
        self._graphs: dict[tuple[int, int], tuple[Any, list[Tensor], Tensor]] = {}
        self._pool: Any = None

    def __call__(self, inputs: Tensor, numbers: Tensor, width: int, most: int) -> Tensor:
        """The step of inputs on the host, with at least `width` columns, of which there are `most`."""
        if not self._works:
            return self._step(width, *self._moved(inputs, numbers))
        key = len(numbers), min(rounded(width), most)
        if key not in self._graphs:
            moved = self._moved(inputs, numbers)
            first = self._step(key[1], *moved)
            self._graph(moved, key)
            return first
        graph, static, out = self._graphs[key]
        for held, given in zip(static, (inputs, numbers), strict=True):
            held.copy_(given, non_blocking=True)
        graph.replay()
        return out

    def _moved(self, *given: Tensor) -> list[Tensor]:
        return [tensor.to(self._device, non_blocking=True) for tensor in given]

    def _graph(self, static: list[Tensor], key: tuple[int, int]) -> None:
        """Make the graph of a step that has just run, which a second time changes nothing."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(side):
                if not self._checked:  # a capture that fails would leave the allocator in disorder
                    with _OnDevice():
                        self._step(key[1], *static)
                    self._checked = True
                if isinstance(self._root, FSDPModule):
                    # otherwise its streams wait for this one at each pass, and would become parts of the graph
                    self._root.set_post_optim_event(side.record_event())
                graph = torch.cuda.CUDAGraph()
                # only of this thread: others may use the device for rewards
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    out = self._step(key[1], *static)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._works = False
            reason = str(error).partition("\n")[0]
            log.info("decoding steps are not captured as CUDA graphs, and are slower: %s", reason)
        else:
            self._pool = graph.pool()
            self._graphs[key] = graph, static, out
        torch.cuda.current_stream(self._device).wait_stream(side)


def rounded(width: int) -> int:
    """The number of columns of the graph that serves `width` of them."""
    size = max(LEAST, 1 << (width - 1).bit_length() >> 3)
    return -(-width // size) * size
