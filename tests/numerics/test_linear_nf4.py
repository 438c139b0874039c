"""Frozen weights in NF4: the nearest values, the same bytes for any split of rows, and the numbers of a layer with the
rounded weight, with and without a gradient.
"""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.fused_lora import FusedLinear
from phalanx.models.linear import NF4, Nf4Linear, count_weights, dense, quantize, quantize_layers, use_onednn
from phalanx.models.lora import add_lora, lora_off

IN, OUT = 128, 96
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def rounded(layer: Nf4Linear, dtype: torch.dtype) -> Tensor:
    return dense(dtype, layer.weight, layer.table)


def make(dtype: torch.dtype = torch.float32, *, lora: bool = True, onednn: bool = False) -> nn.ModuleDict:
    torch.manual_seed(0)
    module = nn.ModuleDict({"to_q": nn.Linear(IN, OUT)})
    if lora:
        add_lora(module, FlowModelConfig(path="none", lora_rank=4), ("to_q",), seed=0)
        nn.init.normal_(module["to_q"].lora_B["default"].weight)  # its initial value is 0
    else:
        module.requires_grad_(False)
    if onednn:
        use_onednn(module)
    return module.to(dtype)


def base_of(module: nn.ModuleDict) -> nn.Module:
    layer = module["to_q"]
    return layer.base_layer if isinstance(layer, FusedLinear) else layer


def quantized(module: nn.ModuleDict) -> tuple[nn.ModuleDict, nn.ModuleDict]:
    """The module in NF4, and a copy with the rounded weight in its own dtype."""
    plain = copy.deepcopy(module)
    dtype = base_of(module).weight.dtype
    quantize_layers([module], CPU, stays=True)
    base_of(plain).weight.data = rounded(base_of(module), dtype)
    return module, plain


def test_each_weight_is_the_nearest_value() -> None:
    weight = torch.randn(OUT, IN)
    weight[3, 64:] = 0
    packed = quantize(weight)
    assert packed.dtype is torch.uint8 and packed.shape == (OUT, IN // 64 * 36)
    table = torch.tensor([[NF4[byte >> 4], NF4[byte & 15]] for byte in range(256)])
    blocks = weight.view(OUT, -1, 64)
    scales = blocks.abs().amax(-1, keepdim=True)
    index = (blocks[..., None] - scales[..., None] * torch.tensor(NF4)).abs().argmin(-1)
    nearest = (torch.tensor(NF4)[index] * scales).view(OUT, IN)
    assert torch.equal(dense(torch.float32, packed, table), nearest)
    assert torch.equal(dense(torch.bfloat16, packed, table), nearest.bfloat16())
    error = (nearest - weight).square().mean() / weight.square().mean()
    assert 0.08 < error.sqrt() < 0.1
    assert torch.equal(quantize(nearest), packed)


def test_codes_are_those_of_bitsandbytes() -> None:
    """Codes of bitsandbytes 0.50.2: quantize_4bit(weight, blocksize=64, quant_type="nf4")."""
    weight = torch.linspace(-2, 1, 64)[None]
    codes = "000000011111111112222223333344444555566667778888999aaaabbbbccccc"
    packed = quantize(weight)
    assert packed[0, :32].numpy().tobytes().hex() == codes
    assert packed[0, 32:].view(torch.float32).item() == 2


def test_rows_are_quantized_by_themselves() -> None:
    weight = torch.randn(7, IN)
    whole = quantize(weight)
    assert torch.equal(torch.cat([quantize(weight[:4]), quantize(weight[4:])]), whole)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 300])
def test_numbers_are_those_of_the_rounded_weight(rows: int, dtype: torch.dtype, lora: bool, onednn: bool) -> None:
    """Bit-equal in both passes, with and without gradients."""
    module, plain = quantized(make(dtype, lora=lora, onednn=onednn))
    assert isinstance(base_of(module), Nf4Linear)
    x, grad = torch.randn(rows, IN, dtype=dtype), torch.randn(rows, OUT, dtype=dtype)
    results = []
    for part in (module, plain):
        start = x.clone().requires_grad_()
        out = part["to_q"](start)
        wanted = [start, *(p for p in part.parameters() if p.requires_grad)]
        results.append([out, *torch.autograd.grad(out, wanted, grad)])
        with torch.no_grad():
            assert torch.equal(part["to_q"](x), out)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    with lora_off(module), torch.no_grad():
        assert torch.equal(module["to_q"](x), base_of(plain)(x))


@pytest.mark.parametrize("lora", [True, False])
def test_no_whole_weight_is_kept_for_the_backward_pass(lora: bool) -> None:
    module, _ = quantized(make(lora=lora))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        module["to_q"](torch.randn(2, IN, requires_grad=True))
    assert sizes and max(sizes) < OUT * IN


def test_what_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """The LoRA, norms, and layers whose inputs are not multiples of 64; it is an error if no layer can be quantized."""
    module = nn.ModuleDict({"to_q": nn.Linear(64, 8), "norm": nn.LayerNorm(8), "to_k": nn.Linear(24, 8)})
    add_lora(module, FlowModelConfig(path="none", lora_rank=4), ("to_q",), seed=0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights = count_weights(module.parameters())
    with caplog.at_level(logging.INFO, "phalanx"):
        quantize_layers([module], CPU, stays=True)
    assert "nf4: 1 layers keep their dtype; inputs are not multiples of 64: to_k has 24" in caplog.text
    assert count_weights(module.parameters()) == weights
    changed = [name for name, p in module.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["to_q.base_layer.weight"]
    with pytest.raises(ValueError, match=r"model\.quantization: nf4 .* a multiple of 64 \(to_k has 24\)"):
        quantize_layers([nn.ModuleDict({"to_k": nn.Linear(24, 8).requires_grad_(False)})], CPU, stays=True)
