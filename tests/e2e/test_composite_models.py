"""Composite models with a vision tower: only the language model is trained, and exported with the other parts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from phalanx.config.tasks import ExportConfig
from phalanx.models.lm.load_folder import load_model, read_lora
from phalanx.models.lora import start_from_lora
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks

TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT |= {"image_size": 28, "patch_size": 14}
QWEN_TEXT = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16}
QWEN_TEXT |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
QWEN_SIGHT = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
LLAMA_SIGHT = SIGHT | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
# the configurations of the text part and of the vision tower, and other keys
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (TEXT, SIGHT, {"mm_tokens_per_image": 4}),
    "Qwen3_5": (TEXT | QWEN_TEXT, QWEN_SIGHT, {}),
    "Mistral3": (TEXT | {"model_type": "mistral"}, SIGHT | {"model_type": "pixtral"}, {}),
    "Llama4": (TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 96}, LLAMA_SIGHT, {}),
}
IDS = torch.arange(3, 60).reshape(3, 19)


def composite(kind: str, tokenizer: Path, folder: Path) -> Path:
    """Write the folder of a tiny random model of the same class as published ones."""
    text, sight, more = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=sight, **more)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def train(model: Path, folder: Path, *overrides: str) -> tuple[Tensor, list[str]]:
    """Train; returns the logits of the policy, and the names of weights that an engine gets."""
    from phalanx.run.rl import build

    keys = ("data.max_prompt_length=60", "trainer.save_freq=2", "trainer.total_training_steps=2", "optim.lr=1e-2")
    trainer = build(tiny_lm_config(model, folder, *keys, *overrides))
    trainer.fit()
    policy: Any = trainer.policy
    with torch.no_grad(), policy.unsharded():
        logits = policy.trained.module(input_ids=IDS).logits
    return logits, [name for name, _ in policy.engine_weights()]


def export(run: Path, folder: Path, *overrides: str) -> Path:
    Export(load_config(ExportConfig, None, [f"checkpoint={run}", f"output_dir={folder}", *overrides])).run()
    return folder


def whole_of(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.full
@pytest.mark.quick("Gemma3", "Qwen3_5")
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_part_is_trained_and_put_back(kind: str, lm_folder: Path, tmp_path: Path) -> None:
    base = composite(kind, lm_folder, tmp_path / "base")
    ((trained, names),) = run_ranks(train, 1, base, tmp_path)
    assert (trained - logits_of(whole_of(base))).abs().max() > 0.01
    folder = export(tmp_path / "out", tmp_path / "export")
    assert torch.allclose(logits_of(whole_of(folder)), trained, atol=1e-5)
    before, after = tensors(base), tensors(folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        same = torch.equal(tensor, after[name])
        assert same or ("vision" not in name and "visual" not in name and "projector" not in name), name
    assert json.loads((folder / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert (folder / "preprocessor_config.json").is_file()
    # an engine with the whole model gets weights under the whole model's names
    assert set(names) <= set(whole_of(base).state_dict())


@pytest.mark.parametrize("kind", ["Gemma3"])
def test_a_lora_goes_on_the_whole(kind: str, lm_folder: Path, tmp_path: Path) -> None:
    """Among the layers with these names, only those of the language model get a LoRA."""
    base = composite(kind, lm_folder, tmp_path / "base")
    ((trained, _),) = run_ranks(train, 1, base, tmp_path, "model.lora_rank=4", "optim.lr=1e-1")
    adapter = PeftModel.from_pretrained(whole_of(base), export(tmp_path / "out", tmp_path / "adapter"))
    assert (trained - logits_of(whole_of(base))).abs().max() > 0.01
    assert torch.allclose(logits_of(adapter), trained, atol=1e-4)
    assert not [name for name, _ in adapter.named_modules() if "vision" in name and "lora" in name]
    merged = export(tmp_path / "out", tmp_path / "merged", "merge_lora=true")
    assert torch.allclose(logits_of(whole_of(merged)), trained, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("Gemma3", "model.language_model."),
        ("Gemma3", "model."),  # names of the text part alone
        ("Mistral3", "language_model.model."),  # before transformers 4.52
    ],
)
def test_training_starts_from_a_lora_of_the_whole(kind: str, prefix: str, lm_folder: Path, tmp_path: Path) -> None:
    base, adapter = composite(kind, lm_folder, tmp_path / "base"), tmp_path / "adapter"
    targets = r".*language_model\..*\.(q_proj|down_proj)"
    torch.manual_seed(1)
    lora = get_peft_model(whole_of(base), LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
    lora.save_pretrained(adapter)
    file = adapter / "adapter_model.safetensors"
    named = {}
    for name, tensor in load_file(file).items():
        named[name.replace("model.language_model.", prefix)] = tensor
    assert any(name.startswith(f"base_model.model.{prefix}layers.1.") for name in named)
    save_file(named, file)
    model = load_model(tiny_lm_config(base, tmp_path).model, torch.float32, chunk=1)
    before = logits_of(model.lm)
    start_from_lora(model, str(adapter), read_lora)
    wanted = logits_of(lora)
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(logits_of(model.lm), wanted, rtol=0, atol=1e-4)


def test_a_lora_of_the_vision_tower_is_refused(lm_folder: Path, tmp_path: Path) -> None:
    base = composite("Gemma3", lm_folder, tmp_path / "base")
    get_peft_model(whole_of(base), LoraConfig(r=3, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    model = load_model(tiny_lm_config(base, tmp_path).model, torch.float32, chunk=1)
    with pytest.raises(
        ValueError, match=r"^model\.lora_path: '.*' is of another model, or of parts that are not trained: "
    ):
        start_from_lora(model, str(tmp_path / "adapter"), read_lora)


def test_the_text_part_computes_what_the_whole_does(
    lm_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = composite("Gemma3", lm_folder, tmp_path / "base")
    with caplog.at_level(logging.INFO):
        model = load_model(tiny_lm_config(folder, tmp_path).model, torch.float32, chunk=1)
    assert torch.equal(logits_of(model.lm), logits_of(whole_of(folder)))
    line = "only the text part of a Gemma3ForConditionalGeneration, a Gemma3ForCausalLM, is trained"
    assert line in caplog.messages


def test_a_text_part_without_a_class_is_refused(lm_folder: Path, tmp_path: Path) -> None:
    folder = composite("Gemma3", lm_folder, tmp_path / "base")
    settings = transformers.Qwen3VLConfig(text_config=TEXT, architectures=["Qwen3VLForConditionalGeneration"])
    settings.save_pretrained(folder)
    with pytest.raises(ValueError) as error:
        load_model(tiny_lm_config(folder, tmp_path).model, torch.float32, chunk=1)
    assert str(error.value) == (
        f"model.path: '{folder}' does not load: the text part of a Qwen3VLForConditionalGeneration, a qwen3_vl_text, has "
        "no causal language model in transformers"
    )
