"""Rules for the parallel layout: sharding, context parallelism and the ranks of a launch."""

from typing import Any

from phalanx.config.messages import near_divisors
from phalanx.run.rules.rule import CONTEXT, FLOW, LM, RL, RUN, SAMPLE, Rule


def _shares(c: Any) -> bool:
    """Whether several ranks share each sample."""
    return bool(c.parallel.ulysses_sequence_parallel_size > 1)


def _replicates(c: Any) -> bool:
    """Whether each rank has all weights that are trained."""
    return bool(c.model.lora_rank > 0 and c.parallel.lora_sharding == "replicate")


RULES = (
    Rule(f"{CONTEXT} model.attn_implementation", LM,
         lambda c: _shares(c) and c.model.attn_implementation not in ("sdpa", "eager"),
         " does not work with {c.model:attn_implementation=}; expected sdpa or eager"),
    Rule(CONTEXT, SAMPLE, _shares, " is only for training; here ranks sample different prompts, so set it to 1"),
    Rule(f"{CONTEXT} rollout.engine", FLOW, lambda c: _shares(c) and c.rollout.facts.weights == "copy",
         " needs an engine that samples in the policy's modules; set {c.rollout:engine}=policy"),
    Rule(f"{CONTEXT} model.compile", RUN, lambda c: _shares(c) and c.model.compile,
         " exchanges tokens within blocks, which cannot be compiled then; set {c.model:compile}=false"),
    Rule("parallel.param_offload parallel.expert_parallel", RUN,
         lambda c: c.parallel.param_offload and c.parallel.expert_parallel,
         " does not work with parallel.expert_parallel; set one to false"),
    Rule("model.quantization rollout.engine", RL,
         lambda c: c.model.quantization and c.rollout.facts.weights == "copy" and not c.rollout.facts.adapters,
         " needs sampling in the trained modules, but {c.rollout.engine} has a separate copy of the weights; set "
         "{c.rollout:engine}=policy or leave it out"),
    Rule("model.lora_init model.quantization", RUN, lambda c: c.model.quantization and c.model.lora_init == "pissa",
         " moves a part of the base into the LoRA, which {c.model:quantization} would round; set it to gaussian"),
    Rule("model.use_prefix_grouper model.use_remove_padding model.attn_implementation", LM,
         lambda c: c.model.use_prefix_grouper
         and (c.model.use_remove_padding is False or c.model.attn_implementation != "sdpa"),
         " needs {c.model:use_remove_padding}=true and {c.model:attn_implementation}=sdpa"),
)  # fmt: skip

LAUNCH_RULES = (
    Rule(CONTEXT, RUN,
         lambda c, w: w.node % c.parallel.ulysses_sequence_parallel_size
         and near_divisors(w.node, c.parallel.ulysses_sequence_parallel_size),
         " does not divide the {w.node} ranks of a node; nearest that does: {x}"),
    Rule("parallel.param_offload parallel.fsdp_size", RUN,
         # FSDP does the offloading, and a shard axis of one rank goes without FSDP
         lambda c, w: c.parallel.param_offload and w.width == 1,
         " needs parallel.fsdp_size > 1; replicated weights stay on the device"),
    Rule("optim.name parallel.fsdp_size", RUN, lambda c, w: c.optim.name == "muon" and w.width > 1,
         " orthogonalizes whole matrices, which {w.width} ranks share here; set parallel.fsdp_size=1 or "
         "{c.optim:name}=adamw"),
    Rule("rollout.tensor_parallel_size rollout.engine", LM,
         lambda c, w: c.rollout.tensor_parallel_size > 1
         and c.rollout.facts.tensor_parallel
         and w.sampling_node % c.rollout.tensor_parallel_size
         and near_divisors(w.sampling_node, c.rollout.tensor_parallel_size),
         " does not divide the {w.sampling_node} ranks of a node; nearest that does: {x}"),
    Rule("rollout.schedule placement", RL, lambda c, w: c.rollout.schedule != "synchronous" and not w.apart,
         " needs ranks that only sample; see placement, such as {{rollout: 0, actor: 1}}"),
    Rule("trainer.resume", RUN,
         # torchrun restarts ranks with the same command line, so "never" or a path would start over
         lambda c, w: c.trainer.resume != "auto" and w.restarts,
         " would begin from there again whenever the ranks are restarted (MAX_RESTARTS, or a range of NNODES); "
         "expected auto, with another trainer.output_dir"),
    Rule("parallel.fsdp_size trainer.peer_copy", RUN,
         lambda c, w: w.in_place and w.width > w.node and not c.trainer.peer_copy and not _replicates(c),
         ": {w.width} ranks share the weights, and IN_PLACE=1 needs a whole copy on each node of {w.node}; expected at "
         "most {w.node}, trainer.peer_copy=true, or no IN_PLACE"),
)  # fmt: skip
