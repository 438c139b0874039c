"""GRPO: group-relative policy optimisation of language models (https://arxiv.org/abs/2402.03300).

    L = sum over tokens of  w max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)) + beta KL(pi, pi_ref)

with rho the likelihood ratio of a token, A the group-relative advantage of its response, and w the token's weight by
actor.loss_agg_mode.

Variants: Dr.GRPO (norm_adv_by_std_in_grpo=false, actor.loss_agg_mode=seq-mean-token-sum-norm; arXiv 2503.20783), DAPO
(clip_ratio_high=0.28, rollout.max_num_gen_batches, rollout.mask_truncated; arXiv 2503.14476) and GSPO
(importance=sequence; arXiv 2507.18071).

Deviations from the paper:
1. All tokens have equal weights (token-mean), as in DAPO and verl; the paper uses seq-mean-token-mean.
2. Samples of a group whose rewards are all equal have weight 0 and do not count in the denominator.
3. For negative advantages rho is bounded by clip_ratio_c, as in verl (dual clip).
"""

from dataclasses import dataclass
from typing import Optional

from torch import Tensor

from phalanx.algorithms._bases import TokenAlgorithm, TokenConfig
from phalanx.config.fields import arg
from phalanx.functional.losses import clipped_tokens
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics


@dataclass
class Config(TokenConfig):
    """The configuration of `algorithm.name=grpo`."""

    clip_ratio: float = arg(0.2, "eps: the ratio is clipped to 1 +- clip_ratio", gt=0)
    clip_ratio_low: Optional[float] = arg(None, "eps below 1; null: clip_ratio", gt=0, le=1)
    clip_ratio_high: Optional[float] = arg(None, "eps above 1, 0.28 in DAPO; null: clip_ratio", gt=0)
    clip_ratio_c: Optional[float] = arg(3.0, "bound of the ratio for negative advantages (dual clip); null: none", gt=1)
    importance: str = arg(
        "token",
        "one likelihood ratio per token, or per response from the mean of its tokens' log-ratios (GSPO)",
        choices=("token", "sequence"),
    )


class Algorithm(TokenAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clip_range = min(self._clip_range())

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The clipped surrogate [B, A], and its metrics."""
        return self.clipped(replay, batch, batch.advantage)

    def clipped(self, replay: TokenReplay, batch: Batch[TokenTrace], advantage: Tensor) -> tuple[Tensor, Metrics]:
        """The clipped surrogate for advantages [B], or [B, A] with one per token."""
        c, (low, high) = self.config, self._clip_range()
        log_ratio = (replay.log_prob - batch.log_prob) * batch.mask
        if c.importance == "sequence":
            log_ratio = of_sequences(replay.log_prob, log_ratio, batch.mask)
        return clipped_tokens(log_ratio, advantage, low=low, high=high, dual=c.clip_ratio_c)

    def _clip_range(self) -> tuple[float, float]:
        """eps_low and eps_high."""
        c = self.config
        low = c.clip_ratio if c.clip_ratio_low is None else c.clip_ratio_low
        high = c.clip_ratio if c.clip_ratio_high is None else c.clip_ratio_high
        return low, high


def of_sequences(log_prob: Tensor, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """ln s [B, A]: the mean of a response's log-ratios, with the gradient of each token's log-probability.

    This is s_{i,t} = sg[s_i] pi / sg[pi] of GSPO-token (equation 14). With one advantage per response, its gradient
    equals GSPO's.
    """
    mean = log_ratio.detach().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mean + log_prob - log_prob.detach()
