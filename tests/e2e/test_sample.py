"""tasks/sample.py gives the images of the stock pipeline and of the trained policy, on any number of ranks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from phalanx.config.tasks import SampleConfig
from phalanx.exit import Stopped
from phalanx.run.rules import load_config
from phalanx.telemetry.records import read_index
from phalanx.tools.sample import Generator
from tests.e2e.test_export import LORA, TEXTS, Runs, runs, stock_images
from tests.helpers.checks import wait_for
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.tasks import run_task
from tests.helpers.tiny import load_pipeline

# the settings of stock_images; the tiny runs of test_export have the same in their config.yaml
PLAIN = ("model.dtype=float32", "height=32", "width=32", "num_inference_steps=4", "max_prompt_length=32")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sd3-full": ("sd3", ("optim.lr=1e-2", "model.dtype=bfloat16")),
    "sd3-pissa": ("sd3", (*LORA, "model.target_modules=[attn.to_v, norm1.linear]", "model.lora_init=pissa")),
    "qwen-lora": ("qwen", (*LORA, "model.dtype=bfloat16")),
}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(request, tmp_path_factory, RUNS)


def run(overrides: tuple[str, ...]) -> None:
    Generator(load_config(SampleConfig, None, list(overrides))).run()


def sampled(folder: Path, *overrides: str, ranks: int = 1) -> Tensor:
    """The pictures [N, 3, H, W] in 0..255 of a call on `ranks` ranks."""
    run_ranks(run, ranks, (f"output_dir={folder}", *overrides), timeout=150)
    return torch.stack([pixels(folder / row["file"]) for row in read_index(folder)])


def pixels(file: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)


def levels(images: Tensor) -> Tensor:
    return (images * 255).round().byte()


def difference(a: Tensor, b: Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


def prompts(texts: list[str]) -> str:
    return f"prompts={json.dumps(texts)}"


@pytest.mark.seldom("z_image")
@pytest.mark.quick("sd3")
@pytest.mark.parametrize("family", ["sd3", "qwen", "flux", "z_image"])
def test_a_model_folder(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    base = request.getfixturevalue(f"{family}_folder")
    guidance = "true_cfg_scale" if family == "qwen" else "guidance_scale"
    ours = sampled(tmp_path, *PLAIN, f"model.path={base}", f"{guidance}=3", prompts(TEXTS))
    stock = levels(stock_images(load_pipeline(base)))
    assert ours.shape == (2, 3, 32, 32) and difference(ours[0], ours[1]) > 20
    assert difference(ours, stock) <= 1  # a value halfway between two levels may be rounded up or down


@pytest.mark.seldom("sd3-pissa", "sd3-full")
@pytest.mark.full
@pytest.mark.parametrize("name", ["sd3-full", "sd3-pissa", "qwen-lora"])
def test_a_checkpoint(name: str, trained: Runs, tmp_path: Path) -> None:
    """Model, sizes, guidance and seed come from the run: the images are bit-equal to those of its validation."""
    live = trained(name)
    common = (f"checkpoint={live.folder}", prompts(TEXTS), "micro_batch_size_per_gpu=4")
    assert torch.equal(sampled(tmp_path / "ema", *common), levels(live.images["ema"]))
    assert torch.equal(sampled(tmp_path / "model", *common, "weights=model"), levels(live.images["model"]))
    assert difference(levels(live.images["ema"]), levels(live.images["model"])) > 2
    other = sampled(tmp_path / "other", *common, "height=16", "seed=1", "num_inference_steps=2")
    assert other.shape == (2, 3, 16, 32)


@pytest.mark.full
def test_ranks_share_the_work_and_change_nothing(trained: Runs, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo words\nthree or more words\n")
    common = (f"checkpoint={trained('sd3-full').folder}", f"prompt_file={file}", "n=3", "micro_batch_size_per_gpu=2")
    alone = sampled(tmp_path / "1", *common)
    assert alone.shape == (9, 3, 32, 32)
    assert len({image.numpy().tobytes() for image in alone}) == 9
    rows = read_index(tmp_path / "1")
    assert [row["index"] for row in rows] == list(range(9))
    assert [row["prompt"] for row in rows] == [line for line in file.read_text().splitlines() for _ in range(3)]
    for name, layout in (("replicas", "parallel.fsdp_size=1"), ("shards", "parallel.fsdp_size=2")):
        folder = tmp_path / name
        assert torch.equal(sampled(folder, *common, layout, ranks=2), alone)
        assert (folder / "index.jsonl").read_bytes() == (tmp_path / "1" / "index.jsonl").read_bytes()
        assert (folder / "grid.png").read_bytes() == (tmp_path / "1" / "grid.png").read_bytes()


def test_command_line_grid_and_older_images(sd3_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    common = (*PLAIN, f"model.path={sd3_folder}", f"output_dir={folder}")
    sampled(folder, *common, prompts(["a", "b", "c", "d", "e"]), "columns=5")
    five = Image.open(folder / "grid.png").size
    (folder / "mine.png").write_bytes(b"kept")
    job = run_task(["tasks/sample.py", *common, prompts(["a", "b"]), "n=2"])
    assert job.returncode == 0, job.stderr
    assert "100%" not in job.stderr  # no progress bars of libraries, which could hide an error
    assert job.stdout == f"4 images in {folder}, all of them in {folder / 'grid.png'}\n"
    assert sorted(file.name for file in folder.iterdir()) == [
        "00000.png", "00001.png", "00002.png", "00003.png", "grid.png", "index.jsonl", "mine.png",
    ]  # fmt: skip
    grid = pixels(folder / "grid.png")
    assert (five[0] - 8) / 5 == (grid.shape[2] - 8) / 2 == 168  # tiles of 160 px with a margin: 5 in a row, 2 in a row
    tile = pixels(folder / "00003.png").repeat_interleave(5, 1).repeat_interleave(5, 2)
    row = (grid.shape[1] - 8) // 2
    assert torch.equal(grid[:, 8 + row : 168 + row, 176:336], tile)
    assert int(grid[:, 168:row].min()) < 100  # the prompt is written below its image


# -- mistakes ---------------------------------------------------------------------------------------------------------


def refused(*overrides: str) -> str:
    """The message of the error with which a rank ends."""
    with pytest.raises(RankError) as error:
        run_ranks(run, 1, overrides)
    lines = [line for line in str(error.value).splitlines() if line.startswith(("ValueError: ", "phalanx."))]
    return lines[-1].partition(": ")[2]


def test_what_is_sampled(sd3_folder: Path, tmp_path: Path) -> None:
    model, words = f"model.path={sd3_folder}", prompts(["a"])
    assert refused(model) == "neither prompts nor prompt_file is set; give one of them, e.g. prompts='a red apple'"
    assert refused(model, words, "prompt_file=x.txt") == "prompts and prompt_file are both set; give one of them"
    assert refused(words) == "neither model.path nor checkpoint is set; give one of them"
    assert refused(model, words, "weights=ema") == (
        "weights: ema needs a checkpoint; a model folder has its own weights only"
    )
    file = tmp_path / "file"
    file.touch()
    assert refused(model, words, f"output_dir={file}") == f"output_dir: '{file}' is a file; give a folder"


def test_settings_that_the_model_does_not_have(sd3_folder: Path) -> None:
    common = (f"model.path={sd3_folder}", prompts(["a"]))
    assert refused(*common) == "height: 512 is more than the model's 128 pixels"
    assert refused(*common, "height=30", "width=32") == "height: 30 should be a multiple of 8, e.g. 24 or 32"
    assert refused(*common, "height=32", "width=32", "true_cfg_scale=4") == (
        "true_cfg_scale: 4 has no effect on this model; its guidance is guidance_scale"
    )


@pytest.mark.full
def test_a_checkpoint_of_another_model(trained: Runs, qwen_folder: Path, tmp_path: Path) -> None:
    live = trained("sd3-full")
    common = (f"checkpoint={live.folder}", prompts(["a"]))
    assert refused(*common, f"model.path={qwen_folder}") == (
        f"checkpoint: {live.folder}/checkpoints/step_000002 does not fit the model '{qwen_folder}': for "
        "context_embedder.bias it contains [64], the model has nothing; give the base model that the run was trained "
        "from"
    )
    nowhere = tmp_path / "nowhere"
    assert refused(f"checkpoint={nowhere}", prompts(["a"])) == f"checkpoint: '{nowhere}': no such folder"


# -- signals ----------------------------------------------------------------------------------------------------------


def interrupted(overrides: tuple[str, ...]) -> str:
    """Sample, with a signal to rank 0 in its second micro-batch; returns how the job ends."""
    job, denoised = Generator(load_config(SampleConfig, None, list(overrides))), 0
    decode = job.policy.decode

    def until_the_signal(*args: Any) -> Tensor:
        nonlocal denoised
        denoised += 1
        if denoised == 2 and job.world.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: job.world.watch.stop is not None)
        return decode(*args)

    job.policy.decode = until_the_signal  # type: ignore[method-assign]
    with pytest.raises(Stopped) as stopped:
        job.run()
    return str(stopped.value)


def test_a_signal_ends_it_with_the_images_so_far(sd3_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    keys = (*PLAIN, f"model.path={sd3_folder}", f"output_dir={folder}", prompts(list("abcd")), "n=2")
    lines = run_ranks(interrupted, 2, (*keys, "micro_batch_size_per_gpu=1"))
    assert lines == [f"stopped by SIGTERM; the images so far are in {folder}"] * 2
    rows = read_index(folder)
    assert [(row["index"], row["prompt"]) for row in rows] == [(0, "a"), (1, "a"), (4, "c"), (5, "c")]
    assert all((folder / row["file"]).stat().st_size > 0 for row in rows) and (folder / "grid.png").exists()
