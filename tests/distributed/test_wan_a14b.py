"""Training Wan 2.2 A14B on shards: all ranks run the same transformers, exports are read by stock diffusers and ComfyUI;
and Wan's image to video.
"""

from pathlib import Path

import pytest

from phalanx.config.flow import FlowRLConfig
from tests.distributed.test_layouts import assert_same_step
from tests.jobs import algorithm_config, one_step, tiny_config
from tests.ranks import run_ranks
from tests.tiny import tiny_wan
from tests.tiny_edit import write_edits
from tests.tiny_i2v import tiny_wan_i2v

FRAMES = 5
LORA = ("model.lora_rank=4", "optim.lr=3e-2")
VIDEO = (f"rollout.num_frames={FRAMES}", "rollout.micro_batch_size_per_gpu=4")
# two of four steps, one on each side of the boundary
BOTH = (*VIDEO, "rollout.sde_window_range=[1,3]", "rollout.guidance_scale_2=2")


@pytest.mark.quick("lora")
@pytest.mark.parametrize("kind", [(*LORA, "algorithm.kl_loss_coef=0.04"), ()], ids=["lora", "full"])
def test_layouts_agree(kind: tuple[str, ...], a14b_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(a14b_folder, tmp_path, *BOTH, *kind)
    reference = run_ranks(one_step, 1, cfg)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0
    cfg.parallel.fsdp_size = 2
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.quick("lora-2")
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
    files = f"data.train_files=[{write_edits(folder)}]"
    return tiny_config(model, folder, *VIDEO, "model.family=wan_i2v", files, *LORA, *overrides)


@pytest.mark.quick("2.2")
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
