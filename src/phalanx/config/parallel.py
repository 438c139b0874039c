"""The section `parallel`: how the ranks of a job share weights, samples and time."""

from dataclasses import dataclass
from typing import Optional

from phalanx.config.choices import FULL
from phalanx.config.fields import arg
from phalanx.config.ranges import COUNT


@dataclass
class ParallelConfig:
    """Sharding of the weights over the ranks."""

    fsdp_size: Optional[int] = arg(None, "ranks that share one copy of the weights; null: the ranks of a node", ge=1)
    reshard_after_forward: bool = arg(True, "free a block's gathered weights after its forward pass in training")
    sync_each_batch: bool = arg(
        False,
        "under FSDP, reduce-scatter gradients after each micro-batch instead of once per optimizer step: more "
        "communication, but no unsharded gradients in memory between micro-batches",
        only=(FULL,),
    )
    rollout_unsharded: bool = arg(True, "gather all weights once for the whole rollout (needs memory for a full copy)")
    lora_sharding: str = arg(
        "shard", "LoRA weights under FSDP: sharded with their block, or replicated", choices=("shard", "replicate")
    )
    expert_parallel: bool = arg(
        False, "under FSDP, keep each expert on one rank and send tokens to it, instead of gathering the experts"
    )
    ulysses_sequence_parallel_size: int = arg(
        1, "number of neighbouring ranks that share each sample, with a part of its tokens on each; 1: off", **COUNT
    )
    param_offload: bool = arg(False, "keep sharded weights in CPU memory between uses (needs fsdp_size > 1)")
    optimizer_offload: bool = arg(False, "keep the optimizer state and the EMA in CPU memory")
    timeout_s: float = arg(600.0, "seconds after which the job ends if a rank does not join a collective", gt=0)
    heartbeat_timeout_s: float = arg(45.0, "seconds without a heartbeat after which a rank counts as lost", gt=0)

    def data_ranks(self, ranks: int) -> int:
        """The number of groups of ranks with different samples."""
        return ranks // self.ulysses_sequence_parallel_size
