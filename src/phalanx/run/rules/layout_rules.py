"""Rules for the parallel layout: sharding, context parallelism and the ranks of a launch."""

from typing import Any

from phalanx.config.messages import near_divisors
from phalanx.run.rules.rule import FLOW, JOINT, LM, RL, RUN, SAMPLE, Rule

_CONTEXT = "parallel.ulysses_sequence_parallel_size"
_SIZE = f"{_CONTEXT}: {{c.{_CONTEXT}}} "


def _shares(c: Any) -> bool:
    """Whether several ranks share each sample."""
    return bool(c.parallel.ulysses_sequence_parallel_size > 1)


RULES = (
    Rule(_CONTEXT, JOINT, "Joint runs do not support context parallelism.",
         _shares,
         _SIZE + "is only for jobs with one policy; set it to 1"),
    Rule(f"{_CONTEXT} model.attn_implementation", LM,
         "Context parallelism of language models supports torch's SDPA and eager attention.",
         lambda c: _shares(c) and c.model.attn_implementation not in ("sdpa", "eager"),
         _SIZE + "does not work with {c.model:attn_implementation=}; expected sdpa or "
         "eager"),
    Rule(_CONTEXT, SAMPLE, "`tasks/sample.py` does not support context parallelism.",
         _shares,
         _SIZE + "is only for training; here ranks sample different prompts, so set it to 1"),
    Rule(f"{_CONTEXT} rollout.engine", FLOW, "With context parallelism, the policy's modules sample.",
         lambda c: _shares(c) and c.rollout.facts.weights == "copy",
         _SIZE + "needs an engine that samples in the policy's modules; set {c.rollout:engine}=policy"),
    Rule(f"{_CONTEXT} model.compile", RUN, "Context parallelism excludes compiled blocks.",
         lambda c: _shares(c) and c.model.compile,
         _SIZE + "exchanges tokens within blocks, which cannot be compiled then; set {c.model:compile}=false"),
    Rule("parallel.param_offload parallel.expert_parallel", RUN, "Weights are not offloaded under expert parallelism.",
         lambda c: c.parallel.param_offload and c.parallel.expert_parallel,
         "parallel.param_offload: true does not work with parallel.expert_parallel; set one to false"),
    Rule("model.quantization rollout.engine", RL,
         "A quantized model samples in the trained modules, or in vLLM.",
         lambda c: c.model.quantization and c.rollout.facts.weights == "copy" and not c.rollout.facts.adapters,
         "{c.model:quantization:} needs sampling in the trained modules, but {c.rollout.engine} has a separate copy "
         "of the weights; set {c.rollout:engine}=policy or leave it out"),
    Rule("model.quantization model.lora_init", RUN, "PiSSA changes the weights that quantization would round.",
         lambda c: c.model.quantization and c.model.lora_init == "pissa",
         "{c.model:lora_init}: pissa moves a part of the base into the LoRA, which {c.model:quantization} would "
         "round; set it to gaussian"),
    Rule("model.use_prefix_grouper model.use_remove_padding model.attn_implementation", LM,
         "Prompts are shared only in packed rows and with torch's SDPA.",
         lambda c: c.model.use_prefix_grouper
         and (c.model.use_remove_padding is False or c.model.attn_implementation != "sdpa"),
         "{c.model:use_prefix_grouper}: true needs {c.model:use_remove_padding}=true and "
         "{c.model:attn_implementation}=sdpa"),
)  # fmt: skip

LAUNCH_RULES = (
    Rule(_CONTEXT, RUN, "The number of ranks that share samples divides the number of ranks of a node.",
         lambda c, w: (
             w.node % c.parallel.ulysses_sequence_parallel_size
             and near_divisors(w.node, c.parallel.ulysses_sequence_parallel_size)
         ),
         _SIZE + "does not divide the {w.node} ranks of a node; nearest that does: {x}"),
    Rule("parallel.param_offload parallel.fsdp_size", RUN, "Only sharded weights are kept on the CPU.",
         # FSDP does the offloading, and a shard axis of one rank goes without FSDP
         lambda c, w: c.parallel.param_offload and w.width == 1,
         "parallel.param_offload: true needs parallel.fsdp_size > 1; replicated weights stay on the device"),
    Rule("optim.name parallel.fsdp_size", RUN, "Muon needs all rows of a matrix on each rank.",
         lambda c, w: c.optim.name == "muon" and w.width > 1,
         "{c.optim:name}: 'muon' orthogonalizes whole matrices, which {w.width} ranks share here; set "
         "parallel.fsdp_size=1 or {c.optim:name}=adamw"),
    Rule("rollout.tensor_parallel_size rollout.engine", LM,
         "The number of ranks that share a copy divides the number of sampling ranks of a node.",
         lambda c, w: (
             c.rollout.tensor_parallel_size > 1
             and c.rollout.facts.tensor_parallel
             and w.sampling_node % c.rollout.tensor_parallel_size
             and near_divisors(w.sampling_node, c.rollout.tensor_parallel_size)
         ),
         "{c.rollout:tensor_parallel_size:} does not divide the {w.sampling_node} ranks of a node; nearest that "
         "does: {x}"),
    Rule("rollout.schedule placement", RL, "A schedule that trains and samples at once needs ranks that only sample.",
         lambda c, w: c.rollout.schedule != "synchronous" and not w.apart,
         "{c.rollout:schedule:} needs ranks that only sample; see placement, such as {{rollout: 0, actor: 1}}"),
    Rule("trainer.resume", RUN, "A job whose ranks may be restarted resumes from its newest checkpoint.",
         # torchrun restarts ranks with the same command line, so "never" or a path would start over
         lambda c, w: c.trainer.resume != "auto" and w.restarts,
         "trainer.resume: {c.trainer.resume!r} would begin from there again whenever the ranks are restarted "
         "(MAX_RESTARTS, or a range of NNODES); expected auto, with another trainer.output_dir"),
)  # fmt: skip
