"""A training step of the job's own trainer, on tensors that are but shapes.

Samples, other weights' outputs, the loss and its gradient are computed as in training, while a Ledger counts. Nothing
is scored, no weight is changed, and no file is read or written. The world is that of one rank of many: sharding, and
what ranks say to one another, is arithmetic (phalanx.plan.layout).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config.lm import LMRLConfig
from phalanx.config.run import EmaConfig, RLConfig
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT
from phalanx.plan.blocks import PlannedBlockPolicy
from phalanx.plan.blueprint import PlannedPolicy
from phalanx.plan.lm import PlannedLMPolicy
from phalanx.rewards import RewardError
from phalanx.telemetry.flops import step_flops
from phalanx.training.block_diffusion import BlockDiffusion, Noised
from phalanx.training.checkpoint import Progress
from phalanx.training.flow_matching import ENCODED_TOGETHER, FlowMatching
from phalanx.training.minibatches import MicroBatches, Units
from phalanx.training.rl import Trainer
from phalanx.training.run import Run
from phalanx.types import Policy, Prompt, Samples


class Rehearsal(Run):
    """A job whose gradients are counted and dropped, and whose ranks have nothing to say to one another."""

    policy: PlannedPolicy | PlannedLMPolicy
    samples_size = 0  # bytes of the step's samples on the device
    outputs_size = 0  # bytes of their images on the host
    copies_reference = False  # whether the reference is a copy of the weights as they were at first
    role = ""  # of the rank that is planned, where ranks have roles of their own

    @property
    def frozen(self) -> dict[str, PlannedPolicy]:
        """The policies of teachers by name."""
        return {}

    def prepare(
        self, total_steps: int, total_updates: int, ema: EmaConfig, averages: Sequence[str] = (), beside: Any = None
    ) -> None:
        """The optimizer and the averages, without checkpoints and logs."""
        self.ledger, layout = self.policy.ledger, self.policy.layout
        self.total_steps, self.progress = 1, Progress()
        self.learner = self.make_learner(total_updates, ema, averages)
        self.updates = self.micro_batches = 0
        self._summed = False
        named = dict(self.policy.trained.module.named_parameters())
        for w in layout.trained:
            size = 0 if w.away else layout.gradient(w)
            named[w.name].register_post_accumulate_grad_hook(partial(self._keep_gradient, w.name, size))
        self.policy.trained.sharded.set_last_micro_batch = self._begin_micro_batch  # type: ignore[method-assign]

    def _begin_micro_batch(self, last: bool) -> None:
        """Between the passes of an optimizer step gradients are there from the start, whole."""
        self.micro_batches += 1
        if not last and not self._summed:
            self._summed = True
            layout = self.policy.layout
            self.ledger.keep_gradient(sum(layout.gradient(w, summed=True) for w in layout.trained))

    def _keep_gradient(self, name: str, size: int, parameter: Tensor) -> None:
        """What FSDP makes of a gradient takes its place."""
        parameter.grad = self.policy.trained.parameters[name].grad = None
        if not self._summed:
            self.ledger.keep_gradient(size)

    def step_optimizer(self, loss: Tensor) -> dict[str, float | Tensor]:
        """No step at all."""
        self.updates, self._summed = self.updates + 1, False
        self.ledger.drop_gradients()
        return {"grad_norm": 0.0, "lr": 0.0, "skipped": False}

    def train(self) -> None:
        """The step's updates, as a phase."""
        raise AssertionError("a job has updates of its own")

    def train_again(self, recomputed: int) -> None:
        """The updates in place of those before, with so many blocks recomputed in backward passes."""
        self.updates = self.micro_batches = 0
        self.ledger.forget("update")
        self.policy.recompute(recomputed)
        self.train()

    def operations(self, *, recomputed: bool) -> int:
        """Floating-point operations of a step on all ranks; `recomputed`: with what checkpointing repeats."""
        raise AssertionError("a job has a step of its own")

    @property
    def flops(self) -> int:
        """What the GPUs compute in a step."""
        return self.operations(recomputed=True)

    @property
    def model_flops(self) -> int:
        """What the model needs in a step."""
        return self.operations(recomputed=False)

    def go_on(self, failure: RewardError | None = None) -> None:
        """There is but one rank."""

    def run_validation(self, prompts: list[Prompt]) -> None:
        """The sampling of a validation on these prompts."""
        with self.ledger.during("validation: sample"):
            average = self.learner.ema is not None and not self.role  # else the actor sends it in place of the weights
            weights = self.policy.using("ema") if average else nullcontext()
            with weights, self.rollout.awake():
                self.rollout.sample_validation(prompts, each=self.submit)


class RLRehearsal(Rehearsal, Trainer):
    """Reinforcement learning. `samples` are those of the step. `rescores`: log-probs may be taken again here, not by
    another role.
    """

    cfg: RLConfig
    samples: Samples
    rescores = True

    @property
    def frozen(self) -> dict[str, PlannedPolicy]:
        return {name: cast(PlannedPolicy, teacher.policy) for name, teacher in self.teachers.items()}

    @property
    def sent(self) -> int:
        """Bytes of this rank's samples, as they go to another role."""
        trace = vars(self.samples.trace)
        beside = {name: value for name, value in vars(self.samples).items() if name != "outputs"}
        values = [part for value in (*trace.values(), *beside.values()) for part in tree_leaves(value)]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def run_step(self) -> None:
        """Sample and train; of a role, its part of that."""
        known = "reference" in self.algorithm.references and "reference" not in self.learner.averages
        self.copies_reference = known and not self.policy.trained.is_base("reference")
        with self.ledger.during("rollout: sample"):
            drawn = self.sample(0)
        if self.role in (ACTOR, INFERENCE):  # other ranks drew them
            self.ledger.phases.clear()
            if self.cfg.rollout.schedule == "one_step_off":
                drawn = replace(drawn, exact=False, version=torch.zeros_like(drawn.index))
        self.samples = drawn
        if self.rescores:
            with self.ledger.during("rescore"):
                self.samples, _ = self.rescore(drawn)
        del drawn
        self.samples_size = self.ledger.live
        outputs = self.samples.outputs
        if isinstance(outputs, Tensor) and self.role in ("", ROLLOUT):  # texts are next to nothing
            self.outputs_size = outputs.nbytes
        if self.role in ("", ACTOR):
            self.train()

    def train(self) -> None:
        """On rewards of which each prompt's best is another sample."""
        reward = (torch.arange(self.plan.samples) + self.group_id) % self.cfg.rollout.n
        with self.ledger.during("update"):
            self.update(self.samples, reward.float(), 0)

    def behaviour(self) -> AbstractContextManager[None]:
        """Other ranks sample with the weights that they were sent."""
        return nullcontext() if self.role else super().behaviour()

    def credit(self, batches: MicroBatches, units: Units, kept: Tensor) -> dict[str, float]:
        """An advantage for each action, whatever it is; nobody trains a critic here."""
        batches.advantage = batches.advantage[:, None].expand(batches.mask.shape)
        return {}

    def operations(self, *, recomputed: bool) -> int:
        return self.step_flops(self.samples, recomputed=recomputed)

    @property
    def flops_of_role(self) -> int:
        """What all ranks of this one's role compute in a step."""
        samples = replace(self.samples, on_policy=True)  # whose log-probs nobody takes again
        trained = self.step_flops(samples, recomputed=True)
        drawn, scored = (
            self.policy.step_flops(
                samples,
                actions=self.algorithm.levels or samples.mask.shape[1],
                count=self.plan.samples,
                updates=0,
                references=passes,
                recomputed=True,
            )
            for passes in (0, 1)
        )
        phases = self.ledger.phases
        again = sum(name in phases and phases[name].passes > 0 for name in ("rollout: log-probs", "rescore"))
        own = {ROLLOUT: drawn, INFERENCE: 0, ACTOR: trained - drawn}[self.role]
        return (own + again * (scored - drawn)) * self.plan.parts

    def _reference(self, name: str, batches: MicroBatches) -> tuple[Policy, MicroBatches, AbstractContextManager[Any]]:
        """As a phase of its own."""
        phase = ExitStack()
        phase.enter_context(self.ledger.during(name if name in self.teachers else "reference"))
        policy, theirs, weights = super()._reference(name, batches)
        phase.enter_context(weights)
        return policy, theirs, phase


class LMRehearsal(RLRehearsal):
    """Reinforcement learning of a language model."""

    cfg: LMRLConfig
    policy: PlannedLMPolicy


class FlowMatchingRehearsal(Rehearsal, FlowMatching):
    """Supervised flow matching, which has neither samples nor teachers."""

    plan = samples = None
    policy: PlannedPolicy

    def run_step(self) -> None:
        """Encode images, where latents are cached, and train."""
        if self.cfg.flow_matching.cache_latents:
            self.total_steps = ENCODED_TOGETHER // self.per_rank + 1
            self._encode_all()
        self.train()

    def train(self) -> None:
        """On the first images."""
        with self.ledger.during("update"):
            self.update(0)

    def operations(self, *, recomputed: bool) -> int:
        model, r, length = self.policy.model, self.cfg.rollout, self.cfg.data.max_prompt_length
        return step_flops(
            model.flops(r.height, r.width, model.most_tokens(length, r.height, r.width)),
            samples=self.batch_size,
            lora=self.policy.trained.lora,
            checkpointing=recomputed * self.policy.trained.recomputed,
        )


class BlockDiffusionRehearsal(Rehearsal, BlockDiffusion):
    """Supervised block diffusion, on samples of the greatest length that are noised most."""

    plan = samples = None
    policy: PlannedBlockPolicy

    def run_step(self) -> None:
        """Train."""
        self.train()

    def train(self) -> None:
        """On the first samples."""
        with self.ledger.during("update"):
            self.update(0)

    def passes(self, share: list[int], step: int) -> list[Noised]:
        found = super().passes(share, step)
        for part in found:
            self.ledger.mark(part.states.weight, part.count)
        return found

    def loss(self, batch: Noised) -> tuple[Tensor, dict[str, Tensor]]:
        """Of equal passes only the first one runs."""
        self.ledger.phase.passes += 1
        return self.ledger.once(batch.states.tokens.shape, lambda: BlockDiffusion.loss(self, batch)[0]), {}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {}

    def operations(self, *, recomputed: bool) -> int:
        data, masked = self.cfg.data, self.cfg.block_diffusion.noise_range_high
        length, response = data.max_prompt_length + data.max_response_length, data.max_response_length
        return step_flops(
            round(self.policy.states_flops(length, response / self.policy.size, response * masked)),
            samples=self.batch_size,
            lora=self.policy.trained.lora,
            checkpointing=recomputed * self.policy.trained.recomputed,
        )


Planned = RLRehearsal | LMRehearsal | FlowMatchingRehearsal | BlockDiffusionRehearsal
