"""The critic in the training loop: the values of a step's samples, and optimizer steps on their returns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.config.critic import CriticConfig
from phalanx.config.run import ActorConfig
from phalanx.distributed.collectives import reduce_sum
from phalanx.distributed.mesh import World
from phalanx.functional.aggregation import Sums
from phalanx.functional.returns import moments, value_loss
from phalanx.functional.token_budget import in_order
from phalanx.models.trained import TrainedModel
from phalanx.telemetry.step_metrics import update_metrics
from phalanx.training.components import Critic
from phalanx.training.minibatches import BatchPlan, Minibatches, optimizer_steps
from phalanx.training.optim import TrainState
from phalanx.types import Samples


class CriticTrainer:
    """Trains a critic on the policy's batches; in the first `warmup` training steps only the critic is trained.

    `prepare` creates `state`, which has its optimizer.
    """

    state: TrainState

    def __init__(
        self, critic: Critic, config: CriticConfig, actor: ActorConfig, plan: BatchPlan, world: World, warmup: int
    ) -> None:
        self.critic, self.config, self.plan, self.world, self.warmup = critic, config, plan, world, warmup
        self.epochs = actor.ppo_epochs if config.ppo_epochs is None else config.ppo_epochs

    def prepare(self, steps: int, *, offload: bool) -> TrainState:
        """Create the optimizer for this number of training steps."""
        updates = steps * self.plan.updates * self.epochs
        self.state = TrainState(self.critic.trained, self.config.optim, updates, offload=offload)
        return self.state

    @torch.no_grad()
    def values(self, samples: Samples) -> Tensor:
        """[B, A] values of this rank's samples, computed in passes of the training's shape."""
        tokens = None if samples.tokens is None else samples.tokens[:, None]
        parts, device = self.plan.passes_of(1).parts(len(samples.mask), tokens), samples.mask.device
        with self.critic.trained.unsharded():
            return in_order([self.critic.values(samples.trace.select(part.to(device))) for part in parts], parts)

    def update(
        self, batch: Minibatches, mask: Tensor, old: Tensor, returns: Tensor, advance: Callable[[], None]
    ) -> dict[str, float]:
        """Take all optimizer steps on the returns [B, A] of this rank's samples, and return critic/... metrics.

        mask: [B, A] bool, the tokens that count. old: [B, A], the values that the returns were computed from. advance:
        called after each micro-batch.
        """
        model, samples = self.critic.trained, batch.samples
        stats: list[Sums] = []  # by optimizer step
        updates: list[dict[str, Any]] = []
        for _ in range(self.epochs):
            mode, tokens = self.config.loss_agg_mode, samples.tokens
            steps = optimizer_steps(
                samples.mask, batch.units, self.plan, self.world, mode=mode, constant=None, tokens=tokens
            )
            for parts in steps:
                stats.append(Sums(first=not stats))
                total = torch.zeros((), device=self.world.device)
                for i, (rows, weight) in enumerate(parts):
                    at = rows.to(self.world.device)
                    model.sharded.set_last_micro_batch(i == len(parts) - 1)
                    values = self.critic.values(samples.trace.select(at))
                    weight = weight.to(self.world.device)
                    per_token, metrics = value_loss(values, old[at], returns[at], clip=self.config.cliprange_value)
                    stats[-1].add(metrics, weight)
                    loss = (per_token * weight).sum()
                    self.critic.trained.backward(loss)
                    total += loss.detach()
                    advance()
                updates.append(self.state.step(total))
        row = explained(old, returns, mask)
        return row | update_metrics("critic", stats, updates, self.plan.updates * self.epochs)

    def relative_cost(self, policy: TrainedModel) -> float:
        """Operations of a step's values and updates, in units of a forward pass of the policy over the samples."""
        critic = self.critic.trained
        size = sum(p.numel() for p in critic.module.parameters()) / sum(p.numel() for p in policy.module.parameters())
        # forward: 1; forward and backward: 3, and once more with checkpointing
        return size * (1 + (3 + critic.recomputed) * self.epochs)


def explained(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """The mean value and the explained variance 1 - Var(R - V) / Var(R) over the masks [B, A] of all ranks; 0 if all
    returns are equal.
    """
    mean, _ = moments(values, mask, reduce_sum)
    _, variance = moments(returns, mask, reduce_sum)
    _, residual = moments(returns - values, mask, reduce_sum)
    return {"critic/values_mean": mean, "critic/explained_variance": 1 - residual / variance if variance > 0 else 0.0}
