"""Keys of the critic, which some algorithms train beside the policy."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Optional

from phalanx.config.load import ConfigError, arg
from phalanx.config.run import DTYPES, LOSS_AGG_MODES, TIMES, OptimConfig, RLConfig


@dataclass
class CriticModelConfig:
    """The critic's model: a causal language model's folder, which gets a head of one value in place of its logits."""

    path: Optional[str] = arg(None, "folder whose weights the critic begins with; null: model.path", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: its main branch")
    dtype: Optional[str] = arg(None, "dtype that the critic computes in; null: model.dtype", choices=DTYPES)
    gradient_checkpointing: Optional[bool] = arg(
        None, "recompute activations block by block in the backward pass; null: as model.gradient_checkpointing"
    )


@dataclass
class CriticConfig:
    """The critic of algorithms that want one, such as ppo: its model, and its updates."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_epochs: Optional[int] = arg(None, "passes over the samples of a training step; null: actor.ppo_epochs", **TIMES)
    loss_agg_mode: str = arg(
        "token-mean", "how tokens are weighed in the loss, as in actor.loss_agg_mode", choices=LOSS_AGG_MODES
    )
    cliprange_value: Optional[float] = arg(
        0.5, "values may move this far from those that the advantages rest on; null: without a limit", gt=0
    )


def check_groups(cfg: RLConfig) -> None:
    """Raise ConfigError for a single sample of each prompt where something compares the samples of a prompt."""
    if cfg.rollout.n > 1:
        return
    if cfg.algorithm.needs_groups:
        raise ConfigError(
            f"rollout.n: 1 leaves algorithm.name={cfg.algorithm.name} nothing to compare a sample with; set it to at "
            "least 2, or algorithm.name=ppo, which needs no groups"
        )
    compares = {
        f"reward.normalize={cfg.reward.normalize}": cfg.reward.normalize != "none",
        f"rollout.max_num_gen_batches={cfg.rollout.max_num_gen_batches}": cfg.rollout.max_num_gen_batches > 1,
        f"rollout.max_draws_per_prompt={cfg.rollout.max_draws_per_prompt}": cfg.rollout.max_draws_per_prompt > 1,
    }
    for what, wanted in compares.items():
        if wanted:
            raise ConfigError(
                f"rollout.n: 1 leaves {what} no group of samples to compare; set it to at least 2, or leave that out"
            )


def check_critic(cfg: RLConfig, critic: CriticConfig, warmup: int) -> None:
    """Raise ConfigError for keys of a critic that is not there; `warmup` is trainer.critic_warmup."""
    if cfg.algorithm.needs_critic:
        if len(critic.optim.betas) != 2 or not all(0 <= b < 1 for b in critic.optim.betas):
            raise ConfigError(
                f"critic.optim.betas: {critic.optim.betas} should be two numbers in 0 .. 1, e.g. [0.9, 0.999]"
            )
        return
    found = [*changed(critic, CriticConfig(), "critic."), *([("trainer.critic_warmup", warmup)] if warmup else [])]
    for key, value in found:
        raise ConfigError(
            f"{key}: {value} is of a critic, which algorithm.name={cfg.algorithm.name} has none of; leave it out, or "
            "set algorithm.name=ppo"
        )


def changed(section: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a section that are not as in another, with their values."""
    for f in fields(section):
        value, other = vars(section)[f.name], vars(default)[f.name]
        if is_dataclass(value):
            yield from changed(value, other, f"{prefix}{f.name}.")
        elif value != other:
            yield f"{prefix}{f.name}", value
