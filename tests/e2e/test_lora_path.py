"""model.lora_path: a job starts from a LoRA, which the KL's reference includes, and its export contains both LoRAs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from phalanx.models.linear import NF4, dense, fits, quantize
from phalanx.models.lora import joined
from tests.e2e.test_export import FULL, LORA, distance, export, sample, stock_images
from tests.e2e.test_export_lm import logits_of, stock
from tests.e2e.test_export_lm import train as train_lm
from tests.helpers.jobs import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import load_pipeline
from tests.numerics.test_lora_start import base_of, drawn

KINDS = {
    "lora": LORA,
    "nf4": (*LORA, "model.quantization=nf4"),
    "pissa": (*LORA, "model.lora_init=pissa"),
    "full": FULL,
}


def write_lora(base: Path, folder: Path, target: str) -> Path:
    """Write a LoRA in diffusers' format for a base model."""
    family, config, transformer = base_of(base)
    layers = {}
    for name, (down, up) in drawn(transformer, target, 3, seed=1).items():
        layers[name] = down * 0.1, up * 0.1
    rank, tensors = joined({}, layers)
    folder.mkdir(parents=True)
    family.export_lora(folder, config, tensors, rank, rank)
    return folder


def rounded(blocks: nn.Module) -> None:
    """Give the layers of a model's blocks the weights of bitsandbytes' NF4; see test_linear_nf4."""
    table = torch.tensor([[NF4[byte >> 4], NF4[byte & 15]] for byte in range(256)])
    for layer in filter(fits, blocks.modules()):
        layer.weight.data = dense(torch.float32, quantize(layer.weight.data), table)


def train(base: Path, folder: Path, overrides: tuple[str, ...]) -> dict[str, Tensor]:
    """Two steps of training; returns images of the start, and of the policy and its reference after them."""
    from phalanx.run.rl import build

    trainer = build(
        tiny_config(
            base,
            folder,
            "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=2",
            "actor.ppo_micro_batch_size_per_gpu=2",
            "actor.ema.decay=null",
            "algorithm.kl_loss_coef=0.1",
            "reward.functions=[{name: jpeg_compressibility}]",
            "trainer.save_freq=2",
            *overrides,
        )
    )
    images = {"start": sample(trainer)}
    trainer.fit()
    return images | {"model": sample(trainer), "reference": sample(trainer, "reference")}


@pytest.mark.quick("lora")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_a_lora(kind: str, sd3_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(sd3_folder, tmp_path / "lora", "ff.net.2")
    keys = (*KINDS[kind], f"model.lora_path={lora}")
    (images,) = run_ranks(train, 1, sd3_folder, tmp_path, keys, timeout=150)
    pipeline = load_pipeline(sd3_folder)
    if kind == "nf4":  # both LoRAs are for the rounded weights
        rounded(pipeline.transformer.transformer_blocks)
    assert distance(stock_images(pipeline), images["start"]) > 0.01
    pipeline.load_lora_weights(lora)
    assert distance(stock_images(pipeline), images["start"]) < 1e-4
    assert distance(images["reference"], images["start"]) < 1e-4
    assert distance(images["model"], images["start"]) > 0.01
    folder = export(tmp_path / "export", tmp_path / "out")
    if kind == "full":
        pipeline = load_pipeline(folder)
    else:  # on top of the base model, not of the start
        pipeline.unload_lora_weights()
        pipeline.load_lora_weights(folder)
    assert distance(stock_images(pipeline), images["model"]) < 1e-4


def test_a_resume_with_another_lora_is_refused(sd3_folder: Path, tmp_path: Path) -> None:
    lora = write_lora(sd3_folder, tmp_path / "lora", "ff.net.2")
    run_ranks(train, 1, sd3_folder, tmp_path, (*LORA, f"model.lora_path={lora}", "trainer.total_training_steps=1"))
    with pytest.raises(Exception, match=f"holds lora_path {lora}, this run has None; give another trainer"):
        run_ranks(train, 1, sd3_folder, tmp_path, LORA)


@pytest.mark.quick("null")
@pytest.mark.parametrize("quantization", ["null", "nf4"])
def test_a_language_model_from_an_adapter(quantization: str, lm_folder: Path, tmp_path: Path) -> None:
    """In 4 bits, the adapter is added to the rounded weights, as peft does, and the export is added to these too."""

    def base() -> Any:
        lm = stock(lm_folder)
        if quantization == "nf4":
            rounded(lm.model.layers)
        return lm

    torch.manual_seed(0)
    settings = LoraConfig(r=3, lora_alpha=1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    first = get_peft_model(base(), settings)
    first.save_pretrained(tmp_path / "adapter")
    keys = ("model.lora_rank=2", "model.target_modules=[self_attn.v_proj, q_proj]", "optim.lr=1e-1")
    start = f"model.lora_path={tmp_path / 'adapter'}", f"model.quantization={quantization}"
    (logits,) = run_ranks(train_lm, 1, lm_folder, tmp_path, (*keys, *start))
    assert (logits_of(base()) - logits["start"]).abs().max() > 0.01
    torch.testing.assert_close(logits["start"], logits_of(first), rtol=0, atol=1e-5)
    assert (logits["model"] - logits["start"]).abs().max() > 0.01
    both = export(tmp_path / "both", tmp_path / "out")
    loaded = PeftModel.from_pretrained(base(), both)
    torch.testing.assert_close(logits_of(loaded), logits["model"], rtol=0, atol=1e-5)
    if quantization == "null":  # a merged model is not in 4 bits
        merged = export(tmp_path / "merged", tmp_path / "out", "merge_lora=true")
        torch.testing.assert_close(logits_of(stock(merged)), logits["model"], rtol=0, atol=1e-5)
