"""Sharded weights and gradients: when and in which dtype they are sent does not change the result."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import ModelConfig
from phalanx.distributed.fsdp import Sharded
from phalanx.models.trained import TrainedModel
from phalanx.run.world import start_world
from tests.helpers.ranks import run_ranks

MICRO_BATCHES = 3


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Small integers, whose products and sums are exact in float32 in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def net() -> nn.Sequential:
    """Three blocks, of which the last rank has smaller parts, and a head outside of them."""
    layers = [nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
    for i, layer in enumerate(layers):
        layer.weight.data = whole_numbers(*layer.weight.shape, seed=i)
        layer.bias.data = whole_numbers(len(layer.bias), seed=10 + i)
    return nn.Sequential(*layers)


def gradients(parallel: ParallelConfig) -> tuple[dict[str, Tensor], list[int]]:
    """Sums of the gradients of some micro-batches, and the number of unsharded gradients on a rank after each."""
    world = start_world(parallel)
    module = net()
    sharded = Sharded(module, list(module)[:3], world, parallel, torch.float32)
    there = []
    for i in range(MICRO_BATCHES):
        sharded.set_last_micro_batch(i == MICRO_BATCHES - 1)
        module(whole_numbers(2, 5, seed=100 + MICRO_BATCHES * world.rank + i)).sum().backward()
        there.append(0)
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                group = unit._get_fsdp_state()._fsdp_param_group
                assert group is not None
                for p in group.fsdp_params:
                    there[-1] += p._unsharded_param.grad is not None
    sharded.reduce_gradients()
    wholes = {}
    for name, p in sharded.parameters.items():
        assert isinstance(p.grad, DTensor)
        wholes[name] = p.grad.full_tensor()
    return wholes, there


@pytest.mark.quick("shards")
@pytest.mark.parametrize("ranks", [2, 4], ids=["shards", "two copies of shards"])
def test_gradients_of_each_micro_batch_are_summed_alike(ranks: int) -> None:
    """Reducing after each micro-batch gives the same numbers as reducing once, and keeps no unsharded gradient."""
    once = run_ranks(gradients, ranks, ParallelConfig(fsdp_size=2))
    each = run_ranks(gradients, ranks, ParallelConfig(fsdp_size=2, sync_each_batch=True))
    for (expected, whole), (found, parts) in zip(once, each, strict=True):
        assert any(value.any() for value in expected.values())
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert (whole, parts) == ([8, 8, 0], [0, 0, 0])


def for_an_engine(dtype: torch.dtype) -> list[dict[str, Any]]:
    """float32 weights of a module that computes in `dtype`: as an engine gets them, and cast afterwards."""
    parallel = ParallelConfig(fsdp_size=2)
    module = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    config, world = ModelConfig(path="x"), start_world(parallel)
    sent = dict(TrainedModel(module, list(module)[:2], world, config, parallel, dtype, seed=0).whole_weights())
    return [sent, {name: value.full_tensor().to(dtype) for name, value in module.state_dict().items()}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_cast_before_they_are_gathered(dtype: torch.dtype) -> None:
    for sent, cast in run_ranks(for_an_engine, 2, dtype):
        assert sent.keys() == cast.keys()
        for name, value in sent.items():
            assert value.dtype is dtype and torch.equal(value, cast[name]), name


def clipped() -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Norm and gradients by clip_gradients, and by torch's functions for DTensors."""
    world = start_world(ParallelConfig(fsdp_size=2))
    module = net()
    sharded = Sharded(module, list(module.children())[:3], world, ParallelConfig(fsdp_size=2), torch.float32)
    assert sharded.clip_gradients(1.0) == 0  # without gradients
    module(whole_numbers(4, 5, seed=world.rank)).square().sum().backward()
    grads = [p.grad for p in sharded.parameters.values() if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(grads)
    expected = [(grad * (1.0 / (norm.full_tensor() + 1e-6)).item()).full_tensor() for grad in grads]  # type: ignore[attr-defined]
    found = sharded.clip_gradients(1.0)
    return norm.full_tensor(), found, expected, [grad.full_tensor() for grad in grads]  # type: ignore[attr-defined]


def test_gradients_are_clipped_as_by_torch() -> None:
    for norm, found, expected, clipped_ones in run_ranks(clipped, 2):
        assert torch.equal(norm, found) and norm > 1
        torch.testing.assert_close(clipped_ones, expected)
