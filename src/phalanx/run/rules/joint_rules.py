"""Rules for joint runs. The rules for each policy's configuration apply as well."""

from collections.abc import Callable
from typing import Any

from phalanx.run.rules.rule import CONTEXT, JOINT, Rule, value_of


def _unlike(value: Any) -> Callable[[Any], bool]:
    return lambda given: bool(given != value)


def _first_key(keys: tuple[str, ...], excluded: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """The first of these keys, if the job has it, with an excluded value."""

    def broken(c: Any) -> str | None:
        for key in keys:
            above, _, leaf = key.rpartition(".")
            if leaf in vars(value_of(c, above)) and excluded(value_of(c, key)):
                return key
        return None

    return broken


def _learns(excluded: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """The key of the name of the first algorithm that is excluded."""

    def broken(c: Any) -> str | None:
        for part in ("writer", "painter"):
            if excluded(value_of(c, f"{part}.algorithm")):
                return f"{part}.algorithm.name"
        return None

    return broken


def _rank_key(c: Any) -> str | None:
    """The key of the rank of the first policy all of whose weights are trained."""
    for part in c.train:
        if value_of(c, f"{part}.model.lora_rank") == 0:
            return f"{part}.model.lora_rank"
    return None


# keys of which each excludes the same values, the values, and what follows a key and its value
_EXCLUDED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("writer.rollout.max_num_gen_batches writer.rollout.max_draws_per_prompt painter.rollout.max_num_gen_batches "
     "painter.rollout.max_draws_per_prompt", lambda count: count > 1,
     "would draw samples again, which a joint run does not support; set it to 1"),
    ("writer.rollout.schedule painter.rollout.schedule", _unlike("synchronous"),
     "needs ranks that only sample, which a joint run does not have; set it to synchronous"),
    ("painter.rollout.engine", _unlike("policy"), "does not support rewritten prompts; set it to policy"),
    ("writer.model.block_size", _unlike(None),
     "is for block diffusion, which joint runs do not support; set it to null"),
    ("painter.algorithm.reference_guidance", bool, "is not supported in a joint run; set it to null"),
    (CONTEXT, lambda ranks: ranks > 1, "is only for jobs with one policy; set it to 1"),
)  # fmt: skip

RULES = (
    *(Rule(keys, JOINT, _first_key(tuple(keys.split()), excluded), f" {text}") for keys, excluded, text in _EXCLUDED),
    Rule("writer.rollout.partial_rollout", JOINT, lambda c: c.writer.rollout.partial_rollout,
         "writer.rollout.partial_rollout: true would leave texts of a step unfinished, but the painter needs them all; "
         "set it to false"),
    Rule("writer.rollout.engine", JOINT, lambda c: c.writer.rollout.facts.weights == "none",
         " takes responses from the data, but a joint run draws what its writer writes; set "
         "{c.writer.rollout:engine}=policy"),
    Rule("writer.algorithm.name painter.algorithm.name", JOINT, _learns(lambda a: a.needs_critic),
         " needs a critic, which a joint run does not have; expected an algorithm without one, such as grpo"),
    Rule("writer.algorithm.name painter.algorithm.name", JOINT,
         _learns(lambda a: bool({"teacher_path", "context_key"} & {*vars(a)})),
         " has a teacher, which a joint run does not support; expected an algorithm without one, such as grpo or "
         "flow_grpo"),
    Rule("painter.algorithm.name", JOINT, lambda c: "last_steps" in vars(c.painter.algorithm),
         " differentiates the reward, which a joint run does not support; expected an algorithm that does not, such as "
         "flow_grpo"),
    Rule("diffusion_group_scope painter.algorithm.name", JOINT,
         lambda c: c.diffusion_group_scope == "prompt" and c.painter.algorithm.name in ("diffusion_dpo", "dgpo"),
         " would compare images of different texts with painter.algorithm.name={c.painter.algorithm.name}; set it to "
         "rewrite"),
    Rule("trainer.export_each_save writer.model.lora_rank painter.model.lora_rank train", JOINT,
         lambda c: c.trainer.export_each_save and _rank_key(c),
         "trainer.export_each_save: exports LoRAs, and {x}=0 trains all weights, which are as large as the base; "
         "export the checkpoints that are needed with `phalanx export`"),
)  # fmt: skip
