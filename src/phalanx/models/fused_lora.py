"""A linear layer and its LoRA in three products, with nothing between them that goes over the output once more.

peft adds up `base + up(down(x)) * scale` in five kernels, three of which read and write tensors of the output's size.
Here the last product is added onto the base's output where it lies. Passes with and without a gradient compute by the
same operations; against peft, a layer in bfloat16 rounds once where peft rounds three times.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from phalanx.models.linear import OneDnnLinear, product


def fuse(module: nn.Module) -> None:
    """Let all linear layers in `module` that have a LoRA of peft's compute it fused, in place."""
    for part in module.modules():
        if type(part) is Linear:
            # not a new module in its place: parameters, hooks and names in checkpoints stay
            part.__class__ = FusedLinear


class FusedLinear(Linear):
    """peft's LoRA of a linear layer, fused where it is the plain one."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] -> [..., out]; by peft where more is asked for than `_is_plain` knows."""
        if self.disable_adapters or self.merged or args or kwargs or not self._is_plain(x):
            return super().forward(x, *args, **kwargs)
        [name] = self.active_adapters
        base, down, up = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        onednn = isinstance(base, OneDnnLinear)
        out: Tensor = _LoraLinear.apply(x, base.weight, base.bias, down, up, self.scaling[name], onednn)
        return out

    def _is_plain(self, x: Tensor) -> bool:
        """One adapter, in the dtype of a frozen base and of `x`, without dropout, biases or a variant such as DoRA."""
        names = self.active_adapters
        if len(names) != 1 or names[0] not in self.lora_A or self.lora_variant or self.fan_in_fan_out:
            return False
        base, name = self.base_layer, names[0]
        if type(base) not in (nn.Linear, OneDnnLinear) or base.weight.requires_grad or self.lora_bias[name]:
            return False
        if not isinstance(self.lora_dropout[name], nn.Identity):
            return False
        return bool(x.dtype == base.weight.dtype == self.lora_A[name].weight.dtype == self.lora_B[name].weight.dtype)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float, onednn: bool
    ) -> Tensor:
        # in the shape that it has: torch rounds some shapes otherwise, and the base alone is the reference
        out = product(x, weight, bias, onednn=onednn)
        hidden = product(_rows(x), down, None, onednn=onednn)
        ctx.save_for_backward(x, weight, down, up, hidden)
        ctx.scale, ctx.onednn = scale, onednn
        # in place: cuBLAS would copy the base's output first
        out.view(-1, out.shape[-1]).addmm_(hidden, up.t(), alpha=scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, hidden = ctx.saved_tensors
        needs_x, _, _, needs_down, needs_up, *_ = ctx.needs_input_grad
        onednn, grad = ctx.onednn, _rows(grad)
        of_x = of_down = of_up = None
        # scaled where there are `rank` columns, not where there are as many as the output has
        of_hidden = product(grad, up.t(), None, onednn=onednn).mul_(ctx.scale)
        if needs_x:
            of_x = product(grad, weight.t(), None, onednn=onednn).addmm_(of_hidden, down).view_as(x)
        if needs_down:
            of_down = product(of_hidden.t(), _rows(x).t(), None, onednn=onednn)
        if needs_up:
            of_up = product(grad.t(), hidden.t(), None, onednn=onednn).mul_(ctx.scale)
        return of_x, None, None, of_down, of_up, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., D] -> [N, D]."""
    return x.reshape(-1, x.shape[-1])
