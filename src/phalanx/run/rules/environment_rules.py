"""Rules for environments and tools."""

from typing import Any

from phalanx.run.rules.rule import LM_RL, Rule

_KEYS = "environment.path environment.tools environment.tool_config_path"


def _asks(c: Any) -> bool:
    """Whether the reward functions include the environment's reward."""
    return any(entry.name == "environment" and entry.path is None for entry in c.reward.functions)


RULES = (
    Rule("environment.tool_config_path environment.path", LM_RL,
         lambda c: c.environment.path is not None and c.environment.tool_config_path is not None,
         " cannot be combined with environment.path; leave out one of them"),
    Rule(f"{_KEYS} model.block_size", LM_RL, lambda c: c.environment.used and c.model.block_size is not None,
         "environment.path: block diffusion ({c.model:block_size=}) has a single turn; leave the section out"),
    Rule(f"reward.functions {_KEYS}", LM_RL, lambda c: _asks(c) and not c.environment.used,
         "reward.functions: the reward environment comes from an environment; set environment.path, or leave it out"),
    Rule(f"reward.functions {_KEYS}", LM_RL,
         lambda c: _asks(c) and c.environment.tools and c.environment.path is c.environment.tool_config_path is None,
         "reward.functions: the reward environment comes from an environment, and environment.tools have no state to "
         "compute one from; give a class with get_reward or step as environment.path, or another reward"),
)  # fmt: skip
