"""Variants of any job that show what changes bits: dtype, packing, attention, size of passes, sharding, compile."""

from typing import Any

import torch

from phalanx.distributed.launch_env import Launch


def standard_variants(cfg: Any) -> dict[str, list[str]]:
    """Overrides by name, each another value than that of `cfg`; some of them may be refused by the job's rules."""
    model, variants = vars(cfg.model), dict[str, list[str]]()
    other = "float32" if model["dtype"] == "bfloat16" else "bfloat16"
    variants[other] = [f"model.dtype={other}"]
    if "use_remove_padding" in model:
        for name, value in (("packed", True), ("padded", False)):
            if model["use_remove_padding"] is not value:
                variants[name] = [f"model.use_remove_padding={str(value).lower()}"]
        other = "sdpa" if model["attn_implementation"] == "eager" else "eager"
        variants[f"attention by {other}"] = [f"model.attn_implementation={other}"]
    else:
        variants["attention by math"] = ["model.attn_backend=_native_math"]
    for section, key in (
        ("actor", "ppo_micro_batch_size_per_gpu"),
        ("flow_matching", "micro_batch_size_per_gpu"),
        ("block_diffusion", "micro_batch_size_per_gpu"),
    ):
        size = vars(vars(cfg)[section]).get(key, 1) if section in vars(cfg) else 1
        if size > 1:
            variants["half as many in a pass"] = [f"{section}.{key}={size // 2}"]
    if model["lora_rank"] and not model["quantization"]:
        variants["base in nf4"] = ["model.quantization=nf4"]
    if torch.cuda.is_available():  # on a CPU it needs a compiler and minutes
        variants["compiled"] = [f"model.compile={str(not model['compile']).lower()}"]
    ranks = Launch.from_env().world_size
    if ranks > 1:
        whole = cfg.parallel.fsdp_size == 1
        variants["sharded" if whole else "replicated"] = [f"parallel.fsdp_size={ranks if whole else 1}"]
    return variants
