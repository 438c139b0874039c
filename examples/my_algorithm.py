"""An algorithm of one's own: REINFORCE with the mean reward of a prompt's samples as the baseline (arXiv 2402.14740).

    sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml algorithm.name=examples/my_algorithm.py

    L = sum over tokens of  -w A log pi,    A = r - mean of the prompt's rewards, divided by `scale`

`Config` adds keys to the section `algorithm`, which are checked, and appear in --help. `Algorithm` brings the loss of
each token; its weight w, the denominator over all ranks, minibatches and optimizer steps are the loop's business.
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms import TokenAlgorithm, TokenConfig
from phalanx.config.load import arg
from phalanx.functional.advantage import group_advantage
from phalanx.functional.token_losses import masked_mean
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch


@dataclass
class Config(TokenConfig):
    """Keys of `algorithm` where its name is this file."""

    scale: float = arg(1.0, "advantages are divided by this", gt=0)


class Algorithm(TokenAlgorithm):
    """Plain policy gradient of the tokens, for one update per step."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] float32 of the rewards [N] of all ranks' samples, of which `group_id` [N] numbers the prompts."""
        return group_advantage(reward, group_id, normalize=False) / self.config.scale

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [B, A] of each token, and detached scalars, which become metrics."""
        loss = -batch.advantage[:, None] * replay.log_prob
        return loss, {"log_prob": masked_mean(replay.log_prob.detach(), batch.mask)}
