"""LoRAs that share a frozen base: copies of a module that differ in the LoRA, and passes with rows of several."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from phalanx.config.trained_model import ModelConfig
from phalanx.models.fused_lora import FusedLinear
from phalanx.models.lora import add_lora
from phalanx.models.meeting import adapters


def copy_beside(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its frozen weights and its buffers."""
    shared: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.requires_grad:
            shared[id(tensor)] = tensor
    return copy.deepcopy(module, shared)


def share_layers(modules: Sequence[nn.Module]) -> None:
    """Let each layer with a LoRA compute rows of any of the modules, which are equal but for the LoRA's weights; see
    phalanx.models.meeting.adapters.
    """
    for name, layer in modules[0].named_modules():
        if isinstance(layer, FusedLinear):
            layers: Any = [module.get_submodule(name) for module in modules]
            for each in layers:
                each.beside = layers


def drawn_again(
    module: nn.Module, part: str, config: ModelConfig, targets: Sequence[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """The weights, by name, that `add_lora` with another seed would have given to a module's submodule `part`."""
    bare = copy_beside(module)
    for name, layer in list(bare.named_modules()):
        if isinstance(layer, FusedLinear):
            bare.set_submodule(name, layer.get_base_layer())
    add_lora(bare.get_submodule(part), config, targets, seed)
    for name, p in bare.named_parameters():
        if p.requires_grad:
            yield name, p.detach()


def form_of(module: nn.Module, args: Sequence[Any]) -> Any:
    """A key that is equal for passes that `together` can run as one; None if the first dim of some tensor is not that
    of the rows of the batch.
    """
    leaves, spec = tree_flatten(args)
    off = next((layer._disable_adapters for layer in module.modules() if isinstance(layer, FusedLinear)), False)
    rows, form = set(), [str(spec), off]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            rows.add(len(leaf))
            leaf = leaf.shape[1:], leaf.dtype
        form.append(leaf)
    return tuple(form) if len(rows) == 1 else None


def together(calls: Sequence[tuple[Any, Any, tuple[Any, ...]]]) -> list[Any]:
    """The results of calls `model._run(function, *args)` for TrainedModels of one base, in a pass of all their rows."""
    model, function, args = calls[0]
    if len(calls) == 1:
        return [model._run(function, *args)]
    spec, counts, rows = tree_structure(args), list[int](), dict[int, int]()
    for other, _, given in calls:
        counts.append(len(next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))))
        rows[other.adapter] = counts[-1]
    merged: list[Any] = []
    for same in zip(*(tree_leaves(given) for _, _, given in calls), strict=True):
        merged.append(torch.cat(same) if isinstance(same[0], Tensor) else same[0])
    with adapters(rows):
        out = model._run(function, *tree_unflatten(merged, spec))
    parts, spec = tree_flatten(out)
    return [tree_unflatten(each, spec) for each in zip(*(part.split(counts) for part in parts), strict=True)]
