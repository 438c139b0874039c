"""How layers with experts compute, by transformers' own kernels; and without numbers, for plans and counts."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

SHAPES = "phalanx_shapes"


def use(lm: Any, name: str, *, compiled: bool) -> None:
    """Compute as model.experts_implementation says; ValueError for a model that cannot."""
    if not lm._can_set_experts_implementation():
        raise ValueError(
            f"model.experts_implementation: {name!r} needs a model with experts, and {lm.config.model_type} has none "
            "that transformers can compute in another way; leave it out"
        )
    if compiled and name == "eager":
        raise ValueError(
            "model.experts_implementation: eager is a loop whose length is in the data, which model.compile cannot "
            "compile; set another one, or model.compile=false"
        )
    lm.set_experts_implementation(name)


def shapes(experts: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The products of grouped_mm, as many and as large, but all with the first expert: on the meta device no one else
    can be chosen, and torch knows grouped_mm in bfloat16 alone.

    states [N, D], chosen and shares [N, K] -> [N, D].
    """
    rows = states.repeat_interleave(chosen.shape[1], 0)
    if experts.has_gate:
        inner = experts._apply_gate(_linear(rows, experts.gate_up_proj, experts.is_transposed))
    else:
        inner = experts.act_fn(_linear(rows, experts.up_proj, experts.is_transposed))
    outer = _linear(inner, experts.down_proj, experts.is_transposed) * shares.reshape(-1, 1)
    return outer.view(*chosen.shape, -1).sum(1).to(states.dtype)


def _linear(rows: Tensor, weights: Tensor, is_transposed: bool) -> Tensor:
    first = weights[0]
    return rows @ first if is_transposed else F.linear(rows, first)


ExpertsInterface.register(SHAPES, shapes)
