"""The optimizer and its learning rate, moving averages of the weights, and the training state of a model."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config.optimizer import OptimConfig
from phalanx.config.run import EmaConfig
from phalanx.distributed.fsdp import Sharded, local
from phalanx.models.lora import lora_alpha
from phalanx.models.trained import TrainedModel
from phalanx.training.checkpoint_contents import trained_state
from phalanx.training.offload import OffloadedState


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """The learning rate of optimizer step `update`, counted from 0."""
    warmup = config.lr_warmup_steps
    if update < warmup:
        return config.lr * (update + 1) / warmup
    decay_from = max(total_updates - round(config.lr_decay_fraction * total_updates), warmup)
    progress = min(max((update - decay_from) / max(total_updates - decay_from, 1), 0.0), 1.0)
    if config.lr_scheduler == "linear":
        return config.lr * (1 - progress)
    if config.lr_scheduler == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


class Optimizer:
    """AdamW or Muon over a sharded model. `updates` counts the optimizer steps since the run began.

    AdamW is elementwise, so it works on this rank's part of each tensor. Muon (Jordan et al., 2024) orthogonalises the
    momentum of whole matrices (convolution kernels as (out, in x k x k)), so these must not be sharded.
    """

    def __init__(self, config: OptimConfig, sharded: Sharded, total_updates: int, *, offload: bool = False) -> None:
        self.config, self.sharded = config, sharded
        self.total_updates = total_updates
        self.updates = 0
        muon = sharded.hidden_matrices if config.name == "muon" else set()
        # Plain tensors that share their storage with the parameters: every operation on a DTensor costs CPU time, and
        # there are hundreds of LoRA matrices.
        self._parts: dict[str, Tensor] = {}
        for name, p in sharded.parameters.items():
            part = local(p).detach()
            self._parts[name] = part.view(len(part), -1) if name in muon else part
        matrices = [part for name, part in self._parts.items() if name in muon]
        others = [part for name, part in self._parts.items() if name not in muon]
        self._optimizers: list[torch.optim.Optimizer] = []
        home = "meta" if offload else None  # OffloadedState then allocates the state on the host
        # The state exists before the first step, since a resumed run loads its checkpoint into these tensors.
        if others:
            beta1, beta2 = config.betas
            # one kernel for many tensors and no temporary ones; its count of steps is on the device
            device = others[0].device
            decay, fused = config.weight_decay, device.type == "cuda"
            adamw = torch.optim.AdamW(others, betas=(beta1, beta2), eps=config.eps, weight_decay=decay, fused=fused)
            for part in others:
                moments = {name: torch.zeros_like(part, device=home) for name in ("exp_avg", "exp_avg_sq")}
                adamw.state[part] = {"step": torch.zeros((), device=device if fused else "cpu")} | moments
            self._optimizers.append(adamw)
        if matrices:
            # scale Muon's updates to the size of AdamW's, so that one learning rate works for both
            optimizer = torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            for part in matrices:
                optimizer.state[part] = {"momentum_buffer": torch.zeros_like(part, device=home)}
            self._optimizers.append(optimizer)
        self._offloaded = OffloadedState(self._part_states().items()) if offload else None

    @torch.no_grad()
    def step(self, loss: Tensor) -> dict[str, float | Tensor]:
        """Reduce, clip and apply the accumulated gradients. Returns grad_norm (before clipping), lr and `skipped`.

        The update is skipped on all ranks if the loss of any rank or the gradient is NaN or infinite. grad_norm is a
        tensor, because reading a number would wait for the device in each step.
        """
        self.sharded.reduce_gradients()
        norm = self.sharded.clip_gradients(self.config.grad_clip)
        lr = learning_rate(self.config, self.updates, self.total_updates)
        if not self.sharded.finite(loss, norm):
            self.drop_gradients()
            return {"grad_norm": norm, "lr": lr, "skipped": True}
        gradients: dict[Tensor, Tensor | None] = {}
        for name, p in self.sharded.parameters.items():
            part = self._parts[name]
            gradients[part] = None if p.grad is None else local(p.grad).reshape(part.shape)
            p.grad = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        for parts in [list(gradients)] if self._offloaded is None else self._offloaded.visits():
            # torch's optimizers skip the parts that have no gradient
            for part in parts:
                part.grad = gradients.pop(part)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # the module may compute with copies of the parameters in another dtype
        self.sharded.copy_to_module()
        self.updates += 1
        return {"grad_norm": norm, "lr": lr, "skipped": False}

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients."""
        for p in self.sharded.parameters.values():
            if p.grad is not None:
                p.grad.mul_(factor)

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients."""
        for p in self.sharded.parameters.values():
            p.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """This rank's part of the state, by parameter name."""
        # torch's own state dict goes by position, which changes with the layers of the model
        states = self._part_states()
        return {name: states[part] for name, part in self._parts.items()}

    def _part_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state, by this rank's part of each parameter."""
        return {part: state for optimizer in self._optimizers for part, state in optimizer.state.items()}


class Average:
    """A moving average of the parameters; `values` has this rank's parts."""

    def __init__(self, parameters: dict[str, Tensor], *, offload: bool = False) -> None:
        self.parameters = parameters
        # always float32: bfloat16 would round small steps of the average away
        self.values: dict[str, Tensor] = {}
        for name, p in parameters.items():
            part = local(p).detach()
            self.values[name] = part.to("cpu" if offload else part.device, torch.float32, copy=True)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """values <- decay * values + (1 - decay) * parameters."""
        current = []
        for name, value in self.values.items():
            current.append(local(self.parameters[name]).to(value.device, value.dtype))
        # one foreach call: launching a kernel for each of hundreds of LoRA matrices is slow
        torch._foreach_lerp_(list(self.values.values()), current, 1 - decay)


class Ema(Average):
    """The exponential moving average of `actor.ema`."""

    def __init__(self, config: EmaConfig, parameters: dict[str, Tensor], *, offload: bool = False) -> None:
        super().__init__(parameters, offload=offload)
        self.config = config

    def after_update(self, updates: int) -> None:
        """Update the average after optimizer step number `updates` (from 1)."""
        decay, warmup = self.config.decay, (1 + updates) / (10 + updates)
        assert decay is not None
        if updates % self.config.update_interval == 0:
            # early in training, a large decay would keep the average near the initial weights
            self.update(min(decay, warmup) if self.config.warmup else decay)


class TrainState:
    """The training state of one model: its weights, the optimizer's state and averages of the weights.

    A checkpoint has one per trained model: the policy, and others such as a critic. averages: averaged weights by name,
    initially equal to the current weights. ema: the average of EmaConfig, None without a decay. The model can compute
    with any of them (TrainedModel.using). `applied` and `skipped` count the optimizer steps of the current training
    step. `undoes`: whether it can return to the state before them.
    """

    undoes = False
    kept: tuple[int, list[Tensor]] | None = None  # updates, and local_parts, before the training step changed any
    changed = False  # whether it has

    def __init__(
        self,
        model: TrainedModel,
        optim: OptimConfig,
        total_updates: int,
        *,
        ema: EmaConfig | None = None,
        averages: Sequence[str] = (),
        offload: bool = False,
    ) -> None:
        """total_updates: optimizer steps of the whole run. offload: keep optimizer state and averages on the CPU."""
        self.model, self.optim_name = model, optim.name
        self.applied = self.skipped = 0
        self.optimizer = Optimizer(optim, model.sharded, total_updates, offload=offload)
        self.ema: Ema | None = None
        if ema is not None and ema.decay is not None:
            self.ema = Ema(ema, model.parameters, offload=offload)
            model.add_weights("ema", self.ema.values)
        self.averages = {name: Average(model.parameters, offload=offload) for name in averages}
        for name, average in self.averages.items():
            model.add_weights(name, average.values)

    @property
    def updates(self) -> int:
        """Number of optimizer steps since the run began."""
        return self.optimizer.updates

    def step(self, loss: Tensor) -> dict[str, float | Tensor]:
        """Take an optimizer step and update the EMA, see Optimizer.step; `loss` is this rank's sum over its passes."""
        self.keep()
        stats = self.optimizer.step(loss)
        if stats["skipped"]:
            self.skipped += 1
            return stats
        self.applied += 1
        self.changed = True
        if self.ema is not None:
            self.ema.after_update(self.optimizer.updates)
        return stats

    def keep(self) -> None:
        """Before a change: keep the state, if the training step can be undone and this is its first one."""
        if self.undoes and self.kept is None:
            self.kept = self.updates, [tensor.clone() for tensor in self.local_parts()]

    def begin_step(self) -> None:
        """A training step begins, to whose start `undo` returns."""
        self.kept, self.changed = None, False

    def local_parts(self) -> list[Tensor]:
        """This rank's part of everything in `state`."""
        return list(map(local, tree_leaves(self.state())))

    def parts_before(self) -> list[Tensor]:
        """Like `local_parts`, before this training step."""
        return self.local_parts() if self.kept is None else self.kept[1]

    @torch.no_grad()
    def undo(self) -> None:
        """Return to the state before this training step, which may not have changed it yet."""
        self.optimizer.drop_gradients()
        if self.changed:
            assert self.kept is not None, "no copy was made"
            self.model.sharded.reshard()
            for part, before in zip(self.local_parts(), self.kept[1], strict=True):
                part.copy_(before)
            self.loaded(self.kept[0])
        self.begin_step()
        self.applied = self.skipped = 0

    @property
    def diverged(self) -> bool:
        """Whether this training step had optimizer steps, all of which were skipped."""
        return self.skipped > 0 and self.applied == 0

    @property
    def _averaged_weights(self) -> dict[str, dict[str, Tensor]]:
        """The averaged weights by name."""
        copies = {name: average.values for name, average in self.averages.items()}
        return copies if self.ema is None else copies | {"ema": self.ema.values}

    def state(self) -> dict[str, Any]:
        """The contents of a checkpoint as DTensors, to save or to load into."""
        return trained_state(self.model.parameters, self.optimizer.state(), self._averaged_weights)

    def not_finite(self) -> str | None:
        """The name of a weight or average with NaN or infinity in this rank's part; None if all are finite."""
        for tensors in (self.model.parameters, *self._averaged_weights.values()):
            finite = [local(tensor).isfinite().all() for tensor in tensors.values()]
            if not torch.stack(finite).all():  # waits for the device once, not once per tensor
                return next(name for name, ok in zip(tensors, finite, strict=True) if not ok)
        return None

    def loaded(self, updates: int) -> None:
        """Finish loading a checkpoint whose tensors were loaded into `state`, after `updates` optimizer steps."""
        self.model.sharded.copy_to_module()
        self.optimizer.updates = updates

    def signature(self) -> dict[str, Any]:
        """Properties that must be equal in a checkpoint for it to be loaded."""
        signature = {
            "trained tensors": len(self.model.parameters),
            "trained parameters": sum(p.numel() for p in self.model.parameters.values()),
            "lora_rank": self.model.config.lora_rank,
            "lora_alpha": lora_alpha(self.model.config),
            "lora_path": self.model.config.lora_path,
            "moving average": self.ema is not None,
            "other weights": ", ".join(sorted(self.averages)) or "none",
            "optimizer": self.optim_name,
        }
        if self.model.config.cpu_linear is not None:
            signature["cpu_linear"] = self.model.config.cpu_linear
        if self.model.config.quantization is not None or self.model.lora:
            quantized = self.model.config.quantization or "none"
            if self.model.config.quantization is not None and self.model.config.lora_path is not None:
                quantized += ", not of lora_path"  # older checkpoints are of runs that rounded the sum of both
            signature["quantization"] = quantized
        return signature
