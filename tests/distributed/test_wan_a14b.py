"""Training Wan 2.2 A14B on shards: all ranks run the same transformers, exports are read by stock diffusers and ComfyUI;
and Wan's image to video.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.flow import FlowRLConfig
from phalanx.config.tasks import ExportConfig
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.types import Prompt
from tests.distributed.test_layouts import assert_same_step
from tests.distributed.test_resume import stop_after
from tests.helpers.checks import refused
from tests.helpers.comfy import add_as_comfy, wan_name
from tests.helpers.jobs import PROMPTS, algorithm_config, one_step, rows, tiny_config
from tests.helpers.policies import make_policy, one_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import load_pipeline, tiny_wan
from tests.helpers.tiny_edit import write_edits
from tests.helpers.tiny_i2v import tiny_wan_i2v

FRAMES = 5
LORA = ("model.lora_rank=4", "optim.lr=3e-2")
VIDEO = (f"rollout.num_frames={FRAMES}", "rollout.micro_batch_size_per_gpu=4")
# two of four steps, one on each side of the boundary
BOTH = (*VIDEO, "rollout.sde_window_range=[1,3]", "rollout.guidance_scale_2=2")


@pytest.mark.long
@pytest.mark.parametrize("kind", [(*LORA, "algorithm.kl_loss_coef=0.04"), ()], ids=["lora", "full"])
def test_layouts_agree(kind: tuple[str, ...], a14b_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(a14b_folder, tmp_path, *BOTH, *kind)
    reference = run_ranks(one_step, 1, cfg)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0
    cfg.parallel.fsdp_size = 2
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.full
@pytest.mark.seldom("lora-1", "full-1", "full-2")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [LORA, ()], ids=["lora", "full"])
def test_levels_that_differ_between_ranks(kind: tuple[str, ...], size: int, a14b_folder: Path, tmp_path: Path) -> None:
    """A micro-batch may have rows for one of the transformers on one rank only."""
    levels = ("algorithm.level_distribution=uniform", "algorithm.train_timesteps=1", "algorithm.kl_loss_coef=0.01")
    cfg = algorithm_config(a14b_folder, tmp_path, "diffusion_nft", *VIDEO, *levels, *kind)
    cfg.actor.ppo_micro_batch_size_per_gpu = 1
    reference = run_ranks(one_step, 1, cfg)
    names = {name.split(".")[0] for name in reference[0]["weights"]}
    assert names == {"transformer", "transformer_2"}
    cfg.parallel.fsdp_size = size
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)


def i2v(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    folder.mkdir(parents=True, exist_ok=True)
    files = (f"data.train_files=[{write_edits(folder)}]", "data.max_prompt_length=512")
    return tiny_config(model, folder, *VIDEO, "model.family=wan_i2v", *files, *LORA, *overrides)


@pytest.mark.full
@pytest.mark.seldom("2.1", "5b")
@pytest.mark.parametrize("kind", ["2.1", "2.2", "5b"])
def test_image_to_video_on_any_ranks(kind: str, datasets_cache: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if kind == "5b":
        tiny_wan(folder, multistep=False, per_token=True)
    else:
        tiny_wan_i2v(folder, sees=kind == "2.1", two=kind == "2.2")
    cfg = i2v(folder, tmp_path, *(BOTH if kind == "2.2" else ()))
    reference = run_ranks(one_step, 1, cfg)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0
    cfg.parallel.fsdp_size = 2
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)


def trained(cfg: FlowRLConfig) -> Tensor:
    """A whole run; then videos of two prompts by the trained policy."""
    from phalanx.run.rl import build

    trainer, parts = build(cfg), []
    trainer.fit()
    with trainer.collector.rollout.awake():
        held_out = [Prompt(text, i, {}) for i, text in enumerate(PROMPTS[:2])]
        trainer.collector.rollout.sample_validation(held_out, each=lambda videos, _: parts.append(videos))
    return torch.cat(parts)


def stock_videos(pipeline: Any) -> Tensor:
    """The stock pipeline's videos [2, F, 3, H, W] from the noise that validation starts from."""
    noise = [normal((4, 2, 8, 8), fold_in(1234, 0, i, 0, "init"), torch.device("cpu")) for i in range(2)]
    return pipeline(
        PROMPTS[:2],
        negative_prompt=["", ""],
        height=32,
        width=32,
        num_frames=FRAMES,
        num_inference_steps=4,
        guidance_scale=3.0,
        guidance_scale_2=2.0,
        max_sequence_length=32,
        latents=torch.stack(noise),
        output_type="pt",
    ).frames


@pytest.mark.long
@pytest.mark.parametrize("kind", [LORA, ("model.gradient_checkpointing=true",)], ids=["lora", "full"])
def test_a_run_resumes_and_its_export_is_played_by_stock_diffusers(
    kind: tuple[str, ...], a14b_folder: Path, tmp_path: Path
) -> None:
    cfg = tiny_config(
        a14b_folder, tmp_path, *BOTH, *kind, "trainer.save_freq=1", "actor.ema.decay=0.5", "parallel.fsdp_size=2"
    )
    [videos, _] = run_ranks(trained, 2, cfg, timeout=150)
    wanted = rows(tmp_path / "out")
    stop_after(tmp_path, 1)
    [again, _] = run_ranks(trained, 2, cfg, timeout=150)
    assert rows(tmp_path / "out") == wanted and torch.equal(again, videos)

    export = [f"checkpoint={tmp_path / 'out'}", "weights=model", f"output_dir={tmp_path / 'export'}"]
    Export(load_config(ExportConfig, None, export)).run()
    pipeline = load_pipeline(a14b_folder)
    assert (stock_videos(pipeline) - videos).abs().max() > 1e-3
    if kind != LORA:
        pipeline = load_pipeline(tmp_path / "export")
        torch.testing.assert_close(stock_videos(pipeline), videos, rtol=0, atol=1e-4)
        return
    second = "pytorch_lora_weights_2.safetensors"
    files = sorted(file.name for file in (tmp_path / "export").iterdir())
    assert files == ["README.md", "curves.png", "pytorch_lora_weights.safetensors", second]
    pipeline.load_lora_weights(tmp_path / "export")
    pipeline.load_lora_weights(tmp_path / "export", weight_name=second, load_into_transformer_2=True)
    torch.testing.assert_close(stock_videos(pipeline), videos, rtol=0, atol=1e-4)
    pipeline = load_pipeline(a14b_folder)
    add_as_comfy(pipeline.transformer, tmp_path / "export", wan_name)
    add_as_comfy(pipeline.transformer_2, tmp_path / "export", wan_name, second)
    torch.testing.assert_close(stock_videos(pipeline), videos, rtol=0, atol=1e-4)
    # it is what another run begins with
    with one_rank() as world:
        begun = make_policy(world, a14b_folder, lora_path=str(tmp_path / "export")).model.transformer
    for part in ("transformer", "transformer_2"):
        name = "blocks.0.attn1.to_q.weight"
        weight = getattr(pipeline, part).get_parameter(name)
        torch.testing.assert_close(begun.get_parameter(f"{part}.{name}"), weight, rtol=0, atol=1e-6)
    (tmp_path / "export" / second).rename(tmp_path / "second.safetensors")
    with one_rank() as world:
        first = make_policy(world, a14b_folder, lora_path=str(tmp_path / "export")).model.transformer
        file = str(tmp_path / "second.safetensors")
        with refused(
            f"model.lora_path: {file!r} should be a folder with pytorch_lora_weights.safetensors for the first of the "
            f"model's two transformers, {second} for the second, or both"
        ):
            make_policy(world, a14b_folder, lora_path=file)
    base = load_pipeline(a14b_folder).transformer_2.get_parameter(name)
    assert torch.equal(first.get_parameter(f"transformer.{name}"), begun.get_parameter(f"transformer.{name}"))
    assert torch.equal(first.get_parameter(f"transformer_2.{name}"), base)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["a14b", "5b"])
def test_ranks_that_share_the_tokens_of_a_video(
    kind: str, a14b_folder: Path, datasets_cache: None, tmp_path: Path
) -> None:
    """Of both transformers, and with a timestep of each token."""
    if kind == "a14b":
        cfg = tiny_config(a14b_folder, tmp_path, *BOTH, "model.lora_rank=4", "optim.eps=1e-3")
    else:
        cfg = i2v(tiny_wan(tmp_path / "model", multistep=False, per_token=True), tmp_path, "optim.eps=1e-3")
    alone = run_ranks(one_step, 1, cfg)
    cfg.parallel.ulysses_sequence_parallel_size = 2
    for part in run_ranks(one_step, 2, cfg):
        assert part["row"]["actor/first_ratio_error"] == 0.0
        assert part["row"]["actor/grad_norm"] == pytest.approx(alone[0]["row"]["actor/grad_norm"], rel=1e-4)
        torch.testing.assert_close(part["images"], alone[0]["images"], rtol=0, atol=1e-5)
