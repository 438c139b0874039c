"""How many responses the policy's own modules decode together on a GPU, so that their keys and values fit it."""

import logging
from typing import Any

import torch

from phalanx.config.lm import LMRunConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.mesh import World
from phalanx.models.lm.lm_policy import LMPolicy

log = logging.getLogger(__name__)
KEY = "rollout.micro_batch_size_per_gpu"
SHARE = 0.3  # fraction of a GPU's memory for keys and values; beside them are weights, moments, logits, a layer's copy


def token_bytes(settings: Any, itemsize: int) -> int:
    """Bytes of the keys and values of a token in all layers of a model; 0 without attention. settings: transformers'
    configuration of the model.
    """
    sizes = settings.to_dict()
    names = (settings.attribute_map.get(name, name) for name in ("num_attention_heads", "hidden_size"))
    heads, hidden = (sizes.get(name) or 0 for name in names)
    if not heads:
        return 0
    width = sizes.get("head_dim") or hidden // heads
    return int(2 * settings.num_hidden_layers * (sizes.get("num_key_value_heads") or heads) * width * itemsize)


def cache_bytes(cfg: LMRunConfig, policy: LMPolicy) -> int:
    """Bytes of the keys and values of the longest response with its prompt."""
    limit = max(cfg.data.max_response_length, cfg.rollout.val.max_response_length or 0)
    return token_bytes(policy.settings, policy.trained.dtype.itemsize) * (cfg.data.max_prompt_length + limit)


def fitting_together(count: int, each: int, memory: int | None, ranks: int = 1) -> int:
    """How many of `count` responses to decode together where each takes `each` bytes: all, or the fewest equal parts
    that fit SHARE of a GPU of `memory` bytes; all if `memory` is None. ranks: those that share the responses.
    """
    share, most = -(-count // ranks), count if memory is None else max(int(SHARE * memory) // max(each, 1), 1)
    return count if share <= most else -(-share // -(-share // most))


def decoded_together(cfg: LMRunConfig, policy: LMPolicy, world: World, count: int) -> int:
    """`count`, or fewer if no key says how many and the policy's own modules decode on GPUs. Collective there.

    From the memory that the smallest GPU has, and not from what is free, so that runs repeat.
    """
    chosen = cfg.rollout.micro_batch_size_per_gpu is not None or cfg.rollout.facts.weights == "copy"
    if chosen or world.device.type != "cuda":
        return count
    memory = -reduce_int(-torch.cuda.get_device_properties(world.device).total_memory, "max")
    each = cache_bytes(cfg, policy)
    together = fitting_together(count, each, memory, world.context_size)
    if together < count and world.lead:
        log.info(
            "%s: %d responses are decoded together, since keys and values of %.3g GB each may take %.0f %% of a GPU",
            *(KEY, together, each / 1e9, 100 * SHARE),
        )
    return together
