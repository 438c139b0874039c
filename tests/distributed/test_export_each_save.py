"""After each save the LoRA lies in export/, as `phalanx export` writes it, for stock peft and diffusers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from phalanx.config.tasks import ExportConfig
from phalanx.run.exporting import exports_of
from phalanx.run.kind import kind_of
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from tests.distributed.test_joint import fit as fit_joint
from tests.distributed.test_joint import joint_config
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks

SAVES = ("trainer.export_each_save=true", "trainer.save_freq=1", "trainer.max_checkpoints=1")
LORA = "model.lora_rank=4"


def files(folder: Path) -> dict[str, Any]:
    """The contents of a folder by file; those of safetensors, whose metadata have no order, as tensors and metadata."""
    contents: dict[str, Any] = {}
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                contents[name] = tensors.metadata(), {key: t.tolist() for key, t in load_file(file).items()}
        elif file.is_file():
            contents[name] = file.read_bytes()
    return contents


def assert_as_exported(run: Path, each: Path, *keys: str) -> None:
    """The folder of the newest save has the files of `phalanx export`, which may add others that describe them."""
    place = run / "by_command"
    Export(load_config(ExportConfig, None, [f"checkpoint={run}", f"output_dir={place}", *keys])).run()
    written, wanted = files(each), files(place)
    assert written and all(wanted[name] == content for name, content in written.items())
    assert any(name.endswith(".safetensors") for name in written)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_language_model(ranks: int, lm_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, *SAVES, LORA, f"parallel.fsdp_size={ranks}", "actor.ema.decay=0.5")
    run_ranks(fit, ranks, cfg)
    exports = tmp_path / "out" / "export"
    # those of pruned checkpoints stay
    assert sorted(folder.name for folder in exports.iterdir()) == ["step_000001", "step_000002"]
    assert_as_exported(tmp_path / "out", exports / "step_000002")
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in sorted(exports.iterdir()))
    assert one.keys() == two.keys() and any(not torch.equal(one[name], two[name]) for name in one)
    base = AutoModelForCausalLM.from_pretrained(lm_folder, dtype=torch.float32)
    ids = torch.arange(12)[None]
    plain = base(ids).logits
    assert not torch.equal(PeftModel.from_pretrained(base, exports / "step_000002")(ids).logits, plain)


@pytest.mark.full
def test_a_flow_model_from_a_lora_and_again_from_the_start(sd3_folder: Path, tmp_path: Path) -> None:
    run_ranks(fit, 2, tiny_config(sd3_folder, tmp_path / "first", *SAVES, LORA))
    first = tmp_path / "first" / "out" / "export" / "step_000002"
    keys = (*SAVES, LORA, f"model.lora_path={first}")
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *keys))
    each = tmp_path / "out" / "export" / "step_000002"
    assert_as_exported(tmp_path / "out", each)
    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3_folder, text_encoder_3=None, tokenizer_3=None)
    pipeline.load_lora_weights(each)
    before = files(each)
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *keys, "trainer.resume=never", "trainer.seed=1"))
    assert files(each).keys() == before.keys() and files(each) != before


@pytest.mark.full
def test_both_policies_of_a_joint_run(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    keys = [f"{part}.model.lora_rank=4" for part in ("writer", "painter")]
    run_ranks(fit_joint, 2, joint_config(lm_folder, sd3_folder, tmp_path, *SAVES, *keys))
    for part in ("writer", "painter"):
        each = tmp_path / "out" / "export" / part
        assert sorted(folder.name for folder in each.iterdir()) == ["step_000001", "step_000002"]
    assert_as_exported(tmp_path / "out", each / "step_000002", "policy=painter")


def test_a_failure_is_a_warning_and_a_mask_token_is_refused_at_the_start(
    lm_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, *SAVES, LORA)
    export = exports_of(cfg.trainer, {"": kind_of(cfg)})
    assert export is not None
    with caplog.at_level(logging.WARNING):
        run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path, *SAVES, LORA, "trainer.export_each_save=false"))
        checkpoint = tmp_path / "out" / "checkpoints" / "step_000002"
        (tmp_path / "out" / "export").write_text("a file in the way")
        export(checkpoint)
    (message,) = (record.getMessage() for record in caplog.records if "exported" in record.getMessage())
    assert message.startswith(f"trainer.export_each_save: {checkpoint} was not exported: ") and "\n" not in message
    masked = tiny_lm_config(lm_folder, tmp_path, *SAVES, LORA, "model.block_size=4", "data.max_response_length=8")
    with pytest.raises(ValueError, match=r"^merge_lora: false would omit the mask token"):
        exports_of(masked.trainer, {"": kind_of(masked)})
    assert exports_of(tiny_lm_config(lm_folder, tmp_path).trainer, {}) is None
