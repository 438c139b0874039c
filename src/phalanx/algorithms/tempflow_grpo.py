"""TempFlow-GRPO: trajectories branch at one step, which gets the credit (https://arxiv.org/abs/2508.04324).

    L = mean over samples of  w_k max(-A rho, -A clip(rho, 1 - eps, 1 + eps)),   w_k = sigma_k / mean of sigma_s

The images of a prompt share one trajectory of the ODE up to step k, where each gets its own noise; afterwards each
follows the ODE again. They differ only by that step, so it gets the credit for their rewards. sigma_k is the std of the
transition. The loss is flow_grpo's surrogate on these samples (rollout.sde_window_size=1, init_same_noise, branching)
with weights proportional to the noise (algorithm.timestep_weight).

Deviations from the paper:
1. A training step branches at one k for all prompts, drawn at random (rollout.window_schedule); the authors' code
   branches at every step of a trajectory, at a proportionally higher cost.
2. The mean of the weights over all steps at which a trajectory may branch is 1.
3. As in flow_grpo, groups of equal rewards have weight 0, and a KL to the reference can be added.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.algorithms.flow_grpo import Algorithm
from phalanx.algorithms.flow_grpo import Config as FlowGrpoConfig
from phalanx.config.fields import arg

__all__ = ["Algorithm", "Config"]


@dataclass
class Config(FlowGrpoConfig):
    """The configuration of `algorithm.name=tempflow_grpo`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "rollout.sde_window_size": 1,
        "rollout.init_same_noise": True,
        "rollout.branching": True,
    }

    timestep_weight: str = arg(
        "noise",
        "noise: the surrogate of each step is weighted by the std of its transition; the weights' mean "
        "over all steps that a window may contain is 1",
        choices=("none", "noise"),
    )
