"""LoRA through peft: adding it, switching it off without touching requires_grad, and starting from one in a file."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from phalanx.config.run import ModelConfig

ALL_LINEAR = "all-linear"  # as in peft
ADAPTER = "adapter_model.safetensors"  # peft's name of the file, and diffusers'
WEIGHTS = "pytorch_lora_weights.safetensors"

Layers = dict[str, tuple[Tensor, Tensor]]  # of a LoRA: A [rank, in], and B [out, rank] with the scale in it, in float32


def add_lora(module: nn.Module, config: ModelConfig, default_targets: Sequence[str], seed: int) -> None:
    """Add a LoRA to a module and freeze all else. Its weights are a function of `seed`. Of a model that reads images
    only the decoder gets one.

    Raises ValueError if no module matches `model.target_modules`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from phalanx.models.fused_lora import fuse

    if config.target_modules == []:
        raise ValueError("model.target_modules: [] names no layer; null takes the default")
    left_out = towers(module)
    linear = [name for name in linear_layers(module) if module.get_submodule(name) not in left_out]

    def matches(target: str) -> bool:
        return any(name == target or name.endswith("." + target) for name in linear)

    # a model with few blocks may lack some of its family's layers: SD3's last block has no output for texts
    targets = [t for t in default_targets if matches(t)] if config.target_modules is None else config.target_modules
    if ALL_LINEAR in (config.target_modules or default_targets):
        targets = [name for name in all_linear(module) if name in linear]
        if not targets:
            raise ValueError(f"model.lora_rank: {config.lora_rank}; the model has no linear layers but its head")
    # peft asks only that some target matches; one that is misspelt would silently go untrained
    for target in targets or default_targets:
        if not matches(target):
            leaves = set()
            for name in linear:
                if in_block := re.search(r"\w+\.\d+\.(.+)", name):
                    leaves.add(in_block[1])
            known = f"in a block: {', '.join(sorted(leaves)) or 'none'}"
            raise ValueError(f"model.target_modules: no linear layer ends in {target!r}; {known}")
    # as whole names: layers of a tower may end in the same, and so may FLUX.2's lists of layers
    targets = [name for name in linear if any(name == t or name.endswith("." + t) for t in targets)]
    inits: dict[str, Any] = {"kaiming": True, "pissa": "pissa_niter_8"}  # peft's names, where they differ
    module.requires_grad_(False)
    # All ranks begin with the same weights, without a message: peft draws them from the process's
    # generator, which is as it was afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=lora_alpha(config),
            target_modules=list(targets),
            init_lora_weights=inits.get(config.lora_init, config.lora_init),
        )
        # in place, without a PeftModel around it: diffusers' own class keeps its methods
        inject_adapter_in_model(lora, module)
    fuse(module)
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.to(getattr(torch, config.lora_dtype))


def linear_layers(module: nn.Module) -> list[str]:
    """Names of the linear layers."""
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def towers(module: nn.Module) -> set[nn.Module]:
    """All modules that read other inputs than text for a language model within `module`, or project what they read."""
    from transformers import PreTrainedModel

    result: set[nn.Module] = set()
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and "text_config" in part.config.sub_configs:
            inside = set(part.get_decoder().modules()) | {part.get_output_embeddings()}
            for child in part.base_model.children():
                if inside.isdisjoint(child.modules()):
                    result.update(child.modules())
    return result


def all_linear(module: nn.Module) -> list[str]:
    """Names of the layers that peft means by all-linear: all linear ones but a language model's head. Towers for other
    inputs than text, and gates of one number, are left out as well.
    """
    from transformers import PreTrainedModel

    left_out: set[nn.Module | None] = set()
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            left_out.add(part.get_output_embeddings())
            if part.main_input_name != "input_ids":
                left_out.update(part.modules())
    names = []
    for name in linear_layers(module):
        layer = module.get_submodule(name)
        if layer not in left_out and layer.out_features != 1:
            names.append(name)
    return names


@contextmanager
def lora_off(module: nn.Module) -> Iterator[None]:
    """Only the base weights, for a while.

    peft's own disable_adapters() flips requires_grad, which FSDP's backward pass does not survive.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer._disable_adapters = state


def merged_weights(state: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A module's state_dict under its names without a LoRA, one whole and merged tensor at a time.

    Sharded tensors are gathered, in `dtype` where that has fewer bits: all ranks of a shard group must draw all of
    them, in step. With a LoRA, sums are in float32.
    """
    scale = lora_alpha(config) / config.lora_rank if config.lora_rank > 0 else 0.0
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        merged = name.endswith(".base_layer.weight")
        if isinstance(tensor, DTensor) and tensor.dtype.itemsize > dtype.itemsize and not merged:
            tensor = tensor.to(dtype)
        weight = _whole(tensor)
        if merged:
            stem = name.removesuffix("base_layer.weight")
            down = _whole(state[f"{stem}lora_A.default.weight"])
            up = _whole(state[f"{stem}lora_B.default.weight"])
            # in float32: the receiver rounds the sum, once
            weight = weight.float() + scale * (up.float() @ down.float())
        yield name.replace(".base_layer.", "."), weight


@torch.no_grad()
def merge_lora(module: nn.Module, kept: torch.dtype | None = None) -> None:
    """Put the LoRA into the weights of its layers, which are the base's own afterwards; each sum is taken in float32
    and rounded once, to `kept` or to the dtype that the weight has.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base, [adapter] = layer.get_base_layer(), layer.active_adapters
            change = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
            total = base.weight.float() + layer.scaling[adapter] * change
            base.weight.data = total.to(kept or base.weight.dtype)
            module.set_submodule(name, base)


def adapter_config(rank: int, alpha: float, targets: Sequence[str] | str, base: str, revision: str | None) -> Any:
    """The LoraConfig with which peft loads a LoRA of a language model; its `save_pretrained` writes the file. `targets`
    may be a pattern of whole names.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )


def lora_file(path: str) -> Path:
    """The file that model.lora_path means; ValueError if there is none."""
    given = Path(path).expanduser()
    for file in (given, given / ADAPTER, given / WEIGHTS):
        if file.is_file():
            return file
    if not given.exists():
        raise ValueError(f"model.lora_path: {path!r}: no such file or folder")
    raise ValueError(
        f"model.lora_path: {path!r} has neither {ADAPTER} nor {WEIGHTS}; expected a LoRA of peft or diffusers, such as "
        "tasks/export_checkpoint.py writes"
    )


def read_adapter(file: Path) -> Layers:
    """A LoRA of peft, with its adapter_config.json beside the file, by the model's names of layers."""
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(str(file.parent)).to_dict()
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(("pissa", "olora", "corda", "loftq")):
        raise ValueError(f"init_lora_weights: {start!r} changes the base weights; convert it to a plain LoRA")
    tensors = {name.removeprefix("base_model.model."): t for name, t in load_file(file).items()}
    return plain_layers(tensors, settings)


def plain_layers(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Layers:
    """The layers of a LoRA of peft's names, without an adapter in them; `settings` are those of its LoraConfig.

    Without a lora_alpha, it is the `alpha` beside a layer's matrices, or else the rank. Raises ValueError for what a
    plain LoRA has not, such as biases or DoRA's magnitudes.
    """
    from peft.utils.other import get_pattern_key

    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.(lora_A|lora_B|alpha)(\.weight)?", name)
        if match is None:
            raise ValueError(f"{name} is no matrix of a plain LoRA")
        parts[match[1]][match[2]] = tensor.float()
    patterns = settings.get("alpha_pattern") or {}
    layers = {}
    for layer, part in parts.items():
        if not part.keys() >= {"lora_A", "lora_B"}:
            raise ValueError(f"{layer} has only {', '.join(part)} and not both matrices of a LoRA")
        rank = len(part["lora_A"])
        alpha = settings.get("lora_alpha", float(part.get("alpha", rank)))
        alpha = patterns.get(get_pattern_key(list(patterns), layer), alpha)
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        layers[layer] = part["lora_A"], part["lora_B"] * scale
    return layers


@torch.no_grad()
def start_from_lora(
    module: nn.Module, path: str | None, read: Callable[[str], Layers], kept: torch.dtype | None = None
) -> None:
    """Add the LoRA at model.lora_path, if any, to the weights of a module, in float32; each sum is rounded once, to
    `kept` or to the dtype that the weight has. Raises ValueError for a LoRA of another model.
    """
    if path is None:
        return
    layers = read(path)
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    linear = set(linear_layers(module))
    for name, (down, up) in layers.items():
        weight: Any = module.get_submodule(name).weight if name in linear else torch.empty(0)
        if weight.shape != (len(up), down.shape[1]):
            held = list(weight.shape) if name in linear else "no such linear layer"
            raise ValueError(
                f"model.lora_path: {path!r} is of another model, or of parts that are not trained: its {name} adds "
                f"{[len(up), down.shape[1]]}, the model has {held}"
            )
        if uses[id(weight)] > 1:
            raise ValueError(f"model.lora_path: {path!r} has {name}, whose weights another layer of the model shares")
        total = weight.float() + up.to(weight.device) @ down.to(weight.device)
        weight.data = total.to(kept or weight.dtype)


def joined(one: Layers, other: Layers) -> tuple[int, dict[str, Tensor]]:
    """The rank, and the tensors by peft's names, of the LoRA with alpha = rank that adds what both add. All of its
    layers have that rank.
    """
    pairs: Layers = {}
    for name in dict.fromkeys([*one, *other]):
        both = [layers[name] for layers in (one, other) if name in layers]
        pairs[name] = torch.cat([down for down, _ in both]), torch.cat([up for _, up in both], 1)
    rank = max(len(down) for down, _ in pairs.values())
    tensors = {}
    for name, (down, up) in pairs.items():
        missing = rank - len(down)
        tensors[f"{name}.lora_A.weight"] = pad(down, (0, 0, 0, missing))
        tensors[f"{name}.lora_B.weight"] = pad(up, (0, missing))
    return rank, tensors


def lora_alpha(config: ModelConfig) -> float:
    """The alpha of model.lora_alpha, by default twice the rank; 0 without a LoRA."""
    if config.lora_rank == 0 or config.lora_alpha is None:
        return 2 * config.lora_rank
    return config.lora_alpha


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
