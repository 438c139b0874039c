"""Preference data: every form of an image, what is refused with its exact message, and what stays on disk."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig, FlowRolloutConfig
from phalanx.data.images import ImageTextData
from phalanx.data.prompts import DataError, load_prompts
from phalanx.media.pictures import Picture, to_size
from phalanx.rollout.flow.dataset import PAIR
from phalanx.run.rules import check as check_rules
from phalanx.run.rules import load_config
from phalanx.types import Prompt
from phalanx.zoo.rewards.image.preferred import preferred
from tests.helpers.checks import refused
from tests.helpers.kinds import check_config as check
from tests.helpers.pairs import PROMPTS, picture, png, rows, write_jsonl, write_parquet

pytestmark = pytest.mark.usefixtures("datasets_cache")

KEY = "data.train_files"


def parquet_of_bytes(folder: Path) -> str:
    return str(write_parquet(folder / "pairs.parquet", rows()))


def parquet_of_structs(folder: Path) -> str:
    """Bytes for the one, a path beside the file for the other, as Hugging Face has them."""
    table = rows()
    for i, row in enumerate(table):
        (folder / f"{i}.png").write_bytes(row["rejected"])
        row["chosen"] = {"bytes": row["chosen"], "path": "elsewhere.png"}
        row["rejected"] = {"bytes": None, "path": f"{i}.png"}
    return str(write_parquet(folder / "pairs.parquet", table))


def jsonl_of_paths(folder: Path) -> str:
    return str(write_jsonl(folder / "json"))


def dataset_of_images(folder: Path) -> str:
    """A folder of save_to_disk whose columns are images for `datasets`."""
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    table = [{name: row[name] for name in ("prompt", *PAIR)} for row in rows()]
    features = Features({"prompt": Value("string"), "chosen": ImageFeature(), "rejected": ImageFeature()})
    Dataset.from_list(table, features=features).save_to_disk(folder / "dataset")
    return str(folder / "dataset")


@pytest.mark.parametrize("write", [parquet_of_bytes, parquet_of_structs, jsonl_of_paths, dataset_of_images])
def test_every_form_holds_the_same_pictures(write: Callable[[Path], str], tmp_path: Path) -> None:
    found = load_prompts([write(tmp_path)], KEY, images=PAIR)
    assert [row.text for row in found] == PROMPTS
    for i, row in enumerate(found):
        for name in PAIR:
            expected = to_size(picture(i, name == "chosen"), 32, 32)
            assert expected.shape == (3, 32, 32)
            assert torch.equal(row.meta[name].pixels(32, 32), expected), (i, name)


def test_other_columns_stay_and_pictures_are_not_read(tmp_path: Path) -> None:
    table = rows()
    table[1]["chosen"] = b"no picture"
    found = load_prompts([str(write_parquet(tmp_path / "pairs.parquet", table))], KEY, images=PAIR)
    assert [row.meta["source"] for row in found] == [f"test {i}" for i in range(4)]
    assert all(isinstance(row.meta[name], Picture) for row in found for name in PAIR)
    found[1].meta["rejected"].pixels(8, 8)
    with pytest.raises(ValueError, match="row 1: chosen: the image cannot be read: its format is unknown"):
        found[1].meta["chosen"].pixels(8, 8)


def test_without_images_the_columns_are_as_they_were(tmp_path: Path) -> None:
    table = rows()
    found = load_prompts([str(write_parquet(tmp_path / "pairs.parquet", table))], KEY)
    assert found[0] == Prompt(PROMPTS[0], 0, {name: table[0][name] for name in (*PAIR, "source")})


def message(*args: Any) -> str:
    with pytest.raises(DataError) as error:
        load_prompts(*args, images=PAIR)
    return str(error.value)


def test_missing_columns(tmp_path: Path) -> None:
    table = [{"prompt": "a", "chosen": b"", "image": b""}]
    file = str(write_parquet(tmp_path / "p.parquet", table))
    assert message([file], KEY) == f"{KEY}: {file} has no column 'rejected'; it has prompt, chosen, image"
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a", "chosen": "a.png", "rejected": "b.png"}\n{"prompt": "b", "rejected": "b.png"}\n')
    assert message([str(lines)], KEY) == f"{KEY}: {lines}:2: no 'chosen'; it has prompt, rejected"
    text = tmp_path / "p.txt"
    text.write_text("a cat\n")
    assert message([str(text)], KEY) == (
        f"{KEY}: {text} is plain text; images (chosen, rejected) come in the other formats"
    )
    (tmp_path / "x.parquet").write_bytes(b"nothing")
    assert message([str(tmp_path / "x.parquet")], KEY).startswith(
        f"{KEY}: {tmp_path}/x.parquet is not a Parquet file: "
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"no picture", "place: the image cannot be read: its format is unknown"),
        (png(Image.new("RGB", (64, 64)))[:70], "place: the image cannot be read: "),
        (b"P6\n4 4x\n255\n", "place: the image cannot be read: invalid literal for int()"),
        ("a\0.png", "place: the image cannot be read: embedded null byte"),
        ("none.png", "place: the image cannot be read: No such file or directory: "),
        (None, "place is empty; expected the bytes of an image file, its path beside the data file, or {bytes, path}"),
        ({"bytes": None, "path": None}, "place is empty; expected "),
        (3, "place is of type int; expected "),
    ],
)
def test_what_is_no_image(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        Picture(lambda: value, tmp_path, "place").pixels(8, 8)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_grays_of_16_bits_keep_their_shades(tmp_path: Path) -> None:
    grays = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    shown = Picture(lambda: png(Image.fromarray(grays)), tmp_path, "place").pil()
    assert np.array_equal(np.asarray(shown)[..., 1], grays // 256)


def test_pictures_stand_upright(tmp_path: Path) -> None:
    """A camera's note of how it was held is followed, as diffusers' load_image does; its digest is that of the image as
    it is seen.
    """
    from diffusers.utils import load_image

    turned, orientation = picture(0, False), Image.Exif()
    orientation[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "camera.png", exif=orientation)
    found = Picture(lambda: "camera.png", tmp_path, "place")
    expected = turned.transpose(Image.Transpose.ROTATE_270)
    assert found.pil().size == (36, 40) and found.pil().tobytes() == expected.tobytes()
    assert found.pil().tobytes() == load_image(str(tmp_path / "camera.png")).tobytes()
    assert torch.equal(found.pixels(40, 36), to_size(expected, 40, 36))
    assert found.digest == Picture(lambda: png(expected), tmp_path, "place").digest
    assert found.digest != Picture(lambda: png(turned), tmp_path, "place").digest

    (tmp_path / "images.jsonl").write_text(json.dumps({"image": "camera.png", "prompt": "x"}))
    supervised = ImageTextData([str(tmp_path / "images.jsonl")], 40, 36)
    assert torch.equal(supervised.image(0), to_size(expected, 40, 36))


def test_images_with_prompts_in_a_dataset_folder(tmp_path: Path) -> None:
    """Their column of prompts may be `caption`, and a split is named; only what is asked for is decoded."""
    from datasets import Dataset, DatasetDict, Features, Value
    from datasets import Image as ImageFeature

    table = [{"caption": "a", "image": png(picture(0, False)), "n": 1}, {"caption": "b", "image": b"", "n": 2}]
    features = Features({"caption": Value("string"), "image": ImageFeature(), "n": Value("int64")})
    DatasetDict({"train": Dataset.from_list(table, features=features)}).save_to_disk(tmp_path / "both")
    data = ImageTextData([f"{tmp_path}/both:train"], 40, 36)
    assert [data.prompt(i) for i in range(len(data))] == ["a", "b"]
    assert torch.equal(data.image(0), to_size(picture(0, False), 40, 36))
    with refused(f"{KEY}: {tmp_path}/both:train, row 1: image: the image cannot be read: its file is empty"):
        data.image(1)
    with refused(f"{KEY}: {tmp_path}/both:test: there is no split 'test'; it has train"):
        ImageTextData([f"{tmp_path}/both:test"], 40, 36)


def test_pixels_beyond_an_images_range_are_an_error_of_the_data(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), -1.0, np.float32)).save(tmp_path / "depth.tiff")
    (tmp_path / "images.jsonl").write_text(json.dumps({"image": "depth.tiff", "prompt": "x"}))
    with pytest.raises(DataError, match=r"images.jsonl:1: the image cannot be read: its pixels are 32-bit numbers"):
        ImageTextData([str(tmp_path / "images.jsonl")], 4, 4).image(0)


def test_a_pictures_digest_is_that_of_its_pixels(tmp_path: Path) -> None:
    """It names files of embeddings, which later versions have to find."""
    plain = Picture(lambda: png(Image.new("RGB", (2, 1), (1, 2, 3))), tmp_path, "place")
    assert plain.digest == hashlib.sha256(b"(2, 1)" + bytes([1, 2, 3] * 2)).hexdigest()


def test_pictures_cover_the_size_and_are_cut_in_the_middle() -> None:
    wide = Image.new("RGB", (40, 10), (255, 0, 0))
    wide.paste((0, 0, 255), (15, 0, 25, 10))  # the middle
    pixels = to_size(wide, 10, 10)
    assert pixels.shape == (3, 10, 10)
    assert pixels[2].min() == 1.0 and pixels[0].max() == 0.0
    assert to_size(wide, 20, 30).shape == (3, 20, 30)


def test_the_reward_says_what_the_data_says() -> None:
    meta = [{"preferred": True}, {"preferred": False}, {"preferred": None}]
    assert preferred(torch.zeros(3, 3, 2, 2), ["a"] * 3, meta) == [1.0, 0.0, 0.0]
    with pytest.raises(
        ValueError, match=r'^no data says whether this image of "a" is preferred; set rollout.engine=dataset$'
    ):
        preferred(torch.zeros(1, 3, 2, 2), ["a"], [{}])


def refusal(folder: Path, *overrides: str) -> str:
    base = ["model.path=x", f"data.train_files=[{json.dumps(str(folder))}]", "reward.functions=[{name: preferred}]"]
    run = ["trainer.total_training_steps=1", f"trainer.output_dir={folder}", "rollout.engine=dataset"]
    with pytest.raises(ConfigError) as error:
        check(load_config(FlowRLConfig, None, [*base, *run, *overrides]))
    return str(error.value)


def test_what_cannot_be_trained_on_pairs(tmp_path: Path) -> None:
    assert refusal(tmp_path, "algorithm.name=diffusion_dpo") == (
        "rollout.n: 16; expected 2 with rollout.engine=dataset: the chosen image and the rejected one"
    )
    assert refusal(tmp_path, "rollout.n=2") == (
        "rollout.engine: dataset takes images from the data, but algorithm.name=flow_grpo trains on sampled denoising "
        "steps; use one that trains on images, such as diffusion_dpo"
    )
    with refused(
        "rollout.correction: none has nothing to correct with rollout.engine=dataset; its images have no log-probs"
    ):
        check_rules(FlowRLConfig(rollout=FlowRolloutConfig(engine="dataset", correction="none")))
