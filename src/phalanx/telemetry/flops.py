"""Floating-point operations that a training step takes, and that the device could do.

Model FLOPs utilisation is `step_flops(...) / (step_seconds * ranks * peak_flops(...))` without
checkpointing, hardware FLOPs utilisation the same with what checkpointing computes again. A
multiplication and an addition are two operations. Only matrix products, convolutions and attention
are counted (what torch's own counter knows); norms, activations and rotations are memory-bound and
below one per cent of a transformer.
"""

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# Dense peaks in TFLOP/s: (bfloat16 and float16 on tensor cores, float32 without TF32). A card's name
# holds all words of its key; the first key that fits is taken, so variants stand before the plain
# name. Datasheets with sparsity: halved.
_PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    # nvidia.com/en-us/data-center/h100 (SXM, PCIe and NVL columns); H800 is an H100 with slower links.
    "H100 NVL": (835.5, 60.0),
    "H100 PCIE": (756.0, 51.2),
    "H100": (989.4, 66.9),
    "H800 PCIE": (756.0, 51.2),
    "H800": (989.4, 66.9),
    # nvidia.com/en-us/data-center/h200
    "H200 NVL": (835.5, 60.0),
    "GH200": (989.4, 66.9),
    "H200": (989.4, 66.9),
    # nvidia.com/en-us/data-center/a100; A800 is an A100 with slower links.
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    # nvidia.com/en-us/data-center/gb200-nvl72 and /hgx (B200: 36 PFLOP/s sparse bf16 for 8 cards)
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    # nvidia.com/en-us/data-center/l40s
    "L40S": (362.0, 91.6),
    # From tables of resellers and reviewers. RTX: float16 with sums in float32, a quarter of the sparse rate with
    # sums in float16.
    "H20": (148.0, 44.0),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    # amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    "MI300X": (1307.4, 163.4),
}
_GEMM_SIZES = (384, 512, 640)
_GEMM_REPEATS = 3
COUNTED: dict[str, int] = {}  # by `forward_flops`, of each kind of pass


def forward_flops(build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], model: str = "") -> int:
    """FLOPs of one forward pass of `build()(**inputs())`, counted without memory or arithmetic.

    Both callables run under `torch.device("meta")`: they must make new tensors and not name a
    device. The count is for the batch that `inputs` makes; with a batch of 1 it is per sample. It
    does not depend on the dtype. Tables made in a model's constructor (Qwen-Image's complex
    rotations) become meta tensors as well.

    Passes of equal inputs through models of which `model` says the same are counted once.

    Raises ValueError where a parameter is not on the meta device: real tensors take attention
    kernels that torch's counter does not know, and the count would be low by all of attention.
    """
    # SDPBackend.MATH splits attention into its two batched products, which are counted like any other.
    with torch.device("meta"), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        given = inputs()
        key = f"{model} {given}"  # with the shapes of tensors, which have no values
        if model and key in COUNTED:
            return COUNTED[key]
        module = build()
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                raise ValueError(
                    f"forward_flops: parameter {name} is on {parameter.device}; build() must make a new model "
                    "and leave the device to the caller"
                )
        counter = FlopCounterMode(display=False)
        with counter:
            module(**given)
    COUNTED[key] = counter.get_total_flops()
    return COUNTED[key]


def step_flops(
    forward: int,
    *,
    samples: int,
    lora: bool,
    checkpointing: float,
    steps: int = 0,
    window: int = 1,
    cfg: bool = False,
    updates_per_sample: float = 1,
    references: float = 0,
    detach_uncond: bool = False,
) -> int:
    """FLOPs of a training step on all ranks, from those of a sample's pass of one guidance branch. The defaults are
    those of supervised training.

    With `branches` = 2 under classifier-free guidance (else 1), each sample costs, in forward
    passes:

    - rollout: `steps * branches`;
    - each of `references`, the passes of a sample with other weights: `window * branches`;
    - each of `updates_per_sample` updates (`ppo_epochs`), for each of the `window` trained steps:
      `branches` for the replay, and for every branch that has a gradient (one of two if
      `detach_uncond`) 2 for the backward pass of a full fine-tune or 1 for a LoRA, and `checkpointing`
      more, the part of the blocks that is recomputed.

    A LoRA needs gradients of activations but not of the frozen weights: half of a backward pass.
    Left out: the LoRA's own products (about rank / width), attention's backward beyond that (its
    inputs are activations, so a LoRA saves nothing there), the VAE, the text encoders and the
    reward. So the utilisation is a lower bound.
    """
    branches = 2 if cfg else 1
    grad_branches = 1 if detach_uncond else branches
    backward = (1 if lora else 2) + checkpointing
    rollout = steps * branches
    others = references * window * branches
    update = window * (branches + grad_branches * backward)
    return round(forward * samples * (rollout + others + updates_per_sample * update))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that `device` can reach in `dtype`; None where it is not known.

    A GPU's is the dense figure of its datasheet. A CPU's is measured: the median rate of a few
    matrix products at the current number of threads, once per process (0.04 s in float32).
    """
    if device.type == "cuda":
        return named_peak_flops(torch.cuda.get_device_name(device), dtype)
    if device.type == "cpu":
        return _measured_gemm(dtype, torch.get_num_threads())
    return None


def known_gpus() -> list[str]:
    """Names of GPUs that named_peak_flops knows; a card's name has all words of one of them."""
    return sorted(_PEAK_TFLOPS)


def named_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Datasheet FLOP/s of the GPU that torch calls `name`; None if unknown, or for 64 or 8 bits."""
    words = name.upper()
    for key, (half, single) in _PEAK_TFLOPS.items():
        if all(word in words for word in key.split()):
            if dtype in (torch.bfloat16, torch.float16):
                return half * 1e12
            return single * 1e12 if dtype == torch.float32 else None
    return None


@lru_cache(maxsize=8)
def _measured_gemm(dtype: torch.dtype, threads: int) -> float:
    """Median FLOP/s of square products; `threads` only keys the cache."""
    rates = []
    for size in _GEMM_SIZES:
        a = torch.ones(size, size, dtype=dtype)
        out = torch.empty_like(a)
        torch.mm(a, a, out=out)  # the first call packs weights and picks a kernel
        for _ in range(_GEMM_REPEATS):
            start = time.perf_counter()
            torch.mm(a, a, out=out)
            rates.append(2 * size**3 / (time.perf_counter() - start))
    return statistics.median(rates)
