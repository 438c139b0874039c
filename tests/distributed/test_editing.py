"""Training a model that edits images: data with images, any layout, validation, sampling, export, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig
from phalanx.config.tasks import EvaluateConfig, ExportConfig, SampleConfig
from phalanx.data.prompts import DataError, load_prompts
from phalanx.run.rules import load_config
from phalanx.tools.evaluate import Evaluation
from phalanx.tools.export import Export
from tests.distributed.test_layouts import assert_same_step
from tests.helpers.checks import refused
from tests.helpers.jobs import fit, one_step, tiny_config
from tests.helpers.pairs import png, write_parquet
from tests.helpers.policies import make_policy, one_rank
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.tiny_edit import INSTRUCTIONS, load_edit_pipeline, photo, write_edits

# how near the image is to the one that it was made of
REWARD = """
import numpy as np
import torch

def kept(images, prompts, metadata):
    sources = [np.asarray(m["image"].pil().resize((32, 32))) for m in metadata]
    return -(images - torch.tensor(np.stack(sources)).permute(0, 3, 1, 2) / 255).abs().mean((1, 2, 3))
"""
LORA = ("model.lora_rank=4", "optim.lr=3e-2")


@pytest.fixture(autouse=True)
def small(datasets_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text encoder sees 9 tokens of an image, not 196."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 96**2)


def configure(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    return tiny_config(
        model,
        folder,
        "model.reference_size=32",
        f"data.train_files=[{write_edits(folder)}]",
        f"reward.functions=[{{path: '{folder / 'reward.py'}:kept'}}]",
        "rollout.micro_batch_size_per_gpu=4",
        *overrides,
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", [LORA, ()], ids=["lora", "full"])
def test_layouts_agree(kind: tuple[str, ...], qwen_edit_folder: Path, tmp_path: Path) -> None:
    cfg = configure(qwen_edit_folder, tmp_path, *kind)
    reference = run_ranks(one_step, 1, cfg)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0
    cfg.parallel.fsdp_size = 2
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.long
def test_layouts_agree_of_several_references(qwen_edit_folder: Path, tmp_path: Path) -> None:
    data = f"data.train_files=[{write_edits(tmp_path / 'two', each=2)}]"
    reward = "reward.functions=[{name: jpeg_incompressibility}]"
    cfg = configure(qwen_edit_folder, tmp_path, *LORA, data, reward, "model.reference_count=2", "optim.eps=1e-3")
    reference = run_ranks(one_step, 1, cfg)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0
    cfg.parallel.fsdp_size = 2
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    cfg.parallel.ulysses_sequence_parallel_size = 2
    for part in run_ranks(one_step, 2, cfg):
        torch.testing.assert_close(part["images"], reference[0]["images"], rtol=0, atol=1e-5)


def test_other_numbers_of_references_are_refused(qwen_edit_folder: Path, qwen_folder: Path, tmp_path: Path) -> None:
    """Before any training, in either kind of file, of training and validation."""
    two = write_edits(tmp_path / "two", each=2)
    rows = [
        {"prompt": text, "image": [{"bytes": png(photo(i)), "path": None}] * (1 + i % 2)}
        for i, text in enumerate("abc")
    ]
    mixed = write_parquet(tmp_path / "mixed.parquet", rows)
    for keys, said in (
        ([f"data.train_files=[{two}]"], f"data.train_files: {two}:1: image holds 2 images; model.reference_count is 1"),
        ([f"data.val_files=[{two}]"], f"data.val_files: {two}:1: image holds 2 images; model.reference_count is 1"),
        (["model.reference_count=2"], "image holds 1 images; model.reference_count is 2"),
        ([f"data.train_files=[{mixed}]"], "mixed.parquet, row 1: image holds 2 images; model.reference_count is 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            built_here(configure(qwen_edit_folder, tmp_path / "job", *keys))
    said = "model.reference_count: 2, but QwenImagePipeline takes no image per row; set it to 1"
    with refused(said, ConfigError):
        built_here(tiny_config(qwen_folder, tmp_path / "plain", "model.reference_count=2"))
    words = [f"model.path={qwen_edit_folder}", f"data.val_files=[{two}]", "reward.functions=[{name: aesthetic}]"]
    with refused(f"data.val_files: {two}:1: image holds 2 images; model.reference_count is 1", ValueError):
        Evaluation(load_config(EvaluateConfig, None, words))


def test_images_in_parquet_are_the_same(tmp_path: Path) -> None:
    rows = [{"prompt": text, "image": png(photo(i))} for i, text in enumerate(INSTRUCTIONS)]
    files = write_edits(tmp_path), write_parquet(tmp_path / "edits.parquet", rows)
    one, other = (load_prompts([str(file)], "data.train_files", ("image",)) for file in files)
    digests = [row.meta["image"].digest for row in one]
    assert digests == [row.meta["image"].digest for row in other] and len(set(digests)) == 4
    assert one[0].meta["image"].pil().tobytes() == photo(0).tobytes()


def trained(cfg: FlowRLConfig) -> Tensor:
    from phalanx.run.rl import build

    trainer = build(cfg)
    trainer.fit()
    parts: list[Tensor] = []
    with trainer.collector.rollout.awake():
        prompts = trainer.job.sampling.val_sets["edits"]
        trainer.collector.rollout.sample_validation(prompts, each=lambda images, _: parts.append(images))
    return torch.cat(parts)


@pytest.mark.full
def test_a_run_from_validation_to_export(
    qwen_edit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks; the LoRA makes the same images in the stock pipeline."""
    cfg = configure(
        qwen_edit_folder,
        tmp_path,
        *LORA,
        f"data.val_files=[{tmp_path / 'edits.jsonl'}]",
        "rollout.val.num_inference_steps=2",
        "trainer.test_freq=1",
        "trainer.save_freq=2",
        "parallel.fsdp_size=2",
        f"data.embeds_cache_dir={tmp_path / 'embeds'}",
        "actor.ema.decay=null",
    )
    images = torch.cat(run_ranks(trained, 2, cfg, timeout=240))
    folder = tmp_path / "out" / "images" / "edits" / "step_000002"
    rows = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == INSTRUCTIONS and (folder / "grid.png").is_file()
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["val/edits/reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 4, rel=1e-5)

    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={tmp_path / 'lora'}"])).run()
    assert any("lora_A" in name for name in load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors"))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 32**2)
    pipeline = load_edit_pipeline(qwen_edit_folder)
    pipeline.load_lora_weights(tmp_path / "lora")
    from phalanx.distributed.seed import fold_in, normal
    from phalanx.models.flow.references import to_ratio

    for i, text in enumerate(INSTRUCTIONS):
        noise = normal((16, 16), fold_in(cfg.rollout.val.seed, 0, i, 0, "init"), torch.device("cpu"))[None]
        made = pipeline(
            to_ratio(photo(i), 32, 32),
            text,
            negative_prompt=" ",
            true_cfg_scale=3.0,
            height=32,
            width=32,
            num_inference_steps=2,
            latents=noise,
            output_type="pt",
        ).images
        torch.testing.assert_close(images[i], made[0], rtol=0, atol=1e-4)


def sampled(overrides: list[str]) -> None:
    from phalanx.tools.sample import Generator

    Generator(load_config(SampleConfig, None, overrides)).run()


def test_sampling_from_a_file(qwen_edit_folder: Path, tmp_path: Path) -> None:
    size = ["height=32", "width=48", "num_inference_steps=2", "model.reference_size=32", "model.dtype=float32"]
    base = [f"model.path={qwen_edit_folder}", f"output_dir={tmp_path / 'made'}", *size]
    run_ranks(sampled, 1, [*base, f"prompt_file={write_edits(tmp_path)}"])
    assert Image.open(tmp_path / "made" / "00003.png").size == (48, 32)
    with pytest.raises(
        RankError, match="prompts: the model takes an image with each text; give prompt_file, with a column image"
    ):
        run_ranks(sampled, 1, [*base, "prompts=[make it red]"])


# -- mistakes ---------------------------------------------------------------------------------------------------------


def built(cfg: Any) -> None:
    from phalanx.run import flow_matching
    from phalanx.run.rl import build

    (build if isinstance(cfg, FlowRLConfig) else flow_matching.build)(cfg)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "make it red\n", "{} is plain text; images (image) come in the other formats"),
        ("a.jsonl", '{"prompt": "x"}\n', "{}:1: no 'image'; it has prompt"),
    ],
)
def test_data_without_images(name: str, text: str, said: str, qwen_edit_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    for key in ("train_files", "val_files"):
        with refused(f"data.{key}: " + said.format(file), DataError):
            built_here(configure(qwen_edit_folder, tmp_path / "job", f"data.{key}=[{file}]"))


def built_here(cfg: Any) -> None:
    """Build the job in this process, whose world is one rank."""
    from phalanx.run.world import stop_world

    try:
        built(cfg)
    finally:
        stop_world()


def test_an_image_that_is_gone(qwen_edit_folder: Path, tmp_path: Path) -> None:
    cfg = configure(qwen_edit_folder, tmp_path)
    (tmp_path / "2.png").unlink()
    with pytest.raises(RankError, match=r"data.train_files: \S*edits.jsonl:3: image: the image cannot be read: "):
        run_ranks(fit, 2, cfg)


def test_supervised_flow_matching_is_refused(qwen_edit_folder: Path, tmp_path: Path) -> None:
    cfg = load_config(
        FlowMatchingTaskConfig,
        None,
        [
            f"model.path={qwen_edit_folder}",
            f"data.train_files=[{write_edits(tmp_path)}]",
            "trainer.total_training_steps=1",
        ],
    )
    with refused(
        f"model.path: '{qwen_edit_folder}' takes an image with each text; flow matching trains only from texts",
        ConfigError,
    ):
        built(cfg)


def test_vllm_omni_has_no_such_model(qwen_edit_folder: Path) -> None:
    from phalanx.zoo.engines.vllm_omni import _pipeline_class

    with (
        one_rank() as world,
        refused(
            "rollout.engine: vllm_omni samples from StableDiffusion3Pipeline and QwenImagePipeline, not "
            "QwenImageEditPlusPipeline; set rollout.engine=policy"
        ),
    ):
        _pipeline_class(make_policy(world, qwen_edit_folder))


def test_the_plan_counts_the_longer_sequence(qwen_edit_folder: Path, qwen_folder: Path, tmp_path: Path) -> None:
    from phalanx.models.flow.registry import family_of
    from phalanx.tools.plan import plan_job
    from phalanx.tools.plan.blueprint import family_name
    from phalanx.tools.plan.jobs import planned
    from phalanx.tools.plan.layout import Cluster

    def of(folder: Path, *overrides: str) -> Any:
        cfg = tiny_config(folder, tmp_path, *overrides)
        cfg.model.family = family_name(cfg.model)
        return cfg, planned(cfg, Cluster(1, 1))

    _, plain = of(qwen_folder)
    _, small = of(qwen_edit_folder, "model.reference_size=32")
    cfg, large = of(qwen_edit_folder, "model.reference_size=128")
    assert "  update " in plan_job(cfg, {})
    assert plain.flops < small.flops < large.flops
    # 16 tokens to be made, 256 of the reference, 32 of the prompt, 9 that the encoder makes of 96 px, the template
    model = large.policy.model
    assert model.most_tokens(32, 32, 32) == 32 + 3 * 3 + 16
    assert {name: t.shape for name, t in model.embeds_like(40, 32, 32).items()} == {
        "prompt_embeds": (40, 64),
        "reference": (256, 16),
    }
    assert model.image_shapes(32, 32) == [(1, 4, 4), (1, 16, 16)]
    assert family_of(cfg.model).pipeline_class == "QwenImageEditPlusPipeline"
