"""A model's shapes without its weights: what --plan counts on. Only the folder's configurations are read.

All tensors are on torch's meta device, where they have shapes and dtypes and take no memory.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.schema import ModelConfig, RunConfig
from phalanx.distributed.mesh import World
from phalanx.models import sd3
from phalanx.models.family import Embeds, FlowModel
from phalanx.models.flow import DTYPES, FlowPolicy, family_of, known_family
from phalanx.models.folder import read_index, read_json
from phalanx.types import Sampler

META = torch.device("meta")
_LIBRARIES = ("diffusers", "transformers")
_WITHOUT_TENSORS = ("Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor")
_CONFIGURATIONS = ["model_index.json", "*/config.json", "scheduler/scheduler_config.json"]


class _Blueprint(FlowModel):
    """Stands before a family in the order of its bases, so that the family's own `__init__` comes to this `load`."""

    text_length: int  # tokens of a prompt, padding included

    def load(
        self, config: ModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype, pipeline: Any, transformer: Any
    ) -> None:
        """As FlowModel.load, with tensors that are but shapes; there are no tokenizers."""
        folder, self.dtype = Path(config.path), dtype
        parts: dict[str, Any] = {
            name: _component(folder, name, *entry)
            for name, entry in read_index(folder).items()
            if isinstance(entry, list) and len(entry) == 2
        }
        if "transformer" in parts:  # the family's own class, which may be a subclass of the folder's
            parts["transformer"] = transformer.from_config(parts["transformer"].config)
        self.pipeline = pipeline(**parts)
        self.transformer, self.vae = nn.Module.to(self.pipeline.transformer, weights_dtype), self.pipeline.vae
        for name, part in parts.items():
            if isinstance(part, nn.Module) and name != "transformer":
                kept = (self.vae_dtype if name == "vae" else None) or dtype
                for parameter in part.parameters():
                    parameter.data = parameter.data.to(kept)  # buffers stay as they were made

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        """The transformer on as many rows as `latents` has, with texts of `text_length` tokens."""
        row = self.inputs_like(tuple(latents.shape[1:]), height, width, self.text_length)
        n = len(latents)
        rows = {name: v if name in self.shared_inputs else self._rows(v, n) for name, v in row.items()}
        return self.transformer(**rows, return_dict=False)[0][:, : latents.shape[1]]  # without an image's own tokens

    def _rows(self, value: Any, n: int) -> Any:
        """An argument for one row, made one for `n`."""
        if not isinstance(value, Tensor):
            return value * n if isinstance(value, list) else value
        computed = value.dim() > 1 and value.is_floating_point()  # neither timesteps nor masks
        return torch.empty(n, *value.shape[1:], dtype=self.dtype if computed else value.dtype)


def planned_policy(cfg: RunConfig, *, detach_uncond: bool, frozen: bool = False) -> FlowPolicy:
    """The policy as training builds it, of one rank that holds all weights, on the meta device. `frozen`: nothing of it
    is trained.

    `cfg.model.path` is a local folder (`fetch`) and `cfg.model.family` is set (`family_name`). Raises ValueError, with
    one line, for a folder that cannot be read, and as FlowPolicy does.
    """
    dtype = DTYPES[cfg.model.dtype]
    kind = type("Blueprint", (_Blueprint, family_of(cfg.model)), {})
    with META:
        try:
            model = kind(cfg.model, dtype, dtype if cfg.model.lora_rank > 0 or frozen else torch.float32)
        except (OSError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            if not reason.startswith("model.path: "):
                reason = f"model.path: {cfg.model.path!r}: {reason}"
            raise ValueError(reason) from error
        model.text_length = text_length(model, cfg)
        # neither of these changes what is kept in memory, and none can be done without numbers
        config = replace(cfg.model, attn_backend=None, compile=False, lora_init="gaussian")
        world = cast(World, SimpleNamespace(device=META, size=1, shard_size=1))
        seed = cfg.trainer.seed
        return FlowPolicy(
            model, world, config, cfg.parallel, cfg.data, seed=seed, detach_uncond=detach_uncond, frozen=frozen
        )


def latent_of(policy: FlowPolicy, sampler: Sampler) -> tuple[int, ...]:
    """Shape of one sample's latent."""
    return policy.model.sample_shape(sampler.height, sampler.width, sampler.num_frames)


def text_length(model: FlowModel, cfg: RunConfig) -> int:
    """The most tokens of a prompt that the transformer sees: SD3 puts CLIP's 77 before those of T5."""
    most = model.most_tokens(cfg.data.max_prompt_length, cfg.rollout.height, cfg.rollout.width)
    return most + (77 if isinstance(model, sd3.Model) else 0)


def fetch(path: str) -> str:
    """The local folder of `model.path`. A hub id's configurations, some kilobytes, come from the hub or its cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ValueError(f"model.path: {path!r}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return snapshot_download(path, allow_patterns=_CONFIGURATIONS)
    except (HfHubHTTPError, OSError):
        raise ValueError(f"model.path: {path!r}: no such folder, and no hub has it within reach") from None


def family_name(config: ModelConfig) -> str:
    """`model.family`, or the module whose family the folder's pipeline is of; ValueError where there is none."""
    if config.family is not None:
        return config.family
    return known_family(config.path, read_index(Path(config.path)))


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention keeps what a fused kernel keeps: inputs, output and a number a row.

    On meta tensors torch would take its plain form, with all weights [N, heads, L, L] in memory, which neither GPUs nor
    CPUs do. A TorchFunctionMode would not reach what checkpointing computes again.
    """

    def fused(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]

    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _component(folder: Path, name: str, library: str | None, kind: str | None) -> Any:
    """A component of the folder by its class in model_index.json; None where it is absent, or has no tensors.

    The scheduler is a real one: it has none to load.
    """
    if library is None or kind is None or kind.endswith(_WITHOUT_TENSORS):
        return None
    if library not in _LIBRARIES:
        raise ValueError(f"model.path: '{folder}' has its {name} from {library}; known: {', '.join(_LIBRARIES)}")
    found = importlib.import_module(library)
    try:
        module = getattr(found, kind)
    except AttributeError:
        raise ValueError(f"model.path: '{folder}' has a {kind}, which the installed {library} lacks") from None
    part = folder / name
    file = part / ("scheduler_config.json" if name == "scheduler" else "config.json")
    if not file.is_file():
        raise ValueError(f"model.path: {part} has no {file.name}")
    read_json(file)
    if name == "scheduler":
        with torch.device("cpu"):
            return module.from_pretrained(part)
    if library == "transformers":
        return module(module.config_class.from_pretrained(part))
    return module.from_config(module.load_config(part))
