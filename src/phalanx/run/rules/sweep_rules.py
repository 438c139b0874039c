"""Rules for sweeps, whose runs share a frozen base."""

from phalanx.run.rules.rule import RL, RUN, Rule

RULES = (
    Rule("sweep model.lora_rank", RUN, "The runs of a sweep train LoRAs on one base.",
         lambda c: c.sweep and c.model.lora_rank == 0,
         "sweep: its runs share a frozen base, on which each trains a LoRA; set {c.model:lora_rank}, such as 16"),
    Rule("sweep model.compile", RUN, "Compiled blocks belong to one LoRA.",
         lambda c: c.sweep and c.model.compile,
         "sweep: its runs share passes, which are not compiled; set {c.model:compile}=false"),
    Rule("sweep model.lora_init trainer.seed", RUN, "PiSSA changes the base by a LoRA that depends on the seed.",
         lambda c: c.sweep and c.model.lora_init == "pissa" and "trainer.seed" in c.sweep,
         "sweep.trainer.seed: with {c.model:lora_init=} each seed has another base; expected another initialization"),
    Rule("sweep rollout.engine", RUN, "The runs of a sweep sample in the trained modules.",
         lambda c: c.sweep and c.rollout.facts.weights == "copy",
         "sweep: its runs sample in the trained modules; set {c.rollout:engine}=policy"),
    Rule("sweep placement", RL, "The runs of a sweep are on all ranks.",
         lambda c: c.sweep and c.placement,
         "sweep: its runs both sample and train on all ranks; leave placement out"),
    Rule("trainer.end_below placement", RL, "Ranks with other roles run for the planned number of steps.",
         lambda c: c.trainer.end_below and c.placement,
         "trainer.end_below: ranks with other roles run to the last step; leave one of the two out"),
    Rule("sweep parallel.ulysses_sequence_parallel_size", RUN, "Context parallelism is only for single runs.",
         lambda c: c.sweep and c.parallel.ulysses_sequence_parallel_size > 1,
         "sweep: its runs share passes, but not the positions of samples; set "
         "parallel.ulysses_sequence_parallel_size=1"),
    Rule("sweep parallel.expert_parallel", RUN, "Each run would have its own experts.",
         lambda c: c.sweep and c.parallel.expert_parallel,
         "sweep: its runs share a base, but not experts that are kept on one rank; set parallel.expert_parallel=false"),
)  # fmt: skip
