"""Counts the memory of a job's phases while they run on tensors of torch's meta device: shapes without memory."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

META = torch.device("meta")
aten = torch.ops.aten
_KEEP_TRUE = (aten.index.Tensor, aten.ne.Scalar, aten.constant_pad_nd.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)  # accept indices on the host


@dataclass
class Phase:
    """Bytes on the device before a phase, and at its peak with the gradients and the gathered weights among them.

    passes: forward passes of the model. rounds: groups of passes in which FSDP may keep gathered weights. aside: other
    weights took the place of the policy's, which were copied.
    """

    name: str
    before: int = 0
    peak: int = 0
    gradients: int = 0
    gathered: int = 0
    passes: int = 0
    rounds: int = 0
    aside: bool = False

    def reach(self, live: int, gradients: int, gathered: int) -> None:
        """Note the present bytes, with those of gradients and of gathered weights."""
        if live > self.peak:
            self.peak, self.gradients, self.gathered = live, gradients, gathered


@dataclass(frozen=True)
class Kind:
    """A kind of phase, by its name in the ledger.

    passes: the purpose of its forward passes, in words. message: the name of weights that are gathered for them. draws:
    samples are drawn; decodes: they become images or texts; trains: they are trained on. optional: without a pass, the
    phase is empty.
    """

    name: str
    passes: str = ""
    message: str = ""
    draws: bool = False
    decodes: bool = False
    trains: bool = False
    optional: bool = False


_SCORES = "weights, gathered to score samples"
_BEFORE = (
    Kind("rollout: sample", "to sample", "weights, gathered to sample", draws=True, optional=True),
    Kind("rollout: decode", decodes=True),
    Kind("rollout: log-probs", "of old log-probs", _SCORES),
    Kind("validation: sample", draws=True, optional=True),
    Kind("validation: decode", decodes=True),
    Kind("judge"),
    Kind("rescore", "to score samples again", _SCORES, optional=True),
    Kind("reference", "of the reference", "weights, gathered for the reference", trains=True),
)
_AFTER = (Kind("encode images"), Kind("update", "to train", "weights, gathered to train", trains=True))


def kinds(teachers: Iterable[str]) -> list[Kind]:
    """The kinds of phases in the order of a step, with a phase for each of these teachers."""
    of_teachers = [Kind(name, f"of the {name}", f"weights of the {name}, gathered") for name in teachers]
    return [*_BEFORE, *of_teachers, *_AFTER]


class Ledger(TorchDispatchMode):
    """Bytes of the meta tensors that are made while it is active: `live` now, and at the peak of each phase.

    Copies to the CPU stay meta tensors that do not count, and so do results of only such tensors. If the host asks for
    numbers, it receives those that it sent itself, masks that are all true (except those of `mark`), and zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.gradients = self.gathered = 0
        self.phase = Phase("")  # that runs now
        self.phases: dict[str, Phase] = {}
        self._counting = True
        self._sizes: dict[int, int] = {}  # counted bytes of storages
        self._on_host: set[int] = set()
        self._numbers: dict[int, Tensor] = {}  # by the storage of their copy on the device
        self._true: dict[int, int] = {}  # elements of masks that are true, by their storage
        self._known: dict[tuple[str, Hashable], tuple[Phase, torch.Size, torch.dtype, bool]] = {}
        self._results: dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}  # of operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 0
        moves = func is aten._to_copy.default and kwargs.get("device") is not None
        if moves and args[0].is_meta and kwargs["device"].type == "cpu":
            return self._to_host(args[0], kwargs)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # the host's tensors are never written to, and take no memory
        if func not in _INDEXED and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(args)):
            args = tree_map_only(Tensor, _on_device, args)
        true: int | None = None
        if func in _KEEP_TRUE and args[0].is_meta:
            # a mask that is indexed by another mask keeps all of its true elements
            true = self._true.get(args[0].untyped_storage()._cdata)
        if func is aten.index.Tensor and args[0].is_meta:
            args = args[0], self._replace_masks(args[1])
        elif func is aten.index.Tensor:
            args = args[0], [self._to_host(i, kwargs) if i is not None and i.is_meta else i for i in args[1]]
        elif func is aten.nonzero.default and args[0].is_meta:
            places = [self._count_true(args[0]), args[0].dim()]
            func, args, kwargs = aten.new_empty.default, (args[0], places), {"dtype": torch.long}
        elif func is aten.bincount.default and args[0].is_meta:
            func, args, kwargs = aten.new_empty.default, (args[0], [args[2]]), {}
        elif func is aten._grouped_mm.default:  # torch supports only bfloat16 on the meta device
            # rows [N, K] by their group's matrix [G, K, M], or columns [K, N] by rows [N, M] in each of G groups
            first, second, ends = args[:3]
            shape = [*([len(ends)] if second.dim() == 2 else []), first.shape[0], second.shape[-1]]
            func, args, kwargs = aten.new_empty.default, (first, shape), {}
        elif func is aten.masked_scatter_backward.default:  # torch's own implementation needs the values of the mask
            func, args = aten.new_empty.default, (args[0], args[2])
        # results that are views of an argument, or the argument itself, take no memory
        new = any(returned.alias_info is None for returned in func._schema.returns)
        out = self._compute_result(func, args, kwargs) if new else func(*args, **kwargs)
        if new:
            inputs, made = _meta_storages(args), _meta_storages(out)
            on_host = bool(inputs) and all(storage._cdata in self._on_host for storage in inputs)
            for storage in made:
                self._enter_storage(storage, on_host=on_host)
                if true is not None:
                    self._true[storage._cdata] = true
            if moves and made and not args[0].is_meta and not args[0].is_floating_point():
                self._numbers[made[0]._cdata] = args[0]
        return out

    def mark(self, values: Tensor, true: int) -> None:
        """Set how many elements of a mask are true, or how many other values are not 0."""
        self._true[values.untyped_storage()._cdata] = true

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the block as a phase; if it runs again, the larger peak is kept."""
        outer = self.phase
        inner = self.phase = Phase(name, self.live, self.live, self.gradients, self.gathered, aside=outer.aside)
        try:
            yield
        finally:
            self.phase = outer
            if name in self.phases:
                known = self.phases[name]
                larger = inner if inner.peak > known.peak else known
                passes, rounds = known.passes + inner.passes, known.rounds + inner.rounds
                inner = replace(larger, passes=passes, rounds=rounds, aside=known.aside | inner.aside)
            self.phases[name] = inner

    def once(self, key: Hashable, run: Callable[[], Tensor]) -> Tensor:
        """`run()` the first time that a phase has this key; later count as much, and return an empty tensor: equal
        micro-batches take equal memory.
        """
        known, outer = (self.phase.name, key), self.phase
        if known not in self._known:
            inner = self.phase = Phase(outer.name, self.live, self.live, self.gradients, self.gathered)
            out = run()
            self.phase = outer
            outer.reach(inner.peak, inner.gradients, inner.gathered)
            self._known[known] = inner, out.shape, out.dtype, out.requires_grad
            return out
        inner, shape, dtype, requires_grad = self._known[known]
        self.phase.reach(self.live + inner.peak - inner.before, self.gradients, inner.gathered)
        return torch.empty(shape, dtype=dtype, device=META, requires_grad=requires_grad)

    def forget(self, name: str) -> None:
        """Drop a phase, which will run again in another way."""
        del self.phases[name]
        self._known = {key: value for key, value in self._known.items() if key[0] != name}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count tensors that the block makes."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def keep_gradient(self, size: int) -> None:
        """Count a gradient that stays; a negative size frees it."""
        self.gradients += size
        self._add_bytes(size)

    def gather(self, size: int) -> None:
        """Count gathered weights; a negative size frees them."""
        self.gathered += size
        self._add_bytes(size)

    def _replace_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices, with masks replaced by as many numbers as they have true elements."""
        numbered: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                numbered.append(index)
                continue
            numbered += [torch.empty(self._count_true(index), dtype=torch.long, device=META)] * index.dim()
        return numbered

    def _count_true(self, mask: Tensor) -> int:
        """The number of true elements: the marked number, or all; of a part of a mask at most its size."""
        return min(self._true.get(mask.untyped_storage()._cdata, mask.numel()), mask.numel())

    def _compute_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new result. It is remembered for equal inputs, because torch computes many shapes slowly, in Python."""
        key = func, _argument_form(args), _argument_form(tuple(kwargs.items()))
        if key in self._results:
            shape, stride, dtype = self._results[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)
        out = func(*args, **kwargs)
        # an _unsafe_view does not declare that it is a view
        shared = {storage._cdata for storage in _meta_storages(args)}
        if isinstance(out, Tensor) and out.is_meta and out.untyped_storage()._cdata not in shared:
            self._results[key] = out.shape, out.stride(), out.dtype
        return out

    def _to_host(self, tensor: Tensor, kwargs: Any) -> Tensor:
        numbers = self._numbers.get(tensor.untyped_storage()._cdata)
        if numbers is not None:
            return numbers.clone()
        if tensor.dtype is torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool)
        out = torch.empty_like(tensor, dtype=kwargs.get("dtype"))
        self._enter_storage(out.untyped_storage(), on_host=True)
        return out

    def _enter_storage(self, storage: torch.UntypedStorage, *, on_host: bool) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if self._counting and not on_host else 0
        if on_host:
            self._on_host.add(key)
        weakref.finalize(storage, self._leave_storage, key).atexit = False
        self._add_bytes(self._sizes[key])

    def _leave_storage(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._on_host.discard(key)
        self._numbers.pop(key, None)
        self._true.pop(key, None)

    def _add_bytes(self, size: int) -> None:
        self.live += size
        self.phase.reach(self.live, self.gradients, self.gathered)


def _on_device(tensor: Tensor) -> Tensor:
    """A host tensor that meets device tensors, such as a vision tower's numbers of image sizes, as one of these."""
    return tensor if tensor.is_meta or tensor.dim() == 0 else torch.empty_like(tensor, device=META)


def _argument_form(value: Any) -> Hashable:
    """All of an argument that determines the form of a result; 1, 1.0 and True are different."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_argument_form, value))
    return type(value), value


def _meta_storages(tree: Any) -> list[torch.UntypedStorage]:
    """The storages of the meta tensors among arguments or results."""
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_meta]


@contextmanager
def fused_attention() -> Iterator[None]:
    """Have attention keep the tensors that a fused kernel keeps: inputs, output and a number per row.

    On meta tensors torch would take its plain form, with all weights [N, heads, L, L] in memory, unlike on GPUs and
    CPUs. A TorchFunctionMode would not reach the forward passes that checkpointing repeats.
    """

    def fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # each call makes an additive mask
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=attn_mask)[0]

    plain, F.scaled_dot_product_attention = F.scaled_dot_product_attention, fused  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def nbytes(*modules: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    total = 0
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            total += tensor.nbytes
    return total
