"""What a rank does in a step of each training job: passes, samples, bytes that stay; on a blueprint of the model."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phalanx import batches
from phalanx.config.load import resolve_registry
from phalanx.config.schema import FlowMatchingTaskConfig, RunConfig, TrainConfig
from phalanx.distributed import mesh
from phalanx.expert import about, check_kind, expert_model, expert_rollout
from phalanx.flops import step_flops
from phalanx.functional.window import visited_levels
from phalanx.models.flow import FlowPolicy
from phalanx.models.folder import read_index
from phalanx.plan.blueprint import META, fetch, latent_of, planned_policy, text_length
from phalanx.plan.layout import Cluster, Layout, Passes, PlannedExpert
from phalanx.plan.memory import Job, no_embeds, velocity
from phalanx.rollout.policy import train_sampler, val_sampler
from phalanx.types import Algorithm, Expert, FlowTrace, Noised, Sampler

Rows = list[tuple[str, str]]
ENCODED_TOGETHER = 64  # images, by phalanx.flow_matching where it caches latents


@dataclass(frozen=True)
class Planned:
    """A job on a cluster: what a rank holds and runs, and its batches in words; `flops` are the world's in a step.

    `plan` is None where the job is not one of reinforcement learning.
    """

    cluster: Cluster
    job: Job
    passes: Passes
    batch: Rows
    flops: int
    plan: batches.BatchPlan | None

    @property
    def layout(self) -> Layout:
        """Where the weights are."""
        return self.job.layout


def planned(cfg: RunConfig, cluster: Cluster) -> Planned:
    """The job on a cluster that it can run on. Raises ValueError for a model folder that cannot be read."""
    if isinstance(cfg, TrainConfig):
        return _reinforcement(cfg, cluster)
    assert isinstance(cfg, FlowMatchingTaskConfig)
    return _flow_matching(cfg, cluster)


def width_of(cfg: RunConfig, cluster: Cluster) -> int:
    """Ranks that share a copy of the weights."""
    return mesh.shard_size(cfg.parallel, mesh.Launch(0, cluster.ranks, 0, cluster.per_node))


def validates(cfg: RunConfig) -> bool:
    """Whether there is a validation at all."""
    due = cfg.trainer.test_freq > 0 or cfg.trainer.val_before_train
    return due and bool(cfg.data.val_files and cfg.reward.functions)


def _reinforcement(cfg: TrainConfig, cluster: Cluster) -> Planned:
    """As phalanx.trainer.Trainer."""
    plan, c = batches.plan(cfg, cluster.ranks), cfg.rollout
    policy = planned_policy(cfg, detach_uncond=cfg.actor.detach_uncond)
    sampler, length = train_sampler(c, policy.model), text_length(policy.model, cfg)
    latent = math.prod(latent_of(policy, sampler)) * 4
    rule: Algorithm = resolve_registry("phalanx.algorithms", cfg.algorithm.name, "algorithm.name").Rule(cfg.algorithm)
    experts = [_expert(cfg, e, plan, cluster) for e in rule.experts]
    own_others = len(rule.others) - len(experts)

    def scored() -> Tensor:
        """A pass over a micro-batch's trained steps, without gradients."""
        return velocity(policy, sampler, plan.view_micro * plan.window)

    reference = scored if own_others else None
    follows = cfg.actor.ref_model_sync_steps is not None
    copied = c.engine == "vllm_omni"  # and its samples are scored again, unless they are taken as they are
    rescoring = scored if copied and c.correction != "none" and not rule.forward else None

    embeds = text_bytes(policy, sampler, length) * _prompts(plan.per_rank, c.n) * (2 if sampler.guided else 1)
    means = plan.window * (1 + len(rule.others)) + 1  # of the rollout, and of other weights; the final latents
    from_data = c.engine == "dataset"  # images are encoded, not sampled
    taken = 0 if from_data else _denoising_steps(cfg, plan)
    split = sampler.guided and cfg.actor.detach_uncond  # the branches of guidance are passes of their own
    job = Job(
        cfg=cfg,
        policy=policy,
        layout=Layout.of(policy, cfg.parallel, cluster.ranks, width_of(cfg, cluster)),
        ema=cfg.actor.ema.decay is not None,
        loss=lambda: _loss(policy, sampler, plan, rule.forward),
        passes=plan.passes,
        together=plan.rollout_micro,
        sampler=None if from_data else sampler,
        encoded=plan.rollout_micro if from_data else 0,
        val_sampler=val_sampler(c, policy.model) if validates(cfg) else None,
        reference=reference,
        rescoring=rescoring,
        averages=len(rule.averages) + (follows and "reference" in rule.others),
        first_weights="reference" in rule.others and not follows,
        behaviour=rule.behaviour is not None,
        samples=plan.per_rank * latent * (plan.stochastic + 1 + means) + embeds,
        pictures=plan.per_rank * sampler.num_frames * 3 * sampler.height * sampler.width * 4,
        experts=experts,
    )
    counts = Passes(
        sampling=plan.per_rank // plan.rollout_micro * taken * (2 if split else 1),
        reference=plan.view_passes * (2 if split else 1) * own_others,
        updates=plan.updates * plan.epochs,
        passes=plan.passes,
        forwards=2 if split else 1,
        rescoring=plan.per_rank // plan.micro * (2 if split else 1) if rescoring is not None else 0,
        copied=copied,
        rounds=plan.view_rounds * own_others,
    )
    forward = policy.model.flops(sampler.height, sampler.width, length, sampler.num_frames)
    views = own_others + sum(e.flops for e in experts) / (forward * (2 if sampler.guided else 1))
    flops = step_flops(
        forward,
        samples=plan.samples,
        steps=taken,
        window=plan.window,
        cfg=sampler.guided,
        updates_per_sample=plan.trained / plan.per_rank,
        lora=cfg.model.lora_rank > 0,
        checkpointing=cfg.model.gradient_checkpointing,
        views=views * plan.viewed / plan.per_rank,
        detach_uncond=cfg.actor.detach_uncond,
    )
    return Planned(cluster, job, counts, _batch(cfg, plan, sampler, job, counts, length), flops, plan)


def _expert(cfg: TrainConfig, expert: Expert, plan: batches.BatchPlan, cluster: Cluster) -> PlannedExpert:
    """As phalanx.expert.LoadedExpert."""
    try:
        folder = fetch(expert.path)
        kind = read_index(Path(folder))["_class_name"]
    except ValueError as error:
        raise about(expert, error) from error
    check_kind(expert, kind, read_index(Path(cfg.model.path))["_class_name"])
    own = replace(cfg, model=expert_model(cfg.model, folder))
    try:
        policy = planned_policy(own, detach_uncond=False, frozen=True)
    except ValueError as error:
        raise about(expert, error) from error
    sampler = train_sampler(expert_rollout(cfg.rollout, expert, policy.model), policy.model)
    length, branches = text_length(policy.model, cfg), 2 if sampler.guided else 1
    return PlannedExpert(
        name=expert.name,
        policy=policy,
        layout=Layout.of(policy, cfg.parallel, cluster.ranks, width_of(cfg, cluster)),
        view=partial(velocity, policy, sampler, plan.view_micro * plan.window),
        passes=plan.view_passes,
        rounds=plan.view_rounds,
        embeds=text_bytes(policy, sampler, length) * _prompts(plan.per_rank, cfg.rollout.n) * branches,
        flops=policy.model.flops(sampler.height, sampler.width, length, sampler.num_frames) * branches,
    )


def _denoising_steps(cfg: TrainConfig, plan: batches.BatchPlan) -> int:
    """The most velocities that a sample takes: with the window where it ends last."""
    r = cfg.rollout
    end = 0
    if plan.stochastic:
        end = r.sde_window_range[1] if r.sde_window_range is not None else r.num_inference_steps - 1
    return len(visited_levels(r.num_inference_steps, end, r.ode_compression)) - 1


def _loss(policy: FlowPolicy, sampler: Sampler, plan: batches.BatchPlan, forward: bool) -> Tensor:
    """The forward pass of a micro-batch's trained steps, or `forward` of its noised images, to a number that depends on
    all that a loss can ask of it.
    """
    shape, images = latent_of(policy, sampler), plan.first(1)
    steps = max(plan.stochastic, plan.window)
    trace = FlowTrace(
        sampler=sampler,
        latents=torch.empty(images, steps + 1, *shape),
        means=torch.empty(images, plan.window, *shape),
        clean=torch.empty(images, *shape),
        sigmas=torch.empty(steps + 1),
        timesteps=torch.empty(steps),
        sigma_max=1.0,
        trained=torch.arange(plan.window),
        embeds=no_embeds(),
        prompt_index=torch.zeros(images, dtype=torch.long),
        evaluations=sampler.num_inference_steps,
    )
    if forward:
        noised = Noised(torch.empty(images, plan.window, *shape), torch.empty(images, plan.window))
        return torch.square(policy.predict(trace, noised) - noised.target(trace.clean)).mean()
    replay = policy.replay(trace)
    return replay.log_prob.sum() + replay.mean.sum()


def _batch(cfg: TrainConfig, plan: batches.BatchPlan, sampler: Sampler, job: Job, counts: Passes, length: int) -> Rows:
    """The arithmetic of a step in words."""
    branches = 2 if sampler.guided else 1
    together = branches // counts.forwards  # branches of guidance that share a forward pass
    both = f" x {together} branches of guidance" if together > 1 else ""
    images, prompts = plan.first(1), _prompts(plan.per_rank, cfg.rollout.n)
    rows = images * plan.window * together
    again = f"{counts.rescoring} to score samples again, " if counts.rescoring else ""
    reference = f"{counts.reference} of the reference, " if counts.reference else ""
    experts = "".join(f"{e.passes} of the {e.name}, " for e in job.experts)
    train = counts.updates * counts.passes * counts.forwards
    total = cfg.trainer.total_training_steps
    run = "as many steps as trainer.total_epochs and the prompts make"
    if total is not None:
        run = f"{_n(total, 'step')}, {_n(total * counts.updates, 'optimizer step')}"
    return [
        ("a step", f"{cfg.data.train_batch_size} prompts x {cfg.rollout.n} images = {plan.samples} images"),
        ("a rank", f"{_n(plan.per_rank, 'image')} of {_n(prompts, 'prompt')}"),
        ("rollout", f"{_n(plan.per_rank // plan.rollout_micro, 'micro-batch')} of {plan.rollout_micro} images{both}"),
        ("updates", f"{counts.updates} a step, each of {_n(counts.passes, 'micro-batch')}"),
        ("micro-batch", f"{_n(images, 'image')} x {_n(plan.window, 'trained step')}{both} = {_n(rows, 'row')}"),
        ("texts", f"{_n(length, 'token')}, the most that there can be"),
        (
            "forward passes",
            f"{counts.sampling} to sample, {again}{reference}{experts}{train} to train, a rank and step",
        ),
        ("run", run),
    ]


def _n(number: int, noun: str) -> str:
    """A number of things in words."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def _prompts(images: int, n: int) -> int:
    """The most prompts that `images` neighbouring images of groups of `n` can belong to."""
    return -(-images // n) if images % n == 0 or n % images == 0 else -(-images // n) + 1


def text_bytes(policy: FlowPolicy, sampler: Sampler, length: int) -> int:
    """Bytes of a prompt's embeddings, `length` tokens long, and of the image that it is about."""
    model = policy.model
    with META:
        inputs = model.forward_inputs(sampler.height, sampler.width, length)
    others = {"hidden_states", "timestep", "guidance", *model.shared_inputs}
    texts = [v for k, v in inputs.items() if isinstance(v, Tensor) and k not in others]
    images = inputs["hidden_states"].numel() - math.prod(model.latent_shape(sampler.height, sampler.width))
    return (sum(t.numel() for t in texts) + images) * model.dtype.itemsize


def _flow_matching(cfg: FlowMatchingTaskConfig, cluster: Cluster) -> Planned:
    """As phalanx.flow_matching.FlowMatching."""
    c, r, size = cfg.flow_matching, cfg.rollout, cfg.data.train_batch_size
    policy = planned_policy(cfg, detach_uncond=False)
    guided, length = train_sampler(r, policy.model), text_length(policy.model, cfg)
    plain = replace(guided, guidance=1.0)
    per_rank = size // cluster.ranks
    counts = Passes(sampling=0, reference=0, updates=1, passes=per_rank // c.micro_batch_size_per_gpu, forwards=1)
    job = Job(
        cfg=cfg,
        policy=policy,
        layout=Layout.of(policy, cfg.parallel, cluster.ranks, width_of(cfg, cluster)),
        ema=c.ema.decay is not None,
        loss=lambda: _regression(policy, plain, c.micro_batch_size_per_gpu),
        passes=counts.passes,
        together=r.micro_batch_size_per_gpu or 16,
        val_sampler=val_sampler(r, policy.model) if validates(cfg) else None,
        encoded=ENCODED_TOGETHER if c.cache_latents else 1,
        samples=text_bytes(policy, plain, length) * c.micro_batch_size_per_gpu,
    )
    flops = step_flops(
        policy.model.flops(r.height, r.width, length),
        samples=size,
        steps=0,
        window=1,
        cfg=False,
        lora=cfg.model.lora_rank > 0,
        checkpointing=cfg.model.gradient_checkpointing,
        views=0,
        detach_uncond=False,
    )
    total = cfg.trainer.total_training_steps
    run = "as many steps as trainer.total_epochs and the images make" if total is None else _n(total, "step")
    batch = [
        ("a step", f"{size} images, {per_rank} a rank, one optimizer step"),
        ("update", f"{_n(counts.passes, 'micro-batch')} of {_n(c.micro_batch_size_per_gpu, 'image')}"),
        ("texts", f"{_n(length, 'token')}, the most that there can be"),
        ("forward passes", f"{counts.passes} to train, a rank and step"),
        ("run", run),
    ]
    return Planned(cluster, job, counts, batch, flops, None)


def _regression(policy: FlowPolicy, sampler: Sampler, images: int) -> Tensor:
    """The forward pass of a micro-batch's loss."""
    target = torch.empty(images, *latent_of(policy, sampler))
    return ((velocity(policy, sampler, images) - target) ** 2).flatten(1).mean(1).sum()
