"""A tiny LLaDA2 folder as on the hub: its names and settings are spelled out here, not written by the tested code."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SETTINGS: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "dtype": "float32",
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 28,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 16,
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 4,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "transformers_version": "4.57.1",
    "use_bias": False,
    "use_cache": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "vocab_size": 512,
}


def weights_of(settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights under the hub's names; the router's bias is in float32, as on the hub."""
    c, generator = settings, torch.Generator().manual_seed(0)
    hidden, head = c["hidden_size"], c["head_dim"]
    heads, all_heads = c["num_attention_heads"], c["num_attention_heads"] + 2 * c["num_key_value_heads"]

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return (around + 0.2 * torch.randn(shape, generator=generator)).to(dtype)

    def mlp(place: str, width: int) -> dict[str, Tensor]:
        return {
            f"{place}.gate_proj.weight": draw(width, hidden),
            f"{place}.up_proj.weight": draw(width, hidden),
            f"{place}.down_proj.weight": draw(hidden, width),
        }

    found = {"model.word_embeddings.weight": draw(c["vocab_size"], hidden), "model.norm.weight": draw(hidden, around=1)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = draw(c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = draw(hidden, around=1)
        found[f"{layer}.post_attention_layernorm.weight"] = draw(hidden, around=1)
        found[f"{layer}.attention.query_key_value.weight"] = draw(all_heads * head, hidden)
        if c["use_qkv_bias"]:
            found[f"{layer}.attention.query_key_value.bias"] = draw(all_heads * head)
        found[f"{layer}.attention.dense.weight"] = draw(hidden, heads * head)
        found[f"{layer}.attention.query_layernorm.weight"] = draw(head, around=1)
        found[f"{layer}.attention.key_layernorm.weight"] = draw(head, around=1)
        if i < c["first_k_dense_replace"]:
            found |= mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        found[f"{layer}.mlp.gate.weight"] = draw(c["num_experts"], hidden)
        found[f"{layer}.mlp.gate.expert_bias"] = draw(c["num_experts"]).float()
        found |= mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"] * c["num_shared_experts"])
        for expert in range(c["num_experts"]):
            found |= mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
    return found


def tiny_llada2(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write the folder with changed `settings`, a tokenizer, and code that must not be run."""
    from assets.make.tiny_lm import make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    found = SETTINGS | {"dtype": str(dtype).removeprefix("torch.")} | settings
    (folder / "config.json").write_text(json.dumps(found, indent=2))
    save_file(weights_of(found, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("configuration_llada2_moe.py", "modeling_llada2_moe.py"):
        (folder / name).write_text("raise AssertionError('code of a model folder was run')\n")
    make_tokenizer().save_pretrained(folder)
    return folder
