"""Higher-order steps of the sampling ODE, by diffusers' own solvers."""

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]


def multistep_solver(levels: list[float]) -> Step:
    """DPM-Solver++(2M) (arXiv 2211.01095) along the levels: second order, one velocity per step.

    The function that is returned takes the velocity and the sample at a level, both [B, ...]
    float32, to the sample at the next, once for each of the levels but the last. The first step is
    Euler's, and so is the one to level 0: the solver looks back at the step before.
    """
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        # the last step is Euler's where it leads to level 0, which final_sigmas_type says
        lower_order_final=False,
    )
    steps = len(levels) - 1
    scheduler.set_timesteps(steps)
    # the model's own schedule instead of the solver's
    scheduler.sigmas = torch.tensor(levels, dtype=torch.float32)
    scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
    scheduler.set_begin_index(0)
    timesteps = iter(scheduler.timesteps)

    def step(velocity: Tensor, sample: Tensor) -> Tensor:
        """Take one step: from the sample [B, ...] at a level to the one at the next level."""
        taken: Tensor = scheduler.step(velocity, next(timesteps), sample, return_dict=False)[0]
        return taken

    return step
