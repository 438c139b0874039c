"""The layers that get a LoRA, in architectures whose layer names differ from Llama's."""

from pathlib import Path

import pytest
from torch import nn

from phalanx.config.lm import LMRLConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.models.lm.lm_policy import LORA_TARGETS
from phalanx.models.lm.model import CausalLM
from phalanx.models.lora import add_lora, all_linear, linear_layers
from phalanx.run.rules import load_config
from tests.numerics.test_agreement import tiny

LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
# for each class, some layers that a list of Llama's names would miss
OTHERS = {
    "phi": {"dense", "fc1", "fc2"},
    "phi3": {"qkv_proj", "gate_up_proj"},
    "starcoder2": {"c_fc", "c_proj"},
    "glm4": {"gate_up_proj"},
    "opt": {"out_proj", "fc1", "fc2"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"},
    "lfm2": {"in_proj", "out_proj", "w1", "w2", "w3"},
    "gpt_neox": {"query_key_value", "dense_h_to_4h"},
    "qwen3_next": {"in_proj_qkvz", "out_proj"},
}


def leaves(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("targets", [None, ["all-linear"]])
def test_all_linear_layers_but_the_head_have_one(kind: str, targets: list[str] | None) -> None:
    module = CausalLM(tiny(kind), chunk=7)
    head = module.lm.get_output_embeddings()
    expected = {name for name in linear_layers(module) if module.get_submodule(name) is not head}
    expected -= {name for name in expected if name.endswith("shared_expert_gate")}
    assert OTHERS[kind] <= leaves(sorted(expected))
    add_lora(module, LMModelConfig(path="m", lora_rank=2, target_modules=targets), LORA_TARGETS, seed=0)
    covered = {name.partition(".lora_A")[0] for name, _ in module.named_parameters() if ".lora_A." in name}
    assert covered == expected
    assert isinstance(head, nn.Linear)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mistral", "gemma3_text"])
def test_blocks_like_llamas_keep_their_layers(kind: str) -> None:
    assert leaves(all_linear(CausalLM(tiny(kind), chunk=7))) <= LLAMA
    assert {"q_proj", "o_proj"} <= leaves(all_linear(CausalLM(tiny(kind), chunk=7)))


def test_the_word_of_peft_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m, target_modules: all-linear}\n")
    assert load_config(LMRLConfig, str(file), []).model.target_modules == ["all-linear"]
    assert load_config(LMRLConfig, None, ["model.path=m", "model.target_modules=all-linear"]).model.target_modules == [
        "all-linear"
    ]
