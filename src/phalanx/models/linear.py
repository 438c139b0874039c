"""Linear layers: the faster library on CPUs, fused biases in compiled code, and frozen weights in 4 bits.

torch computes float32 matrix products by MKL, which on processors not made by Intel uses AVX2 even if they have
AVX-512. oneDNN, which torch includes and uses for convolutions and bfloat16, uses AVX-512: on one core of an AMD EPYC
it reaches 240 GFLOP/s instead of 105 (docs/measurements.md).

NF4 is QLoRA's format (arXiv 2305.14314): every 64 weights of a row share a float32 scale, their largest magnitude, and
each weight is rounded to the nearest of 16 multiples of it. The values are those of bitsandbytes without double
quantization. Each row includes its scales, so that FSDP may split between any two rows, and a weight has the same bytes
in every layout. A LoRA that a run starts from stays beside the rounded weight, as in QLoRA: the layer computes with
Q(W) + B A.
"""

import logging
import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

# The libraries round differently in the last bits, so the choice never depends on timings, which may differ by rank.
TORCH, ONEDNN = "torch", "onednn"
MIN_ROWS = 64  # smaller products go to MKL, because oneDNN's kernel lookup takes about 10 us

log = logging.getLogger(__name__)

# Quantiles of a normal distribution, with 0 and both ends: the values of NF4 in bitsandbytes and torchao.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BLOCK = 64  # weights that share a scale
NF4_BYTES = NF4_BLOCK // 2 + 4  # size of a block: two codes per byte, and the scale
UP, DOWN = "start_up", "start_down"  # parameters of an Nf4Linear with the LoRA that a run started from


def preferred(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The library for float32 linear layers: ONEDNN, if available, for AVX-512 on processors not by Intel, else TORCH.

    There, oneDNN was measured to be 2.3 times as fast as MKL, and without AVX-512 0.7 to 1.1 times as fast.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return TORCH
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not cpuinfo.is_file():
        return TORCH
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo.read_text(), re.MULTILINE)
    return ONEDNN if vendor is not None and vendor[1] != "GenuineIntel" else TORCH


def use_onednn(module: nn.Module) -> None:
    """Let all float32 linear layers in `module` compute by oneDNN, in place. Raises ValueError if torch lacks it."""
    if not torch.backends.mkldnn.is_available():
        raise ValueError("model.cpu_linear: onednn is not available in this build of torch; expected torch or null")
    _register_flops()
    _convert_layers(OneDnnLinear, module)


def unfuse_biases(module: nn.Module) -> None:
    """In code compiled for CPUs, let all linear layers in `module` add their bias separately, in place."""
    _convert_layers(UnfusedLinear, module)


def quantize_layers(blocks: Iterable[nn.Module], device: torch.device, *, stays: bool) -> None:
    """Quantize the frozen weights of all linear layers in `blocks` to NF4, in place.

    They are quantized on `device`; with `stays` they remain there, else they move back to their own device. Raises
    ValueError if no layer can be quantized.
    """
    quantized = total = 0
    left_out: dict[int, list[str]] = {}
    for block in blocks:
        total += sum(p.numel() for p in block.parameters() if not p.requires_grad)
        for name, part in block.named_modules():
            if type(part) not in PLAIN or part.weight.requires_grad:
                continue
            if not fits(part):
                left_out.setdefault(part.in_features, []).append(name.removesuffix(".base_layer"))
                continue
            quantized += part.weight.numel()
            place = device if stays else part.weight.device
            packed = quantize(part.weight.detach().to(device)).to(place)
            part.onednn = type(part) is OneDnnLinear
            # change the class instead of replacing the module, to keep hooks and names in checkpoints
            part.__class__ = Nf4Linear
            part.weight = nn.Parameter(packed, requires_grad=False)
            part.register_buffer("table", _value_pairs(place), persistent=False)
            for factor in (UP, DOWN):
                part.register_parameter(factor, part._parameters.get(factor))
    widths = ", ".join(f"{names[0]} has {width}" for width, names in left_out.items())
    if not quantized:
        fault = f"the inputs of none are a multiple of {NF4_BLOCK} ({widths})" if left_out else "they have none"
        raise ValueError(f"model.quantization: nf4 is for the linear layers of the model's blocks, and {fault}")
    log.info("nf4: %.2f M of the %.2f M frozen weights in the blocks are in 4 bits", quantized / 1e6, total / 1e6)
    if left_out:
        count = sum(map(len, left_out.values()))
        log.warning("nf4: %d layers keep their dtype; inputs are not multiples of %d: %s", count, NF4_BLOCK, widths)


def fits(layer: nn.Module) -> bool:
    """Whether a frozen layer in one of the model's blocks can be quantized."""
    return isinstance(layer, nn.Linear) and type(layer) in PLAIN and layer.in_features % NF4_BLOCK == 0


def keep_beside(layer: nn.Module, up: Tensor, down: Tensor) -> None:
    """Keep a LoRA, [out, rank] and [rank, in], beside the weight of a layer that `quantize_layers` then rounds."""
    for name, factor in ((UP, up), (DOWN, down)):
        weight: Any = layer.weight
        layer.register_parameter(name, nn.Parameter(factor.to(weight), requires_grad=False))


def quantize(weight: Tensor) -> Tensor:
    """[out, in] -> uint8 [out, in / 64 * 36]: rows of 4-bit codes, the first in the upper bits, then float32 scales."""
    blocks = weight.float().unflatten(1, (-1, NF4_BLOCK))
    scales = blocks.abs().amax(-1)
    values = torch.tensor(NF4, device=weight.device)
    units = blocks / torch.where(scales == 0, 1, scales)[..., None]
    codes = torch.bucketize(units, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(1)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], 1)


def count_weights(parameters: Iterable[Tensor]) -> int:
    """Number of weights in parameters, some of which may be outputs of `quantize`."""
    return sum(p.numel() // NF4_BYTES * NF4_BLOCK if p.dtype is torch.uint8 else p.numel() for p in parameters)


def dense(
    dtype: torch.dtype,
    weight: Tensor,
    table: Tensor | None = None,
    up: Tensor | None = None,
    down: Tensor | None = None,
) -> Tensor:
    """A layer's weight [out, in]; one in NF4, which has a `table`, is dequantized to `dtype`.

    up [out, rank], down [rank, in]: a LoRA beside a weight in NF4. The sum is in float32, and rounded once.
    """
    if table is None:
        return weight
    width = weight.shape[1] // NF4_BYTES * NF4_BLOCK // 2
    scales = weight[:, width:].contiguous().view(torch.float32)
    values = F.embedding(weight[:, :width].int(), table).view(*scales.shape, NF4_BLOCK)
    whole = values.mul_(scales[..., None]).flatten(1)
    if up is not None and down is not None:
        whole.addmm_(up.float(), down.float())
    return whole.to(dtype)


def dequantized(dtype: torch.dtype, weight: Tensor, *beside: Tensor) -> Tensor:
    """A layer's weight [out, in], by its output of `quantize` and by up and down of the LoRA beside it, if any."""
    return dense(dtype, weight, _value_pairs(weight.device), *beside)


def _value_pairs(device: torch.device) -> Tensor:
    """[256, 2]: the two values that each byte of codes stands for."""
    values = torch.tensor(NF4, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


def _convert_layers(kind: type[nn.Linear], module: nn.Module) -> None:
    for part in module.modules():
        if type(part) is nn.Linear:
            # change the class instead of replacing the module, to keep parameters, hooks and names in checkpoints
            part.__class__ = kind


class UnfusedLinear(nn.Linear):
    """nn.Linear that adds the bias as in `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return product(input, self.weight, self.bias, onednn=False)


class OneDnnLinear(nn.Linear):
    """nn.Linear that computes by oneDNN, forward and backward, if input and weight are float32 on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not _is_accepted(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return _linear_product(input, self.weight, self.bias)
        # torch has no derivative for the oneDNN operator
        return _Linear.apply(input, self.weight, self.bias)


class Nf4Linear(nn.Linear):
    """nn.Linear with a frozen weight in the format of `quantize`, its codes' `table`, and the LoRA beside it, if any.

    The forward and the backward pass each dequantize the weight to the input's dtype, and free it after the product.
    """

    table: Tensor
    start_up: Tensor | None
    start_down: Tensor | None
    onednn: bool

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return _Nf4Linear.apply(input, self.bias, self.onednn, *self.stored())

    def stored(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The tensors from which `dense` computes the weight."""
        return self.weight, self.table, self.start_up, self.start_down


PLAIN = (nn.Linear, OneDnnLinear, UnfusedLinear)


class _Nf4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, onednn: bool, *stored: Any) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.onednn = onednn
        return product(input, dense(input.dtype, *stored), bias, onednn=onednn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = dense(grad.dtype, *ctx.saved_tensors)
        return product(grad, whole.t(), None, onednn=ctx.onednn), *[None] * 6


def product(input: Tensor, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> Tensor:
    """A layer's output, [..., in] -> [..., out]. It has no derivative if oneDNN computes it."""
    if onednn and _is_accepted(input, weight):
        return _linear_product(input, weight, bias)
    if bias is not None and input.device.type == "cpu" and torch.compiler.is_compiling():
        # torch would first copy the bias to every row of the output; the compiler fuses the sum with what follows
        return F.linear(input, weight) + bias
    return F.linear(input, weight, bias)


def _is_accepted(input: Tensor, weight: Tensor) -> bool:
    if not (input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32):
        return False
    if input.numel() == 0:
        return False  # oneDNN does not accept empty inputs
    # a compiled graph is used for any number of rows
    return torch.compiler.is_compiling() or input.numel() >= MIN_ROWS * weight.shape[1]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # only the weight's gradient needs the input, and a frozen layer with a LoRA does not compute it
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return _linear_product(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        of_input = of_weight = of_bias = None
        if needs_input:
            of_input = _linear_product(grad, weight.t(), None)
        if needs_weight:
            of_weight = _linear_product(rows.t(), input.reshape(-1, input.shape[-1]).t(), None)
        if needs_bias:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias


@cache
def _register_flops() -> None:
    """Register the FLOPs of oneDNN's linear operator with torch's FlopCounterMode, which does not know it."""

    def flops(input: torch.Size, weight: torch.Size, *args: Any, **kwargs: Any) -> int:
        return 2 * math.prod(input) * weight[0]

    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(flops)


def _linear_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        return _opaque_product(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@torch.library.custom_op("phalanx::onednn_linear", mutates_args=())
def _opaque_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's linear operator, opaque to the compiler, whose own lowering requires weights that never change."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


@_opaque_product.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))
