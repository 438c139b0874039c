"""LLaDA2 by the modules of Glm4Moe, which has the same architecture.

Only names differ: those of the settings in config.json, and those of the weights, which are translated when they are
loaded and saved. The code in the hub's folders is never run.
"""

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM

_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_RENAMED = (
    ("^model.word_embeddings.", "model.embed_tokens."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)


@strict
class LLaDA2Config(Glm4MoeConfig):
    """The config.json of LLaDA2, with its own keys and the defaults of its own code."""

    model_type = "llada2_moe"
    attribute_map: ClassVar[dict[str, str]] = {
        **Glm4MoeConfig.attribute_map,
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }

    head_dim: int | None = None
    num_experts_per_tok: int = 2
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 0
    use_bias: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Set what LLaDA2's code has as fixed behavior, and Glm4Moe as settings."""
        self.use_qk_norm = True
        self.norm_topk_prob = self.num_experts_per_tok > 1
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        kwargs["sliding_window"] = None  # published with a width, by which transformers' cache would drop tokens
        super().__post_init__(**kwargs)


class LLaDA2MoeModelLM(Glm4MoeForCausalLM):
    """The model, under the name of the class in config.json."""

    config_class = LLaDA2Config
    _keys_to_ignore_on_load_unexpected = None  # Glm4Moe's keys are for its own folders

    def __init__(self, config: LLaDA2Config) -> None:
        """Raises ValueError for settings that Glm4Moe does not support."""
        if config.use_bias:
            raise ValueError("use_bias is true in its config.json; expected false, as in all that is published")
        if not config.n_shared_experts:
            raise ValueError("num_shared_experts is 0 in its config.json; expected 1 or more")
        super().__init__(config)
        # LLaDA2's own code does not train the embedding of pad_token_id, which also ends responses
        self.model.embed_tokens.padding_idx = None

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # by default, transformers searches for experts in the source file of this class
        return True


class SplitHeads(ConversionOps):
    """Split the rows of a fused projection into the projections of queries, keys and values.

    `transformers.core_model_loading.Split` does the same from transformers 5.20 on; vLLM 0.32 requires 5.19.
    """

    def convert(
        self,
        input_dict: dict[str, torch.Tensor],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Glm4MoeForCausalLM,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        (fused,) = input_dict.values()
        names = [full_layer_name.replace(target_patterns[0], target) for target in target_patterns]
        rows = [model.get_parameter(name).shape[0] for name in names]
        pieces = (fused[0] if isinstance(fused, list) else fused).split(rows)
        return dict(zip(target_patterns, pieces, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(dim=0)


def register() -> None:
    """Make transformers' Auto classes load folders of LLaDA2, and save them in the same format."""
    experts = get_checkpoint_conversion_mapping(Glm4MoeConfig.model_type)
    renamed = [WeightRenaming(there.replace(".", r"\."), here) for there, here in _RENAMED]
    heads = [
        WeightConverter(f"attention.query_key_value.{kind}", [f"{name}.{kind}" for name in _HEADS], [SplitHeads()])
        for kind in ("weight", "bias")
    ]
    AutoConfig.register(LLaDA2Config.model_type, LLaDA2Config)
    AutoModelForCausalLM.register(LLaDA2Config, LLaDA2MoeModelLM)
    register_checkpoint_conversion_mapping(LLaDA2Config.model_type, [*experts, *renamed, *heads])
