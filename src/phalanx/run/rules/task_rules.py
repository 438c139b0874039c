"""Rules for the tasks other than training."""

import math

from phalanx.run.rules.rule import EVALUATE, GENERATE, PREPARE_DATA, SAMPLE, Rule


def _of_weights(schema: str) -> tuple[Rule, ...]:
    """The rules for a task whose weights are those of a folder or of a checkpoint."""
    return (
        Rule("model.path checkpoint", schema,
             lambda c: c.checkpoint is None and not (c.model if schema == EVALUATE else vars(c.model)).get("path"),
             "neither model.path nor checkpoint is set; give one of them"),
        Rule("weights checkpoint", schema, lambda c: c.weights == "ema" and c.checkpoint is None,
             " needs a checkpoint; a model folder has its own weights only"),
    )  # fmt: skip


def _of_sampling(schema: str, example: str) -> tuple[Rule, ...]:
    """The rules for a task that samples. example: a prompt for a message."""
    return (
        *_of_weights(schema),
        Rule("prompts prompt_file", schema, lambda c: c.prompts and c.prompt_file is not None,
             "prompts and prompt_file are both set; give one of them"),
        Rule("prompts prompt_file", schema, lambda c: not c.prompts and c.prompt_file is None,
             f"neither prompts nor prompt_file is set; give one of them, e.g. prompts='{example}'"),
    )  # fmt: skip


RULES = (
    *_of_sampling(SAMPLE, "a red apple"),
    *_of_sampling(GENERATE, "Why is the sky blue?"),
    *_of_weights(EVALUATE),
    Rule("k n", EVALUATE, lambda c: max(c.k or (0,)) > (c.n or math.inf) and max(c.k),
         "k: {x} is not between 1 and n, the samples per prompt; give another k, or a larger n"),
    Rule("source reasoning_gym test_source", PREPARE_DATA,
         lambda c: bool(c.source and c.reasoning_gym) or not (c.source or c.reasoning_gym or c.test_source),
         "give either source, a file, or reasoning_gym, a list of its tasks, or only test_source"),
)  # fmt: skip
