"""Clusters, layouts and groups of a plan, and the ledger of its passes."""

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from phalanx.config import ConfigError
from phalanx.tools.plan import clusters, memory_of
from phalanx.tools.plan.layout import Cluster, Layout, Weight
from phalanx.tools.plan.ledger import META, Ledger, fused_attention
from tests.helpers.plans import GB

# -- the cluster --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        ({}, {}, [(1, 1)]),
        ({}, {"NNODES": "2", "NPROC_PER_NODE": "8"}, [(2, 8)]),
        ({"nnodes": "4", "nproc_per_node": "8"}, {"NNODES": "2", "NPROC_PER_NODE": "1"}, [(4, 8)]),
        ({"nproc": "8"}, {"NNODES": "2:4"}, [(2, 8), (3, 8), (4, 8)]),
    ],
)
def test_clusters(words: Mapping[str, str], env: Mapping[str, str], expected: list[tuple[int, int]]) -> None:
    assert clusters(words, env) == [Cluster(*size) for size in expected]


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ({"nnodes": "0"}, {}, "nnodes=0: expected an integer, e.g. 4, or a range, e.g. 2:4"),
        ({"nnodes": "4:2"}, {}, "nnodes=4:2: expected an integer, e.g. 4, or a range, e.g. 2:4"),
        ({}, {"NNODES": "x"}, "NNODES=x: expected an integer, e.g. 4, or a range, e.g. 2:4"),
        ({"nproc": "8.0"}, {}, "nproc=8.0: expected an integer, e.g. 8"),
        ({}, {"NPROC_PER_NODE": "gpu"}, "NPROC_PER_NODE=gpu: expected an integer, e.g. 8"),
    ],
)
def test_clusters_that_are_none(words: Mapping[str, str], env: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        clusters(words, env)
    assert str(error.value) == message


def test_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the words; else of the one that is here."""
    assert memory_of({}) is None
    assert memory_of({"gpu_memory_gb": "79.6"}) == 79_600_000_000
    for text in ("80GB", "0", "-1", "1.2.3", ""):
        with pytest.raises(ConfigError) as error:
            memory_of({"gpu_memory_gb": text})
        assert str(error.value) == f"gpu_memory_gb={text}: expected GB (10^9 bytes) of a GPU, such as 80"
    here = SimpleNamespace(name="NVIDIA L40S", total_memory=48 * GB)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: here)
    assert memory_of({}) == 48 * GB
    assert memory_of({"gpu_memory_gb": "80"}) == 80 * GB


def test_groups() -> None:
    """phalanx.distributed.mesh cuts its mesh row by row: (replicate, shard)."""
    cluster, mesh = Cluster(nodes=2, per_node=6), torch.arange(12).view(3, 4)
    assert [list(g) for g in cluster.shard_groups(4)] == mesh.tolist()


# -- layout -------------------------------------------------------------------------------------------------------


def test_parts_are_filled_up() -> None:
    """Of two blocks of a frozen [6, 10] and a trained [3, 10], and a trained [5] beside them."""
    weights = [Weight("bias", (5,), torch.float32, True, 4, -1)]
    for unit in range(2):
        weights.append(Weight(f"{unit}.base", (6, 10), torch.bfloat16, False, 4, unit))
        weights.append(Weight(f"{unit}.lora_A", (3, 10), torch.float32, True, 4, unit))
    sharded = Layout(weights, Cluster(1, 8), 4, torch.bfloat16)
    # over 4 ranks: 6 rows are 2 on a rank, 3 rows are 1, and 5 numbers are 2
    assert sharded.kept(weights) == 2 * 4 + 2 * (2 * 10 * 2 + 1 * 10 * 4)
    assert sharded.units() == [4 * (20 + 10) * 2, 4 * (20 + 10) * 2, 4 * 2 * 2]
    assert sharded.for_engine() == 4 * (2 * 2 + 2 * (2 * 10 * 2 + 1 * 10 * 4))
    assert sum(sharded.gradient(w) for w in sharded.trained) == 2 * 4 + 2 * 10 * 4
    assert sum(sharded.gradient(w, summed=True) for w in sharded.trained) == (5 + 2 * 30) * 4
    assert sharded.reduced() == 4 * (2 + 2 * 10) * 4
    assert sharded.message() == 0


def test_weights_in_4_bits_travel_as_they_are_kept() -> None:
    """Of a base [6, 128] in NF4: 72 bytes of a row, a scale for each 64 weights; a LoRA is gathered in bfloat16."""
    base = Weight("0.base", (6, 72), torch.uint8, False, 4, 0)
    lora = Weight("0.lora_A", (3, 128), torch.float32, True, 4, 0)
    sharded = Layout([base, lora], Cluster(1, 4), 4, torch.bfloat16)
    assert (base.count, lora.count) == (6 * 128, 3 * 128)
    assert sharded.kept([base]) == 2 * 72
    assert sharded.units() == [4 * (2 * 72 + 128 * 2), 0]


def test_attention_keeps_no_weights() -> None:
    """Inputs, output and a number a row; torch's plain attention would keep two [4, 1024, 1024]."""
    q, k, v = (torch.zeros(1, 4, 1024, 16, device=META, requires_grad=True) for _ in range(3))
    plain = nn.functional.scaled_dot_product_attention
    with fused_attention(), Ledger() as ledger:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        assert ledger.live == 4 * 1024 * (16 + 1) * 4
        out.sum().backward()
    assert nn.functional.scaled_dot_product_attention is plain
    assert ledger.phase.peak < 10 * 4 * 1024 * 16 * 4
    assert q.grad is not None and q.grad.shape == q.shape


def test_an_operator_again_is_as_it_was() -> None:
    """Shapes, dtypes, strides and bytes are those of the first time, and of the inputs of the second one."""
    x, w, counts = (torch.zeros(*shape, device=META) for shape in ((2, 8, 4), (4, 16), (2, 3)))
    counts = counts.long()
    with Ledger() as ledger:
        for turn in range(2):
            sums = [counts + 1, counts + 1.0, counts.T + 1]
            assert [total.dtype for total in sums] == [torch.int64, torch.float32, torch.int64]
            assert [total.stride() for total in sums] == [(3, 1), (3, 1), (1, 3)]
            before = ledger.live
            with ledger.during(str(turn)):
                product = x @ w  # one operator that makes it, and a view that does not say that it is one
                assert (product.shape, ledger.phase.peak - before) == ((2, 8, 16), 2 * 8 * 16 * 4)
            del product
            assert ledger.live == before == 6 * (8 + 4 + 8)
