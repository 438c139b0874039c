"""Teachers: frozen flow models beside the policy whose outputs for its samples an algorithm uses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.flow import FlowRLConfig
from phalanx.config.section import copy_with, reported_by
from phalanx.config.trained_model import FlowModelConfig
from phalanx.data.unusable import context_of
from phalanx.functional.flow import FlowTrace
from phalanx.models.flow.folder import model_index
from phalanx.models.flow.policy import FlowPolicy, build_policy
from phalanx.models.meeting import shared
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.training.components import taught_model
from phalanx.types import Prompt, Samples, Teacher


def check_teacher(teacher: Teacher, config: FlowModelConfig) -> None:
    """Raise ValueError, before loading, for a folder without a model of the policy's family."""
    with reported_by({"model": taught_model(teacher, config)}):
        kind = model_index(teacher.path, teacher.revision)["_class_name"]
    check_kind(teacher, kind, model_index(config.path, config.revision)["_class_name"])


def check_kind(teacher: Teacher, kind: str, expected: str) -> None:
    """Raise ValueError if the teacher's pipeline is not the policy's, `expected`."""
    if kind != expected:
        raise ValueError(f"{teacher.key}: {teacher.path!r} is a {kind}; it should be a {expected}, as model.path is")


class LoadedFlowTeacher:
    """A teacher sharded over the mesh, in model.dtype. Its rollout only embeds its prompts and never samples.

    It uses the policy's VAE, and the policy's text encoders and embeddings if its own encoders have equal weights;
    otherwise it keeps its own.
    """

    told = False

    def __init__(
        self, student: FlowPolicy, policy: FlowPolicy, cfg: FlowRLConfig, micro: int, scale: float | None
    ) -> None:
        """scale: guidance scale of its velocities; None: that of the rollout."""
        self.student, self.policy = student, policy
        guidance: dict[str, Any] = {} if scale is None else {policy.model.guidance_key: scale}
        self.rollout = PolicyRollout(policy, copy_with(cfg.rollout, **guidance), student.world, micro)

    def relative_cost(self, samples: Samples) -> float:
        """Operations of the teacher's pass over a sample, relative to the policy's."""
        trace: FlowTrace = samples.trace
        theirs = self.policy.forward_flops(trace) * (2 if self.rollout.sampler.guided else 1)
        return theirs / (self.student.forward_flops(trace) * (2 if trace.sampler.guided else 1))

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples with the teacher's embeddings and guidance."""
        trace: FlowTrace = samples.trace
        # `prompt_index` is the position of a prompt among this rank's prompts; embedding them in the same order makes
        # it valid for the teacher's embeddings, too
        prompts = dict(zip(trace.prompt_index.tolist(), samples.prompts, strict=True))
        ordered = [prompts[place] for place in sorted(prompts)]
        embeds = self.collate(ordered)
        return replace(samples, trace=replace(trace, sampler=self.rollout.sampler, embeds=embeds))

    def collate(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """The embeddings of prompts, see PolicyRollout.collate."""
        return self.rollout.collate(prompts, negatives=self.rollout.sampler.guided)

    def encode(self, batches: list[list[Prompt]]) -> int:
        """See PolicyRollout.encode."""
        return self.rollout.encode(batches)


class ContextFlowTeacher(LoadedFlowTeacher):
    """The policy itself, or an average of its weights, with the prompts of `with_context`."""

    told = True

    def collate(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        return super().collate(list(map(_as_told, prompts)))

    def encode(self, batches: list[list[Prompt]]) -> int:
        # the policy's own prompts are in the same cache
        return self.rollout.encode([list(map(_as_told, prompts)) for prompts in batches]) // 2


def _as_told(prompt: Prompt) -> Prompt:
    return replace(prompt, text=str(prompt.told))


def with_context(rows: list[Prompt], key: str) -> list[Prompt]:
    """The rows with the teacher's prompts, in the data's column `key`. Raises DataError for a row without one."""
    return [replace(row, told=context_of(row, key)) for row in rows]


def guided_reference(scale: float, cfg: FlowRLConfig, policy: FlowPolicy, micro: int) -> LoadedFlowTeacher:
    """The policy's reference, whose velocities have another guidance scale than the policy's."""
    if policy.model.distilled and scale > 1:
        raise ValueError(
            f"{cfg.algorithm:reference_guidance}: {scale:g}: the model is distilled to do without guidance"
        )
    return LoadedFlowTeacher(policy, policy, cfg, micro, scale)


def load_teacher(
    teacher: Teacher,
    cfg: FlowRLConfig,
    student: FlowPolicy,
    micro: int,
    build: Callable[..., FlowPolicy] = build_policy,
) -> LoadedFlowTeacher:
    """Load a teacher by `build`; all ranks call this together. Raises ValueError for a model with another VAE."""
    model = taught_model(teacher, cfg.model)
    with reported_by({"model": model}):
        options = {"seed": cfg.trainer.seed, "detach_uncond": False, "frozen": True}
        load = partial(build, model, cfg.parallel, cfg.data, student.world, **options)
        policy = shared(f"teacher {teacher}", load)
    ours, theirs = student.model, policy.model
    if not _are_equal([ours.vae], [theirs.vae], rtol=2e-2, atol=2e-3):  # two folders may differ in their dtype
        raise ValueError(f"{teacher.key}: {teacher.path!r} has another VAE than model.path, so its latents differ")
    policy.share(student, text=_are_equal(ours.text_encoders, theirs.text_encoders))
    return LoadedFlowTeacher(student, policy, cfg, micro, teacher.guidance)


def _are_equal(some: list[nn.Module], others: list[nn.Module], rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether two lists of modules have equal tensors up to the tolerance; on the meta device, equal shapes."""
    states = nn.ModuleList(some).state_dict(), nn.ModuleList(others).state_dict()
    try:
        torch.testing.assert_close(*states, rtol=rtol, atol=atol, check_device=False, check_dtype=False)
    except AssertionError:
        return False
    return True
