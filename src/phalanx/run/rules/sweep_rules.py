"""Rules for sweeps, whose runs share a frozen base."""

from phalanx.run.rules.rule import CONTEXT, RL, RUN, Rule

RULES = (
    Rule("sweep model.lora_rank", RUN, lambda c: c.sweep and c.model.lora_rank == 0,
         "sweep: its runs share a frozen base, on which each trains a LoRA; set {c.model:lora_rank}, such as 16"),
    Rule("sweep model.compile", RUN, lambda c: c.sweep and c.model.compile,
         "sweep: its runs share passes, which are not compiled; set {c.model:compile}=false"),
    Rule("sweep model.lora_init trainer.seed", RUN,
         lambda c: c.sweep and c.model.lora_init == "pissa" and "trainer.seed" in c.sweep,
         "sweep.trainer.seed: with {c.model:lora_init=} each seed has another base; expected another initialization"),
    Rule("sweep rollout.engine", RUN, lambda c: c.sweep and c.rollout.facts.weights == "copy",
         "sweep: its runs sample in the trained modules; set {c.rollout:engine}=policy"),
    Rule("sweep placement", RL, lambda c: c.sweep and c.placement,
         "sweep: its runs both sample and train on all ranks; leave placement out"),
    Rule("trainer.end_below placement", RL, lambda c: c.trainer.end_below and c.placement,
         "trainer.end_below: ranks with other roles run to the last step; leave one of the two out"),
    Rule(f"sweep {CONTEXT}", RUN, lambda c: c.sweep and c.parallel.ulysses_sequence_parallel_size > 1,
         f"sweep: its runs share passes, but not the positions of samples; set {CONTEXT}=1"),
    Rule("sweep parallel.expert_parallel", RUN, lambda c: c.sweep and c.parallel.expert_parallel,
         "sweep: its runs share a base, but not experts that are kept on one rank; set parallel.expert_parallel=false"),
)  # fmt: skip
