"""LoRA through peft: adding, disabling (without changing requires_grad) and merging it, and starting from a file."""

import logging
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad

from phalanx.config.trained_model import ModelConfig
from phalanx.models.headers import read_object
from phalanx.models.linear import fits, keep_beside

log = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"  # as in peft
ADAPTER = "adapter_model.safetensors"  # peft's file name
WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' file name

# By layer: A [rank, in], and B [out, rank] times the scale, in float32. What a LoRA adds to a layer's bias is under the
# layer's name and BIAS, as A [1, 1] = 1 and B [out, 1].
Layers = dict[str, tuple[Tensor, Tensor]]
BIAS = ".bias"
# settings of peft with which an adapter computes something else than W + B A
OTHER_KINDS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config", "use_bdlora",
    "use_dora", "use_qalora",
)  # fmt: skip


def add_lora(module: nn.Module, config: ModelConfig, default_targets: Sequence[str], seed: int) -> None:
    """Add a LoRA to a module and freeze everything else. Its weights are a function of `seed`.

    In a model that reads images, only the decoder gets a LoRA. Raises ValueError if no module matches
    `model.target_modules`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from phalanx.models.fused_lora import fuse

    if config.target_modules == []:
        raise ValueError("model.target_modules: [] names no layer; null takes the default")
    left_out = towers(module)
    linear = [name for name in linear_layers(module) if module.get_submodule(name) not in left_out]

    def matches(target: str) -> bool:
        return any(name == target or name.endswith("." + target) for name in linear)

    # a model with few blocks may lack some layers of its family: SD3's last block, for example, has no text output
    targets = [t for t in default_targets if matches(t)] if config.target_modules is None else config.target_modules
    if ALL_LINEAR in (config.target_modules or default_targets):
        targets = all_linear(module)
        if not targets:
            raise ValueError(f"model.lora_rank: {config.lora_rank}; the model has no linear layers but its head")
    # peft only requires that some target matches, so the layers of a misspelt one would silently not be trained
    for target in targets or default_targets:
        if not matches(target):
            leaves = set()
            for name in linear:
                if in_block := re.search(r"\w+\.\d+\.(.+)", name):
                    leaves.add(in_block[1])
            known = f"in a block: {', '.join(sorted(leaves)) or 'none'}"
            raise ValueError(f"model.target_modules: no linear layer ends in {target!r}; {known}")
    # as full names, because layers of a tower, or in FLUX.2's lists of layers, may have the same suffix
    targets = [name for name in linear if any(name == t or name.endswith("." + t) for t in targets)]
    inits: dict[str, Any] = {"kaiming": True, "pissa": "pissa_niter_8"}  # peft's names where they differ from ours
    rounds = in_bfloat16(config) and config.lora_init in ("pissa", "orthogonal")
    before: dict[str, Any] = {name: module.get_submodule(name).weight.data for name in targets} if rounds else {}
    module.requires_grad_(False)
    # All ranks draw the same weights, so none have to be sent. peft draws them from torch's global generator, whose
    # state is restored afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=lora_alpha(config),
            target_modules=list(targets),
            init_lora_weights=inits.get(config.lora_init, config.lora_init),
        )
        # in place, without a PeftModel around it, so that diffusers' class keeps its methods
        inject_adapter_in_model(lora, module)
        for name, weight in before.items():
            _keep_start(module.get_submodule(name), weight, config)
    fuse(module)
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.to(getattr(torch, config.lora_dtype))


def in_bfloat16(config: ModelConfig) -> bool:
    """Whether a LoRA is stored or computed in bfloat16."""
    return "bfloat16" in (config.dtype, config.lora_dtype)


@torch.no_grad()
def _keep_start(layer: Any, weight: Tensor, config: ModelConfig) -> None:
    """Let a layer's initial LoRA, whose A and B are both not 0, leave the weight [out, in] as it was, also if rounded.

    orthogonal: as peft's, rotated such that the first half of A's rows and the second half of B's columns are the ones
    that are not 0, so that B A is exactly 0 in any dtype. pissa: the base is the rest after the rounded LoRA.
    """
    down, up, half = layer.lora_A["default"].weight, layer.lora_B["default"].weight, config.lora_rank // 2
    if config.lora_init == "orthogonal":
        down.data, up.data = torch.zeros(down.shape), torch.zeros(up.shape)
        down[:half], up[:, half:] = torch.randn(half, down.shape[1]) / 10, torch.randn(len(up), half) / 10
        return
    down.data, up.data = down.bfloat16().float(), up.bfloat16().float()
    rest = weight.float() - layer.scaling["default"] * (up @ down)
    layer.get_base_layer().weight.data = rest.to(weight.dtype)


def linear_layers(module: nn.Module) -> list[str]:
    """Names of the linear layers."""
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def towers(module: nn.Module) -> set[nn.Module]:
    """All submodules that encode inputs other than text for a language model in `module`, and their projectors."""
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
    """Names of the linear layers that peft's all-linear targets: without heads, towers and gates with one output."""
    from transformers import PreTrainedModel

    left_out = towers(module)
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            left_out.add(part.get_output_embeddings())
    names = []
    for name in linear_layers(module):
        layer = module.get_submodule(name)
        if layer not in left_out and layer.out_features != 1:
            names.append(name)
    return names


@contextmanager
def lora_off(module: nn.Module) -> Iterator[None]:
    """Within this context, the module computes with only its base weights.

    peft's own disable_adapters() changes requires_grad, which breaks FSDP's backward pass.
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


@torch.no_grad()
def merge_lora(module: nn.Module, kept: torch.dtype | None = None) -> None:
    """Merge the LoRA into its base layers: sums in float32, rounded once to `kept` or to the weight's dtype."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base, [adapter] = layer.get_base_layer(), layer.active_adapters
            change = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
            total = base.weight.float() + layer.scaling[adapter] * change
            base.weight.data = total.to(kept or base.weight.dtype)
            module.set_submodule(name, base)


def adapter_config(
    rank: int, alpha: float, targets: Sequence[str] | str, base: str, revision: str | None, *, bias: bool = False
) -> Any:
    """The LoraConfig of a language model's LoRA; `targets` are suffixes of names, or a regular expression.

    bias: some layers have a bias (lora_B.bias).
    """
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_bias=bias,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
        inference_mode=True,
    )


def lora_key(config: ModelConfig | None) -> str:
    """The configuration key of the LoRA to start from, for messages."""
    return f"{config or ModelConfig():lora_path}"


def lora_file(path: str) -> Path:
    """The weights file of model.lora_path, which is this file or its folder; raises ValueError if there is none."""
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


def read_adapter(file: Path, key: str = "model.lora_path") -> Layers:
    """Read peft's LoRA file, with adapter_config.json in the same folder; layers have the model's names.

    key: that of a warning.
    """
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unexpected keyword arguments")
        settings = PeftConfig.from_pretrained(str(file.parent)).to_dict()
    given = read_object(file.with_name("adapter_config.json"), "model.lora_path")
    unknown = sorted(key for key, value in given.items() if value and key not in settings)
    if unknown:
        where, names = file.with_name("adapter_config.json"), ", ".join(unknown)
        log.warning("%s: the installed peft does not know settings of %s, which are ignored: %s", key, where, names)
    return plain_layers(renamed(load_file(file), lambda name: name.removeprefix("base_model.model.")), settings)


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """The tensors of a file with other names; raises ValueError if two would have the same."""
    names: dict[str, str] = {}
    for name in tensors:
        other = names.setdefault(rename(name), name)
        if other != name:
            raise ValueError(f"{other} and {name} are the same tensor of the model")
    return {new: tensors[name] for new, name in names.items()}


def plain_layers(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Layers:
    """The layers of a LoRA, from tensors with peft's names (without an adapter's name) and the settings of LoraConfig.

    If `settings` has no lora_alpha, the tensor `alpha` of each layer is used, or else the rank. Raises ValueError for
    tensors and settings that a plain LoRA does not have, such as DoRA's magnitudes.
    """
    from peft.utils.other import get_pattern_key

    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        raise ValueError(f"init_lora_weights: {start!r} changes the base weights; convert it to a plain LoRA")
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in renamed(tensors, lambda name: name.removesuffix(".weight")).items():
        match = re.fullmatch(r"(.+)\.(lora_A|lora_B\.bias|lora_B|alpha)", name)
        if match is None:
            raise ValueError(f"{name} is not a matrix of a plain LoRA")
        parts[match[1]][match[2]] = value = tensor.float()
        if (match[2] != "alpha" and not tensor.is_floating_point()) or not value.isfinite().all():
            raise ValueError(f"{name} has {str(tensor.dtype)[6:]} values; expected floating-point numbers, all finite")
    patterns = settings.get("alpha_pattern") or {}
    layers = {}
    for layer, part in parts.items():
        both = part.keys() >= {"lora_A", "lora_B"}
        if not both and part.keys() != {"lora_B.bias"}:
            raise ValueError(f"{layer} has only {', '.join(part)} and not both matrices of a LoRA")
        rank = len(part["lora_A"]) if both else settings.get("r", 1)
        if both and (part["lora_A"].ndim, part["lora_B"].shape[1:]) != (2, (rank,)):
            given = [list(part[name].shape) for name in ("lora_A", "lora_B")]
            raise ValueError(f"{layer}: its matrices are {given}; expected lora_A [rank, in] and lora_B [out, rank]")
        alpha = settings.get("lora_alpha", float(part.get("alpha", rank)))
        alpha = patterns.get(get_pattern_key(list(patterns), layer), alpha)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"lora_alpha of {layer} is {alpha!r}; expected a number")
        if "alpha" in part and abs(alpha - float(part["alpha"])) > 1e-2 * abs(alpha):  # bfloat16 rounds it
            raise ValueError(f"{layer}.alpha is {float(part['alpha']):g}, and the settings' lora_alpha is {alpha:g}")
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        if both:
            layers[layer] = part["lora_A"], part["lora_B"] * scale
        if "lora_B.bias" in part:
            layers[layer + BIAS] = torch.ones(1, 1), part["lora_B.bias"][:, None] * scale
    for key in filter(settings.get, OTHER_KINDS):
        raise ValueError(f"{key}: {settings[key]} is not a setting of a plain LoRA")
    if not layers:
        raise ValueError("it has no tensors")
    return layers


@torch.no_grad()
def start_from_lora(
    module: nn.Module,
    path: str | None,
    read: Callable[[str], Layers],
    kept: torch.dtype | None = None,
    quantized: Iterable[nn.Module] = (),
) -> None:
    """Add the LoRA at model.lora_path, if any, to a module's weights.

    Each sum is computed in float32 and rounded once, to `kept` or to the weight's dtype. Layers in `quantized`, blocks
    whose weights are yet to be rounded to 4 bits, keep the LoRA beside their weight: it was trained on the rounded
    weights, and rounding the sum would lose most of it. Raises ValueError for a LoRA of another model.
    """
    if path is None:
        return
    layers = read(path)
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    linear = set(linear_layers(module))
    beside = {layer for block in quantized for layer in block.modules() if fits(layer)}
    for name, (down, up) in layers.items():
        owner = name.removesuffix(BIAS)
        size: tuple[int, ...] = (len(up), down.shape[1])
        layer: Any = module.get_submodule(owner) if owner in linear else None
        weight: Any = None
        if layer is not None:
            weight, size = (layer.weight, size) if owner == name else (layer.bias, size[:1])
        if weight is None or weight.shape != size:
            held = "no such linear layer" if layer is None else "no bias" if weight is None else list(weight.shape)
            raise ValueError(
                f"model.lora_path: {path!r} is of another model, or of parts that are not trained: its {name} adds "
                f"{list(size)}, the model has {held}"
            )
        if uses[id(weight)] > 1:
            raise ValueError(f"model.lora_path: {path!r} has {name}, whose weights another layer of the model shares")
        if owner == name and layer in beside:
            keep_beside(layer, up, down)
            continue
        total = weight.float() + (up.to(weight.device) @ down.to(weight.device)).view_as(weight)
        weight.data = total.to(kept or weight.dtype)


def joined(one: Layers, other: Layers) -> tuple[int, dict[str, Tensor]]:
    """The rank, equal in all layers, and the tensors, by peft's names, of a LoRA with alpha = rank that sums both.

    Only `one` may have biases.
    """
    pairs: Layers = {}
    for name in dict.fromkeys([*one, *other]):
        both = [layers[name] for layers in (one, other) if name in layers]
        pairs[name] = torch.cat([down for down, _ in both]), torch.cat([up for _, up in both], 1)
    rank = max(len(down) for down, _ in pairs.values())
    tensors = {}
    for name, (down, up) in pairs.items():
        if name.endswith(BIAS):
            tensors[f"{name.removesuffix(BIAS)}.lora_B.bias"] = up[:, 0]
            continue
        missing = rank - len(down)
        tensors[f"{name}.lora_A.weight"] = pad(down, (0, 0, 0, missing))
        tensors[f"{name}.lora_B.weight"] = pad(up, (0, missing))
    return rank, tensors


def lora_alpha(config: ModelConfig) -> float:
    """model.lora_alpha, by default twice the rank; 0 without a LoRA."""
    if config.lora_rank == 0 or config.lora_alpha is None:
        return 2 * config.lora_rank
    return config.lora_alpha
