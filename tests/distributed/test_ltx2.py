"""Training of LTX-2: the same step on any ranks, two algorithms, and an export that stock diffusers plays."""

from pathlib import Path

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.config.flow import FlowMatchingTaskConfig
from phalanx.config.tasks import ExportConfig
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.types import Prompt
from tests.distributed.test_videos import train
from tests.helpers.checks import refused
from tests.helpers.jobs import PROMPTS, algorithm_config, tiny_config
from tests.helpers.kinds import check
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import load_pipeline
from tests.numerics.test_ltx2 import stock

FRAMES = 5
VIDEO = f"rollout.num_frames={FRAMES}"
LORA = "model.lora_rank=4"


def test_what_trains_on_images_is_refused(ltx2_folder: Path, tmp_path: Path) -> None:
    keys = (f"model.path={ltx2_folder}", "data.train_files=[x.jsonl]", "trainer.total_training_steps=1")
    with refused(f"model.path: '{ltx2_folder}' cannot encode images; flow matching trains on images", ConfigError):
        check(load_config(FlowMatchingTaskConfig, None, list(keys)))
    cfg = algorithm_config(ltx2_folder, tmp_path, "diffusion_dpo", "rollout.engine=dataset", "rollout.n=2")
    with refused(
        "rollout.engine: dataset trains on images of the data, which LTX2Pipeline cannot encode; set "
        "rollout.engine=policy",
        ConfigError,
    ):
        check(cfg)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_the_export_is_played_by_stock_diffusers(kind: str, ltx2_folder: Path, tmp_path: Path) -> None:
    keys = [LORA, "optim.lr=3e-2"] if kind == "lora" else ["optim.lr=1e-2"]
    cfg = tiny_config(ltx2_folder, tmp_path, VIDEO, *keys, "trainer.save_freq=2")
    [videos] = run_ranks(train, 1, cfg, timeout=150)
    exported = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={exported}"])).run()
    pipeline = load_pipeline(ltx2_folder if kind == "lora" else exported)
    if kind == "lora":
        pipeline.load_lora_weights(exported)
    shape = (3 * 64 + 5, 8)
    latents = torch.stack([normal(shape, fold_in(1234, 0, i, 0, "init"), torch.device("cpu")) for i in range(2)])
    prompts = [Prompt(PROMPTS[i], i, {}) for i in range(2)]
    theirs = stock(pipeline, 3.0, FRAMES, latents, prompts, width=32, length=32)
    torch.testing.assert_close(theirs, videos, rtol=0, atol=1e-4)
