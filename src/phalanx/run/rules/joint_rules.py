"""Rules for joint runs. The rules for each policy's configuration apply as well."""

from typing import Any

from phalanx.run.rules.rollout_rules import redrawn
from phalanx.run.rules.rule import JOINT, Rule

_PARTS = ("writer", "painter")


def _schedule(c: Any) -> tuple[str, str] | None:
    """The first policy with a schedule that needs separate ranks, and the schedule."""
    schedules = [(part, vars(c)[part].rollout.schedule) for part in _PARTS]
    return next(((part, name) for part, name in schedules if name != "synchronous"), None)


def _teacher(c: Any) -> tuple[str, str] | None:
    """The first policy whose algorithm has a teacher, and the algorithm's name."""
    algorithms = [(part, vars(c)[part].algorithm) for part in _PARTS]
    return next(((part, a.name) for part, a in algorithms if {"teacher_path", "context_key"} & {*vars(a)}), None)


RULES = (
    Rule("writer.rollout.max_num_gen_batches writer.rollout.max_draws_per_prompt "
         "painter.rollout.max_num_gen_batches painter.rollout.max_draws_per_prompt", JOINT,
         "Joint runs do not resample groups of equal rewards.",
         lambda c: redrawn(c.writer.rollout) or redrawn(c.painter.rollout),
         "{x[0]}: {x[1]} would draw samples again, which a joint run does not support; set it to 1"),
    Rule("writer.rollout.schedule painter.rollout.schedule", JOINT,
         "The policies of a joint run are sampled and trained sequentially, on all ranks.",
         _schedule,
         "{x[0]}.rollout.schedule: {x[1]} needs ranks that only sample, which a joint run does not have; set it to "
         "synchronous"),
    Rule("writer.rollout.partial_rollout", JOINT,
         "The painter needs all texts of a step, so the writer's rollouts are not partial.",
         lambda c: c.writer.rollout.partial_rollout,
         "writer.rollout.partial_rollout: true would leave texts of a step unfinished, but the painter needs them all; "
         "set it to false"),
    Rule("writer.rollout.engine", JOINT, "The writer writes what the painter draws.",
         lambda c: c.writer.rollout.facts.weights == "none",
         "{c.writer.rollout:engine:} takes responses from the data, but a joint run draws what its writer writes; set "
         "{c.writer.rollout:engine}=policy"),
    Rule("painter.rollout.engine", JOINT, "The painter samples in the trained modules.",
         lambda c: c.painter.rollout.engine != "policy",
         "painter.rollout.engine: {c.painter.rollout.engine} does not support rewritten prompts; set it to policy"),
    Rule("writer.model.block_size", JOINT, "The writer is autoregressive.",
         lambda c: c.writer.model.block_size is not None,
         "writer.model.block_size: {c.writer.model.block_size} is for block diffusion, which joint runs do not "
         "support; set it to null"),
    Rule("writer.algorithm.name", JOINT, "The writer has no critic.",
         lambda c: c.writer.algorithm.needs_critic,
         "writer.algorithm.name: {c.writer.algorithm.name} needs a critic, which a joint run does not have; expected "
         "an algorithm without one, such as grpo"),
    Rule("writer.algorithm.name painter.algorithm.name", JOINT, "The policies of a joint run have no teachers.",
         _teacher,
         "{x[0]}.algorithm.name: {x[1]} has a teacher, which a joint run does not support; expected an algorithm "
         "without one, such as grpo or flow_grpo"),
    Rule("painter.algorithm.reference_guidance", JOINT, "The painter's reference has the guidance of the painter.",
         lambda c: vars(c.painter.algorithm).get("reference_guidance"),
         "painter.algorithm.reference_guidance: {x} is not supported in a joint run; set it to null"),
    Rule("painter.algorithm.name", JOINT, "The painter's algorithm does not differentiate the reward.",
         lambda c: "last_steps" in vars(c.painter.algorithm),
         "painter.algorithm.name: {c.painter.algorithm.name} differentiates the reward, which a joint run does not "
         "support; expected an algorithm that does not, such as flow_grpo"),
    Rule("painter.algorithm.name diffusion_group_scope", JOINT,
         "Images that are trained as a pair or a group have the same rewritten prompt.",
         lambda c: c.diffusion_group_scope == "prompt" and c.painter.algorithm.name in ("diffusion_dpo", "dgpo"),
         "diffusion_group_scope: prompt would compare images of different texts with "
         "painter.algorithm.name={c.painter.algorithm.name}; set it to rewrite"),
)  # fmt: skip
