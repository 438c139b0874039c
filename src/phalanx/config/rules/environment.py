"""Rules of environments and tools."""

from typing import Any

from phalanx.config.engines import TURN_ENGINES
from phalanx.config.rules.rule import LM_RL, Rule, changed


def _without(c: Any) -> tuple[str, Any] | None:
    """The first key of an environment that is set though there is none, and its value."""
    if c.environment.used:
        return None
    return next(changed(c.environment, type(c.environment)(), "environment."), None)


def _asks(c: Any) -> bool:
    """Whether the reward of an environment is asked for."""
    return any(entry.name == "environment" and entry.path is None for entry in c.reward.functions)


RULES = (
    Rule("environment.path", LM_RL, "An environment is a path, or a section of paths by their names.",
         lambda c: not isinstance(c.environment.path, str | dict | None),
         "environment.path: expected a built-in environment, module:Class, path/to/file.py:Class, or a section of such "
         "by their names, got {c.environment.path!r}"),
    Rule("environment.* environment.path environment.tools environment.tool_config_path", LM_RL,
         "Keys of an environment need an environment or tools.",
         _without,
         "{x[0]}: {x[1]} is of an environment; set environment.path, environment.tools or "
         "environment.tool_config_path, or leave it out"),
    Rule("environment.path environment.tool_config_path", LM_RL, "verl's tools exclude another environment.",
         lambda c: c.environment.path is not None and c.environment.tool_config_path is not None,
         "environment.tool_config_path: {c.environment.tool_config_path} is beside environment.path; leave out one of "
         "them"),
    Rule("environment.path environment.tools environment.tool_config_path model.block_size", LM_RL,
         "Block diffusion answers in one turn.",
         lambda c: c.environment.used and c.model.block_size is not None,
         "environment.path: block diffusion (model.block_size={c.model.block_size}) has a single turn; leave the "
         "section out"),
    Rule("environment.path environment.tools environment.tool_config_path rollout.engine", LM_RL,
         "Samples of several turns are drawn by a built-in engine.",
         lambda c: c.environment.used and c.rollout.engine not in TURN_ENGINES,
         "rollout.engine: {c.rollout.engine} draws samples of one turn; with an environment expected "
         "rollout.engine=policy or vllm"),
    Rule("environment.path environment.tools environment.tool_config_path rollout.stop rollout.stop_token_ids", LM_RL,
         "With an environment, turns end by the model's end tokens.",
         lambda c: c.environment.used and (c.rollout.stop or c.rollout.stop_token_ids),
         "rollout.stop: with an environment a turn ends by an end token of the model, behind which the answer stands; "
         "leave rollout.stop and rollout.stop_token_ids out"),
    Rule("reward.functions environment.path environment.tools environment.tool_config_path", LM_RL,
         "The reward `environment` needs an environment.",
         lambda c: _asks(c) and not c.environment.used,
         "reward.functions: the reward environment is what an environment gives; set environment.path, or leave it "
         "out"),
    Rule("reward.functions environment.path environment.tools environment.tool_config_path", LM_RL,
         "Functions as tools have no state and give no reward.",
         lambda c: _asks(c) and c.environment.tools and c.environment.path is c.environment.tool_config_path is None,
         "reward.functions: the reward environment is what an environment gives, and environment.tools have no state "
         "to give one by; give a class with get_reward or step as environment.path, or another reward"),
)  # fmt: skip
