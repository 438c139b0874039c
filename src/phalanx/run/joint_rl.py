"""A joint run: a language model rewrites prompts, a flow model makes images from them, and one reward trains both.

The writer's responses become the painter's prompts, and the rewards of the painter's images become the writer's. Then
each policy takes a training step of phalanx.training.loop on the samples already collected.

Shapes: P prompts, N rewrites per prompt, K prompts per original for the painter (the rewrites, and the original itself
with rewrite.keep_originals), M images for each of these.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from phalanx.config.joint import PAINTER, WRITER, JointConfig, frozen
from phalanx.config.messages import ConfigError
from phalanx.config.run import RLConfig
from phalanx.config.section import reported_by
from phalanx.data.overlap import held_out_overlap
from phalanx.data.prompts import MARK, load_prompts, share_of_rank
from phalanx.data.streams import PromptStream
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.rewards.client import RewardClient
from phalanx.run.disaggregated.schedules import Delivered
from phalanx.run.exporting import exports_of
from phalanx.run.job import Job
from phalanx.run.kind import Kind, PolicyKind, Sets, kind_of
from phalanx.run.rewriting import Rewriter, as_original
from phalanx.run.rl import train_state
from phalanx.run.start import build_rewards, choose_cpu_linear, start_job
from phalanx.run.validation import Validator
from phalanx.telemetry.step_metrics import reward_metrics
from phalanx.telemetry.timers import Timers
from phalanx.training.collect import Collector, PromptSource, total_steps
from phalanx.training.components import Records, TrainedPolicy, Training
from phalanx.training.loop import train_step
from phalanx.training.minibatches import BatchPlan
from phalanx.training.optim import TrainState
from phalanx.training.rescorer import Rescorer
from phalanx.training.update import Updater
from phalanx.types import Algorithm, Collected, JobError, Outputs, Prompt, Rollout


@dataclass
class Part:
    """A policy of a joint run with its own configuration. state: None if it is frozen. group: number of consecutive
    samples whose rewards the advantages compare.
    """

    cfg: RLConfig
    plan: BatchPlan
    algorithm: Algorithm
    policy: TrainedPolicy
    rollout: Rollout
    timers: Timers
    group: int
    state: TrainState | None = None

    def best(self) -> AbstractContextManager[None]:
        """A context with the weights to validate: the moving average if there is one."""
        averaged = self.state is not None and self.state.ema is not None
        return self.policy.using("ema") if averaged else nullcontext()


class JointTrainer(Training):
    """Both policies of a joint run, on one rank."""

    def __init__(
        self,
        cfg: JointConfig,
        parts: Mapping[str, Part],
        rewriter: Rewriter,
        collectors: Mapping[str, Collector],
        updaters: Mapping[str, Updater],
        job: Job,
    ) -> None:
        self.cfg, self.parts, self.rewriter, self.job = cfg, parts, rewriter, job
        self.collectors, self.updaters = collectors, updaters
        self.seconds: dict[str, float] = {}  # time that each policy took to sample in this step

    def fit(self) -> None:
        """Train to the last step."""
        with self.job.logger:
            for step in self.job.steps():
                self.job.end_step(step + 1, self.step(step))

    def step(self, step: int) -> dict[str, float]:
        """Take a training step of the policies whose turn it is, and return its metrics."""
        began = time.perf_counter()
        drawn = self.draw(step)
        row: dict[str, float] = {}
        for name in self.parts:
            collected = drawn.pop(name)
            if trains(self.cfg, name, step):
                start = time.perf_counter() - self.seconds[name]  # the step includes the time it took to sample
                with reported_by(vars(self.parts[name].cfg), JobError, JobError):
                    delivered = Delivered(lambda *_, given=collected: given)
                    numbers = train_step(self.job, delivered, self.updaters[name], step, start)
            else:
                numbers = collected.row
            row |= named(name, numbers)
        return row | {"perf/step_s": time.perf_counter() - began}

    def draw(self, step: int) -> dict[str, Collected]:
        """Collect the samples of both policies with their rewards: N responses to each prompt, then M images for each
        of the resulting K prompts.
        """
        writer, painter = self.parts[WRITER], self.parts[PAINTER]
        each, pictures = writer.cfg.rollout.n, painter.cfg.rollout.n
        began = time.perf_counter()
        with reported_by(vars(writer.cfg), JobError, JobError):
            samples, row = self.collectors[WRITER].sample(step)
        assert isinstance(samples.outputs, list)
        with writer.timers("rewrite"):
            row |= self.rewriter.write(step, samples.outputs, each)
        written = time.perf_counter()
        with reported_by(vars(painter.cfg), JobError, JobError):
            painted = self.collectors[PAINTER].collect(step)
        self.seconds = {WRITER: written - began, PAINTER: time.perf_counter() - written}
        # r [P, K]: mean reward of a prompt's images, without images that have none; NaN if no image has one
        of_prompts = painted.reward.view(-1, self.cfg.rewrites, pictures).nanmean(-1)
        reward = of_prompts[:, :each].flatten()  # [P N]
        scored = ~reward.isnan()
        group_id = torch.arange(len(reward)) // each
        row |= writer.rollout.metrics(samples, reward) | reward_metrics(reward[scored], {}, group_id[scored])
        if self.cfg.rewrite.keep_originals:
            row["rewrite/original_reward_mean"] = of_prompts[:, each:].nanmean().item()
        return {WRITER: Collected(samples, reward, row), PAINTER: painted}


def named(name: str, row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a policy with its name as prefix, except the painter's reward/..., which are those of the run."""
    result = {}
    for key, value in row.items():
        result[key if name == PAINTER and key.startswith("reward/") else f"{name}/{key}"] = value
    return result


def trains(cfg: JointConfig, name: str, step: int) -> bool:
    """Whether training step `step` trains a policy."""
    if cfg.alternate is None:
        return name in cfg.train
    return cfg.train[step // cfg.alternate % len(cfg.train)] == name


class JointValidator(Validator):
    """Validates each set of the data once per kind of prompt in rewrite.validate."""

    def __init__(
        self,
        cfg: JointConfig,
        world: World,
        parts: Mapping[str, Part],
        rewriter: Rewriter,
        rewards: RewardClient,
        val_sets: dict[str, list[Prompt]],
        timers: Timers,
    ) -> None:
        painter = parts[PAINTER]
        super().__init__(painter.cfg, world, painter.policy, painter.rollout, rewards, val_sets, timers)
        self.parts, self.rewriter, self.kinds = parts, rewriter, cfg.rewrite.validate
        self.validates *= len(self.kinds)

    def validate(self, step: int, weights: str | None) -> tuple[dict[str, float], Records]:
        """See Validator; each policy uses its own moving average."""
        row: dict[str, float] = {}
        kept: Records = {}
        for data, prompts in self.val_sets.items():
            rewritten = self._rewritten_prompts(prompts) if set(self.kinds) - {"original"} else prompts
            sources = {"original": prompts, "rewritten": rewritten, "swapped": [*rewritten[1:], rewritten[0]]}
            for kind in self.kinds:
                name = f"{data}_{kind}"
                shown = []
                for prompt, source in zip(prompts, sources[kind], strict=True):
                    shown.append(self.rewriter.prompt(prompt, source.text, prompt.group_id))
                with reported_by(vars(self.parts[PAINTER].cfg), JobError, JobError):
                    metrics, kept[name] = self.validate_set(name, shown, self.parts[PAINTER].best())
                row |= metrics
        return row, kept

    def _rewritten_prompts(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts of all ranks, rewritten by the writer."""
        writer = self.parts[WRITER]
        local = share_of_rank(prompts, self.world.rank, self.world.size)
        responses: list[str] = []

        def each(outputs: Outputs, sampled: list[Prompt]) -> None:
            assert isinstance(outputs, list)
            responses.extend(outputs)

        with writer.best(), writer.rollout.awake():
            writer.rollout.sample_validation(local, each=each)
        texts = self.rewriter.texts(responses[:: writer.cfg.rollout.val.n])
        return [self.rewriter.prompt(p, text, p.group_id) for p, (text, _) in zip(prompts, texts, strict=False)]

    def end(self, stop: int = 0) -> None:
        """Close both rollouts."""
        for part in self.parts.values():
            part.rollout.close()


# -- building ---------------------------------------------------------------------------------------------------------


class Joint(Kind):
    """The job's kind, of the kinds of both policies: see phalanx.run.kind."""

    def parts(self) -> dict[str, PolicyKind]:
        """See PolicyKind."""
        return {name: kind_of(part) for name, part in self.cfg.parts().items()}

    def check(self, launch: Launch | None = None, *, installed: bool = True) -> dict[str, BatchPlan]:
        """The batch sizes of each policy."""
        plans = {}
        for name, kind in self.parts().items():
            with reported_by(vars(kind.cfg)):
                plans[name] = kind.check(launch, installed=installed)
        return plans


def build(cfg: JointConfig) -> JointTrainer:
    """Build the job; all ranks call this together. A ValueError is the user's mistake."""
    joint = Joint(cfg)
    plans, kinds = joint.check(), joint.parts()
    writer, painter = kinds[WRITER].cfg, kinds[PAINTER].cfg
    world, rows, val_sets = start_with_prompts(cfg, kinds)
    reward_set = build_rewards(painter, world, rows, val_sets)
    timers, n, m = Timers(), writer.rollout.n, painter.rollout.n
    compared = m if cfg.diffusion_group_scope == "rewrite" else m * cfg.rewrites
    parts: dict[str, Part] = {}
    for name, kind in kinds.items():
        learns = name in cfg.train
        if not learns:
            kind.cfg.model = frozen(kind.cfg.model)
        with reported_by(vars(kind.cfg)):
            policy = kind.load_policy(world, plans[name], frozen=not learns)
            plan, algorithm = kind.as_loaded(plans[name], policy), kind.build_algorithm()
            if name == WRITER:
                rows, val_sets = kind.fitting(rows, val_sets, policy)
            else:  # which reads these prompts rewritten
                kind.fit(rows, "data.train_files", policy)
                kind.name_unused(rows, val_sets, policy)
            rollout = kind.train_rollout(policy, plan, algorithm, learns=learns)
        clock, group = Timers(part=name, whole=timers), n if name == WRITER else compared
        parts[name] = Part(kind.cfg, plan, algorithm, policy, rollout, clock, group)
    pictures: Any = parts[PAINTER].policy
    if world.lead:
        held_out_overlap(rows, chain(*val_sets.values()), *kinds[PAINTER].form()["images"])
    originals = PromptStream(rows, plans[WRITER].samples // n, cfg.data.seed)
    rewriter = Rewriter(cfg.rewrite, originals, pictures.model, painter.data.max_prompt_length)
    trainer_steps = total_steps(cfg.trainer, originals)
    states, learning = {}, {}
    for name in cfg.train:
        part, learning[name] = parts[name], kinds[name]
        steps = sum(trains(cfg, name, step) for step in range(trainer_steps))
        with reported_by(vars(part.cfg)):
            part.state = states[name] = train_state(part.cfg, part.plan, part.algorithm, part.policy, steps)
    texts, images = parts[WRITER], parts[PAINTER]
    unscored = RewardClient(writer, world, None, texts.timers, texts.rollout.noun)
    rewards = RewardClient(painter, world, reward_set, images.timers, images.rollout.noun, judged=as_original)
    validator = JointValidator(cfg, world, parts, rewriter, rewards, val_sets, timers)
    batch = f"{plans[WRITER].samples // n} prompts x {cfg.rewrites} of the writer x {m} {images.rollout.noun}"
    exports = exports_of(cfg.trainer, learning)
    job = Job(cfg, world, states, validator, timers, trainer_steps, batch=batch, exports=exports)
    collectors, updaters = {}, {}
    for name, client, source in ((WRITER, unscored, originals), (PAINTER, rewards, rewriter)):
        part = parts[name]
        beside = kinds[name].load_beside(part.policy, part.plan, part.algorithm, part.rollout)
        collectors[name], updater = around_loop(part, world, job, client, source, beside)
        if updater is not None:
            updaters[name] = updater
    return JointTrainer(cfg, parts, rewriter, collectors, updaters, job)


def start_with_prompts(cfg: JointConfig, kinds: Mapping[str, PolicyKind]) -> tuple[World, list[Prompt], Sets]:
    """The world, and the prompts of training and of each validation set that both policies can read."""
    writer, painter = kinds[WRITER].cfg, kinds[PAINTER].cfg
    with reported_by(vars(painter)):
        # the painter's own columns, but not those of an engine that trains on images: these prompts are rewritten
        rows = load_prompts(cfg.data.train_files, "data.train_files", **kinds[PAINTER].form())
        rows, val_sets = kinds[PAINTER].prepare(rows, kinds[PAINTER].read_sets())
        for row in (*rows, *chain(*val_sets.values())):
            has = f"a place for an image, {MARK}" if MARK in row.text else "a column images"
            if MARK in row.text or "images" in row.meta:
                raise ConfigError(f"{row.place} has {has}; the writer of a joint run reads texts")
    world = start_job(writer, WRITER)
    if world.device.type == "cpu":
        choose_cpu_linear(painter, world, PAINTER)
    with reported_by(vars(painter)):
        return world, *kinds[PAINTER].usable(rows, val_sets, world)


def around_loop(
    part: Part, world: World, job: Job, client: RewardClient, source: PromptSource, beside: dict[str, Any]
) -> tuple[Collector, Updater | None]:
    """The collector and updater of a policy; a frozen policy has no updater. `beside`: see Updater."""
    common = (part.cfg, part.plan, part.algorithm, part.policy)
    rescorer = Rescorer(*common, part.timers, job.progress, exact=part.rollout.exact, between=job.stops.check)
    drawing = partial(Collector, part.cfg, part.plan, part.policy, part.rollout, client, source, part.timers)
    if part.state is None:
        return drawing(weights=None, rescorer=None, group=part.group), None
    updater = Updater(
        *common, world, part.state, rescorer, part.timers, noun=part.rollout.noun, group=part.group, **beside
    )
    return drawing(weights=part.algorithm.behaviour, rescorer=rescorer, group=part.group), updater
