"""The base class of algorithms on tokens: a surrogate of the likelihood ratio, a KL penalty, an entropy bonus."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Optional

from torch import Tensor

from phalanx.algorithms._group import GroupAlgorithm, GroupConfig
from phalanx.config.fields import arg
from phalanx.functional.aggregation import ratio_metrics
from phalanx.functional.token_losses import KL_LOSS_TYPES, kl_estimate
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics, Policy


@dataclass
class TokenConfig(GroupConfig):
    """The configuration shared by all algorithms on tokens."""

    kl_loss_coef: float = arg(0.0, "beta: weight of the KL to the reference; 0 runs no reference at all", ge=0)
    kl_loss_type: str = arg(
        "k3",
        "estimate of that KL at each token (Schulman); k3+: the value of k3 with the gradient of k2, "
        "both unbiased; the expected gradient of k1 is 0",
        choices=KL_LOSS_TYPES,
    )
    entropy_coeff: float = arg(0.0, "weight of the entropy, which is maximised", ge=0)
    early_stop_imp_ratio: Optional[float] = arg(
        None,
        "skip the rest of a step's updates, starting with the first later update whose tokens have a "
        "mean ratio above this; 5 in RLinf; null: never",
        gt=1,
    )


class TokenAlgorithm(GroupAlgorithm, ABC):
    """loss = surrogate + beta KL(pi, pi_ref) - entropy_coeff H, for each token."""

    config: TokenConfig
    corrects = True

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config)
        self.max_ratio = config.early_stop_imp_ratio

    @abstractmethod
    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The surrogate term of the loss [B, A], and metrics."""

    def reference_output(self, policy: Policy, batch: Batch[TokenTrace]) -> Tensor:
        """The log-probabilities [B, A] of the same tokens under other weights."""
        replay: TokenReplay = policy.replay(batch.trace)
        return replay.log_prob

    def loss(self, policy: Policy, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The loss [B, A] per token, before its weight, and metrics."""
        replay: TokenReplay = policy.replay(batch.trace)
        if batch.on_policy:
            batch = replace(batch, log_prob=replay.log_prob.detach())
        loss, stats = self.surrogate(replay, batch)
        if batch.correction is not None:  # only the surrogate: rejected tokens keep their KL and entropy terms
            loss = loss * batch.correction
        if "ratio_error" not in stats:  # the surrogate uses no ratio
            stats["ratio_error"] = ratio_metrics(replay.log_prob - batch.log_prob)["ratio_error"]
        stats |= {"entropy": replay.entropy, "self_certainty": replay.self_certainty}
        return self.regularize(loss, replay, batch, stats), stats

    def regularize(self, loss: Tensor, replay: TokenReplay, batch: Batch[TokenTrace], stats: Metrics) -> Tensor:
        """Add the terms that rollout.correction does not weight: the entropy bonus and the KL."""
        if self.config.entropy_coeff > 0:
            loss = loss - self.config.entropy_coeff * replay.entropy
        if "reference" in batch.reference_outputs:
            other = batch.reference_outputs["reference"]
            kl = kl_estimate(replay.log_prob, other, self.config.kl_loss_type)
            if self.config.kl_loss_coef > 0:  # otherwise the reference is only used for a KL in the reward
                loss = loss + self.config.kl_loss_coef * kl
            stats["kl_ref"] = kl
        return loss
