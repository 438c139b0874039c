"""Rules for batch sizes, prompts and the run."""

from typing import Any

from phalanx.run.rules.rule import BLOCK_DIFFUSION, FLOW_MATCHING, LM, LM_RL, RL, RUN, Rule, beside_per_gpu


def _budget(c: Any) -> tuple[int, str, str] | None:
    """If the longest sample has more tokens than a pass may have: its tokens, further keys that determine them, and the
    ranks that share a pass, in words.
    """
    if not c.actor.use_dynamic_bsz or c.token_budget >= c.longest_row:
        return None
    ranks = c.parallel.ulysses_sequence_parallel_size
    keys = ", and rollout.denoising_steps_per_block times it" if c.model.block_size else ""
    return c.longest_row, keys, f" on each of {ranks} ranks" if ranks > 1 else ""


RULES = (
    Rule("actor.ppo_mini_batch_size_per_gpu actor.ppo_mini_batch_size", RL,
         "A mini-batch is given for all ranks or per rank, not both.",
         lambda c: beside_per_gpu(c.actor, "ppo_mini_batch_size"),
         "{c.actor:ppo_mini_batch_size_per_gpu}: {x[0]} conflicts with {c.actor:ppo_mini_batch_size}: {x[1]}; set "
         "one of them: leave {c.actor:ppo_mini_batch_size} at {x[2]}, or set "
         "{c.actor:ppo_mini_batch_size_per_gpu}=null"),
    Rule("actor.ppo_mini_batch_size_per_gpu data.train_batch_size_per_gpu", RL,
         "A mini-batch per rank needs a batch per rank.",
         lambda c: c.actor.ppo_mini_batch_size_per_gpu is not None and c.data.train_batch_size_per_gpu is None,
         "{c.actor:ppo_mini_batch_size_per_gpu:} grows with the ranks, but data.train_batch_size does not; set "
         "data.train_batch_size_per_gpu, or {c.actor:ppo_mini_batch_size}"),
    Rule("data.train_batch_size_per_gpu data.train_batch_size", RUN,
         "A batch is given for all ranks or per rank, not both.",
         lambda c: beside_per_gpu(c.data, "train_batch_size"),
         "data.train_batch_size_per_gpu: {x[0]} conflicts with data.train_batch_size: {x[1]}; set one of them: leave "
         "data.train_batch_size at {x[2]}, or set data.train_batch_size_per_gpu=null"),
    Rule("actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz data.max_prompt_length data.max_response_length", LM_RL,
         "With `actor.use_dynamic_bsz`, a pass has room for the longest sample: the longest prompt and response, and "
         "for block diffusion all states of the response.",
         _budget,
         "{c.actor:ppo_max_token_len_per_gpu:} tokens{x[2]} are too few for a sample, which may have {x[0]} "
         "(data.max_prompt_length, data.max_response_length{x[1]})"),
    Rule("data.min_pixels data.max_pixels", LM, "The lower bound of an image's pixels does not exceed the upper one.",
         lambda c: None not in (c.data.min_pixels, c.data.max_pixels) and c.data.min_pixels > c.data.max_pixels,
         "data.min_pixels: {c.data.min_pixels} is more than data.max_pixels={c.data.max_pixels}"),
    Rule("trainer.profile_steps trainer.total_training_steps", RUN, "Profiled steps lie within the run.",
         lambda c: c.trainer.total_training_steps is not None
         and max(c.trainer.profile_steps, default=0) > c.trainer.total_training_steps,
         "trainer.profile_steps: {c.trainer.profile_steps} goes beyond "
         "trainer.total_training_steps={c.trainer.total_training_steps}; expected steps of the run"),
)  # fmt: skip

START_RULES = (
    Rule("data.train_files", RL, "Reinforcement learning needs prompts.",
         lambda c, a: not c.data.train_files,
         "data.train_files: [] names no prompts; give at least one .txt, .jsonl, .csv, .parquet or dataset folder"),
    Rule("data.train_files", FLOW_MATCHING, "Flow matching needs images.",
         lambda c, a: not c.data.train_files,
         "data.train_files: [] names no images; give a .jsonl file or a Hugging Face dataset folder"),
    Rule("data.train_files", BLOCK_DIFFUSION, "Supervised block diffusion needs samples.",
         lambda c, a: not c.data.train_files,
         "data.train_files: [] names no samples; give a .jsonl or .parquet file of chats"),
    Rule("trainer.total_training_steps trainer.total_epochs", RUN, "A run has a number of steps or of epochs.",
         lambda c, a: c.trainer.total_training_steps is None and c.trainer.total_epochs is None,
         "trainer.total_training_steps: null needs trainer.total_epochs; set one of them"),
    Rule("trainer.test_freq data.val_files", RUN, "Validations need held-out prompts.",
         lambda c, a: c.trainer.test_freq > 0 and not c.data.val_files,
         "trainer.test_freq: {c.trainer.test_freq} needs data.val_files; give some, or -1"),
)  # fmt: skip
