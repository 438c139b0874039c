"""The batches of a planned step, in words."""

from collections.abc import Callable
from typing import Any

from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRunConfig
from phalanx.plan.blocks import PER_LOOK, PlannedBlockRollout
from phalanx.plan.blueprint import PlannedFlowPolicy
from phalanx.plan.pace import Rows
from phalanx.plan.phases import kinds
from phalanx.plan.rehearsal import Planned, RLRehearsal, SupervisedRehearsal
from phalanx.plan.tasks import by_task, task_of


def batch(p: Planned) -> Rows:
    """The arithmetic of a step."""
    trainer, samples, part = p.cfg.trainer, task_of(p.cfg).samples, "step"
    noun, total = samples.removesuffix("s"), trainer.total_training_steps
    updates_of, inputs_of = by_task(_OF_MODELS, p.cfg)
    run = "" if total is None else counted(total, "step")
    if isinstance(p, SupervisedRehearsal):
        shares, source = p.task.shares, samples
        rows = [
            ("a step", f"{shares.batch_size} {samples}, {shares.per_rank} a rank, one optimizer step"),
            ("update", f"{counted(p.state.micro_batches, 'micro-batch')} of {counted(shares.micro, noun)}"),
        ]
    else:
        plan, n, source, in_parts = p.plan, p.cfg.rollout.n, "prompts", ""
        prompts = len({prompt.group_id for prompt in p.samples.prompts})
        if plan.parts > 1:
            part, in_parts = "part", f", in each of {plan.parts} parts"
        rows = [
            ("a step", f"{plan.samples // n} prompts x {n} {samples} = {plan.samples} {samples}"),
            ("a rank", f"{counted(plan.per_rank, noun)} of {counted(prompts, 'prompt')}{in_parts}"),
            *updates_of(p, p.cfg),
        ]
        if total is not None:
            run += f", {counted(total * plan.updates * plan.epochs, 'optimizer step')}"
    return [
        *rows,
        *inputs_of(p, p.cfg),
        ("forward passes", f"{_forward(p)}, a rank and {part}"),
        ("run", run or f"as many steps as trainer.total_epochs={trainer.total_epochs} and the {source} make"),
    ]


def _forward(p: Planned) -> str:
    """The passes of a step on a rank; a language model decodes in as many as a response has tokens."""
    texts = []
    for kind in kinds(p.frozen):
        counts = kind.passes and kind.name in p.ledger.phases and not (kind.draws and p.policy.tokens)
        if counts and p.ledger.phases[kind.name].passes:
            texts.append(f"{p.ledger.phases[kind.name].passes} {kind.passes}")
    return ", ".join(texts)


def _lm_updates(p: RLRehearsal, cfg: LMRunConfig) -> Rows:
    """The rollout and the updates of a language model."""
    plan, facts = p.plan, cfg.rollout.facts
    assert p.samples.tokens is not None, "samples of tokens have lengths"
    longest, what = int(p.samples.tokens[0]), "tokens"
    engine = "" if facts.weights == "policy" else f", in {cfg.rollout.engine}"
    if isinstance(p.rollout, PlannedBlockRollout):
        what, each = "positions", p.rollout.per_look
        engine = f", {each:.3g} tokens a look at a block{' (assumed, for the time)' * (each == PER_LOOK)}"
    inner = f"{counted(plan.first(1), 'response')} of {longest} {what}"
    if plan.budget is not None:
        inner = f"at most {plan.budget} {what}, {plan.budget // longest} of the longest responses"
    return [
        ("rollout", f"{plan.rollout_micro} responses together{engine}"),
        ("updates", f"{plan.updates * plan.epochs} a step, of {counted(p.state.micro_batches, 'micro-batch')} in all"),
        ("micro-batch", f"{inner}{', in one row' if plan.packed else ''}"),
    ]


def _tokens(p: Planned, cfg: LMRunConfig) -> Rows:
    """The lengths of a language model's samples, and the states of their blocks."""
    rows = [("tokens", f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length}, the most that there can be")]
    if isinstance(p, SupervisedRehearsal):
        rows.append(("states", f"one of each block of a response, {cfg.model.block_size} tokens"))
    elif isinstance(p.rollout, PlannedBlockRollout) and p.samples.tokens is not None:
        size, most = p.rollout.policy.size, p.rollout.most
        clean = int(p.samples.tokens[0]) - most * size
        rows.append(("states", f"{most} of {size} tokens behind {clean} of a sample, the most that there can be"))
    return rows


def _flow_updates(p: RLRehearsal, cfg: FlowRunConfig) -> Rows:
    """The rollout and the updates of a flow model."""
    assert isinstance(p.policy, PlannedFlowPolicy), "of a flow model"
    plan, images = p.plan, p.plan.first(1)
    # branches that share a forward pass
    together = 2 if p.samples.trace.sampler.guided and not p.policy.detach_uncond else 1
    both = f" x {together} branches of guidance" if together > 1 else ""
    inner = f"{counted(images, 'image')} x {counted(plan.actions, 'trained step')}{both}"
    drawn = counted(plan.per_rank // plan.rollout_micro, "micro-batch")
    return [
        ("rollout", f"{drawn} of {plan.rollout_micro} images{both}"),
        ("updates", f"{plan.updates * plan.epochs} a step, each of {counted(plan.passes, 'micro-batch')}"),
        ("micro-batch", f"{inner} = {counted(images * plan.actions * together, 'row')}"),
    ]


def _texts(p: Planned, cfg: FlowRunConfig) -> Rows:
    """The length of a flow model's texts."""
    assert isinstance(p.policy, PlannedFlowPolicy), "of a flow model"
    length = p.policy.model.most_tokens(cfg.data.max_prompt_length, cfg.rollout.height, cfg.rollout.width)
    return [("texts", f"{counted(length, 'token')}, the most that there can be")]


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


# lines about updates on drawn samples, and about the inputs of the model
_OF_MODELS: dict[type, tuple[Callable[[RLRehearsal, Any], Rows], Callable[[Planned, Any], Rows]]] = {
    FlowRunConfig: (_flow_updates, _texts),
    LMRunConfig: (_lm_updates, _tokens),
}
