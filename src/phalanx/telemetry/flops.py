"""The floating-point operations of a forward pass, and the peak rate of the device.

A multiplication and an addition count as two operations. Only matrix products, convolutions and attention are counted
(the operations that torch's counter supports); norms, activations and rotary embeddings are memory-bound and below one
per cent of a transformer.
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

# Dense peak TFLOP/s: (bfloat16 and float16 on tensor cores, float32 without TF32). A key matches if the name of the GPU
# contains all of its words; the first match is used, so variants precede the plain name. Datasheet figures with
# sparsity are halved.
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
    # From tables of resellers and reviewers. RTX: float16 with float32 accumulation, a quarter of the sparse rate with
    # float16 accumulation.
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
COUNTED: dict[str, int] = {}  # cache of `forward_flops`, by model and inputs


def forward_flops(build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], model: str = "") -> int:
    """Count the FLOPs of one forward pass of `build()(**inputs())` without allocating memory or computing.

    Both callables run under `torch.device("meta")`, so they must create new tensors without naming a device. The count
    is for the batch that `inputs` creates; with a batch of 1 it is per sample. It does not depend on the dtype. Tables
    created in a model's constructor (Qwen-Image's complex rotations) become meta tensors too.

    With a description `model`, the result is cached for passes with equal descriptions and inputs.

    Raises ValueError if a parameter is not on the meta device: real tensors use attention kernels that torch's counter
    does not support, and the count would lack attention entirely.
    """
    # SDPBackend.MATH splits attention into its two batched products, which are counted like any other.
    with torch.device("meta"), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        given = inputs()
        key = f"{model} {given}"  # meta tensors are printed with their shapes
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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of `device` in `dtype`; None if unknown.

    For a GPU it is the dense figure of the datasheet. For a CPU it is measured once per process: the median rate of a
    few matrix products with the current number of threads, in the layout that is fastest (0.1 s in float32).
    """
    if device.type == "cuda":
        return named_peak_flops(torch.cuda.get_device_name(device), dtype)
    if device.type == "cpu":
        return _measured_gemm(dtype, torch.get_num_threads())
    return None


def named_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Datasheet FLOP/s of the GPU that torch calls `name`; None if it is unknown, or for 64-bit and 8-bit dtypes."""
    words = name.upper()
    for key, (half, single) in _PEAK_TFLOPS.items():
        if all(word in words for word in key.split()):
            if dtype in (torch.bfloat16, torch.float16):
                return half * 1e12
            return single * 1e12 if dtype == torch.float32 else None
    return None


@lru_cache(maxsize=8)
def _measured_gemm(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of square products in the fastest layout of a training step, the median of each; `threads` only keys the
    cache. Without vector instructions for a dtype, one layout may be ten times as fast as another.
    """
    fastest = 0.0
    for transposed in ((False, True), (False, False), (True, False)):  # x W^T, and the gradients of x and of W
        rates = []
        for size in _GEMM_SIZES:
            out = torch.ones(size, size, dtype=dtype)
            one, other = (out.clone().T if turned else out.clone() for turned in transposed)
            torch.mm(one, other, out=out)  # warm-up: the first call packs weights and selects a kernel
            for _ in range(_GEMM_REPEATS):
                start = time.perf_counter()
                torch.mm(one, other, out=out)
                rates.append(2 * size**3 / (time.perf_counter() - start))
        fastest = max(fastest, statistics.median(rates))
    return fastest
