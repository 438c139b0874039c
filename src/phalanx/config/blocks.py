"""Keys of block diffusion, checked against one another."""

from typing import Any

from phalanx.config.critic import changed
from phalanx.config.engines import KEY
from phalanx.config.load import ConfigError

BLOCK_ENGINES = {"policy": "phalanx.rollout.lm.in_blocks:BlockDiffusionRollout"}
_KEYS = ("mask_token", "denoising_steps_per_block", "threshold", "confidence", "log_prob_estimate")


def check_blocks(cfg: Any) -> None:
    """Raise ConfigError for keys of block diffusion in a configuration without it, and for what does not go with it."""
    size = cfg.model.block_size
    if size is None:
        for name, section in vars(cfg).items():
            if name not in ("model", "rollout", "actor"):
                continue
            for key, value in changed(section, type(section)(), f"{name}."):
                if key.rpartition(".")[2] in _KEYS:
                    raise ConfigError(f"{key}: {value} is of block diffusion; set model.block_size, or leave it out")
        if ":" in cfg.rollout.engine and cfg.rollout.facts.blocks:
            raise ConfigError(
                f"{KEY}: {cfg.rollout.engine} is of block diffusion; set model.block_size, or another one"
            )
        return
    check_lengths(cfg, size)
    r = cfg.rollout
    for key, steps in (("rollout.", r.denoising_steps_per_block), ("rollout.val.", r.val.denoising_steps_per_block)):
        if steps is not None and steps > size:
            raise ConfigError(f"{key}denoising_steps_per_block: {steps} is more than model.block_size={size}")
    algorithm = vars(cfg).get("algorithm")
    if algorithm is not None and algorithm.needs_critic:
        raise ConfigError(
            f"algorithm.name: {algorithm.name} trains a critic, which reads from left to right and not in blocks "
            f"(model.block_size={size}); set algorithm.name=grpo, or leave model.block_size out"
        )
    refused = {
        f"{KEY}: {r.engine}": not _samples_blocks(r),
        "model.use_remove_padding: true": cfg.model.use_remove_padding,
        "model.attn_implementation: flash_attention_2": cfg.model.attn_implementation == "flash_attention_2",
    }
    for what, found in refused.items():
        if found:
            raise ConfigError(f"{what} does not go with block diffusion (model.block_size={size}); leave it out")


def _samples_blocks(r: Any) -> bool:
    """Whether the engine samples block diffusion. A name that is none is another check's business."""
    return r.facts.blocks if ":" in r.engine else r.engine in BLOCK_ENGINES or r.engine not in r.ENGINES


def check_lengths(cfg: Any, size: int) -> None:
    """Raise ConfigError for responses that are not whole blocks."""
    check_whole("data.max_response_length", cfg.data.max_response_length, size)
    check_whole("rollout.val.max_response_length", cfg.rollout.val.max_response_length, size)


def check_whole(key: str, length: int | None, size: int) -> None:
    """Raise ConfigError for a length that is given and is not one of whole blocks."""
    if length is not None and length % size:
        below = max(length // size, 1) * size
        raise ConfigError(
            f"{key}: {length} tokens are no whole number of blocks of model.block_size={size}; nearest that are: "
            f"{below} or {below + size}"
        )
