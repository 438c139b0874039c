"""Keys of the critic, a value model that some algorithms train together with the policy."""

from dataclasses import dataclass, field
from typing import Optional

from phalanx.config.fields import arg
from phalanx.config.optimizer import OptimConfig
from phalanx.config.ranges import DTYPES, LOSS_AGG_MODES, TIMES


@dataclass
class CriticModelConfig:
    """The critic's model: the folder of a causal language model, whose LM head is replaced by a scalar value head."""

    path: Optional[str] = arg(None, "folder of the weights from which the critic starts; null: model.path", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: its main branch")
    dtype: Optional[str] = arg(None, "dtype of the critic's computation; null: model.dtype", choices=DTYPES)
    gradient_checkpointing: Optional[bool] = arg(
        None, "recompute activations block by block in the backward pass; null: as model.gradient_checkpointing"
    )


@dataclass
class CriticConfig:
    """The critic's model and updates, for algorithms that use one, such as ppo."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_epochs: Optional[int] = arg(None, "passes over the samples of a training step; null: actor.ppo_epochs", **TIMES)
    loss_agg_mode: str = arg(
        "token-mean", "aggregation of the loss of tokens, as actor.loss_agg_mode", choices=LOSS_AGG_MODES
    )
    cliprange_value: Optional[float] = arg(
        0.5, "how far values may move from those that the advantages were computed from; null: no limit", gt=0
    )
