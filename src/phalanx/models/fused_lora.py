"""Fused LoRA: a linear layer and its LoRA in three matrix products without further elementwise passes, or in one.

peft computes `base + up(down(x)) * scale` in five kernels, three of which read and write tensors of the output's size.
Here the last product accumulates into the base's output in place. In bfloat16, the output is rounded once where peft
rounds three times.

In float32, the LoRA can be merged into the weight, W + scale * up down, without being lost in rounding, as it would be
in bfloat16. If the input has enough rows, each pass computes this sum, which then costs little, and a single product.

Passes with and without gradients use the same operations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from phalanx.models.linear import PLAIN, Nf4Linear, OneDnnLinear, dense, product
from phalanx.models.meeting import adapters_now

# Merge if the input's products with the LoRA's two matrices cost at least this many times the product of the two.
MIN_GAIN = 4


def fuse(module: nn.Module) -> None:
    """Let all linear layers in `module` with peft's LoRA compute it fused, in place."""
    for part in module.modules():
        if type(part) is Linear:
            # change the class instead of replacing the module, to keep parameters, hooks and names in checkpoints
            part.__class__ = FusedLinear


class FusedLinear(Linear):
    """peft's linear layer with a LoRA, fused if it is a plain LoRA. beside: the layer with each LoRA of its base."""

    beside: "Sequence[FusedLinear]" = ()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] -> [..., out]; computed by peft in cases that `_is_plain` excludes."""
        rows = adapters_now()
        if not rows or self.disable_adapters or not self.beside:
            return self._of_one(self.base_layer, x, *args, **kwargs)
        # rows of the batch are outermost, whatever else has been folded into the first dim
        layers = [self.beside[adapter] for adapter in rows]
        equal = len(set(rows.values())) == 1 and len(x) % len(rows) == 0
        if x.dtype != torch.float32 and equal and all(layer._is_plain(x) for layer in layers) and not args:
            return self._grouped_output(x, layers)
        # in float32 by the same products as alone, for the same bits
        each, rest = divmod(len(x), sum(rows.values()))
        assert rest == 0, f"the first dim, {len(x)}, is not that of {sum(rows.values())} rows of the batch"
        parts = x.split([each * count for count in rows.values()])
        base = self.base_layer  # FSDP has gathered it, and those of the other layers not
        return torch.cat([layer._of_one(base, *pair, **kwargs) for layer, *pair in zip(layers, parts, strict=True)])

    def _grouped_output(self, x: Tensor, layers: "Sequence[FusedLinear]") -> Tensor:
        """The output for equally many rows of each of the layers, which share their base."""
        [name] = self.active_adapters
        base, downs, ups = self.base_layer, list[Tensor](), list[Tensor]()
        for layer in layers:
            downs.append(layer.lora_A[name].weight)
            ups.append(layer.lora_B[name].weight)
        out: Tensor = _GroupedLora.apply(
            x, base.bias, self.scaling[name], len(layers), *downs, *ups, *_stored_tensors(base)
        )
        return out

    def _of_one(self, base: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The output with the weights of `base`, which is the base layer or an equal one."""
        if self.disable_adapters or self.merged or args or kwargs or not self._is_plain(x):
            kept = self._modules["base_layer"]
            self.base_layer = base
            try:
                return super().forward(x, *args, **kwargs)
            finally:
                self.base_layer = kept
        [name] = self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        fused = _MergedLinear if _should_merge(x, base.out_features, base.in_features) else _LoraLinear
        onednn = base.onednn if isinstance(base, Nf4Linear) else isinstance(base, OneDnnLinear)
        out: Tensor = fused.apply(x, down, up, base.bias, self.scaling[name], onednn, *_stored_tensors(base))
        return out

    def _is_plain(self, x: Tensor) -> bool:
        """Whether there is one adapter with the dtype of the frozen base and `x`, without dropout, bias or variants."""
        names = self.active_adapters
        if len(names) != 1 or names[0] not in self.lora_A or self.lora_variant or self.fan_in_fan_out:
            return False
        base, name = self.base_layer, names[0]
        if type(base) not in (*PLAIN, Nf4Linear) or base.weight.requires_grad or self.lora_bias[name]:
            return False
        if not isinstance(self.lora_dropout[name], nn.Identity):
            return False
        dtype = x.dtype if isinstance(base, Nf4Linear) else base.weight.dtype
        return bool(x.dtype == dtype == self.lora_A[name].weight.dtype == self.lora_B[name].weight.dtype)


def _stored_tensors(base: nn.Linear) -> tuple[Tensor | None, ...]:
    """The tensors of which `dense` makes the weight of a base layer."""
    return base.stored() if isinstance(base, Nf4Linear) else (base.weight, None, None, None)


def _should_merge(x: Tensor, wide: int, narrow: int) -> bool:
    """Whether to merge: in float32, if `x` has enough rows to make that cheaper."""
    if x.dtype != torch.float32:
        return False
    if torch.compiler.is_compiling():
        return True  # one graph for any number of rows
    return x.numel() // narrow * (wide + narrow) >= MIN_GAIN * wide * narrow


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None, scale: float, onednn: bool, *stored: Any
    ) -> Tensor:
        # the backward pass recomputes the merged weight: keeping all of them would be a second copy of the model
        ctx.save_for_backward(x, down, up, *stored)
        ctx.scale, ctx.onednn = scale, onednn
        return product(x, torch.addmm(dense(x.dtype, *stored), up, down, alpha=scale), bias, onednn=onednn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, *stored = ctx.saved_tensors
        scale, onednn = ctx.scale, ctx.onednn
        of_x, grad, rows = None, _flatten_rows(grad), _flatten_rows(x)
        if ctx.needs_input_grad[0]:
            merged = torch.addmm(dense(x.dtype, *stored), up, down, alpha=scale)
            of_x = product(grad, merged.t(), None, onednn=onednn).view_as(x)
        wide, narrow = len(up), down.shape[1]
        if wide * narrow <= 2 * len(down) * (wide + narrow):  # whichever takes fewer FLOPs
            of_sum = product(grad.t(), rows.t(), None, onednn=onednn)
            of_down, of_up = up.t() @ of_sum, of_sum @ down.t()
        else:
            of_hidden = product(grad, up.t(), None, onednn=onednn)
            hidden = product(rows, down, None, onednn=onednn)
            of_down = product(of_hidden.t(), rows.t(), None, onednn=onednn)
            of_up = product(grad.t(), hidden.t(), None, onednn=onednn)
        return of_x, of_down.mul_(scale), of_up.mul_(scale), *[None] * 7


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None, scale: float, onednn: bool, *stored: Any
    ) -> Tensor:
        # not flattened: torch rounds some shapes differently, and the base layer without a LoRA is the reference
        out = product(x, dense(x.dtype, *stored), bias, onednn=onednn)
        hidden = product(_flatten_rows(x), down, None, onednn=onednn)
        ctx.save_for_backward(x, down, up, hidden, *stored)
        ctx.scale, ctx.onednn = scale, onednn
        # in place, because cuBLAS would otherwise copy the base's output first
        out.view(-1, out.shape[-1]).addmm_(hidden, up.t(), alpha=scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, hidden, *stored = ctx.saved_tensors
        needs_x, needs_down, needs_up, *_ = ctx.needs_input_grad
        onednn, grad = ctx.onednn, _flatten_rows(grad)
        of_x = of_down = of_up = None
        # scale this product, which has only `rank` columns, instead of one with as many as the output
        of_hidden = product(grad, up.t(), None, onednn=onednn).mul_(ctx.scale)
        if needs_x:
            whole = dense(x.dtype, *stored)
            of_x = product(grad, whole.t(), None, onednn=onednn).addmm_(of_hidden, down).view_as(x)
        if needs_down:
            of_down = product(of_hidden.t(), _flatten_rows(x).t(), None, onednn=onednn)
        if needs_up:
            of_up = product(grad.t(), hidden.t(), None, onednn=onednn).mul_(ctx.scale)
        return of_x, of_down, of_up, *[None] * 7


class _GroupedLora(torch.autograd.Function):
    """One product of all rows with the base, and batched ones, of equally many rows each, with `count` LoRAs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, scale: float, count: int, *tensors: Tensor | None) -> Tensor:
        pairs: Any = tensors[: 2 * count]
        stored: Any = tensors[2 * count :]
        down, up = torch.stack(pairs[:count]), torch.stack(pairs[count:])  # [K, rank, in], [K, out, rank]
        out = product(x, dense(x.dtype, *stored), bias, onednn=False)
        hidden = x.reshape(count, -1, x.shape[-1]) @ down.mT
        out.view(count, -1, out.shape[-1]).baddbmm_(hidden, up.mT, alpha=scale)
        ctx.save_for_backward(x, down, up, hidden, *stored)
        ctx.scale, ctx.count = scale, count
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, hidden, *stored = ctx.saved_tensors
        grads, rows, of_x = grad.reshape(ctx.count, -1, grad.shape[-1]), x.reshape(ctx.count, -1, x.shape[-1]), None
        of_hidden = (grads @ up).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            whole = product(grad, dense(x.dtype, *stored).t(), None, onednn=False)
            of_x = whole.view_as(rows).baddbmm_(of_hidden, down).view_as(x)
        of_down, of_up = of_hidden.mT @ rows, (grads.mT @ hidden).mul_(ctx.scale)
        return of_x, *[None] * 3, *of_down.unbind(), *of_up.unbind(), *[None] * len(stored)


def _flatten_rows(x: Tensor) -> Tensor:
    """[..., D] -> [N, D]."""
    return x.reshape(-1, x.shape[-1])
