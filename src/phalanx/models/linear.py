"""Linear layers on CPUs: by the faster library, and without a separate pass for the bias where they are compiled.

torch hands float32 matrix products to MKL, which on processors that are not Intel's keeps to AVX2
even where they have AVX-512. oneDNN, which torch brings as well and uses for convolutions and
bfloat16, does not: on one core of an AMD EPYC with AVX-512 it does 240 GFLOP/s instead of 105
(docs/performance.md).
"""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

# The choice: rounding differs in the last bits, so that it depends on no clock and is one for all ranks of a job.
TORCH, ONEDNN = "torch", "onednn"
MIN_ROWS = 64  # fewer are MKL's: oneDNN takes about 10 us to find its kernel


def preferred(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The library of float32 linear layers that suits this processor: ONEDNN where torch has it beside MKL, for AVX-512
    on a processor that is not Intel's, else TORCH, torch's default. By oneDNN products were measured to be 0.7 to 1.1
    times as fast without AVX-512, and 2.3 times with it.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return TORCH
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not cpuinfo.is_file():
        return TORCH
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text(), re.MULTILINE)
    return ONEDNN if vendor is not None and vendor[1] != "GenuineIntel" else TORCH


def use_onednn(module: nn.Module) -> None:
    """Let all float32 linear layers in `module` compute by oneDNN, in place. Raises ValueError where torch lacks it."""
    if not torch.backends.mkldnn.is_available():
        raise ValueError("model.cpu_linear: onednn is no part of this torch; expected torch, or null")
    _count_operations()
    _make(OneDnnLinear, module)


def unfuse_biases(module: nn.Module) -> None:
    """Let all linear layers in `module` leave their bias to the compiler where it compiles for a CPU, in place."""
    _make(UnfusedLinear, module)


def _make(kind: type[nn.Linear], module: nn.Module) -> None:
    for part in module.modules():
        if type(part) is nn.Linear:
            # not a new module in its place: parameters, hooks and names in checkpoints stay
            part.__class__ = kind


class UnfusedLinear(nn.Linear):
    """nn.Linear, see `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return product(input, self.weight, self.bias, onednn=False)


class OneDnnLinear(nn.Linear):
    """nn.Linear by oneDNN, in both passes, where input and weight are float32 on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not _takes(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return _product(input, self.weight, self.bias)
        # the operation has no derivative in torch
        return _Linear.apply(input, self.weight, self.bias)


def product(input: Tensor, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> Tensor:
    """[..., in] -> [..., out] as a layer computes it, without a derivative where it is oneDNN that does."""
    if onednn and _takes(input, weight):
        return _product(input, weight, bias)
    if bias is not None and input.device.type == "cpu" and torch.compiler.is_compiling():
        # torch would first copy the bias to every row of the output; the compiler adds it in what comes next
        return F.linear(input, weight) + bias
    return F.linear(input, weight, bias)


def _takes(input: Tensor, weight: Tensor) -> bool:
    if not (input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32):
        return False
    if input.numel() == 0:
        return False  # oneDNN knows no empty products
    # one graph is for any number of rows
    return torch.compiler.is_compiling() or input.numel() >= MIN_ROWS * weight.shape[1]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # only the weight's gradient needs the input: a frozen layer under a LoRA has none
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        of_input = of_weight = of_bias = None
        if needs_input:
            of_input = _product(grad, weight.t(), None)
        if needs_weight:
            of_weight = _product(rows.t(), input.reshape(-1, input.shape[-1]).t(), None)
        if needs_bias:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias


@cache
def _count_operations() -> None:
    """Tell torch's counter of operations of a product that it does not know by itself."""

    def flops(input: torch.Size, weight: torch.Size, *args: Any, **kwargs: Any) -> int:
        return 2 * math.prod(input) * weight[0]

    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(flops)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        return _opaque_product(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@torch.library.custom_op("phalanx::onednn_linear", mutates_args=())
def _opaque_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The compiler's own code for the operation takes only weights that never change."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@_opaque_product.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))
