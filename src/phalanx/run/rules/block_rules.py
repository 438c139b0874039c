"""Rules for block diffusion."""

from typing import Any

from phalanx.config.engines import BLOCK_ENGINES
from phalanx.config.messages import near_multiples
from phalanx.run.rules.rollout_rules import truncated
from phalanx.run.rules.rule import BLOCK_DIFFUSION, GENERATE, LM, LM_RL, Rule

_NOT_WHOLE = "{x[0]}: {x[1]} tokens are not a whole number of blocks of model.block_size={x[2]}; nearest: {x[3]}"


def _not_whole(key: str, length: int | None, size: int | None) -> tuple[str, int, int, str] | None:
    """The values for _NOT_WHOLE if a length is not a whole number of blocks, else None."""
    if size is None or length is None or length % size == 0:
        return None
    return key, length, size, near_multiples(length, size)


def _excluded_key(c: Any) -> str | None:
    """The first key whose value does not work with the blocks of the model."""
    r, model = c.rollout, c.model
    samples = r.facts.blocks if ":" in r.engine else r.engine in BLOCK_ENGINES
    excluded = {
        "rollout.engine": not samples,
        truncated(c): True,
        "model.use_remove_padding": model.use_remove_padding,
        "model.attn_implementation": model.attn_implementation == "flash_attention_2",
    }
    return next((key for key, true in excluded.items() if key and true and model.block_size is not None), None)


def _set_without_blocks(c: Any, m: Any) -> str | None:
    """The first key of tasks/generate.py for block diffusion that is set though the model has no blocks; its value."""
    steps, threshold = c.denoising_steps_per_block, c.threshold
    values = {"model.mask_token": m.mask_token, "denoising_steps_per_block": steps, "threshold": threshold}
    for key, value in values.items():
        if m.block_size is None and value is not None:
            return f"{key}: {value}"
    return None


def _is_more(steps: int | None, size: int | None) -> bool:
    return steps is not None and size is not None and steps > size


RULES = (
    Rule("model.block_size", BLOCK_DIFFUSION, lambda c: c.model.block_size is None,
         "model.block_size is missing: the number of tokens of a block, 32 in LLaDA2"),
    Rule("rollout.engine model.block_size", LM,
         lambda c: c.model.block_size is None and ":" in c.rollout.engine and c.rollout.facts.blocks,
         " is for block diffusion; set {c.model:block_size}, or another engine"),
    Rule("data.max_response_length rollout.val.max_response_length model.block_size", LM,
         lambda c: _not_whole("data.max_response_length", c.data.max_response_length, c.model.block_size)
         or _not_whole("rollout.val.max_response_length", c.rollout.val.max_response_length, c.model.block_size),
         _NOT_WHOLE),
    Rule("rollout.denoising_steps_per_block rollout.val.denoising_steps_per_block model.block_size", LM,
         lambda c: next((r for r in (c.rollout, c.rollout.val) if
                         _is_more(r.denoising_steps_per_block, c.model.block_size)), None),
         "{x:denoising_steps_per_block:} is more than {c.model:block_size=}"),
    Rule("algorithm.name model.block_size", LM_RL,
         lambda c: c.model.block_size is not None and c.algorithm.needs_critic,
         " trains a critic, which reads from left to right and not in blocks ({c.model:block_size=}); set "
         "{c.algorithm:name}=grpo, or leave {c.model:block_size} out"),
    Rule("rollout.engine rollout.top_k rollout.top_p rollout.min_p model.use_remove_padding model.attn_implementation "
         "model.block_size", LM, _excluded_key,
         " does not work with block diffusion ({c.model:block_size=}); leave it out"),
    Rule("block_diffusion.noise_range_low block_diffusion.noise_range_high", BLOCK_DIFFUSION,
         lambda c: c.block_diffusion.noise_range_low > c.block_diffusion.noise_range_high,
         " is above noise_range_high {c.block_diffusion.noise_range_high}"),
    Rule("data.max_prompt_length data.max_response_length model.block_size block_diffusion.train_fill", BLOCK_DIFFUSION,
         lambda c: c.block_diffusion.train_fill == "max_length"
         and _not_whole("", c.data.max_prompt_length + c.data.max_response_length, c.model.block_size),
         "data.max_prompt_length: with data.max_response_length it makes {x[1]} tokens, which are not a whole number "
         "of blocks of model.block_size={x[2]}"),
    Rule("block_diffusion.same_token_labels data.val_files", BLOCK_DIFFUSION,
         lambda c: not c.block_diffusion.same_token_labels and c.data.val_files,
         " trains a model that cannot be validated; leave out data.val_files"),
)  # fmt: skip

MODEL_RULES = (
    Rule("model.mask_token denoising_steps_per_block threshold model.block_size", GENERATE, _set_without_blocks,
         "{x} is for block diffusion; set model.block_size, or leave it out"),
    Rule("max_response_length model.block_size", GENERATE,
         lambda c, m: _not_whole("max_response_length", c.max_response_length, m.block_size), _NOT_WHOLE),
    Rule("denoising_steps_per_block model.block_size", GENERATE,
         lambda c, m: _is_more(c.denoising_steps_per_block, m.block_size),
         " is more than model.block_size={m.block_size}"),
    Rule("model.attn_implementation model.block_size", GENERATE,
         lambda c, m: m.block_size is not None and m.attn_implementation == "flash_attention_2",
         "model.attn_implementation: flash_attention_2 cannot mask blocks; expected sdpa, eager or flex_attention"),
)  # fmt: skip
