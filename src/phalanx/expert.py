"""Frozen models beside the policy whose view of its samples an algorithm wants: the teacher of a distillation."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from phalanx.config.schema import ModelConfig, RolloutConfig, TrainConfig
from phalanx.distributed.mesh import World
from phalanx.models.family import FlowModel, model_index
from phalanx.models.flow import FlowPolicy, build_policy
from phalanx.rollout.policy import PolicyRollout
from phalanx.types import Expert, Samples


def check_expert(expert: Expert, config: ModelConfig) -> None:
    """Raise ValueError for a folder that is no model of the policy's family; before anything is loaded."""
    try:
        kind = model_index(expert.path)["_class_name"]
    except ValueError as error:
        raise about(expert, error) from error
    check_kind(expert, kind, model_index(config.path)["_class_name"])


def check_kind(expert: Expert, kind: str, own: str) -> None:
    """Raise ValueError where the expert's pipeline is another than the policy's `own`."""
    if kind != own:
        raise ValueError(f"{expert.key}: {expert.path!r} is a {kind}; it should be a {own}, as model.path is")


def expert_model(config: ModelConfig, path: str) -> ModelConfig:
    """How an expert is loaded: whole weights, of which none are trained."""
    return replace(config, path=path, lora_rank=0, gradient_checkpointing=False)


def expert_rollout(config: RolloutConfig, expert: Expert, model: FlowModel) -> RolloutConfig:
    """How an expert would have sampled: with its own guidance."""
    guidance: dict[str, Any] = {} if expert.guidance is None else {model.guidance_key: expert.guidance}
    return replace(config, **guidance)


class LoadedExpert:
    """An expert over the mesh, in model.dtype. `rollout` has its guidance and embeds its prompts; it samples nothing.

    The VAE is the policy's, and so are the text encoders and their embeddings where the expert's encoders are equal;
    others stay, and encode for the expert alone.
    """

    def __init__(self, expert: Expert, cfg: TrainConfig, student: FlowPolicy, world: World, micro: int) -> None:
        """All ranks in step. Raises ValueError for a model that cannot judge the policy's latents."""
        try:
            self.policy = build_policy(
                expert_model(cfg.model, expert.path),
                cfg.parallel,
                cfg.data,
                world,
                seed=cfg.trainer.seed,
                detach_uncond=False,
                frozen=True,
            )
        except ValueError as error:
            raise about(expert, error) from error
        own, theirs = student.model, self.policy.model
        if not _alike([own.vae], [theirs.vae], rtol=2e-2, atol=2e-3):  # two folders may differ in their dtype
            raise ValueError(f"{expert.key}: {expert.path!r} has another VAE than model.path, so other latents")
        self.policy.share(student, text=_alike(own.text_encoders, theirs.text_encoders))
        self.rollout = PolicyRollout(self.policy, expert_rollout(cfg.rollout, expert, theirs), world, micro)

    def view_flops(self, text_length: int) -> int:
        """FLOPs of its view of a sample, at one noise level."""
        s = self.rollout.sampler
        return self.policy.model.flops(s.height, s.width, text_length, s.num_frames) * (2 if s.guided else 1)

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples as the expert would have sampled them: with its own embeddings and guidance."""
        places = zip(samples.trace.prompt_index.tolist(), samples.prompts, strict=True)
        prompts = dict(sorted(places, key=lambda place: place[0]))
        sampler = self.rollout.sampler
        embeds = self.rollout.collate(list(prompts.values()), negatives=sampler.guided)
        return replace(samples, trace=replace(samples.trace, sampler=sampler, embeds=embeds))


def _alike(some: list[nn.Module], others: list[nn.Module], rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether modules hold the same tensors."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        a, b = one.state_dict(), other.state_dict()
        if {name: t.shape for name, t in a.items()} != {name: t.shape for name, t in b.items()}:
            return False
        if not all(torch.allclose(t.float(), b[name].float(), rtol, atol) for name, t in a.items()):
            return False
    return True


def about(expert: Expert, error: ValueError) -> ValueError:
    """A message on model.path, about the expert."""
    return ValueError(f"{expert.key}: {str(error).removeprefix('model.path: ')}")
