"""Tensor parallelism of a frozen model over the ranks of a replica, following transformers' plan for its class.

A plan maps names of layers, with * for numbers, to styles: `layers.*.mlp.up_proj: colwise`. Torch parallelizes linear
layers. The styles of this file handle experts, and key-value heads that are fewer than the ranks.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from phalanx.config.messages import check_divides
from phalanx.distributed.mesh import group_of

KEY = "reward.model.tensor_parallel_size"
EXPERTS = "moe_tp_experts"
LINEAR: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), lambda: ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), lambda: RowwiseParallel(input_layouts=Replicate())),
}
# Layers that stay whole on every rank: those that only affect gradients, and embeddings, which may be tied to the head.
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "embedding_rowwise", "embedding_colwise")


def replica_mesh(ranks: Sequence[int], timeout_s: float) -> DeviceMesh:
    """The mesh of the `ranks` that share a model, which include this one. Other ranks need not call this."""
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    return DeviceMesh.from_group(group_of(ranks, timeout_s, backend), device)


def wildcard(name: str) -> str:
    """The name of a module or parameter in the form of plans, with * for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def parallelize(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Keep only this rank's part of the layers in `plan`, for forward passes by all ranks of `mesh`.

    Every rank calls this with the same whole model. Raises ValueError if the model cannot be divided so.
    """
    modules = dict(model.named_modules())
    planned: dict[str, str] = {}
    for name in modules:
        style = plan.get(wildcard(name), WHOLE[0])
        if style not in WHOLE:
            planned[name] = style

    # attention first: if there are fewer key-value heads than ranks, its k_proj and v_proj do not follow the plan
    styles: dict[str, ParallelStyle] = {}
    for name, style in planned.items():
        if name.endswith(".k_proj") and style == "colwise":
            styles |= _repeat_heads(modules, name.removesuffix(".k_proj"), mesh.size())

    for name, style in planned.items():
        module = modules[name]
        if name in styles:
            continue
        if style == EXPERTS:
            # the plan has a style for each parameter of the experts that is divided
            parts = {}
            for leaf, _ in module.named_parameters(recurse=False):
                if f"{wildcard(name)}.{leaf}" in plan:
                    parts[leaf] = plan[f"{wildcard(name)}.{leaf}"]
            styles[name] = Experts(name, parts)
        elif style in LINEAR and isinstance(module, nn.Linear):
            _check_features(name, module, style, mesh.size())
            styles[name] = LINEAR[style]()
        else:
            raise ValueError(
                f"{KEY}: {mesh.size()}: the layer {name}, a {type(module).__name__}, has the style {style!r} in "
                "transformers' plan, which is not supported; expected 1"
            )
    parallelize_module(model, mesh, styles, src_data_rank=None)


def _check_features(name: str, layer: nn.Linear, style: str, tp: int) -> None:
    """Raise ValueError if features that stay divided outside the layer cannot be divided evenly."""
    count = {"colwise": layer.out_features, "rowwise": layer.in_features}.get(style, 0)
    check_divides(KEY, tp, count, f"the {{}} features of the model's layer {name}")


def _repeat_heads(modules: Mapping[str, nn.Module], name: str, tp: int) -> dict[str, ParallelStyle]:
    """Styles of k_proj and v_proj of the attention `name` if it has fewer key-value heads than `tp` ranks."""
    attention, attributes = modules[name], vars(modules[name])
    for attribute in ("head_dim", "num_key_value_groups"):
        if attribute not in attributes:
            raise ValueError(f"{KEY}: {tp}: the heads of {type(attention).__name__} are unknown: it has no {attribute}")
    groups: int = attributes["num_key_value_groups"]
    pairs: int = attention.get_parameter("k_proj.weight").shape[0] // attributes["head_dim"]
    heads = pairs * groups
    # a rank has whole heads, and either whole key-value heads or an equal share of the queries of one
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (n % pairs == 0 or pairs % n == 0)]
    if tp not in fitting:
        raise ValueError(
            f"{KEY}: {tp} does not divide the model's {heads} attention heads and {pairs} key-value heads; "
            f"expected one of {', '.join(map(str, fitting))}"
        )
    if tp <= pairs:
        return {}
    attributes["num_key_value_groups"] = heads // tp  # this rank's query heads share its one key-value head
    return {f"{name}.{part}": RepeatedHeads(pairs) for part in ("k_proj", "v_proj")}


class RepeatedHeads(ParallelStyle):
    """A linear layer that computes `heads` heads, fewer than ranks: each rank keeps the head that its queries use."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        head = device_mesh.get_local_rank() * self.heads // device_mesh.size()
        for name, parameter in list(module.named_parameters(recurse=False)):
            _keep_part(module, name, parameter.chunk(self.heads)[head])
        return module


class Experts(ParallelStyle):
    """Experts with parameters [experts, out, in]: each rank computes with a part of the features of each expert."""

    def __init__(self, name: str, parts: Mapping[str, str]) -> None:
        """parts: styles of the parameters of the module `name`. Raises ValueError for styles that are not supported."""
        for leaf, style in parts.items():
            if style not in ("colwise", "rowwise", "packed_colwise", "packed_rowwise"):
                raise ValueError(f"{KEY}: {name}.{leaf} has the style {style!r}, which is not supported; expected 1")
        self.name, self.parts = name, parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp, rank, group = device_mesh.size(), device_mesh.get_local_rank(), device_mesh.get_group()
        for leaf, style in self.parts.items():
            parameter = module.get_parameter(leaf)
            dim = -2 if style.endswith("colwise") else -1
            packed = 2 if style.startswith("packed") else 1  # two matrices are concatenated
            count = parameter.shape[dim] // packed
            check_divides(KEY, tp, count, f"the {{}} features of the experts {self.name}.{leaf}")
            blocks = parameter.unflatten(dim, (packed, tp, -1))
            _keep_part(module, leaf, blocks.select(dim - 1, rank).flatten(dim - 1, dim))

        def add_up(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            dist.all_reduce(output, group=group)
            return output

        module.register_forward_hook(add_up)
        return module


def _keep_part(module: nn.Module, name: str, part: Tensor) -> None:
    """Replace a parameter by a copy of `part`, so that the whole can be freed."""
    module.register_parameter(name, nn.Parameter(part.detach().clone(), requires_grad=False))
