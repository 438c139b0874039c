"""Reward: the policy's own certainty of its response, as Intuitor trains on it (arXiv 2505.19590).

    u = mean over the response's tokens, its end included, of  logsumexp(z) - mean(z)

with z the logits over the vocabulary of the current policy: the paper's mean KL of the uniform distribution to the
policy's, plus the constant ln V.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from phalanx.distributed.passes import Passes
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.rewards.base import PolicyReward
from phalanx.types import Samples


class TokenPolicy(Protocol):
    """The parts of a policy that this reward uses."""

    @property
    def temperature(self) -> float:
        """That of sampling."""

    def scored(self, trace: TokenTrace, temperature: float) -> TokenReplay:
        """Its view of a trace's tokens at a temperature."""

    def unsharded(self) -> AbstractContextManager[None]:
        """See phalanx.types.Policy."""


class SelfCertainty(PolicyReward):
    """The mean over each response. temperature_scaled: of the logits over the temperature of sampling, as the trained
    log-probabilities are; else of the logits as they are, which needs a further pass where it is not 1.
    """

    def __init__(self, temperature_scaled: bool = True) -> None:
        self._scaled = temperature_scaled

    def __call__(self, policy: TokenPolicy, samples: Samples, passes: Passes) -> Tensor:
        """[B], from the pass that computed the log-probabilities where that had the same temperature."""
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
