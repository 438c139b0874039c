"""FlexAttention: its masks of block diffusion against those made from all pairs of tokens, and its graphs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations.flex_attention import flex_attention_forward

from phalanx.functional.block_states import States, sees
from phalanx.models.lm.flex import block_mask, one_graph
from tests.helpers.ranks import run_ranks


def states(rows: int, length: int, seed: int = 0) -> States:
    """Clean tokens and states of blocks of 8, in rows of different lengths, padding included."""
    generator = torch.Generator().manual_seed(seed)
    clean = length // 3
    block, chunk, limit = (torch.zeros(rows, length, dtype=torch.long) for _ in range(3))
    block[:, :clean] = limit[:, :clean] = torch.arange(clean) // 8
    for place, start in enumerate(range(clean, length, 8)):
        of = torch.randint(clean // 8 + 1, (rows, 1), generator=generator)
        block[:, start : start + 8], limit[:, start : start + 8], chunk[:, start : start + 8] = of, of, place + 1
    padding = torch.arange(length) >= torch.tensor([[length - 40 * row] for row in range(rows)])
    chunk[padding], block[padding] = -1, -1
    empty = torch.zeros(rows, 0, 8, dtype=torch.long)
    return States(block, block, block, chunk, limit, empty.float(), empty, empty, empty)


@pytest.mark.parametrize(("length", "at_once"), [(128, 1 << 26), (300, 1 << 26), (900, 1), (1024, 1 << 18)])
def test_they_are_those_of_all_pairs(length: int, at_once: int) -> None:
    """Tile by tile, whether its pairs are few, all or none, however many are looked at together."""
    seen = states(3, length)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(seen.block[b, q], seen.chunk[b, q], seen.limit[b, q], seen.block[b, k], seen.chunk[b, k])

    expected, found = create_block_mask(rule, 3, None, length, length, device="cpu"), block_mask(seen, at_once)
    assert found.shape == expected.shape and found.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype is other.dtype and torch.equal(one, other), name
    assert length < 900 or int(found.full_kv_num_blocks.sum()) > 0
    assert torch.equal(found.to_dense(), expected.to_dense())


def test_attention_is_that_of_the_dense_mask() -> None:
    seen = states(2, 300, seed=1)
    q, k, v = torch.randn(3, 2, 2, 300, 16, generator=torch.Generator().manual_seed(2)).unbind()
    padding = seen.chunk == -1
    found = flex_attention(q, k, v, block_mask=block_mask(replace(seen)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen.allowed())
    real = ~padding[:, None, :, None].expand_as(found)
    assert torch.allclose(found[real], expected[real], atol=1e-5)


def graphs() -> list[int]:
    """The number of graphs of transformers' FlexAttention after each of several shapes."""
    counter = CompileCounter()
    one_graph(counter)
    layer, found = torch.nn.Module().eval(), []
    for rows, length in ((2, 300), (2, 420), (3, 256), (1, 700), (1, 130)):
        seen = states(rows, length)
        q = torch.randn(rows, 2, length, 16)
        kept, _ = flex_attention_forward(layer, q, q, q, block_mask(seen), scaling=0.25)
        expected = flex_attention(q, q, q, block_mask=block_mask(seen), scale=0.25).transpose(1, 2)
        assert torch.equal(kept, expected)
        found.append(counter.frame_count)
    return found


@pytest.mark.full
def test_one_graph_serves_all_lengths() -> None:
    """A second one serves single rows."""
    assert run_ranks(graphs, 1) == [[1, 1, 1, 2, 2]]
