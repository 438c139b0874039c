"""DanceGRPO: GRPO on visual generation (arXiv 2505.07818).

    L = mean over samples and trained steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

It is flow_grpo's surrogate on other samples: steps of the paper's SDE (rollout.sde_type dance_sde) at all levels but
the last, of which a random share is trained; the images of a prompt begin with the same noise.

Deviations from the paper:
1. The trained steps are drawn once per training step, for all images; the authors' code draws them per image.
2. The std of a group's rewards is the population's, plus 1e-4; the authors' is the sample's, plus 1e-8.
3. As in flow_grpo, groups of equal rewards have weight 0, and a KL to the reference can be added.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.algorithms.flow_grpo import Algorithm
from phalanx.algorithms.flow_grpo import Config as FlowGrpoConfig

__all__ = ["Algorithm", "Config"]


@dataclass
class Config(FlowGrpoConfig):
    """Keys of `algorithm` where its name is dance_grpo."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "rollout.sde_type": "dance_sde",
        "rollout.noise_level": 0.3,
        "rollout.init_same_noise": True,
        "rollout.sde_window_size": None,
        "rollout.timestep_fraction": 0.6,
    }
