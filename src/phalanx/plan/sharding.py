"""Tensors that FSDP2 makes in the passes of an update: gathered units, and gradients on their way to their parts.

FSDP2 gathers a unit into a flat message, copies that out into the unit's parameters, and frees both at certain times.
The hooks here tell a ledger of the same bytes at the same times, since peaks of gathered weights, gradients and
activations do not coincide.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.config.run import ParallelConfig
from phalanx.plan.layout import REDUCED, Layout, Weight
from phalanx.plan.ledger import Ledger

ROOT = -1  # the number of the unit that holds the parameters of no block


class ShardedUpdate:
    """The units of a model whose weights are sharded by `layout`, in the phase "update".

    `summed`: gradients are added up over several passes, whole and in float32. The one pass that runs begins with all
    of these: it stands for the last one, which reduces them, or where there are more than two for one in the `middle`.
    """

    def __init__(
        self, module: nn.Module, blocks: list[nn.Module], layout: Layout, ledger: Ledger, parallel: ParallelConfig
    ) -> None:
        self.ledger, self.layout, self.reshards = ledger, layout, parallel.reshard_after_forward
        self.summed, self.middle = False, True
        self._sizes, self._reduced = layout.units(), layout.by_unit(layout.trained)
        self._weights: dict[int, list[Weight]] = {}
        for w in layout.trained:
            if w.sharded and not w.apart:
                self._weights.setdefault(w.unit, []).append(w)
        self._gathered: dict[str, int] = {}
        self._waiting: dict[int, int] = {}  # parameters of a unit that have no gradient yet in this backward pass
        self._computed: dict[int, int] = {}  # bytes of a unit's gradients that are not reduced yet
        self._backward = False
        self._unit: int | None = None  # the unit whose backward pass runs
        self._message = 0  # of the last reduction, which the next one frees
        for number, unit in [*enumerate(blocks), (ROOT, module)]:
            unit.register_forward_pre_hook(partial(self._enter, number))
            unit.register_forward_hook(partial(self._leave, number))

    def begin(self) -> None:
        """Before a pass: nothing is gathered. Gradients that are summed are there as a whole."""
        self.end()
        if self.summed:
            self.ledger.keep_gradient(sum(self.layout.gradient(w, summed=True) for w in self.layout.trained))

    def add_gradient(self, w: Weight) -> None:
        """A gradient that autograd has computed, as FSDP2 keeps it until the backward pass of its unit ends."""
        if not w.sharded or w.apart:
            if not self.summed:
                self.ledger.keep_gradient(0 if w.away else self.layout.gradient(w))
            return
        size = w.numel * self.layout.dtype.itemsize
        self.ledger.keep_gradient(size)
        self._computed[w.unit] = self._computed.get(w.unit, 0) + size
        self._waiting[w.unit] -= 1
        if self._waiting[w.unit] == 0:
            self._reduce(w.unit)

    def _enter(self, number: int, module: nn.Module, args: Any) -> None:
        if self.ledger.phase.name != "update" or (self._backward and number != ROOT):  # or recomputed by checkpointing
            return
        if number == ROOT:
            self._free()
            self._waiting = {unit: len(weights) for unit, weights in self._weights.items()}
        size = self._sizes[number]
        self._hold("next message", size)  # while the message of the unit before is there
        self._hold("message", 0)
        self._hold(str(number), size)
        self._hold("next message", 0)
        self._hold("message", size)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if self.ledger.phase.name != "update" or (self._backward and number != ROOT):
            return
        if number == ROOT:
            self._hold("message", 0)
            self._backward = True
        elif self.reshards:
            self._hold(str(number), 0)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._enter_backward, number))

    def _enter_backward(self, number: int, gradient: Tensor) -> None:
        if number == self._unit:
            return
        if self._unit is not None and self._unit != ROOT:
            self._reduce(self._unit)
        self._unit = number
        self._hold(str(number), self._sizes[number])  # copied out of the message
        before = len(self._sizes) - 2 if number == ROOT else number - 1
        self._hold("message", 0)
        if self.reshards and before >= 0:
            self._hold("message", self._sizes[before])

    def _reduce(self, number: int) -> None:
        """The end of a unit's backward pass: its weights are freed, and its gradients reduced to this rank's parts."""
        self._hold(str(number), 0)
        if number not in self._computed:
            return
        keep, weights = self.ledger.keep_gradient, self._weights[number]
        computed = self._computed.pop(number)
        if self.summed:
            keep(-computed)
            if self.middle:  # added to those that are there as a whole
                return
            computed = sum(w.numel for w in weights) * REDUCED
        keep(-self._message)
        self._message = self._reduced[number] * REDUCED
        keep(self._message)  # filled from the gradients, which are there until then
        keep(-computed)
        keep(sum(w.part for w in weights) * REDUCED)
        keep(sum(self.layout.gradient(w) * (not w.away) - w.part * REDUCED for w in weights))

    def _hold(self, name: str, size: int) -> None:
        """Let `size` gathered bytes be there by this name, in place of those before."""
        before = self._gathered.get(name, 0)
        self._gathered[name] = size
        self.ledger.gather(size - before)

    def end(self) -> None:
        """After an update: no gradients, and nothing is gathered."""
        self._free()
        self.ledger.drop_gradients()
        self._message = 0
        self._computed.clear()

    def _free(self) -> None:
        for name in self._gathered:
            self._hold(name, 0)
        self._backward, self._unit = False, None
