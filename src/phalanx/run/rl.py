"""Assemble a reinforcement learning job: everything that the training loop takes."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.mesh import ACTOR, INFERENCE
from phalanx.rewards.client import RewardClient
from phalanx.run.disaggregated.role_batches import of_role
from phalanx.run.disaggregated.schedules import SCHEDULES, RemoteCollector
from phalanx.run.job import Job
from phalanx.run.link import link_of
from phalanx.run.start import JobComponents
from phalanx.run.validation import Validator
from phalanx.telemetry.timers import Timers
from phalanx.training.collect import Collector, total_steps
from phalanx.training.components import LoadedTeacher, TrainedPolicy, Training
from phalanx.training.critic_trainer import CriticTrainer
from phalanx.training.loop import Collects, train
from phalanx.training.minibatches import BatchPlan
from phalanx.training.optim import TrainState
from phalanx.training.rescorer import Rescorer
from phalanx.training.update import Updater
from phalanx.types import Algorithm, Samples

log = logging.getLogger(__name__)


@dataclass
class Trainer(Training):
    """The arguments of phalanx.training.loop.train, on one rank."""

    job: Job
    collector: Collects
    updater: Updater

    @property
    def policy(self) -> TrainedPolicy:
        """The model that is trained."""
        return self.updater.policy

    def fit(self) -> None:
        """Train to the last step."""
        with self.job.logger:
            train(self.job, self.collector, self.updater)


def build_trainer(
    cfg: RLConfig,
    plan: BatchPlan,
    algorithm: Algorithm,
    components: JobComponents,
    prompts: PromptStream,
    teachers: Mapping[str, LoadedTeacher] | None = None,
    critic: CriticTrainer | None = None,
    costs: Callable[[Samples], list[float]] | None = None,
) -> Trainer:
    """Build the job; all ranks call this together. For `teachers`, `critic` and `costs` see Updater.

    Raises ValueError for a checkpoint or a folder that cannot be used.
    """
    world, policy, timers, link = components.world, components.policy, Timers(), components.world.link
    steps = total_steps(cfg.trainer, prompts)
    beside, trained = {}, steps
    if critic is not None:
        beside["critic"] = critic.prepare(steps, offload=cfg.parallel.optimizer_offload)
        trained = max(steps - critic.warmup, 0)
    state = train_state(cfg, plan, algorithm, policy, trained)
    updates = "update" if plan.updates == 1 else "updates"
    batch = f"{cfg.data.batch_size(world.data_size)} prompts in {plan.updates} {updates}"
    rollout, exact, noun = components.rollout, components.exact, components.noun
    if link is None:
        assert rollout is not None, "each rank samples"
        rewards = RewardClient(cfg, world, components.rewards, timers, noun)
        validator = Validator(cfg, world, policy, rollout, rewards, components.val_sets, timers)
        job = Job(cfg, world, {"": state}, validator, timers, steps, batch=batch, beside=beside)
        rescorer = Rescorer(cfg, plan, algorithm, policy, timers, job.progress, exact=exact, between=job.stops.check)
        weights = algorithm.behaviour
        collector: Collects = Collector(
            cfg, plan, policy, rollout, rewards, prompts, timers, weights=weights, rescorer=rescorer
        )
    else:
        make, part = SCHEDULES[cfg.rollout.schedule], of_role(plan, cfg, link_of(world).roles, ACTOR)
        held_out = sum(map(len, components.val_sets.values()))
        schedule = make(cfg, part, world, policy, timers, algorithm.behaviour, held_out)
        job = Job(cfg, world, {"": state}, schedule, timers, steps, batch=batch, beside=beside)
        scored = INFERENCE in link_of(world).roles.ranks
        rescorer = Rescorer(cfg, plan, algorithm, policy, timers, job.progress, exact=exact, scored_elsewhere=scored)
        collector = RemoteCollector(schedule, rescorer)
    updater = Updater(
        cfg,
        plan,
        algorithm,
        policy,
        world,
        state,
        rescorer,
        timers,
        teachers=teachers,
        critic=critic,
        chunks=collector.chunks,
        noun=noun,
        costs=costs,
        score=components.rewards.with_gradient if components.rewards is not None and algorithm.last_steps else None,
    )
    return Trainer(job, collector, updater)


def train_state(cfg: RLConfig, plan: BatchPlan, algorithm: Algorithm, policy: TrainedPolicy, steps: int) -> TrainState:
    """The optimizer and the other weights of a policy that is trained for `steps` training steps."""
    warn_of_k1(cfg, lead=policy.trained.world.rank == 0)
    return TrainState(
        policy.trained,
        cfg.optim,
        steps * plan.updates * plan.epochs,
        averages=weights_beside(cfg, algorithm, policy),
        ema=cfg.actor.ema,
        offload=cfg.parallel.optimizer_offload,
    )


def warn_of_k1(cfg: RLConfig, *, lead: bool) -> None:
    """Warn on the rank `lead` of a KL loss without an expected gradient."""
    keys = vars(cfg.algorithm)
    if keys.get("kl_loss_type") == "k1" and keys["kl_loss_coef"] > 0 and lead:
        log.warning(
            "%s: the expected gradient of k1 is 0, so it does not keep the policy near the reference; expected k3+, k2 "
            "or k3",
            f"{cfg.algorithm:kl_loss_type}",
        )


def weights_beside(cfg: RLConfig, algorithm: Algorithm, policy: TrainedPolicy) -> list[str]:
    """Return the names of the averaged weights of the job; a reference that never changes is kept aside at once."""
    averages, sync = list(algorithm.averages), cfg.actor.ref_model_sync_steps
    if "reference" not in algorithm.references:
        return averages
    if sync is None:
        policy.trained.keep_reference()
        return averages
    return [*averages, "reference"]
