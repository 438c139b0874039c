"""The plan in words and tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.run import RLConfig, RunConfig
from phalanx.distributed.placement import judged_beside, place
from phalanx.distributed.roles import ACTOR, ROLLOUT, Roles, roles_of, span
from phalanx.plan.blocks import PER_LOOK, PlannedBlockRollout
from phalanx.plan.blueprint import PlannedPolicy, shipped
from phalanx.plan.layout import Cluster, Traffic, traffic
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu, Rows, arithmetic, sampled
from phalanx.plan.recompute import fewer_blocks
from phalanx.plan.rehearsal import Planned, SupervisedRehearsal
from phalanx.plan.tables import Scale, groups, listed, table
from phalanx.plan.warnings import ALLOWED, crossing, warnings
from phalanx.training.minibatches import BatchPlan


def describe(p: Planned, gpu: Gpu) -> str:
    """The plan of one size."""
    memory, layout = count(p, gpu.memory), p.policy.layout
    trained, total = (sum(w.numel for w in weights) for weights in (layout.trained, layout.weights))
    title, rows = arithmetic(p, gpu)
    across = crossing(layout, range(layout.cluster.ranks), layout.cluster.per_node)
    sections = [
        [*header(layout.cluster), *shipped_shapes(p, memory)],
        ["Topology", *listed(_topology(p))],
        ["Batch", *listed(batch(p))],
        [f"Memory of a rank ({total / 1e9:.3g} B weights, {trained / 1e9:.3g} B of them trained)", *held(memory)],
        [*phases(memory, gpu), *checkpointing(p, gpu), *judging(p, memory)],
        ["In the host's memory", *listed(_host(p, memory))],
        ["Messages of a step: what a rank receives, and sends as much of", *_messages(messages(p))],
        [title, *listed(rows)],
        [f"warning: {warning}" for warning in (*across, *warnings(p, memory, gpu))],
    ]
    return joined(sections)


def header(c: Cluster) -> list[str]:
    """What is planned."""
    return [f"Plan of {words(c)}; no GPU, process group or weights were used"]


def joined(sections: Iterable[Sequence[str]]) -> str:
    """The sections that have lines."""
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def sizes(cfg: RunConfig, asked: Sequence[Cluster], refused: Mapping[Cluster, str]) -> str:
    """A line for each number of nodes: what a rank gets, or why the job is refused."""
    each = cfg.rollout.n if isinstance(cfg, RLConfig) else 1
    rows = []
    for c in asked:
        roles = roles_on(cfg, c) if c not in refused else None
        if roles is None:
            rows.append((words(c), f"refused: {refused[c]}"))
        elif not roles.collocated:
            rows.append((words(c), ", ".join(f"{role} {span(ranks)}" for role, ranks in roles.ranks.items())))
        else:
            ranks = cfg.parallel.data_ranks(c.ranks)
            share = cfg.data.batch_size(ranks) * each // ranks
            rows.append((words(c), f"{share} {sampled(cfg)} a rank, {copies(c, c.width(cfg.parallel))}"))
    return "\n".join(["Sizes", *listed(rows)])


def roles_on(cfg: RunConfig, c: Cluster) -> Roles:
    """The roles of a cluster's ranks; ConfigError where the placement does not fit it."""
    return roles_of(cfg.placement if isinstance(cfg, RLConfig) else {}, c.launch)


def words(c: Cluster) -> str:
    """A cluster in words."""
    return f"{_n(c.nodes, 'node')} x {c.per_node} = {_n(c.ranks, 'rank')}"


def shipped_shapes(p: Planned, memory: Memory) -> Iterator[str]:
    """The models whose own files were not within reach."""
    folders = [policy.config.path for policy in (p.policy, *p.frozen.values())]
    if memory.reward is not None and memory.reward.folder is not None:
        folders.append(memory.reward.folder)
    found = dict.fromkeys(name for folder in folders if (name := shipped(folder)) is not None)
    if found:
        yield f"Shapes of {' and '.join(found)} as shipped with Phalanx: no hub has them within reach"


# -- topology and batches -----------------------------------------------------------------------------------------


def _topology(p: Planned) -> Rows:
    cluster, width, model = p.policy.layout.cluster, p.policy.layout.width, p.cfg.reward.model
    names = ", ".join(f.name or f.path or "" for f in p.cfg.reward.functions)
    rows = [("nodes", groups(cluster.shard_groups(cluster.per_node))), ("weights", copies(cluster, width))]
    if width > 1:
        rows.append(("shard groups", groups(cluster.shard_groups(width))))
    if 1 < width < cluster.ranks:
        rows.append(("replicate groups", groups(cluster.replicate_groups(width))))
    shared = p.cfg.parallel.ulysses_sequence_parallel_size
    if shared > 1:
        rows.append(("context groups", f"{groups(cluster.shard_groups(shared))}: each has samples of its own"))
    rows.append(("rewards", f"{names}: on every rank, for its own {sampled(p.cfg)}" if names else "none"))
    if model.path is not None:  # a replica never crosses a node: `place` refuses it
        domains = place(model, cluster.ranks, cluster.per_node)
        replicas = [range(r[0], r[-1] + 1) for domain in domains for r in domain.replicas]
        rows.append(("reward groups", f"{groups(replicas)}: each holds reward.model, for the judges"))
    return rows


def _forward(p: Planned) -> str:
    """The passes of a step on a rank."""
    said = {"rollout: sample": "to sample", "rescore": "to score samples again", "reference": "of the reference"}
    said |= {name: f"of the {name}" for name in p.frozen} | {"update": "to train"}
    if isinstance(p.cfg, LMRLConfig):  # it decodes in as many as a response has tokens
        said = {"rollout: log-probs": "of old log-probs"} | said
        del said["rollout: sample"]
    passes = {name: p.ledger.phases[name].passes for name in said if name in p.ledger.phases}
    return ", ".join(f"{number} {said[name]}" for name, number in passes.items() if number)


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
    inner = f"{_n(plan.first(1), 'response')} of {longest} {what}"
    if plan.budget is not None:
        inner = f"at most {plan.budget} {what}, {plan.budget // longest} of the longest responses"
    run = f"as many steps as trainer.total_epochs={cfg.trainer.total_epochs} and the prompts make"
    if total is not None:
        run = f"{_n(total, 'step')}, {_n(total * plan.updates * plan.epochs, 'optimizer step')}"
    prompts = len({prompt.group_id for prompt in p.samples.prompts})
    return [
        ("a step", f"{plan.samples // n} prompts x {n} responses = {plan.samples} responses"),
        ("a rank", f"{_n(plan.per_rank, 'response')} of {_n(prompts, 'prompt')}{_in_parts(plan)}"),
        ("rollout", f"{plan.rollout_micro} responses together{engine}"),
        ("updates", f"{plan.updates * plan.epochs} a step, of {_n(p.state.micro_batches, 'micro-batch')} in all"),
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
        ("update", f"{_n(p.state.micro_batches, 'micro-batch')} of {_n(shares.micro, 'sample')}"),
        ("tokens", f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length}, the most that there can be"),
        ("states", f"one of each block of a response, {cfg.model.block_size} tokens"),
        ("forward passes", f"{_forward(p)}, a rank and step"),
        ("run", run if total is None else _n(total, "step")),
    ]


def batch(p: Planned) -> Rows:
    """The arithmetic of a step."""
    if isinstance(p.cfg, LMRLConfig):
        return _lm_batch(p, p.cfg)
    if isinstance(p.cfg, BlockDiffusionTaskConfig):
        return _block_batch(p, p.cfg)
    assert isinstance(p.cfg, FlowRunConfig) and isinstance(p.policy, PlannedPolicy)
    cfg, model, forward = p.cfg, p.policy.model, _forward(p)
    ranks = cfg.parallel.data_ranks(p.policy.layout.cluster.ranks)
    size, total = cfg.data.batch_size(ranks), cfg.trainer.total_training_steps
    length = model.most_tokens(cfg.data.max_prompt_length, cfg.rollout.height, cfg.rollout.width)
    texts = [
        ("texts", f"{_n(length, 'token')}, the most that there can be"),
        ("forward passes", f"{forward}, a rank and step"),
    ]
    run, what = "" if total is None else _n(total, "step"), "images" if p.plan is None else "prompts"
    endless = f"as many steps as trainer.total_epochs and the {what} make"
    if p.plan is None:
        share, micro = size // ranks, p.state.micro_batches
        return [
            ("a step", f"{size} images, {share} a rank, one optimizer step"),
            ("update", f"{_n(micro, 'micro-batch')} of {_n(share // micro, 'image')}"),
            *texts,
            ("run", run or endless),
        ]
    plan, sampler = p.plan, p.samples.trace.sampler
    together = 2 if sampler.guided and not p.policy.detach_uncond else 1  # branches that share a forward pass
    both = f" x {together} branches of guidance" if together > 1 else ""
    images, prompts = plan.first(1), len({prompt.group_id for prompt in p.samples.prompts})
    inner = f"{_n(images, 'image')} x {_n(plan.actions, 'trained step')}{both}"
    if total is not None:
        run += f", {_n(total * plan.updates * plan.epochs, 'optimizer step')}"
    return [
        ("a step", f"{size} prompts x {cfg.rollout.n} images = {plan.samples} images"),
        ("a rank", f"{_n(plan.per_rank, 'image')} of {_n(prompts, 'prompt')}{_in_parts(plan)}"),
        ("rollout", f"{_n(plan.per_rank // plan.rollout_micro, 'micro-batch')} of {plan.rollout_micro} images{both}"),
        ("updates", f"{plan.updates * plan.epochs} a step, each of {_n(plan.passes, 'micro-batch')}"),
        ("micro-batch", f"{inner} = {_n(images * plan.actions * together, 'row')}"),
        *texts,
        ("run", run or endless),
    ]


def _in_parts(plan: BatchPlan) -> str:
    return f", in each of {plan.parts} parts" if plan.parts > 1 else ""


def _n(number: int, noun: str) -> str:
    """A number of things in words."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def copies(cluster: Cluster, width: int) -> str:
    copies = cluster.ranks // width
    if width == 1:
        return "a copy of the weights on each rank"
    return f"{copies} cop{'y' if copies == 1 else 'ies'} of the weights, each over {width} ranks"


# -- memory -------------------------------------------------------------------------------------------------------


def held(memory: Memory) -> Iterator[str]:
    scale = Scale(memory.peak)
    return table([("held throughout", scale.unit), *((f"  {name}", scale(n)) for name, n in memory.held.items())])


def phases(memory: Memory, gpu: Gpu) -> Iterator[str]:
    scale, held = Scale(memory.peak), sum(memory.held.values())
    rows: list[Sequence[str]] = [("phase", "held", "gathered", "activations", "gradients", "other", "together")]
    for q in memory.phases:
        name = f"{q.name} (peak)" if q is memory.largest else q.name
        parts = (held, q.gathered, q.activations, q.gradients, q.other, held + q.total)
        rows.append((name, *map(scale, parts)))
    yield from table(rows)
    if gpu.memory is not None:
        scale = Scale(gpu.memory)
        yield (
            f"  peak: {scale.plain(memory.peak)} and {scale.plain(ALLOWED)} for CUDA and NCCL, of "
            f"{scale.plain(gpu.memory)} {scale.unit}"
        )


def checkpointing(p: Planned, gpu: Gpu) -> Iterator[str]:
    """What fits with less to compute again."""
    fewer = fewer_blocks(p, gpu)
    if fewer is None:
        return
    blocks, flops = fewer
    key = f"model.gradient_checkpointing_blocks={blocks} of {len(p.policy.blocks)}"
    if not blocks:
        key = "model.gradient_checkpointing=false"
    before, after = (100 * (1 - p.model_flops / all_in_all) for all_in_all in (p.flops, flops))
    yield f"  fits too: {key}; backward passes then repeat {after:.0f} instead of {before:.0f} % of a step's arithmetic"


def judging(p: Planned, memory: Memory) -> Iterator[str]:
    """What the figures of the reward model mean."""
    reward, model = memory.reward, p.cfg.reward.model
    if reward is None:
        return
    what = "the weights of reward.model alone; what it computes comes on top"
    share = f"{model.gpu_memory_utilization:g}"
    if reward.share is not None:
        what = f"what reward.model.gpu_memory_utilization={share} gives to vLLM"
    elif model.engine == "vllm":
        what = "the weights of reward.model alone; "
        what += f"vLLM takes {share} of a GPU in all, which gpu_memory_gb=80 would count"
    where = "" if model.placement == "colocate" else f" (on {model.placement} of each node)"
    name, between = "judge", "between scorings it sleeps in the host's memory"
    if not model.sleep:
        name, between = "reward model", "it stays on the GPU between scorings"
    elif judged_beside(p.cfg, p.policy.layout.width):
        between = "awake while images are sampled and scored; else it sleeps in the host's memory"
    yield f"  {name}{where}: {what}; {between}"


def _host(p: Planned, memory: Memory) -> Rows:
    ranks, kept, judges = p.policy.layout.cluster.per_node, sum(memory.host.values()), 0
    if memory.reward is not None:
        domains = place(p.cfg.reward.model, ranks, ranks)
        judges = sum(len(replica) for domain in domains for replica in domain.replicas)
    node = kept * ranks
    if memory.reward is not None:
        node -= memory.reward.asleep * (ranks - judges)
    least, most = (memory.loading_of_a_node(ranks, judges, cast=cast) for cast in (False, True))
    scale = Scale(max(node, most))
    parts = ", ".join(f"{name} {scale(size)}" for name, size in memory.host.items())
    loading = f"up to {scale.plain(least)} {scale.unit} a node"
    if most > least:
        loading += f"; {scale.plain(most)} if files that are not here hold other dtypes, for each rank casts its own"
    return [
        ("a rank", f"{scale(kept)} {scale.unit}: {parts}" if parts else "nothing that counts"),
        ("a node", f"{scale(node)} {scale.unit}"),
        ("loading", loading),
    ]


# -- messages -----------------------------------------------------------------------------------------------------


def messages(p: Planned) -> list[Traffic]:
    """The messages of a training step."""
    layout, parallel, phases = p.policy.layout, p.cfg.parallel, p.ledger.phases
    engine = p.cfg.rollout.facts.weights == "copy" and p.role in ("", ROLLOUT)
    gathered = {"weights, gathered for the engine": layout.stored() * engine}
    if p.role == ACTOR:
        gathered["weights, gathered for other roles"] = layout.stored(trained=True)
    for name, what, of in (
        ("rollout: sample", "weights, gathered to sample", layout),
        ("rollout: log-probs", "weights, gathered to score samples", layout),
        ("rescore", "weights, gathered to score samples", layout),
        ("reference", "weights, gathered for the reference", layout),
        *((name, f"weights of the {name}, gathered", teacher.layout) for name, teacher in p.frozen.items()),
    ):
        if name in phases:
            gathered[what] = of.gathered(phases[name].passes, phases[name].rounds, parallel)
    if "update" in phases:
        to_train = layout.gathered_to_train(p.state.micro_batches, phases["update"].passes, parallel)
        gathered["weights, gathered to train"] = to_train
    return traffic(layout, gathered, p.state.updates_made)


def _messages(found: Sequence[Traffic]) -> Iterable[str]:
    if not found:
        return ["  none"]
    scale = Scale(max(t.size for t in found))
    rows = [(scale.unit, "within a node", "across nodes")]
    rows += [(t.what, scale(t.size * (not t.nodes)), scale(t.size * t.nodes)) for t in found]
    within, across = (sum(t.size for t in found if t.nodes is nodes) for nodes in (False, True))
    return table([*rows, ("together", scale(within), scale(across))])
