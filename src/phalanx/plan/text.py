"""The plan in words and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.config.flow import FlowRLConfig, FlowRunConfig
from phalanx.distributed.placement import place
from phalanx.plan.jobs import Planned, width_of
from phalanx.plan.layout import Cluster, Traffic, traffic
from phalanx.plan.memory import Memory, count
from phalanx.telemetry.flops import named_peak_flops

Rows = list[tuple[str, str]]
SPARE = 0.1  # of a GPU's memory, for what is not counted
SHOWN = 4  # groups, or nodes, that are written out


@dataclass(frozen=True)
class Gpu:
    """A GPU by its name, None where it is not known, and its bytes of memory."""

    name: str | None
    memory: int


def describe(p: Planned, gpu: Gpu | None) -> str:
    """The plan of one size."""
    memory = count(p, None if gpu is None else gpu.memory)
    warnings = [*_crossings(p), *_inexact(p), *_fit(p, memory, gpu), *_unknown(p, memory)]
    trained, total = sum(w.numel for w in p.layout.trained), sum(w.numel for w in p.layout.weights)
    sections = [
        [f"Plan of {words(p.cluster)}; no GPU, process group or weights were used"],
        ["Topology", *_rows(_topology(p))],
        ["Batch", *_rows(_batch(p))],
        [f"Memory of a rank ({total / 1e9:.3g} B weights, {trained / 1e9:.3g} B of them trained)", *_held(memory)],
        [*_phases(memory, gpu), *_judging(p, memory)],
        ["In the host's memory", *_rows(_host(p, memory))],
        ["Messages of a step: what a rank receives, and sends as much of", *_messages(p)],
        ["Arithmetic", *_rows(_arithmetic(p, gpu))],
        [f"warning: {w}" for w in warnings],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def sizes(cfg: FlowRunConfig, asked: Sequence[Cluster], refused: Mapping[Cluster, str]) -> str:
    """A line for each number of nodes: what a rank gets, or why the job is refused."""
    images = cfg.data.train_batch_size * (cfg.rollout.n if isinstance(cfg, FlowRLConfig) else 1)
    rows = []
    for c in asked:
        if c in refused:
            rows.append((words(c), f"refused: {refused[c]}"))
        else:
            rows.append((words(c), f"{images // c.ranks} images a rank, {_copies(c, width_of(cfg, c))}"))
    return "\n".join(["Sizes", *_rows(rows)])


def words(c: Cluster) -> str:
    """A cluster in words."""
    return f"{c.nodes} node{'s' * (c.nodes > 1)} x {c.per_node} = {c.ranks} rank{'s' * (c.ranks > 1)}"


# -- topology and batches -----------------------------------------------------------------------------------------


def _topology(p: Planned) -> Rows:
    cluster, width = p.cluster, p.layout.width
    names = [f.name or f.path or "" for f in p.cfg.reward.functions]
    rows = [("nodes", _groups(cluster.shard_groups(cluster.per_node))), ("weights", _copies(cluster, width))]
    if width > 1:
        rows.append(("shard groups", _groups(cluster.shard_groups(width))))
        if width < cluster.ranks:
            rows.append(("replicate groups", _groups(cluster.replicate_groups(width))))
    rows.append(("rewards", f"{', '.join(names)}: on every rank, for its own images" if names else "none"))
    model = p.cfg.reward.model
    if model.path is not None:  # a replica never crosses a node: `place` refuses it
        domains = place(model, cluster.ranks, cluster.per_node)
        replicas = [range(r[0], r[-1] + 1) for domain in domains for r in domain.replicas]
        rows.append(("reward groups", f"{_groups(replicas)}: each holds reward.model, for the judges"))
    return rows


def _batch(p: Planned) -> Rows:
    """The arithmetic of a step."""
    plan, samples, size, total = p.plan, p.job.samples, p.cfg.data.train_batch_size, p.cfg.trainer.total_training_steps
    passes = {name: phase.passes for name, phase in p.phases.items() if phase.passes}
    said = {"rollout: sample": "to sample", "rescore": "to score samples again", "reference": "of the reference"}
    said |= {e.name: f"of the {e.name}" for e in p.teachers} | {"update": "to train"}
    forward = ", ".join(f"{passes[name]} {what}" for name, what in said.items() if name in passes)
    rows = [
        ("texts", f"{_n(p.length, 'token')}, the most that there can be"),
        ("forward passes", f"{forward}, a rank and step"),
    ]
    if plan is None or samples is None:
        share, micro = size // p.cluster.ranks, p.job.micro_batches
        run = "as many steps as trainer.total_epochs and the images make" if total is None else _n(total, "step")
        return [
            ("a step", f"{size} images, {share} a rank, one optimizer step"),
            ("update", f"{_n(micro, 'micro-batch')} of {_n(share // micro, 'image')}"),
            *rows,
            ("run", run),
        ]
    together = 2 if samples.trace.sampler.guided and not p.policy.detach_uncond else 1
    both = f" x {together} branches of guidance" if together > 1 else ""  # that share a forward pass
    images, updates, prompts = plan.first(1), plan.updates * plan.epochs, {q.group_id for q in samples.prompts}
    run = "as many steps as trainer.total_epochs and the prompts make"
    if total is not None:
        run = f"{_n(total, 'step')}, {_n(total * updates, 'optimizer step')}"
    inner = f"{_n(images, 'image')} x {_n(plan.actions, 'trained step')}{both}"
    return [
        ("a step", f"{size} prompts x {p.cfg.rollout.n} images = {plan.samples} images"),
        ("a rank", f"{_n(plan.per_rank, 'image')} of {_n(len(prompts), 'prompt')}"),
        ("rollout", f"{_n(plan.per_rank // plan.rollout_micro, 'micro-batch')} of {plan.rollout_micro} images{both}"),
        ("updates", f"{updates} a step, each of {_n(plan.passes, 'micro-batch')}"),
        ("micro-batch", f"{inner} = {_n(images * plan.actions * together, 'row')}"),
        *rows,
        ("run", run),
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


def _groups(groups: Sequence[range]) -> str:
    """Groups of ranks, the middle ones left out where there are many."""
    if len(groups) <= SHOWN:
        return " | ".join(map(_span, groups))
    return " | ".join([*map(_span, groups[: SHOWN - 1]), "..", _span(groups[-1])])


def _span(ranks: range) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    if ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= SHOWN:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"


def _crossings(p: Planned) -> Iterator[str]:
    """A shard group on several nodes sends all weights over the network, many times a step."""
    for group in p.cluster.shard_groups(p.layout.width):
        if p.cluster.crosses(group):
            first, last = group[0] // p.cluster.per_node, group[-1] // p.cluster.per_node
            inside = [w for w in range(1, p.layout.width) if p.cluster.per_node % w == 0]
            yield (
                f"ranks {_span(group)} share one copy of the weights and are on nodes {first} to {last}: every gather "
                f"of weights goes through the network; parallel.fsdp_size={inside[-1]} keeps it within a node"
            )
            return


def _inexact(p: Planned) -> Iterator[str]:
    plan = p.plan
    if plan is not None and not plan.exact:
        yield (
            f"rollout.micro_batch_size_per_gpu {plan.rollout_micro} is not ppo_micro_batch_size_per_gpu x window = "
            f"{plan.micro * plan.actions}: log-probs of rollout and replay may differ in the last bits"
        )


# -- memory -------------------------------------------------------------------------------------------------------


def _held(memory: Memory) -> Iterator[str]:
    scale = _Scale(memory.peak)
    return _table([("held throughout", scale.unit), *((f"  {name}", scale(n)) for name, n in memory.held.items())])


def _phases(memory: Memory, gpu: Gpu | None) -> Iterator[str]:
    scale, held = _Scale(memory.peak), sum(memory.held.values())
    rows: list[tuple[str, ...]] = [("phase", "held", "gathered", "activations", "gradients", "other", "together")]
    for q in memory.phases:
        name = f"{q.name} (peak)" if q is memory.largest else q.name
        parts = (held, q.gathered, q.activations, q.gradients, q.other, held + q.total)
        rows.append((name, *map(scale, parts)))
    yield from _table(rows)
    if gpu is not None:
        name = f" ({gpu.name})" if gpu.name is not None else ""
        yield f"  peak: {scale(memory.peak)} of {scale(gpu.memory)} {scale.unit}{name}"


def _judging(p: Planned, memory: Memory) -> Iterator[str]:
    """What the figures of the reward model mean."""
    reward, model = memory.reward, p.cfg.reward.model
    if reward is None:
        return
    if reward.share is not None:
        what = f"what reward.model.gpu_memory_utilization={model.gpu_memory_utilization:g} gives to vLLM"
    elif model.engine == "vllm":
        share = f"vLLM takes {model.gpu_memory_utilization:g} of a GPU in all, which gpu_memory_gb=80 would count"
        what = f"the weights of reward.model alone; {share}"
    else:
        what = "the weights of reward.model alone; what it computes comes on top"
    where = "" if model.placement == "colocate" else f" (on {model.placement} of each node)"
    name, between = "reward model", "it stays on the GPU between scorings"
    if reward.sleeps:
        name, between = "judge", "between scorings it sleeps in the host's memory"
        if reward.beside:
            between = "awake while images are sampled and scored; else it sleeps in the host's memory"
    yield f"  {name}{where}: {what}; {between}"


def _unknown(p: Planned, memory: Memory) -> Iterator[str]:
    reward, model = memory.reward, p.cfg.reward.model
    if reward is None:
        return
    if reward.weights is None:
        yield (
            f"reward.model.path: {model.path!r}: no whole set of *.safetensors, nor their index, is within reach: its "
            "weights are not counted"
        )
    elif reward.share is not None and reward.weights >= reward.share:
        scale = _Scale(reward.weights)
        yield (
            f"reward.model.gpu_memory_utilization: {model.gpu_memory_utilization:g} of the GPU is "
            f"{scale.plain(reward.share)} {scale.unit}, and a rank's part of the weights "
            f"{scale.plain(reward.weights)}: vLLM would "
            "not start; raise it, or reward.model.tensor_parallel_size"
        )


def _host(p: Planned, memory: Memory) -> Rows:
    ranks, kept = p.cluster.per_node, sum(memory.host.values())
    others = ranks - _judges(p) if memory.reward is not None else 0  # ranks without a part of the reward model
    node = kept * ranks - (memory.reward.asleep if memory.reward is not None else 0) * others
    loading = memory.loading * (ranks - others) + memory.loading_without * others
    scale = _Scale(max(node, loading))
    parts = ", ".join(f"{name} {scale(size)}" for name, size in memory.host.items())
    return [
        ("a rank", f"{scale(kept)} {scale.unit}: {parts}"),
        ("a node", f"{scale(node)} {scale.unit}, and up to {scale(loading)} while all ranks load"),
    ]


def _judges(p: Planned) -> int:
    """Ranks of a node that hold a part of the reward model."""
    domains = place(p.cfg.reward.model, p.cluster.per_node, p.cluster.per_node)
    return sum(len(replica) for domain in domains for replica in domain.replicas)


def _fit(p: Planned, memory: Memory, gpu: Gpu | None) -> Iterator[str]:
    if gpu is None or memory.peak <= gpu.memory * (1 - SPARE):
        return
    scale = _Scale(gpu.memory)
    need = f"{memory.largest.name} takes {scale(memory.peak)} of {scale(gpu.memory)} {scale.unit}"
    much = "does not fit" if memory.peak > gpu.memory else "leaves little for the allocator, CUDA and NCCL"
    yield f"{need} and {much}; what helps: {', '.join(_mends(p, memory))}"


def _mends(p: Planned, memory: Memory) -> Iterator[str]:
    """Keys that lower the peak, the cheapest first."""
    cfg, largest, sharded = p.cfg, memory.largest, p.layout.width > 1
    micro = "actor.ppo_micro_batch_size_per_gpu" if p.plan else "flow_matching.micro_batch_size_per_gpu"
    if largest.name == "update":
        if not cfg.model.gradient_checkpointing:
            yield "model.gradient_checkpointing=true"
        if largest.gradients > largest.activations and p.job.micro_batches > p.job.updates and sharded:
            yield f"a larger {micro} (gradients are whole between the passes of an update)"
        else:
            yield f"a smaller {micro}"
        if not cfg.parallel.reshard_after_forward and sharded:
            yield "parallel.reshard_after_forward=true"
    elif largest.gathered and cfg.parallel.rollout_unsharded:
        yield "parallel.rollout_unsharded=false"
    if "sample" in largest.name:
        yield "a smaller rollout.micro_batch_size_per_gpu"
    if "decode" in largest.name:
        yield "a smaller rollout.vae_batch_size"
    if memory.reward is not None and memory.reward.while_sampling and largest.name.endswith(("sample", "decode")):
        yield "reward.overlap=false"
    if largest.name == "judge":
        share = memory.reward is not None and memory.reward.share is not None
        yield (
            "a smaller reward.model.gpu_memory_utilization" if share else "a larger reward.model.tensor_parallel_size"
        )
    held = {name: size for name, size in memory.held.items() if size > memory.peak / 20}
    if "reward model" in held:
        yield "reward.model.sleep=true"
    if cfg.rollout.engine == "vllm_omni" and "sample" in largest.name:
        yield "rollout.engine=policy"
    if "optimizer's state" in held and largest.name != "optimizer":
        yield "parallel.optimizer_offload=true"
    if {"frozen weights", "trained weights", "optimizer's state", *(e.name for e in p.teachers)} & held.keys():
        if p.layout.width < p.cluster.per_node:
            yield "a larger parallel.fsdp_size"
        if sharded and not cfg.parallel.param_offload:
            yield "parallel.param_offload=true"
    if cfg.model.lora_rank == 0:
        yield "a LoRA (model.lora_rank)"


# -- messages and arithmetic --------------------------------------------------------------------------------------


def messages(p: Planned) -> list[Traffic]:
    """The messages of a training step."""
    layout, parallel, copied = p.layout, p.cfg.parallel, p.cfg.rollout.engine == "vllm_omni"
    gathered = {"weights, gathered for the engine": layout.stored() * copied}
    for name, what, of in (
        ("rollout: sample", "weights, gathered to sample", layout),
        ("rescore", "weights, gathered to score samples", layout),
        ("reference", "weights, gathered for the reference", layout),
        *((e.name, f"weights of the {e.name}, gathered", e.layout) for e in p.teachers),
    ):
        if name in p.phases:
            gathered[what] = of.gathered(p.phases[name].passes, p.phases[name].rounds, parallel)
    passes = p.phases["update"].passes
    gathered["weights, gathered to train"] = layout.gathered_to_train(p.job.micro_batches, passes, parallel)
    return traffic(layout, p.cluster, gathered, p.job.updates)


def _messages(p: Planned) -> Iterator[str]:
    found = messages(p)
    if not found:
        yield "  none"
        return
    scale = _Scale(max(t.size for t in found))
    rows = [(scale.unit, "within a node", "across nodes")]
    rows += [(t.what, scale(t.size * (not t.nodes)), scale(t.size * t.nodes)) for t in found]
    within, across = (sum(t.size for t in found if t.nodes is nodes) for nodes in (False, True))
    yield from _table([*rows, ("together", scale(within), scale(across))])


def _arithmetic(p: Planned, gpu: Gpu | None) -> Rows:
    unit, size = ("PFLOP", 1e15) if p.flops >= 1e15 else ("TFLOP", 1e12)
    rows = [("a step", f"{p.flops / size:.4g} {unit}, {p.flops / p.cluster.ranks / size:.4g} a rank")]
    peak = named_peak_flops(gpu.name, p.layout.dtype) if gpu is not None and gpu.name is not None else None
    if peak is not None:
        seconds = p.flops / p.cluster.ranks / peak
        rows.append(("at the GPU's peak", f"{seconds:.3g} s a step, which no step reaches"))
    return rows


# -- layout of the text -------------------------------------------------------------------------------------------


class _Scale:
    """Sizes as numbers of one unit, GB (10^9 bytes) or MB (10^6), the one that fits `largest`."""

    def __init__(self, largest: int) -> None:
        self.unit, self._bytes = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)

    def __call__(self, size: int) -> str:
        """In a table, where what rounds to nothing is a dash."""
        return self.plain(size) if size >= self._bytes / 200 else "-"

    def plain(self, size: int) -> str:
        """In a sentence."""
        return f"{size / self._bytes:.2f}"


def _rows(rows: Rows) -> Iterator[str]:
    """Names and what is to be said of them."""
    longest = max(len(name) for name, _ in rows)
    return (f"  {name:<{longest}}  {text}" for name, text in rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([f"  {first:<{widths[0]}}", *cells]).rstrip()
