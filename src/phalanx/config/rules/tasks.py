"""Rules of the tasks beside training."""

from phalanx.config.rules.rule import GENERATE, PREPARE_DATA, SAMPLE, Rule, too_cold


def _of_sampling(schema: str, example: str) -> tuple[Rule, ...]:
    """The rules of a task that samples; `example` is a prompt."""
    return (
        Rule("model.path checkpoint", schema, "The weights are those of a model folder or of a checkpoint.",
             lambda c: c.model.path is None and c.checkpoint is None,
             "neither model.path nor checkpoint is set; give one of them"),
        Rule("prompts prompt_file", schema, "Prompts come from the command line or from a file, not both.",
             lambda c: c.prompts and c.prompt_file is not None,
             "prompts and prompt_file are both set; give one of them"),
        Rule("prompts prompt_file", schema, "Prompts come from the command line or from a file.",
             lambda c: not c.prompts and c.prompt_file is None,
             f"neither prompts nor prompt_file is set; give one of them, e.g. prompts='[{example}]'"),
        Rule("weights checkpoint", schema, "Only a checkpoint has a moving average.",
             lambda c: c.weights == "ema" and c.checkpoint is None,
             "weights: ema needs a checkpoint; a model folder has its own weights only"),
    )  # fmt: skip


RULES = (
    *_of_sampling(SAMPLE, "a red apple"),
    *_of_sampling(GENERATE, "Why is the sky blue?"),
    too_cold(GENERATE, "temperature"),
    Rule("source reasoning_gym", PREPARE_DATA, "Problems come from a file or from tasks of reasoning-gym.",
         lambda c: (c.source is None) == (not c.reasoning_gym),
         "give either source, a file, or reasoning_gym, a list of its tasks"),
)  # fmt: skip
