"""Rules for batch sizes, prompts and the run."""

from dataclasses import fields
from typing import Any

from phalanx.run.rules.rule import BLOCK_DIFFUSION, FLOW_MATCHING, LM, LM_RL, RL, RUN, Rule, value_of


def _over_budget(c: Any) -> tuple[int, str, str] | None:
    """If the longest sample has more tokens than a pass may have: its tokens, further keys that determine them, and the
    ranks that share a pass, in words.
    """
    if not c.actor.use_dynamic_bsz or c.token_budget >= c.longest_row:
        return None
    ranks = c.parallel.ulysses_sequence_parallel_size
    keys = ", and rollout.denoising_steps_per_block times it" if c.model.block_size else ""
    return c.longest_row, keys, f" on each of {ranks} ranks" if ranks > 1 else ""


def _given_twice(name: str, key: str, schema: str) -> Rule:
    """The rule that a size of the section `name` is given for all ranks or per rank, not both."""

    def broken(c: Any) -> Any:
        section = value_of(c, name)
        default = next(f.default for f in fields(section) if f.name == key)
        return vars(section)[f"{key}_per_gpu"] is not None and vars(section)[key] != default and default

    return Rule(f"{name}.{key}_per_gpu {name}.{key}", schema, broken,
                f" conflicts with {{c.{name}:{key}:}}; set one of them: leave {{c.{name}:{key}}} at {{x}}, or set "
                f"{{c.{name}:{key}_per_gpu}}=null")  # fmt: skip


def _validated(c: Any) -> bool:
    """Whether the metric of trainer.keep_best is one of validations."""
    return c.trainer.keep_best is not None and c.trainer.keep_best.startswith("val/")


RULES = (
    _given_twice("actor", "ppo_mini_batch_size", RL),
    Rule("actor.ppo_mini_batch_size_per_gpu data.train_batch_size_per_gpu", RL,
         lambda c: c.actor.ppo_mini_batch_size_per_gpu is not None and c.data.train_batch_size_per_gpu is None,
         " grows with the ranks, but data.train_batch_size does not; set data.train_batch_size_per_gpu, or "
         "{c.actor:ppo_mini_batch_size}"),
    _given_twice("data", "train_batch_size", RUN),
    Rule("actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz data.max_prompt_length data.max_response_length", LM_RL,
         _over_budget,
         " tokens{x[2]} are too few for a sample, which may have {x[0]} (data.max_prompt_length, "
         "data.max_response_length{x[1]})"),
    Rule("data.min_pixels data.max_pixels", LM,
         lambda c: None not in (c.data.min_pixels, c.data.max_pixels) and c.data.min_pixels > c.data.max_pixels,
         " is more than data.max_pixels={c.data.max_pixels}"),
    Rule("trainer.profile_steps trainer.total_training_steps", RUN,
         lambda c: c.trainer.total_training_steps is not None
         and max(c.trainer.profile_steps, default=0) > c.trainer.total_training_steps,
         " goes beyond trainer.total_training_steps={c.trainer.total_training_steps}; expected steps of the run"),
    Rule("trainer.keep_best_mode trainer.keep_best", RUN,
         lambda c: c.trainer.keep_best is None and c.trainer.keep_best_mode != "max",
         " is of trainer.keep_best, which is not set; name a metric there, or leave it out"),
    Rule("trainer.keep_best trainer.save_freq", RUN,
         lambda c: c.trainer.keep_best is not None and c.trainer.save_freq < 1,
         " needs checkpoints; set trainer.save_freq, or leave it out"),
    Rule("trainer.keep_best trainer.test_freq", RUN, lambda c: _validated(c) and c.trainer.test_freq < 1,
         " is measured in validations; set trainer.test_freq"),
    Rule("trainer.keep_best reward.functions", RUN, lambda c: _validated(c) and not c.reward.functions,
         " is measured by reward.functions, which is empty; give what is measured, such as [{{name: ocr}}]"),
    Rule("trainer.keep_best trainer.save_freq trainer.test_freq", RUN,
         lambda c: _validated(c) and c.trainer.save_freq % c.trainer.test_freq,
         " is measured every {c.trainer.test_freq} steps (trainer.test_freq); expected trainer.save_freq, "
         "{c.trainer.save_freq}, to be a multiple, so that each checkpoint has a value"),
    Rule("trainer.export_each_save trainer.save_freq", RUN,
         lambda c: c.trainer.export_each_save and c.trainer.save_freq < 1,
         " exports checkpoints; set trainer.save_freq, or leave it out"),
    Rule("trainer.export_each_save model.lora_rank", RUN,
         lambda c: c.trainer.export_each_save and c.model.lora_rank == 0 and c.model.names[""] == "model",
         " exports LoRAs, and {c.model:lora_rank=} trains all weights, which are as large as the base; export the "
         "checkpoints that are needed with `phalanx export`"),
    Rule("trainer.export_each_save model.lora_init", RUN,
         lambda c: c.trainer.export_each_save and c.model.lora_init == "pissa",
         " exports LoRAs without loading the base, which {c.model:lora_init=} needs; use `phalanx export`"),
)  # fmt: skip

_WITHOUT_DATA = {
    RL: " names no prompts; give at least one .txt, .jsonl, .csv, .parquet or dataset folder",
    FLOW_MATCHING: " names no images; give a .jsonl file or a Hugging Face dataset folder",
    BLOCK_DIFFUSION: " names no samples; give a .jsonl or .parquet file of chats",
}
START_RULES = (
    *(Rule("data.train_files", job, lambda c, a: not c.data.train_files, text) for job, text in _WITHOUT_DATA.items()),
    Rule("trainer.total_training_steps trainer.total_epochs", RUN,
         lambda c, a: c.trainer.total_training_steps is None and c.trainer.total_epochs is None,
         " needs trainer.total_epochs; set one of them"),
    Rule("trainer.test_freq data.val_files", RUN, lambda c, a: c.trainer.test_freq > 0 and not c.data.val_files,
         " needs data.val_files; give some, or -1"),
)  # fmt: skip
