"""The batches of a planned step in words, its operations, and its messages: bytes that a rank receives and sends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.config.lm import LMRLConfig
from phalanx.config.messages import counted
from phalanx.distributed.mesh import ACTOR, ROLLOUT
from phalanx.rollout.lm.partial import drawn_at_once
from phalanx.run.roles import Roles
from phalanx.tools.plan.blueprint import PlannedFlowPolicy
from phalanx.tools.plan.jobs import task_of
from phalanx.tools.plan.ledger import kinds
from phalanx.tools.plan.lm_blueprint import PlannedBlockRollout
from phalanx.tools.plan.rehearsal import Rehearsal, RLRehearsal, SupervisedRehearsal
from phalanx.tools.plan.tables import Rows


def batch(p: Rehearsal) -> Rows:
    """How a step is divided over ranks, optimizer steps and micro-batches."""
    trainer, samples, part = p.cfg.trainer, task_of(p.cfg).samples, "step"
    noun, total = samples.removesuffix("s"), trainer.total_training_steps
    run = "" if total is None else counted(total, "step")
    if isinstance(p, SupervisedRehearsal):
        shares = p.task.shares
        rows = [
            ("a step", f"{shares.batch_size} {samples}, {shares.per_rank} per rank, one optimizer step"),
            ("update", f"{counted(p.state.micro_batches, 'micro-batch')} of {counted(shares.micro, noun)}"),
        ]
    else:
        assert isinstance(p, RLRehearsal), "the other kind of training"
        plan, n, in_parts = p.plan, p.cfg.rollout.n, ""
        prompts = len({prompt.group_id for prompt in p.samples.prompts})
        if plan.parts > 1:
            part, in_parts = "part", f", in each of {plan.parts} parts"
        rows = [
            ("a step", f"{plan.samples // n} prompts x {n} {samples} = {plan.samples} {samples}"),
            ("a rank", f"{counted(plan.per_rank, noun)} of {counted(prompts, 'prompt')}{in_parts}"),
            *(_of_tokens(p) if p.policy.tokens else _of_images(p)),
        ]
        if total is not None:
            run += f", {counted(total * plan.updates * plan.epochs, 'optimizer step')}"
    passes = []
    for kind in kinds(p.frozen):  # decoding a language model takes as many passes as a response has tokens
        took = p.ledger.phases.get(kind.name)
        if kind.passes and took is not None and took.passes and not (kind.draws and p.policy.tokens):
            passes.append(f"{took.passes} {kind.passes}")
    return [
        *rows,
        *_inputs(p),
        ("forward passes", f"{', '.join(passes)}, per rank and {part}"),
        ("run", run or f"as many steps as trainer.total_epochs={trainer.total_epochs} gives"),
    ]


def _of_tokens(p: RLRehearsal) -> Rows:
    """How responses are drawn and trained."""
    plan, what = p.plan, "tokens"
    assert p.samples.tokens is not None, "samples of tokens have lengths"
    longest = int(p.samples.tokens[0])
    engine = "" if p.cfg.rollout.facts.weights == "policy" else f", in {p.cfg.rollout.engine}"
    if isinstance(p.rollout, PlannedBlockRollout):
        what = "positions"
        engine = f", at least {p.rollout.per_look:.3g} of a block's tokens per denoising step"
    inner = f"{counted(plan.first(1), 'response')} of {longest} {what}"
    if plan.budget is not None:
        inner = f"at most {plan.budget} {what}, {plan.budget // longest} of the longest responses"
    flying: Rows = []
    if isinstance(p.cfg, LMRLConfig) and p.cfg.rollout.partial_rollout:
        r = p.cfg.rollout
        drawn = drawn_at_once(r, plan.samples // r.n) * r.n
        rounds = f"in rounds of {counted(r.partial_rollout_tokens, 'token')}"
        flying = [("in flight", f"{drawn} responses, {rounds}; those that wait have no keys and values")]
    return [
        ("rollout", f"{plan.rollout_micro} responses together{engine}"),
        *flying,
        (
            "updates",
            f"{plan.updates * plan.epochs} per step, of {counted(p.state.micro_batches, 'micro-batch')} in all",
        ),
        ("micro-batch", f"{inner}{', in one row' if plan.packed else ''}"),
    ]


def _of_images(p: RLRehearsal) -> Rows:
    """How images are drawn and trained."""
    assert isinstance(p.policy, PlannedFlowPolicy), "of a flow model"
    plan, images = p.plan, p.plan.first(1)
    # branches of guidance that share a forward pass
    together = 2 if p.samples.trace.sampler.guided and not p.policy.detach_uncond else 1
    both = f" x {together} branches of guidance" if together > 1 else ""
    inner = f"{counted(images, 'image')} x {counted(plan.actions, 'trained step')}{both}"
    drawn = counted(plan.per_rank // plan.rollout_micro, "micro-batch")
    return [
        ("rollout", f"{drawn} of {plan.rollout_micro} images{both}"),
        ("updates", f"{plan.updates * plan.epochs} per step, each of {counted(plan.passes, 'micro-batch')}"),
        ("micro-batch", f"{inner} = {counted(images * plan.actions * together, 'row')}"),
    ]


def _inputs(p: Rehearsal) -> Iterator[tuple[str, str]]:
    """The lengths of texts, or of a language model's samples with the states of their blocks."""
    policy, prompt = p.policy, p.cfg.data.max_prompt_length
    if isinstance(policy, PlannedFlowPolicy):
        yield "texts", f"{counted(policy.text_tokens, 'token')} at most"
        return
    yield "tokens", f"{prompt} + {policy.tokens - prompt} at most"
    if policy.vision is not None:
        tower = "frozen, which reads each once" if policy.vision.frozen else "trained, which reads it in each pass"
        yield "images", f"1 image per prompt, {policy.vision.look.count} of its tokens; the tower is {tower}"
    if isinstance(p.rollout, PlannedBlockRollout) and isinstance(p, RLRehearsal):
        size, most = p.rollout.policy.size, p.rollout.most
        assert p.samples.tokens is not None, "samples of tokens have lengths"
        clean = int(p.samples.tokens[0]) - most * size
        yield "states", f"{most} of {size} tokens behind {clean} of a sample at most"


def arithmetic(parts: Sequence[Rehearsal], roles: Roles, *, alternate: bool = False) -> Rows:
    """Operations of a step, of each policy of a joint run, or of the ranks of each role. alternate: each step trains
    only one of the policies.
    """
    rows = []
    for p in parts:
        if p.role:
            assert isinstance(p, RLRehearsal), "only samples are drawn elsewhere"
            rows.append((p.role, _operations(p.flops_of_role, len(roles.ranks[p.role]))))
            continue
        text = _operations(p.flops, p.policy.layout.cluster.ranks)
        if alternate:
            assert isinstance(p, RLRehearsal), "both draw samples"
            text += f"; {_operations(p.drawn_flops)} in a step that does not train it"
        rows.append((p.part or "a step", text))
        again = 1 - p.model_flops / p.flops
        if again > 0 and not p.part:
            rows.append(("repeated", f"{100 * again:.0f} % of it, recomputed in backward passes"))
    if any(p.policy.tokens for p in parts):
        rows.append(("assumed", "all prompts and responses have their maximum lengths"))
    return [*rows, ("left out", "rewards, text encoders, VAE and vision tower")]


def _operations(flops: int, ranks: int = 1) -> str:
    """A number of operations with its unit, and each rank's share of it."""
    unit, size = ("PFLOP", 1e15) if flops >= 1e15 else ("TFLOP", 1e12)
    text = f"{flops / size:.4g} {unit}"
    return text if ranks == 1 else f"{text}, {flops / ranks / size:.4g} per rank"


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives in a training step. nodes: they cross a group of several nodes."""

    what: str
    size: int
    nodes: bool


def messages(p: Rehearsal) -> list[Traffic]:
    """The messages of a planned job that are not negligible, each sent around a ring.

    In a ring of n ranks, a gather of b bytes brings (n - 1) / n b to each rank, a reduce-scatter of b takes as much,
    and an all-reduce both. Single numbers, such as rewards and norms, are left out.
    """
    layout, parallel, phases = p.policy.layout, p.cfg.parallel, p.ledger.phases
    engine = p.cfg.rollout.facts.weights == "copy" and p.role in ("", ROLLOUT)
    gathered = {"weights, gathered for the engine": layout.for_engine() * engine}  # bytes of whole weights
    if p.role == ACTOR:
        sharded = [w for w in layout.trained if w.sharded]
        gathered["weights, gathered for other roles"] = sum(w.gathered * w.kept.itemsize for w in sharded)
    for kind in kinds(p.frozen):
        if not kind.message or kind.name not in phases:
            continue
        phase, reshards = phases[kind.name], parallel.reshard_after_forward
        if kind.name == "update":  # backward passes gather the blocks again, and so does the second of two forwards
            micro_batches = p.state.micro_batches
            size = layout.gathered_times(micro_batches + phase.passes * reshards, micro_batches)
        else:
            weights = p.frozen[kind.name].layout if kind.name in p.frozen else layout
            keeps = parallel.rollout_unsharded or not reshards
            size = weights.gathered_times(phase.rounds if keeps else phase.passes, phase.rounds)
            size += weights.experts() * phase.rounds * parallel.rollout_unsharded
        gathered[kind.message] = gathered.get(kind.message, 0) + size
    cluster, width, updates = layout.cluster, layout.width, p.state.updates_made
    copies = cluster.ranks // width
    apart = cluster.nodes > 1 and cluster.per_node % width > 0  # a copy of the weights spans nodes
    spread = cluster.nodes > 1 and copies > 1
    reduced, message = layout.reduced() * updates, layout.message() * updates
    reductions = p.state.micro_batches if parallel.sync_each_batch else updates
    gathered["gradients, reduced to their parts"] = layout.reduced() * reductions
    items = [Traffic(purpose, size * (width - 1) // width, apart) for purpose, size in gathered.items()]
    items.append(Traffic("gradients, summed over copies", 2 * reduced // width * (copies - 1) // copies, spread))
    everywhere = 2 * message * (cluster.ranks - 1) // cluster.ranks
    items.append(Traffic("gradients of replicated weights", everywhere, cluster.nodes > 1))
    return [item for item in items if item.size]
