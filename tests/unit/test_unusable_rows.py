"""data.unusable_rows: rows that cannot be used are found before the first step, and told or left out."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from phalanx.config.lm import LMRLConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.data.data_files import DataError
from phalanx.data.images import ImageTextData
from phalanx.data.prompts import load_prompts
from phalanx.media.pictures import Picture
from phalanx.run.lm_kind import LM
from phalanx.run.rules import load_config
from phalanx.run.usable_images import usable_images
from phalanx.run.world import start_world
from tests.helpers.checks import refused
from tests.helpers.pairs import write_parquet
from tests.helpers.ranks import run_ranks

KEY = "data.train_files"
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8))


def outcome(read: Any) -> str:
    try:
        read()
    except ValueError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_the_check_of_an_image_says_what_reading_it_says(form: str) -> None:
    file = BytesIO()
    NOISE.save(file, form)
    whole = file.getvalue()
    cuts = [whole[: int(len(whole) * share)] for share in (0, 0.1, 0.5, 0.99)]
    for content in (whole, whole[:-1], whole + b"more", whole + bytes(9), *cuts):
        picture = Picture(lambda content=content: content, Path(), "row 3")  # type: ignore[misc]
        assert outcome(picture.check) == outcome(picture.pil)
    assert outcome(Picture(lambda: cuts[1], Path(), "row 3").check).startswith("row 3: the image cannot be read: ")


@pytest.mark.parametrize(
    ("name", "content", "kept", "first"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": 1}\n[2]\n{"prompt"\n{"prompt": "b"}',
            "ab",
            ":2: prompt is of type number",
        ),
        ("b.jsonl", '{"text": "a"}\n{"prompt": "b"}', "b", ":1: no 'prompt'; it has text"),
        ("c.csv", "prompt,x\na,1\nb,2,3\nc,4", "ac", ":3: more cells than the header has columns"),
        ("d.json", '[{"prompt": "a"}, 7, {"prompt": ""},\n {"prompt": "b"}]', "ab", ", row 1: JSON of type number"),
        ("e.txt", b"a\n\xff\nb", "ab", ":2: not UTF-8 (byte 0xff)"),
    ],
)
def test_rows_are_left_out_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: str | bytes, kept: str, first: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        load_prompts([str(path)], KEY)
    assert str(error.value).startswith(f"{KEY}: {path}{first}")
    rows = load_prompts([str(path)], KEY, unusable="filter")
    assert "".join(row.text for row in rows) == kept
    [warning] = [record.getMessage() for record in caplog.records]
    assert (
        warning.startswith(f"{KEY}: ")
        and f"cannot be used and are left out (data.unusable_rows), first: {path}{first}" in warning
    )


def test_a_file_of_which_no_row_can_be_used_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{}')
    with refused(f"{KEY}: none of its 2 rows can be used, first: {path}:1: no 'prompt'; it has text", DataError):
        load_prompts([str(path)], KEY, unusable="filter")


def test_a_list_in_a_json_file(tmp_path: Path) -> None:
    """As VBench publishes its prompts; a .json file may also have one object per line."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt_en": "a cat", "dimension": ["color"]}, {"prompt_en": "a dog"}], indent=2))
    rows = load_prompts([str(path)], KEY, prompt="prompt_en")
    assert [(row.text, row.meta, row.place) for row in rows] == [
        ("a cat", {"dimension": ["color"]}, f"{KEY}: {path}, row 0"),
        ("a dog", {}, f"{KEY}: {path}, row 1"),
    ]
    path.write_text('{"prompt_en": "a"}\n{"prompt_en": "b"}')
    assert [row.text for row in load_prompts([str(path)], KEY, prompt="prompt_en")] == ["a", "b"]
    path.write_text('[{"prompt_en": "a"}')
    with pytest.raises(DataError, match=r"prompts\.json: not a JSON list \("):
        load_prompts([str(path)], KEY, prompt="prompt_en")


def test_a_cache_that_cannot_be_written_is_not_the_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edits.parquet"
    write_parquet(file, [{"prompt": "a", "image": {"bytes": b"x", "path": None}}])
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with refused(
        f"{KEY}: {file}: its copy in the cache of datasets, {tmp_path}/file/cache, cannot be written: Not a directory; set "
        "the environment variable HF_DATASETS_CACHE to a folder with space, or name a folder that save_to_disk wrote",
        DataError,
    ):
        load_prompts([str(file)], KEY, images=["image"])


def usable(path: str, choice: str) -> tuple[list[str], str]:
    """On each rank: the texts of the rows that are left, or the error."""
    world = start_world(ParallelConfig())
    rows = load_prompts([path], KEY, images=["image"])
    try:
        return [row.text for row in usable_images(rows, KEY, unusable=choice, world=world)], ""
    except DataError as error:
        return [], str(error)


def test_ranks_look_at_images_together(tmp_path: Path) -> None:
    NOISE.save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])
    images = ["whole.jpg", "cut.jpg", "missing.jpg", None, "whole.jpg"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "image": image}) + "\n" for i, image in enumerate(images)))
    for ranks in (1, 2):
        for texts, error in run_ranks(usable, ranks, str(path), "filter"):
            assert (texts, error) == (["0", "4"], "")
        for texts, error in run_ranks(usable, ranks, str(path), "error"):
            assert error.startswith(f"{KEY}: {path}:2: image: the image cannot be read: ") and not texts
            assert error.endswith("; 3 of 5 rows cannot be used; data.unusable_rows=filter leaves such rows out")


def usable_sets(path: str, choice: str) -> tuple[dict[str, list[str]], str]:
    """As `usable`, of a job's validation sets."""
    cfg = load_config(LMRLConfig, None, ["model.path=m", f"data.val_files=[{path}]", f"data.unusable_rows={choice}"])
    kind = LM(cfg)
    try:
        _, sets = kind.usable([], kind.read_sets(), start_world(ParallelConfig()))
    except DataError as error:
        return {}, str(error)
    return {name: [row.text for row in rows] for name, rows in sets.items()}, ""


def test_images_of_validation_rows_are_looked_at_before_training(tmp_path: Path) -> None:
    NOISE.save(tmp_path / "a.png")
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "a", "images": ["a.png"]}\n{"prompt": "b", "images": ["b.png"]}\n')
    assert run_ranks(usable_sets, 2, str(path), "filter") == [({"held_out": ["a"]}, "")] * 2
    for _, error in run_ranks(usable_sets, 2, str(path), "error"):
        assert error.startswith(f"data.val_files: {path}:2: images[0]: the image cannot be read: ")


def test_images_to_train_on_are_left_out_as_well(tmp_path: Path) -> None:
    NOISE.save(tmp_path / "a.png")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"image": "a.png", "prompt": "a"}\n{"image": 3}\n{"image": "b.png", "prompt": "b"}')
    with pytest.raises(DataError, match=r':2: expected \{"image": "path", "prompt": "text"\}$'):
        ImageTextData([str(path)], 8, 8)
    images = ImageTextData([str(path)], 8, 8, unusable="filter")
    images.keep(lambda rows: [i for i, (picture,) in enumerate(rows) if outcome(picture.check) == "read"])
    assert [images.prompt(i) for i in range(len(images))] == ["a"]
