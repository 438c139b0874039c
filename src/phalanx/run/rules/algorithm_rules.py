"""Rules for the algorithm, its rewards and its critic."""

from collections.abc import Callable
from typing import Any

from phalanx.run.rules.rule import FLOW_RL, LM_RL, RL, RUN, Rule, first_set, not_betas


def _critic(c: Any) -> tuple[str, Any] | None:
    """The first key of a critic that is set though the algorithm has none, and its value."""
    if c.algorithm.needs_critic:
        return None
    entry = first_set(c.critic)
    if entry is not None:
        return f"critic.{entry[0]}", entry[1]
    return ("trainer.critic_warmup", c.trainer.critic_warmup) if c.trainer.critic_warmup else None


def _term(c: Any, broken: Callable[[Any], bool]) -> tuple[int, Any] | None:
    """The index of the first term of the reward that breaks a rule, and the term."""
    for i, term in enumerate(c.reward.functions):
        if broken(term):
            return i, term
    return None


def _teachers(c: Any, broken: Callable[[Any], bool]) -> bool:
    """Whether the algorithm learns from teachers and its keys break a rule."""
    return "teachers" in vars(c.algorithm) and broken(c.algorithm)


_DECAYS = ("old_decay_rate", "old_decay_flat", "old_decay_limit")
_NO_GROUP = (
    "{c.rollout:n}: 1 leaves %s no group of samples to compare; set it to at least 2, or leave the other key out"
)

RULES = (
    Rule("rollout.n algorithm.name", LM_RL,
         "An algorithm that compares the samples of a prompt needs at least two of them.",
         lambda c: c.rollout.n == 1 and c.algorithm.needs_groups,
         "{c.rollout:n}: 1 leaves {c.algorithm:name=} nothing to compare a sample with; set it to at least 2, or "
         "{c.algorithm:name}=ppo, which needs no groups"),
    Rule("rollout.n reward.normalize", LM_RL,
         "Rewards that are normalized within a prompt's group need at least two samples of each prompt.",
         lambda c: c.rollout.n == 1 and c.reward.normalize != "none",
         _NO_GROUP % "reward.normalize={c.reward.normalize}"),
    Rule("rollout.n rollout.max_num_gen_batches", LM_RL,
         "New prompts for groups of equal rewards need at least two samples of each prompt.",
         lambda c: c.rollout.n == 1 and c.rollout.max_num_gen_batches > 1,
         _NO_GROUP % "{c.rollout:max_num_gen_batches=}"),
    Rule("rollout.n rollout.max_draws_per_prompt", LM_RL,
         "New samples for groups of equal rewards need at least two samples of each prompt.",
         lambda c: c.rollout.n == 1 and c.rollout.max_draws_per_prompt > 1,
         _NO_GROUP % "{c.rollout:max_draws_per_prompt=}"),
    Rule("critic.optim.betas", LM_RL, "AdamW's betas of the critic are two numbers in 0 .. 1.",
         lambda c: c.algorithm.needs_critic and not_betas(c.critic.optim.betas),
         "critic.optim.betas: {c.critic.optim.betas} should be two numbers in 0 .. 1, e.g. [0.9, 0.999]"),
    Rule("critic.* trainer.critic_warmup algorithm.name", LM_RL,
         "Keys of a critic are only for an algorithm that trains one.",
         _critic,
         "{x[0]}: {x[1]} configures a critic, but {c.algorithm:name=} has none; leave it out, or set "
         "{c.algorithm:name}=ppo"),
    Rule("trainer.critic_warmup trainer.total_training_steps", LM_RL,
         "The steps that train only the critic do not exceed those of the run.",
         lambda c: 0 < (c.trainer.total_training_steps or 0) < c.trainer.critic_warmup,
         "trainer.critic_warmup: {c.trainer.critic_warmup} is beyond trainer.total_training_steps="
         "{c.trainer.total_training_steps}; expected fewer, so that the policy is trained too"),
    Rule("reward.functions", RUN, "The range to which a term's scores are clamped is given by two numbers.",
         lambda c: _term(c, lambda t: t.clip is not None and not (len(t.clip) == 2 and t.clip[0] < t.clip[1])),
         "reward.functions[{x[0]}].clip: {x[1].clip} should be two numbers, the smaller first, e.g. [0, 1]"),
    Rule("reward.functions", RUN, "A term's initial weight and the number of steps of its change are given together.",
         lambda c: _term(c, lambda t: (t.initial_weight is None) != (t.weight_steps == 0)),
         "reward.functions[{x[0]}].initial_weight: {x[1].initial_weight} with weight_steps {x[1].weight_steps} is only "
         "half of a schedule; set both, or leave both out"),
    Rule("rollout.max_num_gen_batches rollout.max_draws_per_prompt", RL,
         "For groups of equal rewards, either new prompts are drawn or new samples, not both.",
         lambda c: min(c.rollout.max_num_gen_batches, c.rollout.max_draws_per_prompt) > 1,
         "{c.rollout:max_num_gen_batches:} draws new prompts, and {c.rollout:max_draws_per_prompt:} the same ones "
         "again; set one of the two to 1"),
    Rule("algorithm.global_std reward.normalize", RL, "`reward.normalize=gdpo` divides by the std of all samples.",
         lambda c: c.reward.normalize == "gdpo" and vars(c.algorithm).get("global_std") is False,
         "{c.algorithm:global_std}: false contradicts reward.normalize=gdpo, which divides by the std of all "
         "samples; leave it out, or set reward.normalize=group"),
    Rule("algorithm.* algorithm.name", RL, "A key is only set for an algorithm that reads it.",
         lambda c: first_set(c.algorithm, c.algorithm.unused),
         "{c.algorithm:{x[0]}}: {x[1]} is not used by {c.algorithm:name=}; leave it out"),
    Rule("algorithm.adv_clip_max algorithm.norm_adv_by_std_in_grpo", RL,
         "Advantages are clamped only if they are divided by a standard deviation.",
         lambda c: (
             c.algorithm.bounds_stds
             and not c.algorithm.norm_adv_by_std_in_grpo
             and first_set(c.algorithm, ("adv_clip_max",))
         ),
         "{c.algorithm:adv_clip_max:} clamps advantages that were divided by a std, but "
         "{c.algorithm:norm_adv_by_std_in_grpo}=false does not divide; leave it out"),
    Rule("rollout.sde_type algorithm.name", FLOW_RL,
         "The stochastic step is one for which the algorithm's loss is derived.",
         lambda c: c.rollout.sde_type not in c.algorithm.sde_types and " or ".join(c.algorithm.sde_types),
         "{c.rollout:sde_type:} does not work with {c.algorithm:name=}; expected {x}"),
    Rule("algorithm.timestep_weight algorithm.importance", FLOW_RL,
         "Weights of single steps need a likelihood ratio per step.",
         lambda c: (
             vars(c.algorithm).get("importance") == "sequence"
             and vars(c.algorithm).get("timestep_weight", "none") != "none"
         ),
         "{c.algorithm:timestep_weight:} weights a sample's steps differently, but {c.algorithm:importance}=sequence "
         "treats them as one; set one of the two to its default"),
    Rule("algorithm.noise_draws algorithm.last_steps", FLOW_RL,
         "Fresh noise is drawn only for the last denoising step.",
         lambda c: vars(c.algorithm).get("noise_draws") and c.algorithm.last_steps > 1,
         "{c.algorithm:noise_draws:} draws repeat only the last denoising step; set {c.algorithm:last_steps} to 1, "
         "or leave it out"),
    Rule("algorithm.teacher_path algorithm.teachers", RL,
         "An algorithm that learns from a teacher needs at least one.",
         lambda c: _teachers(c, lambda a: a.teacher_path is None and not a.teachers),
         "{c.algorithm:teacher_path} is not set; give {c.algorithm:teacher_path}=..., or several as "
         "{c.algorithm:teachers}"),
    Rule("algorithm.teachers algorithm.teacher_path algorithm.teacher_revision", RL,
         "Several teachers take the place of a single teacher and its revision.",
         lambda c: _teachers(c, lambda a: a.teachers and (a.teacher_path or a.teacher_revision)),
         "{c.algorithm:teachers}: takes the place of {c.algorithm:teacher_path} and {c.algorithm:teacher_revision}; "
         "leave those out, or {c.algorithm:teachers}"),
    Rule("algorithm.teacher_key algorithm.teachers", RL,
         "Several teachers need the column that names each row's teacher, and vice versa.",
         lambda c: _teachers(c, lambda a: bool(a.teachers) != (a.teacher_key is not None)),
         "{c.algorithm:teacher_key:}; expected the column of the data that names each row's teacher, one of "
         "{c.algorithm:teachers}; set both, or leave both out"),
    Rule("algorithm.old_decay_rate algorithm.old_decay_flat algorithm.old_decay_limit algorithm.old_decay", FLOW_RL,
         "With `algorithm.old_decay=zero` the sampling weights are the policy's, without a schedule.",
         lambda c: vars(c.algorithm).get("old_decay") == "zero" and first_set(c.algorithm, _DECAYS),
         "{c.algorithm:{x[0]}}: {x[1]} has no effect with {c.algorithm:old_decay}=zero; set old_decay to slow or late, "
         "or leave it out"),
)  # fmt: skip

START_RULES = (
    Rule("reward.functions algorithm.name", RL, "An algorithm that learns from rewards needs a reward.",
         lambda c, a: a.needs_reward and not c.reward.functions,
         "reward.functions: [] leaves nothing to optimise; give at least one, e.g. reward.functions=[{{name: ocr}}]"),
    Rule("reward.functions algorithm.name", RL, "At least one term of the reward has a nonzero weight.",
         lambda c, a: a.needs_reward and c.reward.functions and not any(
             term.weight or term.initial_weight for term in c.reward.functions
         ),
         "reward.functions: all weights are 0, which leaves nothing to optimise; give at least one a weight"),
    Rule("rollout.max_num_gen_batches algorithm.name", RL,
         "Prompts are drawn again only if the algorithm learns from rewards.",
         lambda c, a: not a.needs_reward and c.rollout.max_num_gen_batches > 1,
         "{c.rollout:max_num_gen_batches:} depends on rewards, from which {c.algorithm.name} does not learn; set it "
         "to 1"),
    Rule("rollout.max_draws_per_prompt algorithm.name", RL,
         "Samples are drawn again only if the algorithm learns from rewards.",
         lambda c, a: not a.needs_reward and c.rollout.max_draws_per_prompt > 1,
         "{c.rollout:max_draws_per_prompt:} depends on rewards, from which {c.algorithm.name} does not learn; set it "
         "to 1"),
    Rule("actor.ref_model_sync_steps algorithm.kl_loss_coef", RL,
         "A reference that follows the policy needs a loss that reads a reference.",
         lambda c, a: c.actor.ref_model_sync_steps is not None and "reference" not in a.references,
         "{c.actor:ref_model_sync_steps:} has no reference to sync; set {c.algorithm:kl_loss_coef} > 0, or leave it "
         "out"),
)  # fmt: skip
