"""The batches of a planned step, in words."""

from collections.abc import Callable
from typing import Any

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRLConfig
from phalanx.plan.blocks import PER_LOOK, PlannedBlockRollout
from phalanx.plan.blueprint import PlannedFlowPolicy
from phalanx.plan.pace import Rows
from phalanx.plan.phases import kinds
from phalanx.plan.rehearsal import Planned, SupervisedRehearsal
from phalanx.plan.tasks import by_task
from phalanx.training.minibatches import BatchPlan


def batch(p: Planned) -> Rows:
    """The arithmetic of a step."""
    return by_task(_BATCHES, p.cfg)(p, p.cfg)


def _forward(p: Planned) -> str:
    """The passes of a step on a rank; a language model decodes in as many as a response has tokens."""
    texts = []
    for kind in kinds(p.frozen):
        counts = kind.passes and kind.name in p.ledger.phases and not (kind.draws and p.policy.tokens)
        if counts and p.ledger.phases[kind.name].passes:
            texts.append(f"{p.ledger.phases[kind.name].passes} {kind.passes}")
    return ", ".join(texts)


def _lm_batch(p: Planned, cfg: LMRLConfig) -> Rows:
    """The arithmetic of a step of a language model."""
    plan, total = p.plan, cfg.trainer.total_training_steps
    assert plan is not None and p.samples.tokens is not None, "samples of tokens have lengths"
    longest, n, what = int(p.samples.tokens[0]), cfg.rollout.n, "tokens"
    engine = "" if cfg.rollout.facts.weights == "policy" else f", in {cfg.rollout.engine}"
    states: Rows = []
    if isinstance(p.rollout, PlannedBlockRollout):
        what, size, most, each = "positions", p.rollout.policy.size, p.rollout.most, p.rollout.per_look
        clean, assumed = longest - most * size, " (assumed, for the time)" if each == PER_LOOK else ""
        states = [("states", f"{most} of {size} tokens behind {clean} of a sample, the most that there can be")]
        engine = f", {each:.3g} tokens a look at a block{assumed}"
    inner = f"{counted(plan.first(1), 'response')} of {longest} {what}"
    if plan.budget is not None:
        inner = f"at most {plan.budget} {what}, {plan.budget // longest} of the longest responses"
    run = f"as many steps as trainer.total_epochs={cfg.trainer.total_epochs} and the prompts make"
    if total is not None:
        run = f"{counted(total, 'step')}, {counted(total * plan.updates * plan.epochs, 'optimizer step')}"
    prompts = len({prompt.group_id for prompt in p.samples.prompts})
    return [
        ("a step", f"{plan.samples // n} prompts x {n} responses = {plan.samples} responses"),
        ("a rank", f"{counted(plan.per_rank, 'response')} of {counted(prompts, 'prompt')}{_in_parts(plan)}"),
        ("rollout", f"{plan.rollout_micro} responses together{engine}"),
        ("updates", f"{plan.updates * plan.epochs} a step, of {counted(p.state.micro_batches, 'micro-batch')} in all"),
        ("micro-batch", f"{inner}{', in one row' if plan.packed else ''}"),
        ("tokens", f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length}, the most that there can be"),
        *states,
        ("forward passes", f"{_forward(p)}, a rank and {'step' if plan.parts == 1 else 'part'}"),
        ("run", run),
    ]


def _block_batch(p: Planned, cfg: BlockDiffusionTaskConfig) -> Rows:
    """The arithmetic of a step of supervised block diffusion."""
    assert isinstance(p, SupervisedRehearsal), "it is supervised"
    shares, total = p.task.shares, cfg.trainer.total_training_steps
    run = f"as many steps as trainer.total_epochs={cfg.trainer.total_epochs} and the samples make"
    return [
        ("a step", f"{shares.batch_size} samples, {shares.per_rank} a rank, one optimizer step"),
        ("update", f"{counted(p.state.micro_batches, 'micro-batch')} of {counted(shares.micro, 'sample')}"),
        ("tokens", f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length}, the most that there can be"),
        ("states", f"one of each block of a response, {cfg.model.block_size} tokens"),
        ("forward passes", f"{_forward(p)}, a rank and step"),
        ("run", run if total is None else counted(total, "step")),
    ]


def _flow_batch(p: Planned, cfg: FlowRunConfig) -> Rows:
    """The arithmetic of a step of a flow model."""
    assert isinstance(p.policy, PlannedFlowPolicy), "of a flow model"
    model, forward = p.policy.model, _forward(p)
    ranks = cfg.parallel.data_ranks(p.policy.layout.cluster.ranks)
    size, total = cfg.data.batch_size(ranks), cfg.trainer.total_training_steps
    length = model.most_tokens(cfg.data.max_prompt_length, cfg.rollout.height, cfg.rollout.width)
    texts = [
        ("texts", f"{counted(length, 'token')}, the most that there can be"),
        ("forward passes", f"{forward}, a rank and step"),
    ]
    run, what = "" if total is None else counted(total, "step"), "images" if p.plan is None else "prompts"
    endless = f"as many steps as trainer.total_epochs and the {what} make"
    if p.plan is None:
        share, micro = size // ranks, p.state.micro_batches
        return [
            ("a step", f"{size} images, {share} a rank, one optimizer step"),
            ("update", f"{counted(micro, 'micro-batch')} of {counted(share // micro, 'image')}"),
            *texts,
            ("run", run or endless),
        ]
    plan, sampler = p.plan, p.samples.trace.sampler
    together = 2 if sampler.guided and not p.policy.detach_uncond else 1  # branches that share a forward pass
    both = f" x {together} branches of guidance" if together > 1 else ""
    images, prompts = plan.first(1), len({prompt.group_id for prompt in p.samples.prompts})
    inner = f"{counted(images, 'image')} x {counted(plan.actions, 'trained step')}{both}"
    if total is not None:
        run += f", {counted(total * plan.updates * plan.epochs, 'optimizer step')}"
    return [
        ("a step", f"{size} prompts x {cfg.rollout.n} images = {plan.samples} images"),
        ("a rank", f"{counted(plan.per_rank, 'image')} of {counted(prompts, 'prompt')}{_in_parts(plan)}"),
        (
            "rollout",
            f"{counted(plan.per_rank // plan.rollout_micro, 'micro-batch')} of {plan.rollout_micro} images{both}",
        ),
        ("updates", f"{plan.updates * plan.epochs} a step, each of {counted(plan.passes, 'micro-batch')}"),
        ("micro-batch", f"{inner} = {counted(images * plan.actions * together, 'row')}"),
        *texts,
        ("run", run or endless),
    ]


def _in_parts(plan: BatchPlan) -> str:
    return f", in each of {plan.parts} parts" if plan.parts > 1 else ""


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


_BATCHES: dict[type, Callable[[Planned, Any], Rows]] = {
    FlowRunConfig: _flow_batch,
    LMRLConfig: _lm_batch,
    BlockDiffusionTaskConfig: _block_batch,
}
