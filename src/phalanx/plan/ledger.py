"""Counts what a job's phases take, while they run on tensors of torch's meta device: shapes without memory."""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
aten = torch.ops.aten


@dataclass
class Phase:
    """Bytes on the device that were there before a phase, and the most that were there meanwhile, with the gradients
    among them; forward `passes` of the model, and `rounds` between which FSDP may keep gathered weights. `aside`: other
    weights took the place of the policy's, which were copied.
    """

    before: int = 0
    peak: int = 0
    gradients: int = 0
    passes: int = 0
    rounds: int = 0
    aside: bool = False

    def reach(self, live: int, gradients: int) -> None:
        """Note that there are so many bytes now, and so many of them gradients."""
        if live > self.peak:
            self.peak, self.gradients = live, gradients


class Ledger(TorchDispatchMode):
    """Bytes of the meta tensors that are made while it is active: `live` now, and the most of each phase.

    What goes to the CPU stays a meta tensor that does not count, and so does what is computed of such tensors alone.
    Numbers that the host asks for: those that it sent there itself come back, a mask is all true, others are zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.gradients = 0
        self.phase, self.name = Phase(), ""  # the one that runs
        self.phases: dict[str, Phase] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}  # of storages, as far as they count
        self._on_host: set[int] = set()
        self._counting = True
        self._numbers: dict[int, Tensor] = {}  # by the storage of their copy on the device
        self._known: dict[Hashable, tuple[int, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 0
        moves = func is aten._to_copy.default and kwargs.get("device") is not None
        if moves and args[0].is_meta and kwargs["device"].type == "cpu":
            return self._to_host(args[0], kwargs)
        out = func(*args, **kwargs)
        if _makes_tensors(func):
            made = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_meta]
            away = bool(self._on_host) and self._of_host_alone(args)
            for storage in made:
                self._enter(storage, on_host=away)
            if moves and made and not args[0].is_meta and not args[0].is_floating_point():
                self._numbers[made[0]._cdata] = args[0]
        return out

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """The block as a phase, or again as one: then what was largest is kept."""
        outer, self.name = (self.phase, self.name), name
        self.phase = Phase(self.live, self.live, self.gradients, aside=self.phase.aside)
        try:
            yield
        finally:
            inner = self.phase
            self.phase, self.name = outer
            known = self.phases.setdefault(name, inner)
            if known is not inner:
                if inner.peak > known.peak:
                    known.before, known.peak, known.gradients = inner.before, inner.peak, inner.gradients
                known.passes, known.rounds = known.passes + inner.passes, known.rounds + inner.rounds
                known.aside |= inner.aside

    def once(self, key: Hashable, run: Callable[[], Tensor]) -> Tensor:
        """`run()` the first time that a phase has this key. Later it takes as much, and an empty tensor is returned:
        what a micro-batch takes does not change from one to the next.
        """
        key = (self.name, key)
        if key in self._known:
            taken, like = self._known[key]
            self.phase.reach(self.live + taken, self.gradients)
            return torch.empty_like(like).requires_grad_(like.requires_grad)
        outer, self.phase = self.phase, Phase(self.live, self.live)
        out = run()
        inner, self.phase = self.phase, outer
        outer.reach(inner.peak, self.gradients)
        with self.uncounted():
            self._known[key] = inner.peak - inner.before, torch.empty_like(out).requires_grad_(out.requires_grad)
        return out

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the block makes does not count."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def keep_gradient(self, size: int) -> None:
        """Enter a gradient that stays."""
        self.gradients += size
        self._add(size)

    def drop_gradients(self) -> None:
        """After an optimizer step."""
        self.live, self.gradients = self.live - self.gradients, 0

    def _to_host(self, tensor: Tensor, kwargs: Any) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key in self._numbers:
            return self._numbers[key].clone()
        if tensor.dtype is torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool)
        out = torch.empty_like(tensor, dtype=kwargs.get("dtype"))
        self._enter(out.untyped_storage(), on_host=True)
        return out

    def _of_host_alone(self, args: Any) -> bool:
        inputs = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_meta]
        return bool(inputs) and all(t.untyped_storage()._cdata in self._on_host for t in inputs)

    def _enter(self, storage: torch.UntypedStorage, *, on_host: bool) -> None:
        key = storage._cdata
        if key in self._storages:
            return

        def leave(_: Any) -> None:
            del self._storages[key]
            self.live -= self._sizes.pop(key)
            self._on_host.discard(key)
            self._numbers.pop(key, None)

        self._storages[key] = weakref.ref(storage, leave)
        self._sizes[key] = storage.nbytes() if self._counting and not on_host else 0
        if on_host:
            self._on_host.add(key)
        self._add(self._sizes[key])

    def _add(self, size: int) -> None:
        self.live += size
        self.phase.reach(self.live, self.gradients)


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether an operator's result is new, rather than a view of an argument or the argument itself."""
    return any(returned.alias_info is None for returned in func._schema.returns)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention keeps what a fused kernel keeps: inputs, output and a number a row.

    On meta tensors torch would take its plain form, with all weights [N, heads, L, L] in memory, which neither GPUs nor
    CPUs do. A TorchFunctionMode would not reach what checkpointing computes again.
    """

    def fused(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]

    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def nbytes(tensors: Any) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
