"""Keys of the critic, which some algorithms train beside the policy."""

from dataclasses import dataclass, field
from typing import Optional

from phalanx.config.load import arg
from phalanx.config.ranges import DTYPES, TIMES
from phalanx.config.run import LOSS_AGG_MODES, OptimConfig


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
