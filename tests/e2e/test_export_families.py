"""Exports of the families that test_export.py does not cover: stock diffusers generates the trained policy's images
from a LoRA and from a whole folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch import Tensor

from phalanx.config.flow import FlowRLConfig
from phalanx.config.tasks import ExportConfig
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.types import Prompt
from tests.helpers.jobs import PROMPTS, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_edit import edits, write_edits

SIDE, FRAMES, LENGTH = 32, 5, 32
NOISE = {"flux2": (16, 4, 4), "flux2_klein": (16, 4, 4), "flux_kontext": (24, 16), "hunyuan_i2v": (4, 2, 8, 8)}


def held_out(images: bool) -> list[Prompt]:
    return edits(1) if images else [Prompt(PROMPTS[0], 0, {})]


def train(cfg: FlowRLConfig, images: bool) -> Tensor:
    """A whole run, then samples of the trained policy."""
    from phalanx.run.rl import build

    trainer, parts = build(cfg), []
    trainer.fit()
    with trainer.collector.rollout.awake():
        trainer.collector.rollout.sample_validation(held_out(images), each=lambda samples, _: parts.append(samples))
    return torch.cat(parts)


@contextmanager
def preferring(size: tuple[int, int]) -> Iterator[None]:
    """Give Kontext's pipeline, which scales references to the nearest of its sizes, only this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [size])
        yield


def stock(family: str, pipeline: Any, noise: Tensor) -> Tensor:
    """Samples [1, ...] of diffusers' pipeline, from `noise`."""
    [prompt] = held_out(family in ("flux_kontext", "hunyuan_i2v"))
    keys: dict[str, Any] = {"num_inference_steps": 4, "latents": noise[None], "output_type": "pt"}
    if family == "hunyuan_i2v":  # its pipeline takes the size from the image
        pipeline.guider.guidance_scale, pipeline.tokenizer_max_length = 3.0, LENGTH
        return pipeline(prompt.meta["image"].pil(), prompt.text, num_frames=FRAMES, **keys).frames
    keys |= {
        "height": SIDE,
        "width": 48 if family == "flux_kontext" else SIDE,
        "guidance_scale": 3.0,
        "max_sequence_length": LENGTH,
    }
    if family == "flux_kontext":
        with preferring((40, 24)):
            return pipeline(prompt.meta["image"].pil(), prompt.text, max_area=SIDE * 48, **keys).images
    if family == "flux2_klein":  # its pipeline takes negatives only as embeddings
        keys["negative_prompt_embeds"], _ = pipeline.encode_prompt([""], max_sequence_length=LENGTH)
    return pipeline(prompt=prompt.text, **keys).images


@pytest.mark.full
@pytest.mark.seldom(
    *("flux2-lora", "flux2-full", "flux2_klein-lora", "flux2_klein-full"),
    *("flux_kontext-lora", "hunyuan_i2v-lora", "hunyuan_i2v-full"),
)
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", list(NOISE))
def test_the_export_is_read_by_stock_diffusers(
    family: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base: Path = request.getfixturevalue(f"{family}_folder")
    keys = ["model.lora_rank=4", "optim.lr=3e-2"] if kind == "lora" else ["optim.lr=1e-2"]
    pipeline, noise, images = load_pipeline(base), NOISE[family], family in ("flux_kontext", "hunyuan_i2v")
    if images:
        keys += [f"data.train_files=[{write_edits(tmp_path / 'edits')}]", f"model.reference_size={SIDE}"]
    if family == "flux_kontext":
        keys += ["model.family=flux_kontext", "rollout.width=48"]
    if family == "hunyuan_i2v":
        sides = pipeline.video_processor.calculate_default_height_width(height=64, width=96, target_size=SIDE)
        height, width = map(int, sides)
        noise = (*NOISE[family][:2], height // 4, width // 4)
        keys += [f"rollout.num_frames={FRAMES}", f"rollout.height={height}", f"rollout.width={width}"]
    [made] = run_ranks(train, 1, tiny_config(base, tmp_path, *keys, "trainer.save_freq=2"), images, timeout=240)
    start = normal(noise, fold_in(1234, 0, 0, 0, "init"), torch.device("cpu"))
    exported = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={exported}"])).run()
    assert (stock(family, pipeline, start) - made).abs().max() > 0.02
    if kind == "full":
        pipeline = load_pipeline(exported)
    elif family == "hunyuan_i2v":  # only the transformer, not the pipeline's class, can load LoRAs
        file = {"weight_name": "pytorch_lora_weights.safetensors", "prefix": "transformer"}
        pipeline.transformer.load_lora_adapter(exported, **file)
    else:
        pipeline.load_lora_weights(exported)
    torch.testing.assert_close(stock(family, pipeline, start), made, rtol=0, atol=1e-4)
