"""Rules for the algorithm, its rewards and its critic."""

from collections.abc import Callable
from typing import Any

from phalanx.run.rules.rollout_rules import redrawn
from phalanx.run.rules.rule import FLOW_RL, LM_RL, RL, RUN, Rule, key_and_value


def _comparing_key(c: Any) -> str | None:
    """The key that compares the rewards of a prompt's samples, if one is set, and its value."""
    key = "reward.normalize" if c.reward.normalize != "none" else redrawn(c)
    return key and key_and_value(c, key).replace(": ", "=")


def _half_scheduled(c: Any) -> tuple[int, Any] | None:
    """The index of the first term of the reward with a part of a schedule, and the term."""
    for i, term in enumerate(c.reward.functions):
        if (term.initial_weight is None) != (term.weight_steps == 0):
            return i, term
    return None


def _teachers(c: Any, broken: Callable[[Any], bool]) -> bool:
    """Whether the algorithm learns from teachers and its keys break a rule."""
    return "teachers" in vars(c.algorithm) and broken(c.algorithm)


RULES = (
    Rule("rollout.n algorithm.name", LM_RL, lambda c: c.rollout.n == 1 and c.algorithm.needs_groups,
         " leaves {c.algorithm:name=} nothing to compare a sample with; set it to at least 2, or "
         "{c.algorithm:name}=ppo, which needs no groups"),
    Rule("rollout.n reward.normalize rollout.max_num_gen_batches rollout.max_draws_per_prompt", LM_RL,
         lambda c: _comparing_key(c) if c.rollout.n == 1 else None,
         " leaves {x} no group of samples to compare; set it to at least 2, or leave the other key out"),
    Rule("trainer.critic_warmup trainer.total_training_steps", LM_RL,
         lambda c: 0 < (c.trainer.total_training_steps or 0) < c.trainer.critic_warmup,
         " is beyond trainer.total_training_steps={c.trainer.total_training_steps}; expected fewer, so that the policy "
         "is trained too"),
    Rule("reward.functions", RUN, _half_scheduled,
         "reward.functions[{x[0]}].initial_weight: {x[1].initial_weight} with weight_steps {x[1].weight_steps} is only "
         "half of a schedule; set both, or leave both out"),
    Rule("rollout.max_num_gen_batches rollout.max_draws_per_prompt", RL,
         lambda c: min(c.rollout.max_num_gen_batches, c.rollout.max_draws_per_prompt) > 1,
         " draws new prompts, and {c.rollout:max_draws_per_prompt:} the same ones again; set one of the two to 1"),
    Rule("algorithm.global_std reward.normalize", RL,
         lambda c: c.reward.normalize == "gdpo" and vars(c.algorithm).get("global_std") is False,
         " contradicts reward.normalize=gdpo, which divides by the std of all samples; leave it out, or set "
         "reward.normalize=group"),
    Rule("rollout.sde_type algorithm.name", FLOW_RL,
         lambda c: c.rollout.sde_type not in c.algorithm.sde_types and " or ".join(c.algorithm.sde_types),
         " does not work with {c.algorithm:name=}; expected {x}"),
    Rule("algorithm.timestep_weight algorithm.importance", FLOW_RL,
         lambda c: {"importance": "sequence"}.items() <= vars(c.algorithm).items()
         and vars(c.algorithm).get("timestep_weight", "none") != "none",
         " weights a sample's steps differently, but {c.algorithm:importance}=sequence treats them as one; set one of "
         "the two to its default"),
    Rule("algorithm.teacher_path algorithm.teachers", RL,
         lambda c: _teachers(c, lambda a: a.teacher_path is None and not a.teachers),
         "{c.algorithm:teacher_path} is not set; give {c.algorithm:teacher_path}=..., or several as "
         "{c.algorithm:teachers}"),
    Rule("algorithm.teachers algorithm.teacher_path algorithm.teacher_revision", RL,
         lambda c: _teachers(c, lambda a: a.teachers and (a.teacher_path or a.teacher_revision)),
         "{c.algorithm:teachers}: takes the place of {c.algorithm:teacher_path} and {c.algorithm:teacher_revision}; "
         "leave those out, or {c.algorithm:teachers}"),
    Rule("algorithm.teacher_key algorithm.teachers", RL,
         lambda c: _teachers(c, lambda a: bool(a.teachers) != (a.teacher_key is not None)),
         "; expected the column of the data that names each row's teacher, one of {c.algorithm:teachers}; set both, or "
         "leave both out"),
)  # fmt: skip

START_RULES = (
    Rule("actor.loss_agg_mode algorithm.name", LM_RL,
         lambda c, a: c.algorithm.name == "dpo" and c.actor.loss_agg_mode != "seq-mean-token-mean",
         " would weigh pairs by their lengths with {c.algorithm:name=}; set it to seq-mean-token-mean"),
    Rule("algorithm.name model.block_size", LM_RL,
         lambda c, a: "context_key" in vars(c.algorithm) and c.model.block_size is not None,
         " reads a response behind two prompts, which {c.model:block_size=} divides into different blocks; expected an "
         "autoregressive model"),
    Rule("algorithm.context environment.path", LM_RL,
         lambda c, a: vars(c.algorithm).get("context") == ["environment"] and not c.talks,
         "{c.algorithm:context}: [environment] is what an environment answers, but there is none; set "
         "environment.path or environment.tools"),
    Rule("algorithm.context reward.functions", LM_RL,
         lambda c, a: {"peer", "reward"} & {*vars(c.algorithm).get("context", ())} and not c.reward.functions,
         "{c.algorithm:context}: peers and feedback need rewards; set reward.functions, or leave these sources out"),
    Rule("rollout.correction algorithm.name", LM_RL,
         lambda c, a: a.samples_per_unit != 1 and c.rollout.correction not in ("rescore", "none"),
         " weighs single responses, but {c.algorithm:name=} trains several as one; set it to rescore"),
    Rule("reward.functions algorithm.name", RL, lambda c, a: a.needs_reward and not c.reward.functions,
         " leaves nothing to optimise; give at least one, e.g. reward.functions=[{{name: ocr}}]"),
    Rule("reward.functions algorithm.name", RL,
         lambda c, a: a.needs_reward and c.reward.functions
         and not any(term.weight or term.initial_weight for term in c.reward.functions),
         "reward.functions: all weights are 0, which leaves nothing to optimise; give at least one a weight"),
)  # fmt: skip
