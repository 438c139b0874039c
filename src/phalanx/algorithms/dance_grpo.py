"""DanceGRPO: GRPO on visual generation (arXiv 2505.07818).

    L = mean over samples and trained steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

The surrogate of flow_grpo on other samples: steps of the paper's SDE (rollout.sde_type=dance_sde) at all levels but the
last, of which a random subset is trained; the images of a prompt start from the same noise.

Deviations from the paper:
1. The trained steps are drawn once per training step, for all images; the authors' code draws them per image.
2. The std of a group's rewards is the population std plus 1e-4; the authors use the sample std plus 1e-8.
3. As in flow_grpo, groups of equal rewards have weight 0, and a KL to the reference can be added.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.algorithms.flow_grpo import Algorithm
from phalanx.algorithms.flow_grpo import Config as FlowGrpoConfig

__all__ = ["Algorithm", "Config"]


@dataclass
class Config(FlowGrpoConfig):
    """The configuration of `algorithm.name=dance_grpo`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "rollout.sde_type": "dance_sde",
        "rollout.noise_level": 0.3,
        "rollout.init_same_noise": True,
        "rollout.sde_window_size": None,
        "rollout.timestep_fraction": 0.6,
    }
