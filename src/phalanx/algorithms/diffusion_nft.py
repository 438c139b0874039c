"""DiffusionNFT: negative-aware fine-tuning on the forward process (https://arxiv.org/abs/2509.16117).

    v+ = beta v + (1 - beta) v_old,   v- = (1 + beta) v_old - beta v,   r = clip(A, -c, c) / 2c + 1/2
    L = mean over samples and noise levels of  c (r l+ + (1 - r) l-) / beta + lambda mean (v - v_ref)^2

with l+- the squared errors of x_0 = x_t - t v+-, each divided by its own mean absolute error, and c = adv_clip_max.
v_old is the prediction of the weights that sample, an average: old <- d old + (1 - d) policy after each training step.

Deviations from the paper and its authors' code:
1. The decay d is a function of the training step; the authors count optimizer steps, which is the same with one
   optimizer step per training step.
2. Samples of a group whose rewards are all equal have weight 0 and do not count in the mean's denominator; the authors
   train them with r = 1/2.
3. The authors sample with a second-order solver (such as rollout.solver=dpm_solver++) and train at 9 of its 10 noise
   levels; here the default is the Euler method, and `train_timesteps` is the number of levels.
"""

from dataclasses import dataclass
from typing import ClassVar, Optional

from torch import Tensor

from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig, mean_square
from phalanx.config.choices import DECAY
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch
from phalanx.functional.losses import negative_aware, optimality
from phalanx.types import Metrics, Policy

# (rate, flat, limit) of d = min(rate x max(step - flat, 0), limit), as in the authors' code
SCHEDULES = {"zero": (0.0, 0, 0.0), "slow": (0.001, 0, 0.5), "late": (0.0075, 75, 0.999)}


@dataclass
class Config(ForwardConfig):
    """The configuration of `algorithm.name=diffusion_nft`."""

    bounds_stds: ClassVar[bool] = False  # adv_clip_max is the range of r, in whatever units

    global_std: bool = arg(True, "divide advantages by the std of all rewards, as the paper does, not of the group's")
    beta: float = arg(1.0, "distance of the implicit policies from the old one", gt=0)
    old_decay: str = arg(
        "slow",
        "decay of the sampling weights, min(rate x max(step - flat, 0), limit): zero (they are the policy's), slow "
        "(0.001, 0, 0.5) or late (0.0075, 75, 0.999)",
        choices=tuple(SCHEDULES),
    )
    old_decay_rate: Optional[float] = arg(
        None, "rate of old_decay per training step; null: the schedule's", only=(DECAY,), ge=0
    )
    old_decay_flat: Optional[int] = arg(
        None, "training steps before old_decay rises; null: the schedule's", only=(DECAY,), ge=0
    )
    old_decay_limit: Optional[float] = arg(None, "largest old_decay; null: the schedule's", only=(DECAY,), ge=0, lt=1)


class Algorithm(ForwardAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config
    behaviour = "old"
    averages = ("old",)
    references = ("old",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        rate, flat, limit = SCHEDULES[config.old_decay]
        self.rate = rate if config.old_decay_rate is None else config.old_decay_rate
        self.flat = flat if config.old_decay_flat is None else config.old_decay_flat
        self.limit = limit if config.old_decay_limit is None else config.old_decay_limit

    def decay(self, name: str, step: int) -> float:
        """The decay d of the sampling weights after training step number `step` (from 1)."""
        assert name == "old"
        return min(self.rate * max(step - self.flat, 0), self.limit)

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample and noise level, before its weight, and metrics."""
        velocity, old = policy.predict(batch.trace, batch.corrupted), batch.reference_outputs["old"]
        limit = self.config.adv_clip_max
        loss, positive, negative = negative_aware(
            velocity,
            old,
            batch.corrupted.target(batch.trace.clean),
            batch.corrupted.levels,
            optimality(batch.advantage, limit),
            beta=self.config.beta,
        )
        distance = mean_square(velocity.detach() - old)
        stats: Metrics = {"loss_positive": positive, "loss_negative": negative, "old_distance": distance}
        return self.penalise(limit * loss, velocity, batch, stats)
