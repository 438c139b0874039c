"""The plan in words and tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from phalanx.config.flow import FlowRunConfig
from phalanx.config.run import RLConfig, RunConfig
from phalanx.distributed.placement import judged_beside, place
from phalanx.plan.blocks import PER_LOOK, PlannedBlockRollout
from phalanx.plan.blueprint import PlannedPolicy, shipped
from phalanx.plan.layout import Cluster, Traffic, traffic
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu, Rows, arithmetic, sampled
from phalanx.plan.rehearsal import BlockDiffusionRehearsal, LMRehearsal, Planned
from phalanx.plan.tables import Scale, groups, listed, span, table

ALLOWED = 2 * 10**9  # bytes of a GPU for CUDA's context and NCCL's buffers
SPARE = 0.1  # of a GPU's memory, for gaps of the allocator


def describe(p: Planned, gpu: Gpu) -> str:
    """The plan of one size."""
    memory, layout = count(p, gpu.memory), p.policy.layout
    trained, total = (sum(w.numel for w in weights) for weights in (layout.trained, layout.weights))
    title, rows = arithmetic(p, gpu)
    sections = [
        [f"Plan of {words(layout.cluster)}; no GPU, process group or weights were used", *_shipped(p, memory)],
        ["Topology", *listed(_topology(p))],
        ["Batch", *listed(_batch(p))],
        [f"Memory of a rank ({total / 1e9:.3g} B weights, {trained / 1e9:.3g} B of them trained)", *_held(memory)],
        [*_phases(memory, gpu), *_judging(p, memory)],
        ["In the host's memory", *listed(_host(p, memory))],
        ["Messages of a step: what a rank receives, and sends as much of", *_messages(p)],
        [title, *listed(rows)],
        [f"warning: {warning}" for warning in _warnings(p, memory, gpu)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def sizes(cfg: RunConfig, asked: Sequence[Cluster], refused: Mapping[Cluster, str]) -> str:
    """A line for each number of nodes: what a rank gets, or why the job is refused."""
    each = cfg.rollout.n if isinstance(cfg, RLConfig) else 1
    rows = []
    for c in asked:
        if c in refused:
            rows.append((words(c), f"refused: {refused[c]}"))
        else:
            share = cfg.data.batch_size(c.ranks) * each // c.ranks
            rows.append((words(c), f"{share} {sampled(cfg)} a rank, {_copies(c, c.width(cfg.parallel))}"))
    return "\n".join(["Sizes", *listed(rows)])


def words(c: Cluster) -> str:
    """A cluster in words."""
    return f"{_n(c.nodes, 'node')} x {c.per_node} = {_n(c.ranks, 'rank')}"


def _shipped(p: Planned, memory: Memory) -> Iterator[str]:
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
    rows = [("nodes", groups(cluster.shard_groups(cluster.per_node))), ("weights", _copies(cluster, width))]
    if width > 1:
        rows.append(("shard groups", groups(cluster.shard_groups(width))))
    if 1 < width < cluster.ranks:
        rows.append(("replicate groups", groups(cluster.replicate_groups(width))))
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
    if isinstance(p, LMRehearsal):  # it decodes in as many as a response has tokens
        said = {"rollout: log-probs": "of old log-probs"} | said
        del said["rollout: sample"]
    passes = {name: p.ledger.phases[name].passes for name in said if name in p.ledger.phases}
    return ", ".join(f"{number} {said[name]}" for name, number in passes.items() if number)


def _lm_batch(p: LMRehearsal) -> Rows:
    """The arithmetic of a step of a language model."""
    cfg, plan, total = p.cfg, p.plan, p.cfg.trainer.total_training_steps
    assert p.samples.tokens is not None, "samples of tokens have lengths"
    longest, n, what = int(p.samples.tokens[0]), cfg.rollout.n, "tokens"
    engine = "" if cfg.rollout.engine == "policy" else f", in {cfg.rollout.engine}"
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
        ("a rank", f"{_n(plan.per_rank, 'response')} of {_n(prompts, 'prompt')}"),
        ("rollout", f"{plan.rollout_micro} responses together{engine}"),
        ("updates", f"{plan.updates * plan.epochs} a step, of {_n(p.micro_batches, 'micro-batch')} in all"),
        ("micro-batch", f"{inner}{', in one row' if plan.packed else ''}"),
        ("tokens", f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length}, the most that there can be"),
        *states,
        ("forward passes", f"{_forward(p)}, a rank and step"),
        ("run", run),
    ]


def _block_batch(p: BlockDiffusionRehearsal) -> Rows:
    """The arithmetic of a step of supervised block diffusion."""
    cfg, total = p.cfg, p.cfg.trainer.total_training_steps
    run = f"as many steps as trainer.total_epochs={cfg.trainer.total_epochs} and the samples make"
    return [
        ("a step", f"{p.batch_size} samples, {p.per_rank} a rank, one optimizer step"),
        ("update", f"{_n(p.micro_batches, 'micro-batch')} of {_n(p.micro, 'sample')}"),
        ("tokens", f"{cfg.data.max_prompt_length} + {cfg.data.max_response_length}, the most that there can be"),
        ("states", f"one of each block of a response, {cfg.model.block_size} tokens"),
        ("forward passes", f"{_forward(p)}, a rank and step"),
        ("run", run if total is None else _n(total, "step")),
    ]


def _batch(p: Planned) -> Rows:
    """The arithmetic of a step."""
    if isinstance(p, LMRehearsal):
        return _lm_batch(p)
    if isinstance(p, BlockDiffusionRehearsal):
        return _block_batch(p)
    assert isinstance(p.cfg, FlowRunConfig) and isinstance(p.policy, PlannedPolicy)
    cfg, model, ranks, forward = p.cfg, p.policy.model, p.policy.layout.cluster.ranks, _forward(p)
    size, total = cfg.data.batch_size(ranks), cfg.trainer.total_training_steps
    length = model.most_tokens(cfg.data.max_prompt_length, cfg.rollout.height, cfg.rollout.width)
    texts = [
        ("texts", f"{_n(length, 'token')}, the most that there can be"),
        ("forward passes", f"{forward}, a rank and step"),
    ]
    run, what = "" if total is None else _n(total, "step"), "images" if p.plan is None else "prompts"
    endless = f"as many steps as trainer.total_epochs and the {what} make"
    if p.plan is None:
        share, micro = size // ranks, p.micro_batches
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
        ("a rank", f"{_n(plan.per_rank, 'image')} of {_n(prompts, 'prompt')}"),
        ("rollout", f"{_n(plan.per_rank // plan.rollout_micro, 'micro-batch')} of {plan.rollout_micro} images{both}"),
        ("updates", f"{plan.updates * plan.epochs} a step, each of {_n(plan.passes, 'micro-batch')}"),
        ("micro-batch", f"{inner} = {_n(images * plan.actions * together, 'row')}"),
        *texts,
        ("run", run or endless),
    ]


def _n(number: int, noun: str) -> str:
    """A number of things in words."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def _copies(cluster: Cluster, width: int) -> str:
    copies = cluster.ranks // width
    if width == 1:
        return "a copy of the weights on each rank"
    return f"{copies} cop{'y' if copies == 1 else 'ies'} of the weights, each over {width} ranks"


# -- memory -------------------------------------------------------------------------------------------------------


def _held(memory: Memory) -> Iterator[str]:
    scale = Scale(memory.peak)
    return table([("held throughout", scale.unit), *((f"  {name}", scale(n)) for name, n in memory.held.items())])


def _phases(memory: Memory, gpu: Gpu) -> Iterator[str]:
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


def _judging(p: Planned, memory: Memory) -> Iterator[str]:
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
    gathered = {"weights, gathered for the engine": layout.stored() * (p.cfg.rollout.engine != "policy")}
    for name, what, of in (
        ("rollout: sample", "weights, gathered to sample", layout),
        ("rollout: log-probs", "weights, gathered to score samples", layout),
        ("rescore", "weights, gathered to score samples", layout),
        ("reference", "weights, gathered for the reference", layout),
        *((name, f"weights of the {name}, gathered", teacher.layout) for name, teacher in p.frozen.items()),
    ):
        if name in phases:
            gathered[what] = of.gathered(phases[name].passes, phases[name].rounds, parallel)
    to_train = layout.gathered_to_train(p.micro_batches, phases["update"].passes, parallel)
    return traffic(layout, gathered | {"weights, gathered to train": to_train}, p.updates)


def _messages(p: Planned) -> Iterable[str]:
    found = messages(p)
    if not found:
        return ["  none"]
    scale = Scale(max(t.size for t in found))
    rows = [(scale.unit, "within a node", "across nodes")]
    rows += [(t.what, scale(t.size * (not t.nodes)), scale(t.size * t.nodes)) for t in found]
    within, across = (sum(t.size for t in found if t.nodes is nodes) for nodes in (False, True))
    return table([*rows, ("together", scale(within), scale(across))])


# -- warnings -----------------------------------------------------------------------------------------------------


def _warnings(p: Planned, memory: Memory, gpu: Gpu) -> Iterator[str]:
    cluster, width, plan = p.policy.layout.cluster, p.policy.layout.width, p.plan
    crossing = [group for group in cluster.shard_groups(width) if cluster.crosses(group)]
    if crossing:  # it sends all weights over the network, many times a step
        group = crossing[0]
        first, last = group[0] // cluster.per_node, group[-1] // cluster.per_node
        inside = max(w for w in range(1, width) if cluster.per_node % w == 0)
        yield (
            f"ranks {span(group)} share one copy of the weights and are on nodes {first} to {last}: every gather "
            f"of weights goes through the network; parallel.fsdp_size={inside} keeps it within a node"
        )
    if plan is not None and not plan.exact and not isinstance(p, LMRehearsal):
        yield (
            f"rollout.micro_batch_size_per_gpu {plan.rollout_micro} is not ppo_micro_batch_size_per_gpu x window = "
            f"{plan.micro * plan.actions}: log-probs of rollout and replay may differ in the last bits"
        )
    if isinstance(p, LMRehearsal) and p.cfg.algorithm.needs_critic:
        yield (
            f"algorithm.name={p.cfg.algorithm.name} trains a critic, which is in none of these figures: of the "
            "policy's size it takes as much again as training all weights of the policy"
        )
    needed = memory.peak + ALLOWED
    if gpu.memory is not None and needed > gpu.memory * (1 - SPARE):
        scale = Scale(gpu.memory)
        much = "does not fit" if needed > gpu.memory else "leaves little for gaps of the allocator"
        takes = f"takes {scale.plain(needed)} of {scale.plain(gpu.memory)} {scale.unit} with CUDA and NCCL"
        yield f"{memory.largest.name} {takes} and {much}; what helps: {', '.join(_mends(p, memory))}"
    reward, model = memory.reward, p.cfg.reward.model
    if reward is None:
        return
    if reward.weights is None:
        yield (
            f"reward.model.path: {model.path!r}: no whole set of *.safetensors, nor their index, is within reach: its "
            "weights are not counted"
        )
    elif reward.share is not None and reward.weights >= reward.share:
        scale = Scale(reward.weights)
        yield (
            f"reward.model.gpu_memory_utilization: {model.gpu_memory_utilization:g} of the GPU is "
            f"{scale.plain(reward.share)} {scale.unit}, and a rank's part of the weights "
            f"{scale.plain(reward.weights)}: vLLM would not start; raise it, or reward.model.tensor_parallel_size"
        )


def _mends(p: Planned, memory: Memory) -> list[str]:
    """Keys that lower the peak, the cheapest first."""
    cfg, parallel, largest, layout = p.cfg, p.cfg.parallel, memory.largest, p.policy.layout
    sharded, reward = layout.width > 1, memory.reward
    update, judge = largest.name == "update", largest.name == "judge"
    sample, decode = "sample" in largest.name, "decode" in largest.name
    section = "block_diffusion" if isinstance(p, BlockDiffusionRehearsal) else "flow_matching"
    micro = "actor.ppo_micro_batch_size_per_gpu" if p.plan else f"{section}.micro_batch_size_per_gpu"
    if p.plan is not None and p.plan.budget is not None:
        micro = "actor.ppo_max_token_len_per_gpu"
    whole = largest.gradients > largest.activations and p.micro_batches > p.updates and sharded
    held = {name for name, size in memory.held.items() if size > memory.peak / 20}
    divided = bool(held & {"frozen weights", "trained weights", "optimizer's state", *p.frozen})
    share = reward is not None and reward.share is not None
    texts = isinstance(p, LMRehearsal | BlockDiffusionRehearsal)
    may_reshard = parallel.rollout_unsharded and not texts
    of_logits = f"{'actor' if p.plan else section}.log_prob_chunk_size"
    mends = {
        "model.gradient_checkpointing=true": update and not cfg.model.gradient_checkpointing,
        f"a larger {micro} (gradients are whole between the passes of an update)": update and whole,
        f"a smaller {micro}": update and not whole,
        "parallel.reshard_after_forward=true": update and not parallel.reshard_after_forward and sharded,
        "parallel.rollout_unsharded=false": not update and largest.gathered and may_reshard,
        "a smaller rollout.micro_batch_size_per_gpu": sample and cfg.rollout.engine != "vllm",
        "a smaller rollout.vae_batch_size": decode,
        "reward.overlap=false": (sample or decode) and reward is not None and reward.while_sampling,
        "a smaller reward.model.gpu_memory_utilization": judge and share,
        "a larger reward.model.tensor_parallel_size": judge and not share,
        "reward.model.sleep=true": "reward model" in held,
        f"a smaller {of_logits}": texts and (update or largest.name == "rescore"),
        "a smaller rollout.gpu_memory_utilization": sample and cfg.rollout.engine == "vllm",
        "rollout.engine=policy": sample and cfg.rollout.engine == "vllm_omni",
        "parallel.optimizer_offload=true": "optimizer's state" in held and largest.name != "optimizer",
        "a larger parallel.fsdp_size": divided and layout.width < layout.cluster.per_node,
        "parallel.param_offload=true": divided and sharded and not parallel.param_offload,
        "a LoRA (model.lora_rank)": cfg.model.lora_rank == 0,
    }
    return [mend for mend, helps in mends.items() if helps]
