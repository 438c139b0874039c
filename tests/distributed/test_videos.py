"""Training on videos: the same step on any ranks, validations as mp4, an export that stock diffusers plays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from torch import Tensor

from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig
from phalanx.config.tasks import ExportConfig, SampleConfig
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.telemetry.records import read_index
from phalanx.tools.export import Export
from phalanx.tools.sample import Generator
from phalanx.types import Prompt
from tests.distributed.test_layouts import assert_same_step, together
from tests.helpers.checks import refused
from tests.helpers.comfy import add_as_comfy, wan_name
from tests.helpers.jobs import PROMPTS, algorithm_config, base_overrides, one_step, tiny_config
from tests.helpers.pairs import write_jsonl
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import load_pipeline

FRAMES = 5
REWARD = """
def motion(videos, prompts, metadata):
    assert videos.shape[1] == 5, videos.shape
    return (videos[:, 1:] - videos[:, :-1]).abs().mean(dim=(1, 2, 3, 4))
"""


def configure(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    """Frames that compress badly, and that move."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    motion = f"{{path: '{folder / 'reward.py'}:motion', weight: 100}}"
    return tiny_config(
        model,
        folder,
        f"rollout.num_frames={FRAMES}",
        "rollout.micro_batch_size_per_gpu=4",
        f"reward.functions=[{{name: jpeg_incompressibility, frames: 3}}, {motion}]",
        *overrides,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["flowgrpo", "diffusion_nft"])
@pytest.mark.parametrize("family", ["hunyuan", "ltx2"])
def test_layouts_agree(family: str, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(f"{family}_folder")
    keys = (f"rollout.num_frames={FRAMES}", "model.lora_rank=4", "algorithm.kl_loss_coef=0.01")
    keys = (*keys, "rollout.micro_batch_size_per_gpu=4")
    make = tiny_config if name == "flowgrpo" else lambda *args: algorithm_config(*args[:2], name, *args[2:])
    one = run_ranks(one_step, 1, make(folder, tmp_path, *keys))
    assert one[0]["images"].shape == (16, FRAMES, 3, 32, 32)
    assert one[0]["row"]["actor/updates_skipped"] == 0 and one[0]["row"]["actor/grad_norm"] > 0
    if name == "flowgrpo":
        assert one[0]["row"]["actor/first_ratio_error"] == 0
    cfg = make(folder, tmp_path, *keys, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.full
@pytest.mark.seldom("full")
@pytest.mark.parametrize("kind", [("model.lora_rank=4",), ()], ids=["lora", "full"])
def test_shards_and_replicas_agree(kind: tuple[str, ...], wan_folder: Path, tmp_path: Path) -> None:
    cfg = configure(wan_folder, tmp_path, *kind)
    reference = run_ranks(one_step, 1, cfg)
    assert together(reference, "images").shape == (16, FRAMES, 3, 32, 32)
    assert together(reference, "latents").shape == (16, 3, 4, 2, 8, 8)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0
    for size in (1, 2):
        cfg.parallel.fsdp_size = size
        assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.full
def test_mixed_precision(wan_folder: Path, tmp_path: Path) -> None:
    one, two = (
        run_ranks(
            one_step,
            ranks,
            configure(wan_folder, tmp_path, "model.dtype=bfloat16", "model.lora_rank=4", f"parallel.fsdp_size={ranks}"),
        )
        for ranks in (1, 2)
    )
    assert torch.equal(together(one, "images"), together(two, "images"))
    assert one[0]["row"]["actor/grad_norm"] == pytest.approx(two[0]["row"]["actor/grad_norm"], rel=2e-2)
    assert one[0]["row"]["actor/first_ratio_error"] == two[0]["row"]["actor/first_ratio_error"] == 0.0


def train(cfg: FlowRLConfig) -> Tensor:
    """All of a run; then videos of the trained policy, two of the held-out prompts'."""
    from phalanx.run.rl import build

    trainer, parts = build(cfg), []
    trainer.fit()
    with trainer.collector.rollout.awake():
        held_out = [Prompt(text, i, {}) for i, text in enumerate(PROMPTS[:2])]
        trainer.collector.rollout.sample_validation(held_out, each=lambda videos, _: parts.append(videos))
    return torch.cat(parts)


@pytest.fixture(scope="module")
def trained(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """The folder of a finished run, and its policy's videos."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "held_out.txt").write_text("\n".join(PROMPTS[:3]) + "\n")
    cfg = configure(
        wan_folder,
        folder,
        "model.lora_rank=4",
        "optim.lr=3e-2",
        f"data.val_files=[{folder / 'held_out.txt'}]",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        "trainer.logger=[tensorboard]",
    )
    [videos, _] = run_ranks(train, 2, cfg, timeout=150)
    return folder / "out", videos


def frames(file: Path) -> int:
    with av.open(str(file)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_validations_are_videos(trained: tuple[Path, Tensor]) -> None:
    folder = trained[0] / "images" / "held_out" / "step_000002"
    rows = read_index(folder)
    assert [(row["prompt"], row["video"]) for row in rows] == [(t, f"0000{i}.mp4") for i, t in enumerate(PROMPTS[:3])]
    assert [frames(folder / row["video"]) for row in rows] == [FRAMES] * 3
    assert frames(folder / "grid.mp4") == FRAMES and (folder / "grid.png").is_file()


def stock_videos(pipeline: Any) -> Tensor:
    """The stock pipeline's videos [2, F, 3, H, W] from the noise that validation starts from, by Euler's steps."""
    from diffusers import UniPCMultistepScheduler

    c = pipeline.scheduler.config
    pipeline.scheduler = UniPCMultistepScheduler.from_config(c, solver_order=1, disable_corrector=list(range(4)))
    noise = [normal((4, 2, 8, 8), fold_in(1234, 0, i, 0, "init"), torch.device("cpu")) for i in range(2)]
    return pipeline(
        PROMPTS[:2],
        negative_prompt=["", ""],
        height=32,
        width=32,
        num_frames=FRAMES,
        num_inference_steps=4,
        guidance_scale=3.0,
        max_sequence_length=32,
        latents=torch.stack(noise),
        output_type="pt",
    ).frames


def test_the_exported_lora_is_played_by_stock_diffusers(
    trained: tuple[Path, Tensor], wan_folder: Path, tmp_path: Path
) -> None:
    folder, videos = trained
    Export(load_config(ExportConfig, None, [f"checkpoint={folder}", f"output_dir={tmp_path / 'export'}"])).run()
    pipeline = load_pipeline(wan_folder)
    assert (stock_videos(pipeline) - videos).abs().max() > 0.05
    pipeline.load_lora_weights(tmp_path / "export")
    torch.testing.assert_close(stock_videos(pipeline), videos, rtol=0, atol=1e-4)
    pipeline.unload_lora_weights()
    add_as_comfy(pipeline.transformer, tmp_path / "export", wan_name)
    torch.testing.assert_close(stock_videos(pipeline), videos, rtol=0, atol=1e-4)


def run_sample(overrides: list[str]) -> None:
    Generator(load_config(SampleConfig, None, overrides)).run()


@pytest.mark.long
def test_a_checkpoint_is_sampled_as_mp4(trained: tuple[Path, Tensor], tmp_path: Path) -> None:
    wanted = [f"checkpoint={trained[0]}", f"prompts=['{PROMPTS[3]}']", f"output_dir={tmp_path}"]
    run_ranks(run_sample, 1, wanted)
    (row,) = read_index(tmp_path)
    assert row["file"] == "00000.mp4" and frames(tmp_path / "00000.mp4") == frames(tmp_path / "grid.mp4") == FRAMES
    run_ranks(run_sample, 1, [*wanted, "num_frames=9"])
    assert frames(tmp_path / "00000.mp4") == 9
    run_ranks(run_sample, 1, [*wanted, "num_frames=1"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00000.png", "grid.png", "index.jsonl"]


def test_flow_matching_refuses_videos(wan_folder: Path, tmp_path: Path) -> None:
    overrides = [o for o in base_overrides(wan_folder, tmp_path) if not o.startswith(("actor.", "algorithm."))]
    with refused("rollout.num_frames: 5: flow matching trains on images; set it to 1"):
        load_config(FlowMatchingTaskConfig, None, [*overrides, "rollout.num_frames=5"])


def fit(make: Callable[[Any], Any], cfg: Any) -> None:
    make(cfg).fit()


@pytest.mark.parametrize("of", ["flow matching", "dataset"])
def test_jobs_that_train_on_images_validate_with_videos(of: str, wan_folder: Path, tmp_path: Path) -> None:
    from phalanx.run import flow_matching
    from phalanx.run.rl import build

    (tmp_path / "held_out.txt").write_text("\n".join(PROMPTS[:2]) + "\n")
    (tmp_path / "reward.py").write_text(REWARD)
    videos = [
        f"data.val_files=[{tmp_path / 'held_out.txt'}]",
        f"rollout.val.num_frames={FRAMES}",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=1",
        "trainer.logger=[tensorboard]",
    ]
    pairs = write_jsonl(tmp_path)
    refused = ("algorithm.", "reward.", "data.train_files", *(["actor."] if of == "flow matching" else []))
    base = [o for o in base_overrides(wan_folder, tmp_path) if not o.startswith(refused)]
    if of == "dataset":
        own = ["rollout.engine=dataset", "rollout.n=2", "rollout.guidance_scale=1", "algorithm.name=diffusion_dpo"]
        own += [f"data.train_files=[{pairs}]", "algorithm.beta=100", "reward.functions=[{name: preferred}]"]
        run_ranks(fit, 1, build, load_config(FlowRLConfig, None, [*base, *own, *videos]))
    else:
        pictures = tmp_path / "pictures.jsonl"
        rows = [json.loads(line) for line in pairs.read_text().splitlines()]
        pictures.write_text("".join(json.dumps({"image": r["chosen"], "prompt": r["prompt"]}) + "\n" for r in rows))
        own = [f"data.train_files=[{pictures}]", "flow_matching.micro_batch_size_per_gpu=2"]
        own += [f"reward.functions=[{{path: '{tmp_path / 'reward.py'}:motion'}}]"]
        run_ranks(fit, 1, flow_matching.build, load_config(FlowMatchingTaskConfig, None, [*base, *own, *videos]))
    folder = tmp_path / "out" / "images" / "held_out" / "step_000001"
    assert [frames(folder / row["video"]) for row in read_index(folder)] == [FRAMES] * 2
