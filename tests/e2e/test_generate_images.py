"""tasks/generate.py on prompts with images: from a run's checkpoint, and from its exported folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.lm import LMRLConfig
from phalanx.config.tasks import ExportConfig, GenerateConfig
from phalanx.run import rl
from phalanx.run.rules import load_config
from phalanx.telemetry.records import read_index
from phalanx.tools.export import Export
from phalanx.tools.generate import Generation
from tests.helpers.checks import refused
from tests.helpers.lm import lm_overrides, tiny_lm
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_vision import picture, tiny_vision


def train(model: Path, folder: Path, prompts: Path) -> None:
    """Two steps, and a validation after them."""
    keys = [
        *lm_overrides(model, folder),
        f"data.train_files=[{prompts}]",
        f"data.val_files=[{prompts}]",
        "data.max_prompt_length=100",
        "rollout.val.temperature=0.8",
        "optim.lr=1e-2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        f"trainer.output_dir={folder / 'out'}",
    ]
    trainer: Any = rl.build(load_config(LMRLConfig, None, keys))
    trainer.fit()


def generate(words: list[str]) -> None:
    Generation(load_config(GenerateConfig, None, words)).run()


def write_prompts(folder: Path) -> Path:
    """Prompts with two images, one, or none."""
    rows = []
    for i, count in enumerate((2, 1, 0, 1)):
        names = [f"{i}_{j}.png" for j in range(count)]
        for j, name in enumerate(names):
            picture(48, 24 + 8 * i, seed=10 * i + j).save(folder / name)
        rows.append({"prompt": "<image>" * count + "read", "images": names})
    file = folder / "shown.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.full
def test_a_checkpoint_and_its_export_write_what_validation_did(tmp_path: Path) -> None:
    model, prompts = tiny_vision(tmp_path / "model", "qwen3_vl"), write_prompts(tmp_path)
    run_ranks(train, 1, model, tmp_path / "run", prompts)
    out, export = tmp_path / "run" / "out", tmp_path / "export"
    (kept,) = (out / "samples").glob("*/step_000002")
    Export(load_config(ExportConfig, None, [f"checkpoint={out}", f"output_dir={export}"])).run()
    settings = ["model.dtype=float32", "temperature=0.8", "max_response_length=12"]
    for source in ([f"checkpoint={out}"], [f"model.path={export}", *settings]):
        file = tmp_path / "texts.jsonl"
        run_ranks(generate, 1, [*source, f"prompt_file={prompts}", f"output_file={file}"])
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["text"] for row in rows] == [row["text"] for row in read_index(kept, "text")]
        assert rows[0]["images"] == [f"prompt_file: {prompts}:1: images[{j}]" for j in (0, 1)]
        assert len({row["text"] for row in rows}) == 4 and "images" not in rows[2]
    # the whole model is loaded even for a prompt without images
    run_ranks(generate, 1, [f"checkpoint={out}", "prompts=[read]", f"output_file={file}"])
    assert len(file.read_text().splitlines()) == 1


def test_models_that_read_no_images_are_refused(tmp_path: Path) -> None:
    model, prompts = tiny_lm(tmp_path / "model"), write_prompts(tmp_path)
    words = [f"model.path={model}", f"prompt_file={prompts}"]
    with refused(
        f"prompt_file: {prompts}:1 has images, and model.path: '{model}' is a Qwen3ForCausalLM, which reads none"
    ):
        generate(words)
    with refused(
        f"prompt_file: {prompts}:1 has images, which block diffusion does not support; leave model.block_size out"
    ):
        generate([*words, "model.block_size=4"])
