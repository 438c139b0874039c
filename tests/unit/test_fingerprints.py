"""Weights are compared in blocks, wherever an engine keeps them."""

import logging

import pytest
import torch
from torch import Tensor, nn

from phalanx.engines.receipt import Receipt, fingerprints

HELD = {
    "q": (64, 48),
    "k": (32, 48),
    "o": (48, 32),
    "bias": (96,),
    "norm": (48,),
    "conv": (8, 3, 2, 2),
    "router": (2, 48),
}


def sent(layer: int) -> dict[str, Tensor]:
    torch.manual_seed(layer)
    return {f"{layer}.{name}": torch.randn(shape).bfloat16() for name, shape in HELD.items()}


def engine(weights: dict[str, Tensor], rank: int, ranks: int) -> nn.Module:
    """As vLLM holds them: rows or columns split, projections and biases concatenated, a router in float32."""
    model = nn.Module()
    for layer in range(2):
        q, k, o, bias, norm, conv, router = (weights[f"{layer}.{name}"] for name in HELD)
        fused = torch.cat([t.chunk(ranks)[rank] for t in (q, k)])
        parts = torch.cat([t.chunk(ranks)[rank] for t in bias.split([64, 32])])
        held = (fused, parts, o.chunk(ranks, 1)[rank], norm, conv.flatten(1), router.float(), torch.zeros(64, 4))
        for i, tensor in enumerate(held):
            model.register_buffer(f"{layer}_{i}", tensor.clone())
    return model


def missing(receipt: Receipt, ranks: int, *weights: dict[str, Tensor]) -> list[str]:
    """Of the last `weights`, when the ranks hold the first."""
    for _ in receipt.noted(iter(weights[-1].items())):
        pass
    seen: list[Tensor] = []

    def union(values: Tensor) -> Tensor:
        seen.append(values)
        return torch.stack(seen).any(0)

    for rank in range(ranks):
        last = Receipt(ranks) if rank < ranks - 1 else receipt
        last._sent, last._dtype = receipt._sent, receipt._dtype
        names = last.missing(engine(weights[0], rank, ranks).buffers(), union)
    return names


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_tensor_is_found_and_one_changed_number_is_not(ranks: int) -> None:
    weights = sent(0) | sent(1)
    receipt = Receipt(ranks)
    assert missing(receipt, ranks, weights) == []
    for name, tensor in weights.items():
        changed = tensor.clone()
        changed.view(-1).view(torch.int16)[-1] ^= 1
        assert missing(receipt, ranks, weights, weights | {name: changed}) == [name]
    assert missing(receipt, ranks, weights) == []


def test_another_form_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """One stale layer is not another form of all layers."""
    weights = sent(0) | sent(1)
    other = {name: t.exp() if name.endswith("router") else t for name, t in weights.items()}
    other["1.q"] = torch.zeros_like(other["1.q"])
    receipt = Receipt(1)
    with caplog.at_level(logging.WARNING):
        assert missing(receipt, 1, other, weights) == ["1.q"] == missing(receipt, 1, other, weights)
    assert caplog.messages == ["rollout.engine: vLLM keeps #.router in another form; only a probe verifies its copy"]


def test_a_strict_receipt_compares_every_kind() -> None:
    """A LoRA that an engine has left out is not in another form."""
    weights = sent(0) | sent(1)
    other = {name: t.exp() if name.endswith("router") else t for name, t in weights.items()}
    assert missing(Receipt(1, strict=True), 1, other, weights) == ["0.router", "1.router"]


def test_zeros_are_no_evidence() -> None:
    """A tensor that was 0 counts as comparable once it is not, whatever it was before."""
    weights = sent(0) | sent(1)
    zero = weights | {"0.norm": torch.zeros(48).bfloat16(), "1.norm": torch.zeros(48).bfloat16()}
    receipt = Receipt(1)
    assert missing(receipt, 1, zero) == [] == missing(receipt, 1, weights)
    assert missing(receipt, 1, zero, weights) == ["0.norm", "1.norm"]


def test_blocks_depend_on_place_in_the_block_only() -> None:
    x = torch.randn(64, 24)
    assert torch.equal(
        fingerprints(torch.cat([x[32:], x[:32]])), torch.cat([fingerprints(x[32:]), fingerprints(x[:32])])
    )
    assert torch.equal(fingerprints(x, 2).view(8, 2)[:, 1], fingerprints(x[:, 12:]))
    assert torch.equal(fingerprints(x.t().contiguous().t()), fingerprints(x))
    assert not torch.isin(fingerprints(x.flip(0)), fingerprints(x)).any()
    assert torch.equal(fingerprints(x[:61]), fingerprints(torch.cat([x[:61], torch.zeros(3, 24)])))
    y = torch.randn(8 * 24 + 1)[1:].view(8, 24)  # not aligned to words
    assert torch.equal(fingerprints(y), fingerprints(y.clone()))
    assert fingerprints(torch.empty(0, 4)).shape == (0,)
