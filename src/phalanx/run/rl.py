"""Put a reinforcement learning job together, of any kind of policy: everything that the training loop takes."""

import logging
from dataclasses import dataclass
from itertools import chain
from typing import Any

from phalanx.config.messages import ConfigError
from phalanx.config.run import RLConfig
from phalanx.data.overlap import held_out_overlap
from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import INFERENCE, ROLLOUT
from phalanx.rewards.client import RewardClient
from phalanx.run.disaggregated.role_batches import part_of
from phalanx.run.disaggregated.schedules import Delivered, OneStepOffSchedule, Schedule
from phalanx.run.disaggregated.workers import LogProbWorker, RolloutWorker
from phalanx.run.exporting import exports_of
from phalanx.run.job import Job
from phalanx.run.kind import PolicyKind, kind_of, policy_of
from phalanx.run.link import link_of
from phalanx.run.start import JobComponents, build_rewards, routed, start_job
from phalanx.run.validation import Validator
from phalanx.telemetry.timers import Timers
from phalanx.training.collect import Collector, total_steps
from phalanx.training.components import TrainedPolicy, Training
from phalanx.training.loop import Collects, train
from phalanx.training.minibatches import BatchPlan
from phalanx.training.optim import TrainState
from phalanx.training.rescorer import Rescorer
from phalanx.training.update import Updater
from phalanx.types import Algorithm

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


def build(cfg: RLConfig) -> Trainer | RolloutWorker | LogProbWorker:
    """Build the job, or this rank's worker in it; all ranks call this together. A ValueError is the user's mistake."""
    # The cheapest checks come first: numbers, then files, then everything that needs process groups and models.
    kind: PolicyKind = kind_of(cfg)
    plan: BatchPlan = kind.check()
    algorithm = kind.build_algorithm()
    rows = load_prompts(cfg.data.train_files, "data.train_files", **kind.form(train=True))
    rows = routed(rows, algorithm.teachers, first=Launch.from_env().rank == 0)
    rows, val_sets = kind.prepare(rows, kind.read_sets())
    world = start_job(cfg)
    rows, val_sets = kind.usable(rows, val_sets, world)
    gradients = algorithm.last_steps > 0
    rewards = build_rewards(cfg, world, rows, val_sets, outputs=kind.outputs, gradients=gradients)
    if val_sets and rewards is not None and not rewards.validates:
        raise ConfigError(
            "data.val_files: the policy itself computes all terms of the reward, which it does only in training; add "
            "one for validation, such as {name: gsm8k, weight: 0}"
        )
    policy = policy_of(kind, world, plan)
    plan = kind.as_loaded(plan, policy)
    part = part_of(plan, cfg, world)
    if world.role == INFERENCE:
        return LogProbWorker(cfg, part, world, policy)
    rows, val_sets = kind.fitting(rows, val_sets, policy)
    prompts = PromptStream(rows, plan.samples // cfg.rollout.n, cfg.data.seed)
    rollout = kind.train_rollout(policy, plan, algorithm) if world.samples else None
    exact = cfg.rollout.facts.exact if rollout is None else rollout.exact
    tell = None if rollout is None else kind.tell(policy, rollout)
    components = JobComponents(world, rewards, policy, rollout, val_sets, exact=exact, noun=kind.noun, tell=tell)
    if world.role == ROLLOUT:
        return RolloutWorker(cfg, part, components, prompts)
    beside = kind.load_beside(policy, plan, algorithm, rollout)
    trainer = build_trainer(cfg, plan, algorithm, components, prompts, beside)
    if world.lead:
        held_out_overlap(rows, chain(*val_sets.values()), *kind.form().get("images", ()))
    return trainer


def build_trainer(
    cfg: RLConfig,
    plan: BatchPlan,
    algorithm: Algorithm,
    components: JobComponents,
    prompts: PromptStream,
    beside: dict[str, Any],
) -> Trainer:
    """Build the job; all ranks call this together. beside: see Kind.load_beside.

    Raises ValueError for a checkpoint or a folder that cannot be used.
    """
    world, policy, timers, link = components.world, components.policy, Timers(), components.world.link
    steps = total_steps(cfg.trainer, prompts)
    critic, others, trained = beside.get("critic"), {}, steps
    if critic is not None:
        others["critic"] = critic.prepare(steps, offload=cfg.parallel.optimizer_offload)
        trained = max(steps - critic.warmup, 0)
    state = train_state(cfg, plan, algorithm, policy, trained)
    updates = "update" if plan.updates == 1 else "updates"
    batch = f"{cfg.data.batch_size(world.data_size)} prompts in {plan.updates} {updates}"
    exports = exports_of(cfg.trainer, {"": kind_of(cfg)})
    rollout, exact, noun = components.rollout, components.exact, components.noun
    if link is None:
        assert rollout is not None, "each rank samples"
        rewards = RewardClient(cfg, world, components.rewards, timers, noun)
        validator = Validator(cfg, world, policy, rollout, rewards, components.val_sets, timers)
        job = Job(cfg, world, {"": state}, validator, timers, steps, batch=batch, exports=exports, beside=others)
        rescorer = Rescorer(cfg, plan, algorithm, policy, timers, job.progress, exact=exact, between=job.stops.check)
        weights = algorithm.behaviour
        if not algorithm.needs_reward and rollout.facts.weights == "none":  # scores of the data would teach nothing
            rewards = RewardClient(cfg, world, None, timers, noun)
        beside_rollout: dict[str, Any] = {"weights": weights, "rescorer": rescorer, "tell": components.tell}
        collector: Collects = Collector(cfg, plan, policy, rollout, rewards, prompts, timers, **beside_rollout)
    else:
        make = OneStepOffSchedule if cfg.rollout.schedule == "one_step_off" else Schedule
        part = part_of(plan, cfg, world)
        held_out = sum(map(len, components.val_sets.values()))
        schedule = make(cfg, part, world, policy, timers, algorithm.behaviour, held_out)
        job = Job(cfg, world, {"": state}, schedule, timers, steps, batch=batch, exports=exports, beside=others)
        scored = INFERENCE in link_of(world).roles.ranks
        rescorer = Rescorer(cfg, plan, algorithm, policy, timers, job.progress, exact=exact, scored_elsewhere=scored)
        collector = Delivered(schedule.collect, part.parts, rescorer)
    updater = Updater(
        cfg,
        plan,
        algorithm,
        policy,
        world,
        state,
        rescorer,
        timers,
        chunks=collector.chunks,
        noun=noun,
        score=components.rewards.with_gradient if components.rewards is not None and algorithm.last_steps else None,
        **beside,
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
