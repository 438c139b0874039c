"""AdamW over named tensors, its learning rate, and the moving average of the weights."""

import math

import torch
from torch import Tensor

from phalanx.config.schema import EmaConfig, OptimConfig
from phalanx.distributed.fsdp import Sharded, local


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """The learning rate of optimizer step `update`, counted from 0."""
    warmup = config.lr_warmup_steps
    if update < warmup:
        return config.lr * (update + 1) / warmup
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if config.lr_scheduler == "linear":
        return config.lr * (1 - progress)
    if config.lr_scheduler == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


class Optimizer:
    """One optimizer step: reduce, clip, update, publish. `updates` counts the steps since the run began.

    AdamW is elementwise, so it works on this rank's part of each tensor.
    """

    def __init__(self, config: OptimConfig, sharded: Sharded, total_updates: int, *, offload: bool = False) -> None:
        self.config, self.sharded, self.total_updates, self.offload = config, sharded, total_updates, offload
        self.updates = 0
        self._parts = {name: local(p).detach() for name, p in sharded.parameters.items()}
        beta1, beta2 = config.betas
        self._adamw = torch.optim.AdamW(
            list(self._parts.values()), betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay
        )
        for part in self._parts.values():  # made now, so that a checkpoint has something to load into
            self._adamw.state[part] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(part),
                "exp_avg_sq": torch.zeros_like(part),
            }
        self._move("cpu")

    @torch.no_grad()
    def step(self) -> dict[str, float | Tensor]:
        """Apply the accumulated gradients; returns grad_norm (before clipping, a tensor) and lr."""
        self.sharded.reduce_gradients()
        norm = self.sharded.clip_gradients(self.config.grad_clip)
        lr = learning_rate(self.config, self.updates, self.total_updates)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, p in self.sharded.parameters.items():
            self._parts[name].grad = None if p.grad is None else local(p.grad)
            p.grad = None
        self._move(None)
        self._adamw.step()
        self._adamw.zero_grad()
        self._move("cpu")
        self.sharded.publish()
        self.updates += 1
        return {"grad_norm": norm, "lr": lr}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """This rank's part of the state by the name of its parameter: exp_avg, exp_avg_sq, step."""
        return {name: self._adamw.state[part] for name, part in self._parts.items()}

    def _move(self, device: str | None) -> None:
        """With offload: the moments to `device`, or to their parameter's where it is None."""
        if not self.offload:
            return
        for part, state in self._adamw.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device or part.device)


class Ema:
    """Exponential moving average of the optimizer's tensors; `values` holds this rank's parts."""

    def __init__(self, config: EmaConfig, parameters: dict[str, Tensor], *, offload: bool = False) -> None:
        self.config, self.parameters = config, parameters
        parts = {name: local(p).detach() for name, p in parameters.items()}
        self.values = {name: part.clone().to("cpu" if offload else part.device) for name, part in parts.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """After optimizer step number `updates` (from 1)."""
        assert self.config.decay is not None
        decay = min(self.config.decay, (1 + updates) / (10 + updates)) if self.config.warmup else self.config.decay
        averages = list(self.values.values())
        current = [local(p).to(a.device) for p, a in zip(self.parameters.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, current, 1 - decay)
