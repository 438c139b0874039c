"""Every causal class of transformers has the same log-probabilities by all paths of a job, or is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.models.lm.agreement import check_agreement
from phalanx.models.lm.lm_policy import build_policy
from phalanx.models.lm.load_folder import causal_lm
from phalanx.models.lm.model import CausalLM, decoder_of, positions

# Sizes by the names that classes use; each class gets those that its configuration has.
SIZES: dict[str, Any] = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim_model": 32, "embed_dim": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 48, "n_inner": 48, "d_ff": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "decoder_ffn_dim": 48,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "max_seq_len": 64, "seq_length": 64, "max_target_positions": 64, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "num_shared_experts": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_expand": 2, "ssm_state_size": 8, "n_groups": 1, "state_size": 8,
    "expand": 2, "conv_kernel": 4, "lru_width": 32, "laurel_rank": 8, "hidden_size_per_layer_input": 8,
}  # fmt: skip
# attention layers among those with a state
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "granite": {"logits_scaling": 4.0},
    "minicpm3": {"dim_model_base": 16},
}
MOST_WEIGHTS = 30e6
# Classes that can be trained and sampled; some of them can be packed. None may be lost.
RIGHT = {
    "cohere", "deepseek_v3", "falcon_h1", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "granitemoehybrid", "jamba", "bamba", "lfm2", "llama", "llama4_text", "minicpm3", "mistral", "mixtral",
    "nemotron_h", "olmo_hybrid", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "recurrent_gemma", "smollm3", "starcoder2", "bloom", "mpt",
}  # fmt: skip
PACKED = {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi3", "granite", "smollm3"}
STATES_ONLY = ("falcon_mamba", "mamba", "rwkv", "xlstm")  # no attention, only a state that padding disturbs


class Tokenizer:
    """A tokenizer with as many tokens as the models embed."""

    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return int(SIZES["vocab_size"])


def tiny(kind: str) -> Any:
    """An untrained model of the class, with weights large enough for differences to show."""
    config_class = CONFIG_MAPPING[kind]
    known, aliases = config_class().to_dict().keys() | config_class.attribute_map.keys(), config_class.attribute_map
    sizes = {name: value for name, value in SIZES.items() if name in known and aliases.get(name) not in SIZES}
    if "qk_rope_head_dim" in known:  # multi-head latent attention: as many key heads as query heads
        sizes["num_key_value_heads"] = 4
        sizes.pop("head_dim", None)
    config = config_class(**sizes | MORE.get(kind, {}))
    if config.to_dict().get("sliding_window"):
        config.sliding_window = 6
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count} weights, most of them in a part that these sizes do not name")
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if lm._supports_sdpa:
        lm.set_attn_implementation("sdpa")
    with torch.no_grad():
        for p in lm.parameters():
            if p.dim() > 1:
                p.mul_(3)
    return lm


def refusal(lm: Any, *, packed: bool = False, decodes: bool = True) -> str:
    """The line with which a model is refused; empty if it is accepted."""
    attention = "sdpa" if lm._supports_sdpa else "eager"
    config = LMModelConfig(path="m", dtype="float32", use_remove_padding=packed, attn_implementation=attention)
    try:
        module = causal_lm(lm, config, chunk=7)
        check_agreement(module, config, Tokenizer(), torch.device("cpu"), decodes=decodes)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_causal_class_is_right_or_refused(kind: str) -> None:
    try:
        lm = tiny(kind)
    except Exception as error:  # a class that needs other sizes
        assert kind not in RIGHT
        pytest.skip(f"cannot be built tiny: {type(error).__name__}: {error}")
    if not any(isinstance(child, torch.nn.ModuleList) for child in decoder_of(lm).children()):
        pytest.skip("its layers are not where others are: refused as it is loaded")
    for packed in (False, True):
        line = refusal(lm, packed=packed, decodes=not packed)
        assert "\n" not in line and len(line) < 400
        if kind in (PACKED if packed else RIGHT):
            assert line == ""
        if line:
            assert line.startswith(("model.path: 'm': ", "model.use_remove_padding: true needs layers of attention"))


@pytest.mark.parametrize("kind", ["granite", "minicpm3", "falcon_h1", "gemma2", "cohere", "qwen3_next", "opt"])
def test_classes_that_scale_or_keep_a_state_are_right(kind: str) -> None:
    assert refusal(tiny(kind)) == ""


@pytest.mark.parametrize("kind", ["gpt_oss", "bloom", "xglm", "stablelm"])
def test_classes_that_mix_packed_samples_are_refused(kind: str) -> None:
    lm = tiny(kind)
    assert refusal(lm) == ""
    line = refusal(lm, packed=True)
    assert line.startswith(
        f"model.path: 'm': log-probs of a {type(lm).__name__} by passes over packed samples differ by "
    )
    assert line.endswith("from its forward pass's, more than 0.0001; set model.use_remove_padding=false")


@pytest.mark.parametrize(
    ("kind", "packs", "line"),
    [
        ("llama", True, ""),
        ("bloom", False, "samples are padded, not packed: log-probs of a BloomForCausalLM by passes over packed"),
        ("falcon_h1", False, "samples are padded, not packed: the layers of a FalconH1ForCausalLM would mix them"),
    ],
)
def test_packing_that_is_only_tried(kind: str, packs: bool, line: str, caplog: pytest.LogCaptureFixture) -> None:
    """A model that does not pack goes without, and says so once."""
    config = LMModelConfig(path="m", dtype="float32", use_remove_padding=True, use_prefix_grouper=True)
    with caplog.at_level("INFO", "phalanx"):
        module = causal_lm(tiny(kind), config, chunk=7, tries=True)
        check_agreement(module, config, Tokenizer(), torch.device("cpu"), decodes=True)
        check_agreement(module, config, Tokenizer(), torch.device("cpu"), decodes=True)
    assert module.packs == module.groups == packs
    lines = [text for text in caplog.messages if "packed" in text]
    assert [text.startswith(line) for text in lines] == [True] * bool(line)


def test_a_class_that_takes_no_finished_mask_decodes_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, config = tiny("llama"), LMModelConfig(path="m", dtype="float32")
    forward = type(lm).forward

    def strict(self: Any, *args: Any, attention_mask: Any = None, **given: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 4:
            raise TypeError("only masks [B, T]")
        return forward(self, *args, attention_mask=attention_mask, **given)

    module = causal_lm(lm, config, chunk=7)
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(type(lm), "forward", strict)
        check_agreement(module, config, Tokenizer(), torch.device("cpu"), decodes=True)
        assert module.masks is not fails


@pytest.mark.parametrize("kind", ["falcon_mamba", "mamba", "rwkv"])
def test_classes_of_states_only_cannot_sample(kind: str) -> None:
    line = refusal(tiny(kind))
    assert "by decoding with a cache differ by" in line and line.endswith("set rollout.engine=vllm")
    assert refusal(tiny(kind), decodes=False) == ""


def test_a_head_without_its_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is any other difference between the two forward passes."""

    def unscaled(module: CausalLM, output: Any) -> Callable[[Tensor], Tensor]:
        return module.lm.get_output_embeddings()  # type: ignore[no-any-return]

    assert refusal(tiny("granite")) == ""
    monkeypatch.setattr(CausalLM, "head", unscaled)
    line = refusal(tiny("granite"))
    assert line.startswith(
        "model.path: 'm': log-probs of a GraniteForCausalLM by passes over padded samples differ by "
    )
    assert refusal(tiny("llama")) == ""


def test_a_policy_is_checked_as_it_is_built(lm_folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 within its bound; a class that fails in one of the paths is reported with the reason."""
    data = LMDataConfig(max_prompt_length=64, max_response_length=16)
    options: dict[str, Any] = {"chunk": 5, "temperature": 0.7, "seed": 0}
    for dtype in ("float32", "bfloat16"):
        config = LMModelConfig(path=str(lm_folder), dtype=dtype, use_remove_padding=True)
        policy = build_policy(config, ParallelConfig(), data, world, **options)
    assert all(p.grad is None for p in policy.trained.parameters.values())

    kind = type(policy.trained.module.lm)
    assert issubclass(kind, PreTrainedModel)
    forward = kind.forward

    def without_cache(self: Any, *args: Any, use_cache: bool, **kwargs: Any) -> Any:
        if use_cache:
            raise NotImplementedError("no cache")
        return forward(self, *args, use_cache=False, **kwargs)

    monkeypatch.setattr(kind, "forward", without_cache)
    message = (
        r"^model\.path: .* fails in decoding with a cache \(NotImplementedError: no cache\); this model cannot samp"
    )
    with pytest.raises(ValueError, match=message):
        build_policy(config, ParallelConfig(), data, world, **options)
    build_policy(config, ParallelConfig(), data, world, decodes=False, **options)


def test_flex_attention_is_refused_on_cpus(lm_folder: Path, world: World) -> None:
    config = LMModelConfig(path=str(lm_folder), dtype="float32", attn_implementation="flex_attention")
    data = LMDataConfig(max_prompt_length=8, max_response_length=8)
    with pytest.raises(
        ValueError, match=r"^model\.attn_implementation: flex_attention needs a GPU; expected sdpa or eag"
    ):
        build_policy(config, ParallelConfig(), data, world, chunk=5, temperature=1.0, seed=0)


def test_positions_of_yarn_and_of_models_without_a_limit() -> None:
    def longest(kind: str, **sizes: Any) -> int | None:
        return positions(CONFIG_MAPPING[kind](**sizes))

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    assert longest("qwen3", max_position_embeddings=64, rope_parameters=yarn) == 256
    assert longest("qwen3", max_position_embeddings=256, rope_parameters=yarn) == 256  # the factor is included
    assert longest("qwen3", max_position_embeddings=64) == 64
    assert longest("gpt2", n_positions=128) == 128
    assert longest("mpt", max_seq_len=512) == 512
    assert longest("bloom") is None
