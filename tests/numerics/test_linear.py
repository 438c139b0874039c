"""Linear layers by oneDNN: correct in both passes, and the same bits with and without gradients."""

import ast
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from phalanx import make_products_exact
from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.models import linear as products
from phalanx.models.linear import MIN_ROWS, OneDnnLinear, preferred, unfuse_biases, use_onednn
from phalanx.models.lm.lm_policy import build_policy

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def layer(bias: bool = True) -> OneDnnLinear:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    use_onednn(linear)
    assert type(linear) is OneDnnLinear
    return linear


def passes(linear: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = linear(x)
    return [out, *torch.autograd.grad(out, [x, *linear.parameters()], grad)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(MIN_ROWS,), (3, 50), (2, 3, 20)])
def test_both_passes_agree_with_float64(shape: tuple[int, ...], bias: bool) -> None:
    linear = layer(bias)
    x, grad = torch.randn(*shape, 24), torch.randn(*shape, 40)
    reference = nn.Linear(24, 40, bias=bias).double()
    reference.load_state_dict(linear.state_dict())
    found, expected = passes(linear, x, grad), passes(reference, x.double(), grad.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_tensors_that_are_not_contiguous() -> None:
    linear = layer()
    x = torch.randn(24, 70).t()
    grad = torch.randn(1, 40).expand(70, 40)
    found = passes(linear, x, grad)
    for a, b in zip(found, passes(linear, x.contiguous(), grad.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_with_and_without_gradients_the_bits_are_the_same() -> None:
    linear, x = layer(), torch.randn(128, 24)
    with torch.no_grad():
        sampled = linear(x)
    assert torch.equal(linear(x), sampled)
    assert torch.equal(linear.requires_grad_(False)(x.requires_grad_()), sampled)


def test_no_rows() -> None:
    linear = layer()
    out, *gradients = passes(linear, torch.empty(2, 0, 24), torch.empty(2, 0, 40))
    assert out.shape == (2, 0, 40)
    assert [(g.shape, float(g.sum())) for g in gradients] == [((2, 0, 24), 0), ((40, 24), 0), ((40,), 0)]


def test_a_frozen_layer_passes_gradients_on() -> None:
    linear = layer().requires_grad_(False)
    x = torch.randn(70, 24, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(70, 24))
    assert linear.weight.grad is None


@pytest.mark.parametrize(
    ("rows", "dtype"), [(MIN_ROWS - 1, torch.float32), (200, torch.bfloat16), (200, torch.float64)]
)
def test_the_rest_is_left_to_torch(rows: int, dtype: torch.dtype) -> None:
    linear, x = layer().to(dtype), torch.randn(rows, 24, dtype=dtype)
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("rows", [8, 200])
@pytest.mark.parametrize(("change", "exact"), [(use_onednn, True), (unfuse_biases, False)])
def test_compiled_it_is_the_same(change: Callable[[nn.Module], None], exact: bool, rows: int) -> None:
    """In both passes; bit-equal where both use oneDNN. No code is generated, which would need a compiler."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 40)
    change(linear)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    x, grad = torch.randn(rows, 24), torch.randn(rows, 40)
    x.requires_grad_()
    wanted, found = (
        [out, *torch.autograd.grad(out, [x, *linear.parameters()], grad)] for out in (linear(x), compiled(x))
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if exact and rows >= MIN_ROWS:
        assert torch.equal(found[0], wanted[0])


def test_only_plain_linear_layers_change() -> None:
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), Own(4, 4))
    names = list(module.state_dict())
    use_onednn(module)
    kinds = [type(m) for m in module.modules() if isinstance(m, nn.Linear)]
    assert kinds == [OneDnnLinear, OneDnnLinear, Own]
    assert list(module.state_dict()) == names


def test_operations_are_counted() -> None:
    linear, x = layer(), torch.randn(100, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 100 * 24 * 40  # output, gradient of the input, of the weight


@pytest.mark.parametrize(
    ("capability", "vendor", "mkl", "onednn", "choice"),
    [
        ("AVX512", "AuthenticAMD", True, True, "onednn"),
        ("AVX512", "GenuineIntel", True, True, "torch"),
        ("AVX2", "AuthenticAMD", True, True, "torch"),
        ("AVX512", "AuthenticAMD", True, False, "torch"),
        ("AVX512", "AuthenticAMD", False, True, "torch"),
        ("DEFAULT", None, False, True, "torch"),  # ARM
    ],
)
def test_the_library_is_chosen_by_the_processor(
    capability: str,
    vendor: str | None,
    mkl: bool,
    onednn: bool,
    choice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\n" + (f"vendor_id\t: {vendor}\n" if vendor else "") + "cpu family\t: 26\n")
    assert preferred(cpuinfo) == choice
    assert preferred(tmp_path / "none") == "torch"


def test_no_clock_chooses() -> None:
    """In all models: the library depends only on the configuration and the processor."""
    clocks = re.compile(r"\b(time|timeit|perf_counter|thread_time|monotonic|datetime)\b")
    for file in sorted(Path(products.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not any(clocks.search(name) for name in names), file


@pytest.mark.parametrize("library", ["torch", "onednn"])
def test_the_key_sets_the_library(library: str, lm_folder: Path, world: World) -> None:
    config = LMModelConfig(path=str(lm_folder), dtype="float32", cpu_linear=library)
    data = LMDataConfig(max_prompt_length=64, max_response_length=16)
    policy = build_policy(config, ParallelConfig(), data, world, chunk=5, temperature=0.7, seed=0)
    layers = {type(m) for m in policy.trained.module.modules() if isinstance(m, nn.Linear)}
    assert layers == {OneDnnLinear if library == "onednn" else nn.Linear}


def one_by_one(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The products of rows that each stand between other rows, and in another place, than in `product(rows)`."""
    return torch.cat([product(torch.cat([row[None].repeat(5, 1), rows]))[2:3] for row in rows])


@pytest.mark.parametrize("library", ["torch", "onednn"])
def test_a_rows_product_depends_on_nothing_but_the_row(library: str) -> None:
    """A replay has the rows of a rollout in another order, and may have more of them. See make_products_exact."""
    if library == "torch" and os.environ.get("MKL_CBWR") != "AUTO,STRICT":
        pytest.skip("MKL has a strict mode on Intel's processors only")
    for rows, width, out in ((7, 32, 32), (9, 64, 256), (33, 48, 144), (65, 400, 32), (128, 128, 32)):
        linear, x = nn.Linear(width, out), torch.randn(rows, width)
        kernel = products._linear_product if library == "onednn" else F.linear  # whatever the number of rows
        use = partial(kernel, weight=linear.weight, bias=linear.bias)
        with torch.no_grad():
            assert torch.equal(one_by_one(use, x), use(x))


def test_only_intels_processors_get_the_strict_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, given, expected in (
        ("GenuineIntel", None, "AUTO,STRICT"),
        ("GenuineIntel", "AVX2", "AVX2"),
        ("AuthenticAMD", None, None),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
        monkeypatch.setattr(os, "environ", {} if given is None else {"MKL_CBWR": given})
        make_products_exact(str(tmp_path / "cpuinfo"))
        assert os.environ.get("MKL_CBWR") == expected
    monkeypatch.setattr(os, "environ", {})
    make_products_exact(str(tmp_path / "none"))  # as on a Mac
    assert not os.environ
