"""MixGRPO: mixed ODE-SDE sampling with a window that moves over the steps (arXiv 2507.21802).

    L = mean over samples and the window's steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

The surrogate of flow_grpo, with stochastic steps only in a window of 4 that moves by 1 every 25 training steps, from
the first step of the schedule to the last but one. MixGRPO-Flash replaces the steps after the window by fewer steps of
a second-order solver: rollout.solver=dpm_solver++ rollout.ode_compression=0.4.

Deviations from the paper:
1. Flash restarts the solver after the window; the authors' code continues from the predictions within it.
2. Flash's longer steps use levels of the schedule, those nearest to an even spacing.
3. The std of a group's rewards is the population std plus 1e-4; the authors use the sample std plus 1e-8.
4. As in flow_grpo, groups of equal rewards have weight 0, and a KL to the reference can be added.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.algorithms.flow_grpo import Algorithm
from phalanx.algorithms.flow_grpo import Config as FlowGrpoConfig

__all__ = ["Algorithm", "Config"]


@dataclass
class Config(FlowGrpoConfig):
    """The configuration of `algorithm.name=mix_grpo`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "rollout.sde_window_size": 4,
        "rollout.window_schedule": "progressive",
        "rollout.window_iters": 25,
        "rollout.window_stride": 1,
        "rollout.init_same_noise": True,
    }
