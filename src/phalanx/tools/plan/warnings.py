"""Warnings of a plan, and the fewest blocks that gradient checkpointing has to recompute for the update to fit."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.distributed.mesh import ROLLOUT, alone
from phalanx.run.roles import span
from phalanx.tools.plan.ledger import fused_attention
from phalanx.tools.plan.memory import Memory, count
from phalanx.tools.plan.rehearsal import Rehearsal
from phalanx.tools.plan.tables import Scale

# Bytes of a GPU for CUDA's context and NCCL's buffers. Beside vLLM, which brings its own groups, CUDA graphs and
# allocator, estimated as 4 GB and a twentieth of the peak, until a GPU measures it.
ALLOWED = 2 * 10**9
BESIDE_VLLM = 4 * 10**9
PART_BESIDE_VLLM = 0.05
SPARE = 0.1  # fraction of a GPU's memory that is left for fragmentation


def allowance(p: Rehearsal, memory: Memory) -> tuple[int, str]:
    """Bytes of a rank's GPU that no tensor accounts for, and what they are for."""
    samples = p.role in ("", ROLLOUT) and p.cfg.rollout.engine_memory.reserved > 0
    if samples or (memory.reward is not None and memory.reward.share is not None):
        return BESIDE_VLLM + int(PART_BESIDE_VLLM * memory.peak), "CUDA, NCCL and vLLM"
    return ALLOWED, "CUDA and NCCL"


def warnings(
    p: Rehearsal, memory: Memory, gpu_memory: int | None, ranks: Sequence[int], per_node: int
) -> Iterator[str]:
    """Warnings before the job runs. gpu_memory: bytes of a GPU, if known. ranks: the numbers of the job's ranks in the
    world, which has `per_node` ranks on each node.
    """
    cluster, width = p.policy.layout.cluster, p.policy.layout.width
    for group in cluster.shard_groups(width):
        numbers = tuple(ranks[i] for i in group)
        first, last = numbers[0] // per_node, numbers[-1] // per_node
        if first < last:
            inside = max(w for w in range(1, width) if cluster.per_node % w == 0)
            yield (
                f"ranks {span(numbers)} share one copy of the weights and are on nodes {first} to {last}: every gather "
                f"of weights goes through the network; parallel.fsdp_size={inside} keeps it within a node"
            )
            break
    algorithm = vars(p.cfg).get("algorithm")
    if algorithm is not None and algorithm.needs_critic and p.trains:
        yield (
            f"algorithm.name={algorithm.name} trains a critic, which no figure includes: one of the "
            "policy's size it takes as much again as training all weights of the policy"
        )
    beside, owners = allowance(p, memory)
    needed = memory.peak + beside
    if gpu_memory is not None and needed > gpu_memory * (1 - SPARE):
        scale = Scale(gpu_memory)
        much = "does not fit" if needed > gpu_memory else "leaves little for fragmentation"
        takes = f"takes {scale.plain(needed)} of {scale.plain(gpu_memory)} {scale.unit} with {owners}"
        yield f"{memory.largest.name} {takes} and {much}; what helps: {', '.join(_memory_remedies(p, memory))}"
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


def _memory_remedies(p: Rehearsal, memory: Memory) -> list[str]:
    """Keys that lower the peak, the cheapest first."""
    cfg: Any = p.cfg
    parallel, largest, layout = p.cfg.parallel, memory.largest, p.policy.layout
    sharded, reward, facts = layout.width > 1, memory.reward, cfg.rollout.facts
    update, judge = largest.name == "update", largest.name == "judge"
    sample, decode = "sample" in largest.name, "decode" in largest.name
    section = p.kind.section
    micro = f"{cfg.actor:ppo_micro_batch_size_per_gpu}" if p.plan else f"{section}.micro_batch_size_per_gpu"
    if p.plan is not None and p.plan.budget is not None:
        micro = f"{cfg.actor:ppo_max_token_len_per_gpu}"
    summed = p.state.micro_batches > p.state.updates_made and sharded and not parallel.sync_each_batch
    whole = largest.gradients > largest.activations and summed
    held = {name for name, size in memory.held.items() if size > memory.peak / 20}
    divided = bool(held & {"frozen weights", "trained weights", "optimizer's state", *p.frozen})
    share = reward is not None and reward.share is not None
    texts = p.policy.tokens > 0
    may_reshard = parallel.rollout_unsharded and not texts
    remedies = {
        f"{cfg.model:gradient_checkpointing}=true": update and not cfg.model.gradient_checkpointing,
        f"a larger {cfg.model:gradient_checkpointing_blocks}": update and 0 < p.policy.trained.recomputed < 1,
        "parallel.sync_each_batch=true": update and summed and cfg.model.lora_rank == 0,
        f"a larger {micro} (gradients are whole between the passes of an update)": update and whole,
        f"a smaller {micro}": update and not whole,
        "parallel.reshard_after_forward=true": update and not parallel.reshard_after_forward and sharded,
        "parallel.rollout_unsharded=false": not update and largest.gathered and may_reshard,
        f"a smaller {cfg.rollout:micro_batch_size_per_gpu}": sample and not facts.reserves,
        f"a smaller {cfg.rollout:vae_batch_size}": decode,
        "reward.overlap=false": (sample or decode) and reward is not None and reward.overlaps and reward.awake,
        "a smaller reward.model.gpu_memory_utilization": judge and share,
        "a larger reward.model.tensor_parallel_size": judge and not share,
        "reward.model.sleep=true": "reward model" in held,
        f"a smaller {section}.log_prob_chunk_size": texts and (update or largest.name == "rescore"),
        f"a smaller {cfg.rollout:gpu_memory_utilization}": sample and facts.reserves,
        f"{cfg.rollout:engine}=policy": sample and facts.weights == "copy" and not facts.reserves,
        "parallel.optimizer_offload=true": "optimizer's state" in held and largest.name != "optimizer",
        "a larger parallel.fsdp_size": divided and layout.width < layout.cluster.per_node,
        "parallel.param_offload=true": divided and sharded and not parallel.param_offload,
        f"a LoRA ({cfg.model:lora_rank})": cfg.model.lora_rank == 0,
    }
    return [remedy for remedy, helps in remedies.items() if helps]


def fewer_blocks(p: Rehearsal, memory: int | None) -> tuple[int, int] | None:
    """The smallest number of recomputed blocks that fits, and a step's operations with it; None if that is the number
    of the job, the job itself does not fit, or `memory`, the bytes of a GPU, is unknown.

    Secant method between a number that fits and one that does not: blocks are nearly alike, so two or three are tried.
    """
    share = p.policy.trained.recomputed
    if memory is None or not share or "update" not in p.ledger.phases:
        return None
    configured = round(share * len(p.policy.blocks))
    before = dict(p.ledger.phases), p.state.updates_made, p.state.micro_batches

    def excess(blocks: int) -> float:
        """Bytes of an update above those that it may take, with this number of blocks recomputed."""
        if blocks != configured:
            train_again(p, blocks)
        counted = count(p, memory)
        update = next(phase.total for phase in counted.phases if phase.name == "update")
        return sum(counted.held.values()) + update + allowance(p, counted)[0] - memory * (1 - SPARE)

    above = {configured: excess(configured)}
    if above[configured] > 0:
        return None
    above[0] = excess(0)
    few, many = 0, configured if above[0] > 0 else 0
    while many - few > 1:
        met = few + above[few] / (above[few] - above[many]) * (many - few)
        tried = min(max(math.ceil(met), few + 1), many - 1)
        above[tried] = excess(tried)
        few, many = (few, tried) if above[tried] <= 0 else (tried, many)
    p.policy.recompute(many)
    flops = p.flops
    p.policy.recompute(configured)
    p.ledger.phases, p.state.updates_made, p.state.micro_batches = before
    return (many, flops) if many < configured else None


def train_again(job: Rehearsal, recomputed: int) -> None:
    """Repeat a planned job's updates with `recomputed` blocks recomputed in backward passes."""
    job.state.updates_made = job.state.micro_batches = 0
    job.ledger.forget("update")
    job.policy.recompute(recomputed)
    with alone(job.cfg.parallel.ulysses_sequence_parallel_size), fused_attention(), job.ledger:
        job.train()
