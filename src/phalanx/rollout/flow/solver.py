"""Higher-order steps of the sampling ODE, with diffusers' solvers."""

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


def multistep_solver(levels: list[float]) -> Step:
    """DPM-Solver++(2M) (arXiv 2211.01095) along the levels: second order, one velocity per step.

    Returns a function that maps the velocity and the sample at a level, both [B, ...] float32, to the sample at the
    next level; it must be called once for each level but the last. The first step, which has no previous one to look
    back at, and the step to level 0 are Euler steps.
    """
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        # a last step to level 0 is an Euler step in any case, because of final_sigmas_type
        lower_order_final=False,
    )
    steps = len(levels) - 1
    scheduler.set_timesteps(steps)
    # the model's schedule instead of the solver's
    scheduler.sigmas = torch.tensor(levels, dtype=torch.float32)
    scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
    scheduler.set_begin_index(0)
    timesteps = iter(scheduler.timesteps)

    def step(velocity: Tensor, sample: Tensor) -> Tensor:
        """Take one step: from the sample [B, ...] at a level to the one at the next level."""
        following: Tensor = scheduler.step(velocity, next(timesteps), sample, return_dict=False)[0]
        return following

    return step
