"""DPO: direct preference optimisation of language models (https://arxiv.org/abs/2305.18290, equation 7).

    L = mean over pairs of  -log sigmoid(beta [(s_w - s_w_ref) - (s_l - s_l_ref)])  +  sft_coef L_w

with s the sum of a response's log-probabilities, w the preferred response of a pair and l the other, ref the reference,
and L_w the mean of -log pi over the preferred response (RPO, https://arxiv.org/abs/2404.19733). With loss_type=ipo the
first term is ([(s_w - s_w_ref) - (s_l - s_l_ref)] - 1 / (2 beta))^2 with s the mean of the log-probabilities
(https://arxiv.org/abs/2310.12036, equation 17).

Deviations from the papers:
1. The pair is the best and the worst response of each prompt, by reward: of the policy's own responses (online DPO), or
   with rollout.engine=dataset and the reward `chosen` a pair of the data, as in the paper.
2. Under ipo, s is a mean over tokens instead of a sum, as in the authors' later work and TRL.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phalanx.algorithms._bases import OF_ADVANTAGES, TokenAlgorithm, TokenConfig
from phalanx.config.fields import arg
from phalanx.functional.preference import best_and_worst, pair_loss
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics, Policy


@dataclass
class Config(TokenConfig):
    """The configuration of `algorithm.name=dpo`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"actor.loss_agg_mode": "seq-mean-token-mean"}  # a mean over pairs
    unused: ClassVar[tuple[str, ...]] = (
        *OF_ADVANTAGES,
        *("early_stop_imp_ratio", "kl_loss_coef", "kl_loss_type", "entropy_coeff"),
    )

    beta: float = arg(0.1, "weight of the difference between a pair's log-ratios", gt=0)
    loss_type: str = arg("sigmoid", "sigmoid: DPO; ipo: the squared error of IPO", choices=("sigmoid", "ipo"))
    sft_coef: float = arg(0.0, "weight of the negative log-likelihood of preferred responses, rpo_alpha in TRL", ge=0)


class Algorithm(TokenAlgorithm):
    """The learning rule: see phalanx.types.Algorithm. Rows 2 j and 2 j + 1 of a Batch are a pair, preferred first."""

    config: Config
    samples_per_unit = 2
    references = ("reference",)
    corrects = False

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[G, 2]: the best and the worst response of each prompt."""
        return best_and_worst(reward, group_id)

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The loss [B / 2, A] of each pair, the same for all its actions, and its metrics."""
        c, mask = self.config, batch.mask
        log_prob = (replay.log_prob * mask).unflatten(0, (-1, 2))  # [B, A] -> [B / 2, 2, A]
        reference = (batch.reference_outputs["reference"] * mask).unflatten(0, (-1, 2))
        lengths = mask.sum(1).clamp(min=1).unflatten(0, (-1, 2))  # [B / 2, 2]
        gain = (log_prob - reference).sum(-1)
        loss, stats = pair_loss(gain / lengths if c.loss_type == "ipo" else gain, beta=c.beta, kind=c.loss_type)
        nll = -(log_prob[:, 0].sum(-1) / lengths[:, 0])
        return (loss + c.sft_coef * nll)[:, None].expand(-1, mask.shape[1]), stats | {
            "nll": nll,
            "entropy": replay.entropy,
        }

    def loss(self, policy: Policy, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The loss [B / 2, A] of pairs, before its weight, and metrics."""
        return self.surrogate(policy.replay(batch.trace), batch)
