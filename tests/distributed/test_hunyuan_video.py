"""Training of HunyuanVideo 1.5: the same step on any ranks, two algorithms, and an export that stock diffusers plays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.tasks import ExportConfig
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from tests.distributed.test_layouts import assert_same_step
from tests.distributed.test_videos import train
from tests.helpers.jobs import PROMPTS, one_step, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_edit import write_edits

FRAMES = 5
VIDEO = f"rollout.num_frames={FRAMES}"
LORA = "model.lora_rank=4"


@pytest.mark.full
@pytest.mark.long
def test_layouts_agree_from_images(hunyuan_i2v_folder: Path, tmp_path: Path) -> None:
    data = f"data.train_files=[{write_edits(tmp_path)}]"
    cfg = tiny_config(hunyuan_i2v_folder, tmp_path, VIDEO, LORA, data, "rollout.micro_batch_size_per_gpu=4")
    one = run_ranks(one_step, 1, cfg)
    assert one[0]["images"].shape == (16, FRAMES, 3, 32, 32) and one[0]["row"]["actor/first_ratio_error"] == 0
    cfg.parallel.fsdp_size = 2
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    cfg.parallel.ulysses_sequence_parallel_size = 2
    for part in run_ranks(one_step, 2, cfg):
        torch.testing.assert_close(part["images"], one[0]["images"], rtol=0, atol=1e-5)


@pytest.mark.full
def test_plans_count_the_image(hunyuan_folder: Path, hunyuan_i2v_folder: Path, tmp_path: Path) -> None:
    folders = hunyuan_folder, hunyuan_i2v_folder
    configs = [tiny_config(folder, tmp_path / folder.name, VIDEO, f"model.family={folder.name}") for folder in folders]
    text, image = (planned(cfg, Cluster(1, 1)) for cfg in configs)
    assert text.flops < image.flops < 1.2 * text.flops  # 4 tokens more
    assert {name: t.shape for name, t in image.policy.model.embeds_like(40, 32, 48).items()} == {
        "prompt_embeds": (40, 64),
        "kinds": (40,),
        "first": (4, 8, 12),
    }


def stock_videos(pipeline: Any) -> Tensor:
    """The stock pipeline's videos [2, F, 3, H, W] from the noise that validation starts from."""
    pipeline.guider.guidance_scale, pipeline.tokenizer_max_length, videos = 3.0, 32, []
    pipeline.vision_num_semantic_tokens = 9  # of the absent image, to which none attends
    for i in range(2):
        noise = normal((4, 2, 8, 8), fold_in(1234, 0, i, 0, "init"), torch.device("cpu"))
        keys = {"height": 32, "width": 32, "num_frames": FRAMES, "num_inference_steps": 4, "output_type": "pt"}
        videos.append(pipeline(PROMPTS[i], latents=noise[None], **keys).frames)
    return torch.cat(videos)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_export_is_played_by_stock_diffusers(kind: str, hunyuan_folder: Path, tmp_path: Path) -> None:
    keys = [LORA, "optim.lr=3e-2"] if kind == "lora" else ["optim.lr=1e-2"]
    cfg = tiny_config(hunyuan_folder, tmp_path, VIDEO, *keys, "trainer.save_freq=2")
    [videos] = run_ranks(train, 1, cfg, timeout=150)
    exported = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={exported}"])).run()
    pipeline = load_pipeline(hunyuan_folder)
    assert (stock_videos(pipeline) - videos).abs().max() > 0.05
    if kind == "lora":  # the pipeline's class has no loader of LoRAs, its transformer has
        file = {"weight_name": "pytorch_lora_weights.safetensors", "prefix": "transformer"}
        pipeline.transformer.load_lora_adapter(exported, **file)
    else:
        pipeline = load_pipeline(exported)
    torch.testing.assert_close(stock_videos(pipeline), videos, rtol=0, atol=1e-4)
