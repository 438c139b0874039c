"""Supervised flow matching: it learns the same on all layouts; and the steps that make the tiny base model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from assets.make import digits
from PIL import Image

from phalanx.config import ConfigError
from phalanx.config.flow import FlowMatchingTaskConfig
from phalanx.data.images import ImageTextData
from phalanx.data.prompts import DataError
from phalanx.data.streams import IndexStream
from phalanx.run import flow_matching
from phalanx.run.rules import load_config
from tests.helpers.checks import refused
from tests.helpers.jobs import full_weights, rows
from tests.helpers.kinds import check, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import run_task


def write_pictures(folder: Path) -> Path:
    """A .jsonl of eight plain pictures, of other sizes than the model's."""
    rng = random.Random(0)
    rows = []
    for i in range(8):
        colour = tuple(rng.randint(0, 255) for _ in range(3))
        Image.new("RGB", (48 + 2 * i, 40), colour).save(folder / f"{i}.png")
        rows.append({"image": f"{i}.png", "prompt": f"picture {i}"})
    file = folder / "pictures.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path)


def configure(model: Path, pictures: Path, folder: Path, *overrides: str) -> FlowMatchingTaskConfig:
    base = [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train_files=[{pictures}]",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "rollout.height=32",
        "rollout.width=32",
        "flow_matching.micro_batch_size_per_gpu=2",
        "optim.lr=3e-3",
        "trainer.total_training_steps=3",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.output_dir={folder}",
    ]
    return load_config(FlowMatchingTaskConfig, None, [*base, *overrides])


def train(cfg: FlowMatchingTaskConfig) -> dict[str, Any]:
    job = flow_matching.build(cfg)
    job.fit()
    found = rows(Path(cfg.trainer.output_dir)) if job.world.rank == 0 else []
    return {"rows": found, "weights": full_weights(job.policy.trained.parameters)}


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_layouts_agree(optimizer: str, sd3_folder: Path, pictures: Path, tmp_path: Path) -> None:
    name = f"optim.name={optimizer}"
    one = run_ranks(train, 1, configure(sd3_folder, pictures, tmp_path / "one", name))[0]
    layouts = [(2, 1), (4, 2)] if optimizer == "adamw" else [(2, 1)]
    tolerance = 1e-5 if optimizer == "adamw" else 1e-3  # torch's Muon orthogonalises in bfloat16
    for world, fsdp in layouts:
        cfg = configure(sd3_folder, pictures, tmp_path / f"{world}", name, f"parallel.fsdp_size={fsdp}")
        other = run_ranks(train, world, cfg)[0]
        for a, b in zip(one["rows"], other["rows"], strict=True):
            assert b["train/loss"] == pytest.approx(a["train/loss"], rel=tolerance)
            assert b["actor/grad_norm"] == pytest.approx(a["actor/grad_norm"], rel=10 * tolerance)


def test_it_learns(sd3_folder: Path, pictures: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, pictures, tmp_path / "out", "trainer.total_training_steps=40", "model.lora_rank=8")
    losses = [row["train/loss"] for row in run_ranks(train, 1, cfg)[0]["rows"]]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_batch_per_rank(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path / "pictures.jsonl", tmp_path, "data.train_batch_size=32")
    cfg.data.train_batch_size_per_gpu = 4
    assert [plan_of(cfg, ranks) for ranks in (1, 3, 8)] == [4, 4, 4]
    cfg.data.train_batch_size_per_gpu = 5
    message = "data.train_batch_size_per_gpu: 5 images do not divide by flow_matching.micro_batch_size_per_gpu 2; "
    with refused(message + "nearest that do: 4 or 6", ConfigError):
        plan_of(cfg, 3)


@pytest.mark.parametrize(
    ("ranks", "override", "message"),
    [
        (
            "4",
            "optim.name=muon",
            "optim.name: muon orthogonalizes whole matrices, which 4 ranks share here; set parallel.fsdp_size=1 or "
            "optim.name=adamw",
        ),
        (
            "1",
            "flow_matching.micro_batch_size_per_gpu=3",
            "data.train_batch_size: 8 images do not divide over 1 ranks x flow_matching.micro_batch_size_per_gpu 3; "
            "nearest that do: 6 or 9",
        ),
    ],
    ids=["muon", "batch"],
)
def test_what_is_refused(
    ranks: str, override: str, message: str, sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(ConfigError) as error:
        check(configure(sd3_folder, tmp_path / "pictures.jsonl", tmp_path, override))
    assert str(error.value) == message


def test_images_are_covered_and_cut(pictures: Path) -> None:
    data = ImageTextData([str(pictures)], 32, 32)
    assert len(data) == 8 and data.prompt(3) == "picture 3"
    image = data.image(3)
    assert image.shape == (3, 32, 32)
    expected = torch.tensor(Image.open(pictures.parent / "3.png").getpixel((0, 0))) / 255
    assert torch.allclose(image[:, 16, 16], expected)


def test_stream_visits_every_image_once_an_epoch() -> None:
    stream = IndexStream(10, 4, seed=3)
    seen = [i for step in range(5) for i in stream.batch(step)]
    assert sorted(seen[:10]) == list(range(10)) == sorted(seen[10:])
    assert seen[:10] != seen[10:]
    assert IndexStream(10, 4, seed=3).batch(4) == seen[16:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{oops\n", "{file}:1: not JSON"),
        ('{"image": "0.png"}\n', '{file}:1: expected {{"image": "path", "prompt": "text"}}'),
        ("\n", "data.train_files: ['{file}'] contain no images"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(DataError) as error:
        ImageTextData([str(file)], 32, 32)
    assert str(error.value).startswith(message.format(file=file))


def test_unreadable_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no picture")
    file = tmp_path / "one.jsonl"
    file.write_text('{"image": "x.png", "prompt": "p"}\n')
    with pytest.raises(DataError, match=r"one.jsonl:1: the image cannot be read"):
        ImageTextData([str(file)], 32, 32).image(0)


def test_held_out_numbers_are_in_no_training_data() -> None:
    train, held_out = digits.split()
    assert len(train) == 872 and len(held_out) == 128 and not set(train) & set(held_out)
    shipped = Path("assets/digits")
    assert (shipped / "train.txt").read_text().splitlines() == [digits.prompt(n) for n in train]
    assert (shipped / "held_out.txt").read_text().splitlines() == [digits.prompt(n) for n in held_out]


@pytest.mark.long
@pytest.mark.full
@pytest.mark.timeout(200)
def test_make_base(tmp_path: Path) -> None:
    """All steps of `make base`, shortened: images, VAE and transformer, on two ranks."""
    pytest.importorskip("matplotlib", reason="its fonts draw the pictures: the extra `base`")
    made = run_task(
        ["assets/make/make_base.py", f"output_dir={tmp_path}", "images=200", "vae_steps=20"], nproc=2, timeout=120
    )
    assert made.returncode == 0, made.stderr
    from datasets import load_from_disk

    drawn = set(load_from_disk(tmp_path / "images")["prompt"])
    assert not drawn & set((tmp_path / "held_out.txt").read_text().splitlines())
    keys = [f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'images'}]", "data.val_files=[]"]
    keys += ["trainer.total_training_steps=5", "trainer.test_freq=-1", "trainer.save_freq=5"]
    keys += [f"trainer.output_dir={tmp_path / 'out'}"]
    task = ["tasks/train_flow_matching.py", "configs/flow_matching/digits.yaml"]
    done = run_task([*task, *keys], nproc=2, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "checkpoints" / "step_000005" / "meta.json").exists()
