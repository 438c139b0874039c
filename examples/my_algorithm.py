"""A custom algorithm: REINFORCE with the mean reward of a prompt's samples as the baseline (arXiv 2402.14740).

    sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml algorithm.name=examples/my_algorithm.py

    L = sum over tokens of  -w A log pi,    A = r - mean of the prompt's rewards, divided by `scale`

`Config` adds keys to the section `algorithm`; they are checked, and appear in --help. `Algorithm` defines the loss of
each token. The loop applies the weight w and the denominator over all ranks, and does minibatches and optimizer steps.
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms import TokenAlgorithm, TokenConfig
from phalanx.config.fields import arg
from phalanx.functional.advantage import group_advantage
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics


@dataclass
class Config(TokenConfig):
    """Keys of `algorithm` if its name is this file."""

    scale: float = arg(1.0, "advantages are divided by this", gt=0)


class Algorithm(TokenAlgorithm):
    """The plain token-level policy gradient, for one update per step."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """Advantages [N] float32 of the rewards [N] of all ranks' samples; `group_id` [N] are the prompts' numbers."""
        return group_advantage(reward, group_id, normalize=False) / self.config.scale

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The loss [B, A] of each token, and metrics, whose means over all tokens that count are logged."""
        loss = -batch.advantage[:, None] * replay.log_prob
        return loss, {"log_prob": replay.log_prob}
