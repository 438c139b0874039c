"""Reward: the policy's certainty about its own response, as in Intuitor (arXiv 2505.19590).

    u = mean over the response's tokens, including the end token, of  logsumexp(z) - mean(z)

where z are the current policy's logits over the vocabulary of size V. This is the paper's mean KL(uniform || policy)
plus the constant ln V.
"""

from torch import Tensor

from phalanx.distributed.passes import Passes
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.rewards.base import PolicyReward
from phalanx.types import Samples


class SelfCertainty(PolicyReward):
    """The mean certainty over each response.

    temperature_scaled: divide the logits by the temperature of sampling, as for the log-probabilities in training;
        otherwise the logits are unscaled, which needs an additional forward pass if the temperature is not 1.
    """

    def __init__(self, temperature_scaled: bool = True) -> None:
        self._scaled = temperature_scaled

    def __call__(self, policy: LMPolicy, samples: Samples, passes: Passes) -> Tensor:
        """Certainties [B], taken from the pass that computed the log-probabilities if it had the same temperature."""
        trace: TokenTrace = samples.trace
        temperature = policy.temperature if self._scaled else 1.0
        if trace.certainty is not None and temperature == policy.temperature:
            return trace.certainty
        assert samples.tokens is not None
        parts = passes.parts(len(samples.tokens), samples.tokens[:, None])
        with policy.unsharded():
            replays = [policy.scored(trace.select(part.to(trace.ids.device)), temperature) for part in parts]
        certainty = trace.rescored(replays, parts).certainty
        assert certainty is not None
        return certainty
