"""The kernels that benchmarks/count_kernels.py counts, and the time that it gives to them."""

import pytest
import torch
from benchmarks.count_kernels import RATES, Kernels, layer_of, passes


def test_a_product_and_an_elementwise_kernel() -> None:
    x, w = torch.empty(512, 256, device="meta"), torch.empty(256, 1024, device="meta")
    with Kernels() as kernels:
        (x @ w).relu()
    product, relu = 4 * (512 * 256 + 256 * 1024 + 512 * 1024), 2 * 4 * 512 * 1024
    assert (kernels.kernels, kernels.bytes, kernels.elementwise_bytes) == (2, product + relu, relu)
    assert kernels.flops == 2 * 512 * 256 * 1024
    # as narrow a product waits for memory
    assert kernels.modelled == pytest.approx((product + relu) / 3.35e12 / 0.85)
    assert RATES.seconds(1e15, 1) == pytest.approx(1e15 / 989.4e12 / 0.7)
    assert RATES.seconds(1e15, 1, attention=True) == pytest.approx(1e15 / 989.4e12 / 0.5)


def test_a_layer_of_a_language_model() -> None:
    """Its backward pass has twice the operations of the products, and 2.5 times those of attention, whose scores it
    computes again.
    """
    rows, length, width, inner = 4, 64, 896, 4864
    layer, inputs = layer_of("qwen25_0_5b", rows, length)
    counted = passes(layer, inputs)
    products = 2 * rows * length * width * (2 * width + 2 * width // 7 + 3 * inner)
    attention = 4 * rows * length * length * width
    assert counted["forward"].flops == products + attention
    assert counted["backward"].flops == 2 * products + 2.5 * attention
