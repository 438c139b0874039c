"""Flow-CPS: coefficients-preserving sampling for RL with flow matching (arXiv 2509.05952).

    L = mean over samples and trained steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta KL(pi, pi_ref)

The surrogate of flow_grpo on steps that keep the amount of noise in a sample equal to its noise level
(rollout.sde_type=cps), with ln p = -mean (x' - mu)^2.

Deviations from the paper: those of flow_grpo.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.algorithms.flow_grpo import Algorithm
from phalanx.algorithms.flow_grpo import Config as FlowGrpoConfig
from phalanx.config.fields import arg

__all__ = ["Algorithm", "Config"]


@dataclass
class Config(FlowGrpoConfig):
    """The configuration of `algorithm.name=cps`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"rollout.sde_type": "cps", "rollout.noise_level": 0.8}
    sde_types: ClassVar[tuple[str, ...]] = ("cps",)

    clip_ratio: float = arg(1e-5, "eps: the ratio is clipped to 1 +- clip_ratio", gt=0)
