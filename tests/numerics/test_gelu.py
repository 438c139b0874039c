"""GELU for `model.compile` on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import nn

from phalanx.models.flow.gelu import gelu, use_sigmoid


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
def test_both_passes_are_those_by_tanh(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.linspace(-12, 12, 4001).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    found, wanted = gelu(x), F.gelu(wide, approximate="tanh")
    (of_found,), (of_wanted,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), wide)
    for one, other in ((found, wanted), (of_found, of_wanted)):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_the_exact_gelu_stays() -> None:
    module = nn.ModuleList([GELU(8, 8, approximate="tanh"), GELU(8, 8), nn.GELU(approximate="tanh"), nn.GELU()])
    x = torch.randn(4, 8)
    before = [part(x) for part in module]
    use_sigmoid(module)
    assert [gelu in vars(part).values() for part in module] == [True, False, True, False]
    for part, wanted in zip(module, before, strict=True):
        torch.testing.assert_close(part(x), wanted)
