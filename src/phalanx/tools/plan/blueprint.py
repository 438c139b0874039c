"""The shapes of a flow-matching model without its weights. Only the configurations of its folder are read.

All tensors are on torch's meta device, where they have shapes and dtypes and take no memory.
"""

import logging
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.flow import FlowRunConfig
from phalanx.config.messages import counted, told_as
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import Embeds, FlowModel, Instruction
from phalanx.models.flow.folder import read_index
from phalanx.models.flow.pipeline_headers import module_of
from phalanx.models.flow.policy import DTYPES, FlowPolicy, build_policy
from phalanx.models.flow.registry import family_of, known_family
from phalanx.models.headers import local_folder, read_json
from phalanx.models.recompute import recompute
from phalanx.run.world import lone_world
from phalanx.tools.plan.layout import Cluster, CountedPolicy
from phalanx.tools.plan.ledger import META, Ledger
from phalanx.tools.plan.tables import Rows

log = logging.getLogger(__name__)
_WITHOUT_TENSORS = ("Tokenizer", "TokenizerFast", "FeatureExtractor")
_SHIPPED = Path(__file__).with_name("models")  # a folder of configurations for each hub id
_SETTINGS = {"scheduler": "scheduler_config.json", "guider": "guider_config.json"}  # of components without tensors
_FILES = ["*config.json", "model_index.json", "model.safetensors.index.json"]  # some kilobytes of a hub's folder


class _Blueprint(FlowModel):
    """A base in front of a family, so that the family's own `__init__` calls this `load`.

    Of equal passes of a phase only the first one runs.
    """

    ledger: Ledger
    mapped: list[nn.Module]  # text encoders whose files have the dtype that they compute in

    def load(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """As FlowModel.load, with tensors on the meta device and without tokenizers."""
        folder, self.dtype = Path(config.path), dtype
        pipeline = self.stock_pipeline()
        parts: dict[str, Any] = {}
        self.mapped: list[nn.Module] = []
        for name, entry in read_index(folder).items():
            if isinstance(entry, list) and len(entry) == 2:
                library, kind = entry
                parts[name] = _make_component(folder, name, library, kind, dtype)
                if name.startswith("text_encoder") and parts[name] is not None and _stored_in(folder / name) is dtype:
                    self.mapped.append(parts[name])
            elif name in signature(pipeline.__init__).parameters:
                parts[name] = entry  # a setting, such as Wan's boundary_ratio
        if "transformer" in parts:  # the family's own class, which may be a subclass of the folder's
            parts["transformer"] = self.transformer_class.from_config(parts["transformer"].config)
        with told_as(ValueError, f"model.path: {config.path!r}: ", TypeError):
            self.pipeline = pipeline(**parts)
        self.transformer, self.vae = self.pipeline.transformer, self.pipeline.vae
        for name, part in parts.items():
            if name.startswith("transformer") and part is not None:
                nn.Module.to(part, weights_dtype)
            elif isinstance(part, nn.Module):
                kept = (self.vae_dtype if name == "vae" else None) or dtype
                stored = part.state_dict().keys()  # buffers that are in no file keep their dtype
                for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                    if name in stored and tensor.is_floating_point():
                        tensor.data = tensor.data.to(kept)

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """Embeddings of the longest texts, on the CPU."""
        return [self.embeds_like(self.most_tokens(max_length, 0, 0), 0, 0) for _ in texts]

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        length = self.most_tokens(max_length, *instruction.size)
        return self.embeds_like(length, *instruction.size, instruction.frames)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        self.ledger.phase.passes += 1
        # the transformer itself and not its id, which another one may have once this one is freed
        key = self.transformer, torch.is_grad_enabled(), *(tuple(value.shape) for value in (latents, *embeds.values()))
        return self.ledger.once(key, partial(super().velocity, latents, timesteps, embeds, height, width))

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        with self.ledger.during(self.ledger.phase.name.replace("sample", "decode")):
            return self.ledger.once(tuple(latents.shape), partial(super().decode, latents, height, width))

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        with self.ledger.during("encode images"):
            return self.ledger.once(tuple(images.shape), partial(super().encode_images, images, generator))


class _Processor:
    """In place of a processor, which some pipelines ask for the tokens of their template in their constructor."""

    def __init__(self) -> None:
        self.tokenizer = self

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[]]

    def encode(self, text: str) -> list[int]:
        return [0]


class PlannedFlowPolicy(CountedPolicy, FlowPolicy):
    """A flow model's policy on the meta device. text_tokens: the length of the longest text's embedding."""

    text_tokens = 0

    def update_rows(self, p: Any) -> Rows:
        """How images of a planned job `p` are drawn and trained."""
        plan, images = p.plan, p.plan.first(1)
        # branches of guidance that share a forward pass
        together = 2 if p.samples.trace.sampler.guided and not self.detach_uncond else 1
        both = f" x {together} branches of guidance" if together > 1 else ""
        inner = f"{counted(images, 'image')} x {counted(plan.actions, 'trained step')}{both}"
        drawn = counted(plan.per_rank // plan.rollout_micro, "micro-batch")
        return [
            ("rollout", f"{drawn} of {plan.rollout_micro} images{both}"),
            ("updates", f"{plan.updates * plan.epochs} per step, each of {counted(plan.passes, 'micro-batch')}"),
            ("micro-batch", f"{inner} = {counted(images * plan.actions * together, 'row')}"),
        ]

    def input_rows(self, p: Any) -> Rows:
        """The lengths of texts."""
        return [("texts", f"{counted(self.text_tokens, 'token')} at most")]

    def recompute(self, count: int) -> None:
        """Have the first `count` blocks recomputed in backward passes."""
        for block in self.blocks:
            vars(block).pop("recomputed", None)
        self.model.transformer.enable_gradient_checkpointing(recompute(self.blocks[:count]))
        self.trained.recomputed = count / len(self.blocks)


def planned_policy(
    cfg: FlowRunConfig, cluster: Cluster, ledger: Ledger, *, rank: int = 0, **options: bool
) -> PlannedFlowPolicy:
    """The policy as training builds it, on the meta device, of one rank that has all weights; its layout is that of a
    rank of the cluster. Options and errors are those of build_policy.
    """
    kind = type("Blueprint", (_Blueprint, family_of(cfg.model)), {"ledger": ledger})
    # none of these changes what is kept in memory, and none can be done without numbers
    config = replace(cfg.model, attn_backend=None, compile=False, lora_init="gaussian")
    data = replace(cfg.data, embeds_cache_dir=None)
    world = lone_world(cfg.parallel, cluster.ranks, rank, META)
    given: dict[str, Any] = {"detach_uncond": False, "seed": cfg.trainer.seed, "make": PlannedFlowPolicy, **options}
    with META:
        policy: Any = build_policy(config, cfg.parallel, data, world, family=kind, **given)
    policy.lay_out(cfg, cluster, ledger, policy.model.blocks())
    policy.encoders, policy.decoders = policy.model.text_encoders, [policy.model.vae]
    policy.mapped = policy.model.mapped
    policy.image_columns = [] if policy.model.image_column is None else [policy.model.image_column]
    policy.text_tokens = policy.model.most_tokens(data.max_prompt_length, cfg.rollout.height, cfg.rollout.width)
    return policy


def fetch(path: str, revision: str | None = None) -> str:
    """The local folder of `model.path`. The configurations of a hub id come from the hub or its cache, or else from
    those that Phalanx ships.
    """
    folder = local_folder(path, "model.path", "a model's folder")
    if folder is not None:
        return str(folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return snapshot_download(path, revision=revision, allow_patterns=_FILES)
    except (HfHubHTTPError, OSError):
        return str(_shipped_folder(path))


@cache
def _shipped_folder(path: str) -> Path:
    """The folder of a hub id's configurations that Phalanx ships; cached, so that a process logs each only once."""
    folder = _SHIPPED / path.replace("/", "--")
    if not folder.is_dir():
        raise ValueError(f"model.path: {path!r}: no such folder, and no hub has it within reach") from None
    log.warning("%s: no hub has it within reach; the plan uses the shapes that Phalanx ships", path)
    return folder


def family_name(config: FlowModelConfig) -> str:
    """`model.family`, or the family of the folder's pipeline; ValueError if there is none."""
    return config.family or known_family(config.path, read_index(Path(config.path)))


def _stored_in(folder: Path) -> torch.dtype | None:
    """The dtype that transformers names in the configuration of a component; None without one."""
    settings = read_json(folder / "config.json")
    return DTYPES.get(settings.get("dtype", settings.get("torch_dtype")))


def _make_component(folder: Path, name: str, library: str | None, kind: str | None, dtype: torch.dtype) -> Any:
    """A component of the folder by its class in model_index.json; None if it is absent or has no tensors.

    The scheduler and the guider are real ones: they have no tensors to load.
    """
    if library is None or kind is None or kind.endswith(_WITHOUT_TENSORS):
        return None
    if kind.endswith("Processor"):
        return _Processor()
    module = getattr(module_of(library), kind)
    part = folder / name
    file = part / _SETTINGS.get(name, "config.json")
    if not file.is_file():
        raise ValueError(f"model.path: {part} has no {file.name}")
    read_json(file)
    if name in _SETTINGS:
        with torch.device("cpu"):
            return module.from_pretrained(part)
    if library == "transformers":
        # as from_pretrained does: buffers that are in no file may have the dtype, too
        return module._from_config(module.config_class.from_pretrained(part), dtype=dtype)
    return module.from_config(module.load_config(part))
