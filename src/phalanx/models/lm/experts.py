"""Implementations of mixture-of-experts layers: transformers' kernels, spread experts, and shapes to count FLOPs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.expert_parallel import SpreadExperts

SHAPES, SPREAD = "phalanx_shapes", "phalanx_spread"


def use(lm: Any, config: LMModelConfig) -> None:
    """Set model.experts_implementation; raises ValueError for a model that does not support it."""
    name = config.experts_implementation
    if not lm._can_set_experts_implementation():
        raise ValueError(
            f"{config:experts_implementation}: {name!r} needs a model with experts, and {lm.config.model_type} has "
            "none that transformers can compute in another way; leave it out"
        )
    if config.compile and name == "eager":
        raise ValueError(
            f"{config:experts_implementation}: eager is a loop with a data-dependent length, which {config:compile} "
            f"cannot compile; set another one, or {config:compile}=false"
        )
    lm.set_experts_implementation(name)


def spread(lm: Any, config: LMModelConfig, parallel: ParallelConfig, ranks: int) -> list[nn.Module]:
    """Under expert parallelism over `ranks` ranks, let the modules with experts exchange tokens, and return them.

    Raises ValueError for a model that does not support this.
    """
    if not parallel.expert_parallel:
        return []
    key = "parallel.expert_parallel: true"
    layers = []
    for module in lm.modules():
        if any(p.dim() == 3 for p in module.parameters(recurse=False)):
            layers.append(module)
    if not layers or not lm._can_set_experts_implementation():
        raise ValueError(f"{key} needs a model with experts, and {lm.config.model_type} has none; leave it out")
    if any(m.has_bias or m.is_transposed or not m.has_gate for m in layers):
        raise ValueError(f"{key} needs experts with a gate and without biases, unlike those of {lm.config.model_type}")
    if config.compile:
        raise ValueError(
            f"{key} sends a data-dependent number of tokens, which {config:compile} cannot compile; drop one"
        )
    if ranks == 1:
        return []
    lm.config._experts_implementation = SPREAD
    return layers


def exchanged(experts: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Send each token to the ranks of its experts: states [N, D], chosen and shares [N, K] -> [N, D]."""
    spread_experts: SpreadExperts = experts.spread
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts)
    rows, tensors = states[order // chosen.shape[1]], spread_experts.tensors()
    if spread_experts.gathered is None:
        exchange = spread_experts.exchange(rows, counts)
        rows = exchange.back(_expert_outputs(experts, tensors, exchange.rows, exchange.counts))
    else:
        rows = _expert_outputs(experts, tensors, rows, counts)
    outputs = torch.empty_like(rows).index_copy(0, order, rows).view(*chosen.shape, -1)
    return (outputs * shares[..., None]).sum(1).to(states.dtype)


def _expert_outputs(experts: Any, tensors: dict[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """The experts' MLPs on rows [N, D], sorted by expert; `counts` has the number of rows of each."""
    if not len(rows):
        return rows
    ends = counts.cumsum(0, dtype=torch.int32)
    inner = experts._apply_gate(F.grouped_mm(rows, tensors["gate_up_proj"].mT, offs=ends))
    return F.grouped_mm(inner, tensors["down_proj"].mT, offs=ends)


def shapes(experts: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Products of the same number and size as in grouped_mm, but all with the first expert, to count FLOPs.

    On the meta device experts cannot be selected, and torch has grouped_mm only in bfloat16. states [N, D], chosen and
    shares [N, K] -> [N, D].
    """
    rows = states.repeat_interleave(chosen.shape[1], 0)
    if experts.has_gate:
        inner = experts._apply_gate(_first_linear(rows, experts.gate_up_proj, experts.is_transposed))
    else:
        inner = experts.act_fn(_first_linear(rows, experts.up_proj, experts.is_transposed))
    outer = _first_linear(inner, experts.down_proj, experts.is_transposed) * shares.reshape(-1, 1)
    return outer.view(*chosen.shape, -1).sum(1).to(states.dtype)


def _first_linear(rows: Tensor, weights: Tensor, is_transposed: bool) -> Tensor:
    first = weights[0]
    return rows @ first if is_transposed else F.linear(rows, first)


ExpertsInterface.register(SHAPES, shapes)
ExpertsInterface.register(SPREAD, exchanged)
