"""Fused LoRA: peft's numbers in both passes, with fewer kernels and bytes; peft's own code for other than plain LoRAs."""

import copy
from typing import Any

import pytest
import torch
from benchmarks.count_kernels import Kernels, by
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.fused_lora import FusedLinear, fuse
from phalanx.models.linear import use_onednn
from phalanx.models.lora import add_lora, lora_off, merge_lora
from phalanx.models.meeting import adapters
from phalanx.models.shared_base import share_layers

IN, OUT = 24, 40


def make(
    dtype: torch.dtype = torch.float32, *, bias: bool = True, onednn: bool = False, rank: int = 4
) -> nn.ModuleDict:
    torch.manual_seed(0)
    module = nn.ModuleDict({"to_q": nn.Linear(IN, OUT, bias=bias)})
    add_lora(module, FlowModelConfig(path="none", lora_rank=rank, lora_alpha=6), ("to_q",), seed=0)
    nn.init.normal_(module["to_q"].lora_B["default"].weight)  # its initial value is 0
    if onednn:
        use_onednn(module)
    return module.to(dtype)


def as_peft(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    by(Linear, module)
    return module


def passes(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the LoRA."""
    x = x.clone().requires_grad_()
    out = module["to_q"](x)
    return [out, *torch.autograd.grad(out, [x, *(p for p in module.parameters() if p.requires_grad)], grad)]


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (7,), (3, 50), (2, 3, 20)])
def test_both_passes_are_pefts(shape: tuple[int, ...], bias: bool, onednn: bool, rank: int) -> None:
    """With few and many rows, and with ranks for which one gradient is cheaper through that of the merged weight."""
    module = make(bias=bias, onednn=onednn, rank=rank)
    x, grad = torch.randn(*shape, IN), torch.randn(*shape, OUT)
    assert type(module["to_q"]) is FusedLinear
    found = passes(module, x, grad)
    expected = passes(as_peft(module).double(), x.double(), grad.double())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 2e-6 * b.abs().max()


@pytest.mark.parametrize("onednn", [False, True])
def test_no_rows(onednn: bool) -> None:
    """The gradient of an unused LoRA is 0, not None."""
    out, *gradients = passes(make(onednn=onednn), torch.empty(2, 0, IN), torch.empty(2, 0, OUT))
    assert out.shape == (2, 0, OUT)
    assert [(g.shape, float(g.sum())) for g in gradients] == [((2, 0, IN), 0), ((4, IN), 0), ((OUT, 4), 0)]


def test_tensors_that_are_not_contiguous() -> None:
    module = make()
    x, grad = torch.randn(IN, 5, 30).permute(2, 1, 0), torch.randn(1, 1, OUT).expand(30, 5, OUT)
    for a, b in zip(passes(module, x, grad), passes(as_peft(module), x, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_no_further_from_the_truth_than_pefts() -> None:
    module = make(torch.bfloat16)
    x, grad = torch.randn(4, 500, IN).bfloat16(), torch.randn(4, 500, OUT).bfloat16()
    exact = passes(as_peft(module).double(), x.double(), grad.double())
    fused, peft = (
        [
            float((a.double() - b).detach().square().mean().sqrt())
            for a, b in zip(passes(m, x, grad), exact, strict=True)
        ]
        for m in (module, as_peft(module))
    )
    assert fused[0] < peft[0]  # one rounding of the output instead of three
    assert all(a < 1.05 * b for a, b in zip(fused, peft, strict=True))


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_and_without_gradients_the_bits_are_the_same(dtype: torch.dtype, onednn: bool) -> None:
    module, x = make(dtype, onednn=onednn), torch.randn(3, 64, IN).to(dtype)
    with torch.no_grad():
        sampled = module["to_q"](x)
    assert torch.equal(module["to_q"](x), sampled)
    assert torch.equal(module["to_q"](x.requires_grad_()), sampled)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_lora_the_base_is_what_it_was(dtype: torch.dtype) -> None:
    module, x = make(dtype), torch.randn(IN, 5, 30).permute(2, 1, 0).to(dtype)
    base = module["to_q"].base_layer(x)
    with lora_off(module):
        assert torch.equal(module["to_q"](x), base)
    module["to_q"].lora_B["default"].weight.zero_()
    assert torch.equal(module["to_q"](x), base)  # a KL is exactly 0 before any update


def counted(module: nn.ModuleDict, n: int) -> tuple[Kernels, Kernels]:
    """Kernels and bytes of both passes for n rows."""
    dtype = module["to_q"].base_layer.weight.dtype
    rows, grad = torch.randn(n, IN, dtype=dtype, requires_grad=True), torch.randn(n, OUT, dtype=dtype)
    forward, backward = Kernels(), Kernels()
    with forward:
        out = module["to_q"](rows)
    with backward:
        torch.autograd.grad(out, [rows, *(p for p in module.parameters() if p.requires_grad)], grad)
    return forward, backward


def test_fewer_kernels_and_bytes() -> None:
    """In 2-byte numbers, N = 1000 rows: peft's scaling reads and writes N x OUT, its sum reads two and writes one."""
    module, n = make(torch.bfloat16), 1000
    (peft_forward, peft_backward), (forward, backward) = counted(as_peft(module), n), counted(module, n)
    assert (peft_forward.kernels, forward.kernels) == (5, 3)
    assert peft_forward.bytes - forward.bytes == 2 * n * 4 * OUT  # the last product reads what it adds to
    assert backward.kernels <= peft_backward.kernels
    assert backward.bytes < peft_backward.bytes - 2 * n * OUT
    assert forward.elementwise_bytes == 0
    assert backward.elementwise_bytes == 2 * 2 * (n * 4 + OUT * 4)  # the scaled products have `rank` columns


@pytest.mark.parametrize("rank", [4, 16])
def test_one_product_in_float32(rank: int) -> None:
    """The forward pass reads the rows once; only LoRA-sized tensors are scaled, however its gradient is computed."""
    module, n = make(rank=rank), 1000
    forward, backward = counted(module, n)
    assert forward.kernels == 2
    assert forward.bytes == 4 * (n * (IN + OUT) + OUT + 3 * IN * OUT + rank * (IN + OUT))
    assert forward.elementwise_bytes == 0
    assert backward.elementwise_bytes == 2 * 4 * rank * (IN + OUT)


def test_few_rows_are_not_worth_a_merged_weight() -> None:
    forward, _ = counted(make(), 8)
    assert forward.kernels == 3


def injected(**config: Any) -> nn.ModuleDict:
    torch.manual_seed(0)
    module = nn.ModuleDict({"to_q": nn.Linear(IN, OUT)})
    inject_adapter_in_model(
        LoraConfig(**{"r": 4, "target_modules": ["to_q"], "init_lora_weights": False} | config), module
    )
    fuse(module)
    return module


def two_adapters() -> nn.ModuleDict:
    module = injected()
    layer = module["to_q"]
    config = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    layer.update_layer("other", 2, lora_alpha=2, config=config)
    layer.set_adapter(["default", "other"])
    return module


def mixed() -> nn.ModuleDict:
    module = injected()
    module["to_q"].base_layer.bfloat16()
    return module


def trained_base() -> nn.ModuleDict:
    module = injected()
    module["to_q"].base_layer.weight.requires_grad_()
    return module


def merged() -> nn.ModuleDict:
    module = injected()
    module["to_q"].merge()
    return module


@pytest.mark.parametrize(
    "make_special",
    [
        lambda: injected(lora_dropout=0.5),
        lambda: injected(use_dora=True),
        lambda: injected(lora_bias=True),
        two_adapters,
        mixed,
        trained_base,
        merged,
    ],
    ids=["dropout", "dora", "bias", "two", "mixed", "trained_base", "merged"],
)
def test_what_is_special_is_pefts_own(make_special: Any) -> None:
    module = make_special()
    x = torch.randn(5, IN, dtype=module["to_q"].base_layer.weight.dtype)
    outs = []
    for m in (module, as_peft(module)):
        torch.manual_seed(1)
        outs.append(m["to_q"](x))
    assert type(module["to_q"]) is FusedLinear
    assert torch.equal(*outs)
    assert outs[0].dtype == x.dtype
    names = {type(node).__name__ for node in walk(outs[0].grad_fn)}
    assert "_LoraLinearBackward" not in names


def walk(node: Any) -> list[Any]:
    return [] if node is None else [node, *(n for child, _ in node.next_functions for n in walk(child))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)], ids=str)
def test_rows_of_several_loras_in_one_pass(counts: tuple[int, ...], bias: bool) -> None:
    """Grouped products for equal numbers of rows, others one by one: both are each LoRA's own pass on its rows."""
    modules = [make(torch.float64, bias=bias)]
    for _ in counts[1:]:
        frozen = {id(p): p for p in modules[0].parameters() if not p.requires_grad}
        modules.append(copy.deepcopy(modules[0], frozen))
        for p in modules[-1].parameters():
            if p.requires_grad:
                nn.init.normal_(p)
    share_layers(modules)
    x, grad = torch.randn(6, 5, IN, dtype=torch.float64), torch.randn(6, 5, OUT, dtype=torch.float64)
    alone = []
    for module, rows, grads in zip(modules, x.split(counts), grad.split(counts), strict=True):
        alone.append(passes(module, rows, grads))
    x.requires_grad_()
    with adapters(dict(enumerate(counts))):
        out = modules[0]["to_q"](x)
    trained = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    of_x, *others = torch.autograd.grad(out, [x, *trained[0], *trained[1], *trained[2]], grad)
    expected = [torch.cat([each[0] for each in alone]), torch.cat([each[1] for each in alone])]
    expected += [value for each in alone for value in each[2:]]
    for a, b in zip([out, of_x, *others], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    grouped = "_GroupedLora" in out.grad_fn.name()
    assert grouped == (len(set(counts)) == 1)
    with adapters({0: 3, 1: 1}), pytest.raises(AssertionError, match="the first dim, 6, is not that of 4 rows"):
        modules[0]["to_q"](x)


def test_merged_for_good_it_computes_the_same() -> None:
    module, x = make(), torch.randn(6, IN)
    before = module["to_q"](x)
    merge_lora(module)
    assert type(module["to_q"]) is nn.Linear
    torch.testing.assert_close(module["to_q"](x), before, rtol=1e-5, atol=1e-5)


def test_a_merged_sum_is_rounded_once() -> None:
    module = make()
    layer = module["to_q"]
    layer.base_layer.bfloat16()
    change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    exact = layer.base_layer.weight.float() + change
    merge_lora(module)
    assert torch.equal(module["to_q"].weight, exact.bfloat16())
