"""A training step of the job's loop on tensors of the meta device, which have only shapes.

Samples, other weights' outputs, the loss and its gradient are computed as in training, while a Ledger counts. Nothing
is scored, no weight changes, no file is touched. The world is one rank of many, see phalanx.tools.plan.layout.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config.messages import counted
from phalanx.config.run import EmaConfig, RLConfig, RunConfig
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.run.block_diffusion_sft import BlockDiffusion, Noised
from phalanx.run.flow_matching import ENCODED_TOGETHER, FlowMatching
from phalanx.run.job import Job
from phalanx.run.kind import Kind
from phalanx.run.rl import weights_beside
from phalanx.telemetry.step_metrics import step_flops
from phalanx.telemetry.timers import Timers
from phalanx.tools.plan.blueprint import PlannedFlowPolicy
from phalanx.tools.plan.layout import Cluster, ShardedUpdate, Weight
from phalanx.tools.plan.ledger import META
from phalanx.tools.plan.lm_blueprint import PlannedBlockPolicy, PlannedLMPolicy
from phalanx.tools.plan.tables import Rows
from phalanx.training.components import LoadedTeacher
from phalanx.training.loop import train_step
from phalanx.training.minibatches import BatchPlan, Minibatches
from phalanx.training.optim import TrainState
from phalanx.training.progress import Progress
from phalanx.training.rescorer import Rescorer
from phalanx.training.stops import Stops
from phalanx.training.supervised import SupervisedTrainer
from phalanx.training.update import StepLog, Updater
from phalanx.types import Algorithm, Credit, Outputs, Policy, Prompt, Rollout, Samples, Scored

AnyPlannedPolicy = PlannedFlowPolicy | PlannedLMPolicy


class PlannedState(TrainState):
    """The optimizer and the averages; gradients are counted and dropped."""

    def __init__(self, policy: AnyPlannedPolicy, cfg: RunConfig, ema: EmaConfig, averages: Sequence[str] = ()) -> None:
        offload = cfg.parallel.optimizer_offload
        super().__init__(policy.trained, cfg.optim, 1, ema=ema, averages=averages, offload=offload)
        self.policy = policy
        self.updates_made = self.micro_batches = 0
        self.sharding = ShardedUpdate(policy, cfg.parallel)
        named = dict(policy.trained.module.named_parameters())
        for w in policy.layout.trained:
            named[w.name].register_post_accumulate_grad_hook(partial(self._count_gradient, w))
        policy.trained.sharded.set_last_micro_batch = self._begin_micro_batch  # type: ignore[method-assign]

    def step(self, loss: Tensor) -> dict[str, float | Tensor]:
        """Drop the gradients."""
        self.updates_made, self.sharding.summed = self.updates_made + 1, False
        self.sharding.end()
        return {"grad_norm": 0.0, "lr": 0.0, "skipped": False}

    def _begin_micro_batch(self, last: bool) -> None:
        self.micro_batches += 1
        self.sharding.summed |= not last
        self.sharding.begin()

    def _count_gradient(self, w: Weight, parameter: Tensor) -> None:
        parameter.grad = self.policy.trained.parameters[w.name].grad = None
        self.sharding.add_gradient(w)


class PlannedJob(Job):
    """A job of one step, without checkpoints and logs."""

    def __init__(self, policy: AnyPlannedPolicy, state: PlannedState) -> None:
        self.world, self.state, self.timers, self.progress = policy.world, state, Timers(), Progress()
        self.stops = Stops(self.world, {}, self.progress, self.timers)


class PlannedUpdater(Updater):
    """The learning rule; its passes with other weights are separate phases."""

    trained = 0  # samples of this rank, over all epochs

    def reference(self, name: str, batch: Minibatches) -> tuple[Policy, Minibatches, AbstractContextManager[Any]]:
        """As Updater.reference, as a phase of the ledger."""
        phase, ledger = ExitStack(), cast(AnyPlannedPolicy, self.policy).ledger
        theirs = name in self.teachers and self.teachers[name].policy is not self.policy
        phase.enter_context(ledger.during(name if theirs else "reference"))
        policy, inputs, weights = super().reference(name, batch)
        phase.enter_context(weights)
        return policy, inputs, phase

    def asks(self, name: str, prompt: Prompt) -> bool:
        """True: each teacher counts with all samples, as on a rank that has only its rows."""
        return True

    def follow(self, step: int) -> None:
        """Do nothing: no weight has changed."""

    def performance(self, samples: Samples, log: StepLog, seconds: float) -> dict[str, float]:
        """No metrics: nothing is timed."""
        self.trained = log.trained
        return {}


class Rehearsal(ABC):
    """A job whose step runs on shapes.

    plan: the batch arithmetic of reinforcement learning. samples_size: bytes of the step's samples on the device, and
    outputs_size of their images on the host. copies_reference: the reference is a copy of the initial weights.
    frozen: the policies of teachers by name. unit: what its passes are counted in. updates: optimizer steps of a step.

    role: that of the planned rank, if ranks have roles; rescores: log-probs may be recomputed here, not by another
    role. part: the name of this policy of a joint run; learns: it is trained; beside: bytes that the other policy holds
    on the device; waiting: bytes of the other policy's samples before this one's updates, and during them.
    """

    kind: Kind
    plan: BatchPlan | None = None
    samples: Samples
    samples_size = outputs_size = 0
    copies_reference = False
    role = part = ""
    unit, updates = "step", 1
    learns = rescores = True
    beside: Mapping[str, int] = {}
    waiting = 0, 0
    frozen: Mapping[str, PlannedFlowPolicy] = {}

    def __init__(self, cfg: RunConfig, policy: AnyPlannedPolicy, rollout: Rollout, state: PlannedState) -> None:
        self.cfg, self.policy, self.rollout, self.state = cfg, policy, rollout, state
        self.ledger = policy.ledger
        self.job = PlannedJob(policy, state)

    @property
    def label(self) -> str:
        """The name of this part of the job; empty if it is the whole job."""
        return self.role or self.part

    @property
    def trains(self) -> bool:
        """Whether this rank trains the policy."""
        return self.learns and self.role in ("", ACTOR)

    @abstractmethod
    def run_step(self) -> None:
        """Sample and train, as far as the rank's role does."""

    @abstractmethod
    def train(self) -> None:
        """The updates of the step."""

    @abstractmethod
    def step_rows(self, noun: str) -> Rows:
        """How a step is divided over ranks, optimizer steps and micro-batches; noun: what a sample is called."""

    @abstractmethod
    def operations(self, *, recomputed: bool) -> int:
        """Floating-point operations of a step on all ranks; `recomputed`: with those that checkpointing repeats."""

    @property
    def flops(self) -> int:
        """Operations that the GPUs compute in a step."""
        return self.operations(recomputed=True)

    @property
    def model_flops(self) -> int:
        """Operations that the model needs in a step."""
        return self.operations(recomputed=False)

    def run_validation(self, prompts: list[Prompt]) -> None:
        """The sampling of a validation on these prompts."""
        with self.ledger.during("validation: sample"):
            average = self.state.ema is not None and not self.role  # else the actor sends it in place of the weights
            weights = self.policy.using("ema") if average else nullcontext()
            with weights, self.rollout.awake():
                self.rollout.sample_validation(prompts, each=_score_none)


def _score_none(outputs: Outputs, prompts: list[Prompt]) -> None:
    """Take samples, and score none."""


def _image_means(images: Tensor, *, prompts: list[Prompt], step: int) -> Tensor:
    """A number for each image, with a gradient, in place of a reward."""
    return images.flatten(1).mean(1)


class RLRehearsal(Rehearsal):
    """Reinforcement learning. It is also the loop's collector, which returns samples that are drawn already."""

    cfg: RLConfig
    plan: BatchPlan
    chunks = 1

    def __init__(
        self,
        cfg: RLConfig,
        plan: BatchPlan,
        algorithm: Algorithm,
        policy: AnyPlannedPolicy,
        rollout: Rollout,
        prompts: list[Prompt],
        teachers: Mapping[str, LoadedTeacher] | None = None,
        *,
        learns: bool = True,
    ) -> None:
        state = PlannedState(policy, cfg, cfg.actor.ema, weights_beside(cfg, algorithm, policy) if learns else ())
        super().__init__(cfg, policy, rollout, state)
        self.learns = learns
        self.plan, self.algorithm, self.prompts = plan, algorithm, prompts
        self.unit, self.updates = "part" if plan.parts > 1 else "step", plan.updates * plan.epochs
        state.sharding.middle = plan.budget is not None or plan.passes > 2
        loaded = {name: cast(PlannedFlowPolicy, teacher.policy) for name, teacher in (teachers or {}).items()}
        self.frozen = {name: teacher for name, teacher in loaded.items() if teacher is not policy}
        timers, progress = self.job.timers, self.job.progress
        self.rescorer = Rescorer(cfg, plan, algorithm, policy, timers, progress, exact=rollout.exact)
        algorithm.credit = self._assign_credit  # type: ignore[method-assign]
        algorithm.max_ratio = None  # ratios have no values, so that all updates of a step count
        common = (cfg, plan, algorithm, policy, policy.world, state, self.rescorer, timers)
        score = _image_means if algorithm.last_steps else None
        self.updater = PlannedUpdater(*common, teachers=teachers, score=score)

    @property
    def sent(self) -> int:
        """Bytes of this rank's samples, as they are sent to another role."""
        values = tree_leaves([*vars(self.samples.trace).values(), *vars(replace(self.samples, outputs=[])).values()])
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def run_step(self) -> None:
        """Sample and train, as far as the rank's role does."""
        known = "reference" in self.algorithm.references and "reference" not in self.state.averages
        self.copies_reference = known and not self.policy.trained.is_base("reference")
        behaviour = None if self.role else self.algorithm.behaviour  # ranks of a role sample with what they receive
        with self.ledger.during("rollout: sample"):
            weights = nullcontext() if behaviour is None else self.policy.using(behaviour)
            self.rollout.prepare(lambda _: self.prompts, 0, 1)
            with weights, self.rollout.awake():
                drawn = self.rollout.sample(self.prompts, seed=0, step=0, each=_score_none)
        if self.role in (ACTOR, INFERENCE):  # other ranks drew them
            self.ledger.phases.clear()
            if self.cfg.rollout.schedule == "one_step_off":
                drawn = replace(drawn, exact=False, version=torch.zeros_like(drawn.index))
        self.samples = drawn
        if self.rescores:
            with self.ledger.during("rescore"):
                self.samples, _ = self.rescorer(drawn)
        del drawn
        self.samples_size = self.ledger.live
        outputs = self.samples.outputs
        if isinstance(outputs, Tensor) and self.role in ("", ROLLOUT):  # texts take next to nothing
            self.outputs_size = outputs.nbytes
        if self.trains:
            self.train()

    def step_rows(self, noun: str) -> Rows:
        plan, n = self.plan, self.cfg.rollout.n
        prompts = len({prompt.group_id for prompt in self.samples.prompts})
        in_parts = f", in each of {plan.parts} parts" if plan.parts > 1 else ""
        return [
            ("a step", f"{plan.samples // n} prompts x {n} {noun}s = {plan.samples} {noun}s"),
            ("a rank", f"{counted(plan.per_rank, noun)} of {counted(prompts, 'prompt')}{in_parts}"),
            *self.policy.update_rows(self),
        ]

    def train(self) -> None:
        """The updates, with rewards whose best sample is a different one for each prompt."""
        with self.ledger.during("update"):
            train_step(self.job, self, self.updater, 0)

    def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
        """The samples of the step."""
        return self.samples, {}

    def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
        """A reward for each sample."""
        reward = (torch.arange(self.plan.samples) + self.updater.group_id) % self.cfg.rollout.n
        return samples, reward.float(), {}

    def _assign_credit(self, scored: Scored, total: Callable[[Tensor], Tensor]) -> Credit:
        """An advantage for each action, whatever it is; no critic is trained here."""
        advantage = scored.advantage[:, None].expand(scored.mask.shape)
        return Credit(advantage, advantage, {})

    def operations(self, *, recomputed: bool) -> int:
        if not self.learns:
            return self.drawn_flops
        return self.updater.step_flops(self.samples, self.updater.trained, recomputed=recomputed)

    @property
    def drawn_flops(self) -> int:
        """Operations of all ranks that draw a step's samples."""
        return self._without_updates(references=0)

    def _without_updates(self, references: int) -> int:
        samples = replace(self.samples, on_policy=True)  # so that no log-probs are recomputed
        actions, count = self.algorithm.levels or samples.mask.shape[1], self.plan.samples
        beside: dict[str, Any] = {"references": references, "recomputed": True}
        return self.policy.step_flops(samples, actions=actions, count=count, updates=0, **beside)

    @property
    def flops_of_role(self) -> int:
        """Operations of all ranks of this rank's role in a step."""
        samples = replace(self.samples, on_policy=True)  # so that no log-probs are recomputed
        trained = self.updater.step_flops(samples, self.updater.trained, recomputed=True)
        drawn, scored = self.drawn_flops, self._without_updates(references=1)
        phases = self.ledger.phases
        again = sum(name in phases and phases[name].passes > 0 for name in ("rollout: log-probs", "rescore"))
        role_flops = {ROLLOUT: drawn, INFERENCE: 0, ACTOR: trained - drawn}[self.role]
        return (role_flops + again * (scored - drawn)) * self.plan.parts


class SupervisedRehearsal(Rehearsal):
    """Supervised training on a task; task_flops: operations of a forward pass over one of its samples."""

    def __init__(
        self,
        cfg: RunConfig,
        policy: AnyPlannedPolicy,
        rollout: Rollout,
        task: "FlowMatching | PlannedBlockDiffusion",
        ema: EmaConfig,
        task_flops: int,
    ) -> None:
        super().__init__(cfg, policy, rollout, PlannedState(policy, cfg, ema))
        self.task, self.task_flops = task, task_flops
        self.state.sharding.middle = task.shares.per_rank > 2 * task.shares.micro
        self.trainer = SupervisedTrainer(self.job, task)

    def run_step(self) -> None:
        """Encode the first samples, and train."""
        self.task.begin(range(ENCODED_TOGETHER // self.task.shares.per_rank + 1))
        self.train()

    def step_rows(self, noun: str) -> Rows:
        shares = self.task.shares
        return [
            ("a step", f"{shares.batch_size} {noun}s, {shares.per_rank} per rank, one optimizer step"),
            ("update", f"{counted(self.state.micro_batches, 'micro-batch')} of {counted(shares.micro, noun)}"),
        ]

    def train(self) -> None:
        """The update on the first samples."""
        with self.ledger.during("update"):
            self.trainer.update(0)

    def operations(self, *, recomputed: bool) -> int:
        return step_flops(
            self.task_flops,
            samples=self.task.shares.batch_size,
            lora=self.policy.trained.lora,
            checkpointing=recomputed * self.policy.trained.recomputed,
        )


class PlannedBlockDiffusion(BlockDiffusion):
    """Supervised block diffusion on the longest samples with the most noise."""

    policy: PlannedBlockPolicy

    def passes(self, share: list[int], step: int) -> list[Noised]:
        passes = super().passes(share, step)
        for noised in passes:
            self.policy.ledger.mark(noised.states.weight, noised.count)
        return passes

    def loss(self, batch: Noised) -> tuple[Tensor, dict[str, Tensor]]:
        """As BlockDiffusion.loss; only the first of equal passes runs."""
        ledger = self.policy.ledger
        ledger.phase.passes += 1
        return ledger.once(batch.states.tokens.shape, lambda: BlockDiffusion.loss(self, batch)[0]), {}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {}


def busiest_rank(cfg: RLConfig, plan: BatchPlan, cluster: Cluster) -> int:
    """The rank whose samples belong to the most prompts."""
    n, each, ranks = cfg.rollout.n, plan.per_rank, cfg.parallel.data_ranks(cluster.ranks)
    return max(range(ranks), key=lambda rank: ((rank + 1) * each - 1) // n - rank * each // n)


def longest_prompts(policy: AnyPlannedPolicy, count: int, columns: Sequence[str] = ()) -> list[Prompt]:
    """Prompts, with an image in each of these columns and in that of an editing model."""
    images = dict.fromkeys([*columns, *policy.image_columns], Blank())
    return [Prompt(f"prompt {i}", i, images) for i in range(count)]


class Blank:
    """An image of the data, which takes no memory."""

    def pixels(self, height: int, width: int) -> Tensor:
        """An image [3, H, W] on the host, where it takes no memory."""
        return torch.empty(3, height, width, device=META).cpu()
