"""Images in prompts of language models, in the formats of verl, TRL and JSON Lines."""

import json
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pil

from phalanx.data.overlap import held_out_overlap
from phalanx.data.prompts import load_prompts, refuse_images, validation_sets
from phalanx.data.streams import PromptStream
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.pairs import write_parquet

KEY = "data.train_files"
COLOURS = ((250, 0, 0), (0, 250, 0), (0, 0, 250))
IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


def drawn(i: int) -> Pil.Image:
    return Pil.new("RGB", (4 + i, 2), COLOURS[i])


def png(i: int) -> bytes:
    file = BytesIO()
    drawn(i).save(file, "PNG")
    return file.getvalue()


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(file: Path | str, **form: Any) -> list[Prompt]:
    return load_prompts([str(file)], KEY, quoted=False, **form)


def shown(row: Prompt) -> list[int]:
    """Which pictures a row shows."""
    numbers = []
    for picture in row.images:
        assert picture.size == (2, picture.pil().width)
        numbers.append(COLOURS.index(picture.pil().getpixel((0, 0))))  # type: ignore[arg-type]
    return numbers


def test_files_of_verl(tmp_path: Path) -> None:
    """geo3k: a list of {bytes, path} in each row, and marks in the texts."""
    stored = [{"bytes": png(i), "path": None} for i in range(3)]
    truth = {"style": "rule", "ground_truth": "3"}
    rows = [
        {"prompt": user("<image>Find x."), "images": stored[:1], "reward_model": truth, "ability": "math"},
        {"prompt": user("Is <image> in\n<image>?"), "images": stored[1:], "reward_model": truth, "ability": "math"},
        {"prompt": user("1+1?"), "images": [], "reward_model": truth, "ability": "math"},
        {"prompt": user("1+2?"), "images": None, "reward_model": truth, "ability": "math"},
    ]
    write_parquet(tmp_path / "geo.parquet", rows)
    found = read(tmp_path / "geo.parquet")
    assert [row.messages for row in found] == [
        user(IMAGE, text("Find x.")),
        user(text("Is "), IMAGE, text(" in\n"), IMAGE, text("?")),
        user("1+1?"),
        user("1+2?"),
    ]
    assert [row.text for row in found] == ["Find x.", "Is  in\n?", "1+1?", "1+2?"]
    assert [shown(row) for row in found] == [[0], [1, 2], [], []]
    assert {row.meta["ground_truth"] for row in found} == {"3"}
    assert all(row.meta["images"] is row.images for row in found)
    assert found[1].images[1].where == f"{KEY}: {tmp_path}/geo.parquet, row 1: images[1]"
    prompts = PromptStream(found, 4, seed=0).batch(0)
    assert {prompt.text: len(prompt.images) for prompt in prompts} == {row.text: len(row.images) for row in found}
    (held_out,) = validation_sets([str(tmp_path / "geo.parquet")], quoted=False).values()
    assert [prompt.images[0].digest for prompt in held_out[:1]] == [found[0].images[0].digest]


@pytest.mark.parametrize("listed", [False, True])
def test_datasets_of_trl(tmp_path: Path, listed: bool) -> None:
    """A column of PIL images, with parts of messages or plain contents, or a plain text."""
    name, feature = ("images", List(Image())) if listed else ("image", Image())
    part = {"type": Value("string"), "text": Value("string")}
    chats = Features({"prompt": List({"role": Value("string"), "content": List(part)}), name: feature})
    images = [[drawn(i)] if listed else drawn(i) for i in (0, 1)] + [None]
    parts = [user(IMAGE | {"text": None}, text("a")), user(text("b"), IMAGE | {"text": None}), user(text("c"))]
    Dataset.from_dict({"prompt": parts, name: images}, chats).save_to_disk(tmp_path / "chats")
    found = read(tmp_path / "chats")
    assert [row.messages for row in found] == [user(IMAGE, text("a")), user(text("b"), IMAGE), user("c")]
    assert [shown(row) for row in found] == [[0], [1], []]
    plain = Features({"prompt": Value("string"), name: feature, "answer": Value("int64")})
    data = Dataset.from_dict({"prompt": ["a", "b", "c"], name: images, "answer": [1, 2, 3]}, plain)
    data.save_to_disk(tmp_path / "texts")
    found = read(tmp_path / "texts")
    assert [row.messages for row in found] == [user(IMAGE, text("a")), user(IMAGE, text("b")), None]
    assert [row.meta["ground_truth"] for row in found] == [1, 2, 3]
    # the same file as Parquet, as on a hub
    data.to_parquet(tmp_path / "texts.parquet")
    assert [(row.messages, shown(row)) for row in read(tmp_path / "texts.parquet")] == [
        (row.messages, shown(row)) for row in found
    ]


def test_json_lines_and_tables_of_paths(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for i in range(2):
        drawn(i).save(tmp_path / "pictures" / f"{i}.png")
    paths = [f"pictures/{i}.png" for i in range(2)]
    system = {"role": "system", "content": "Look."}
    file = jsonl(
        tmp_path / "data.jsonl",
        {"prompt": "a", "images": paths},
        {"prompt": [system, *user("b")], "images": paths[1]},
        {"prompt": "c"},
        {"prompt": user(IMAGE), "images": paths[:1]},
    )
    found = read(file)
    assert [row.messages for row in found] == [
        user(IMAGE, IMAGE, text("a")),
        [system, *user(IMAGE, text("b"))],
        None,
        user(IMAGE),
    ]
    assert [shown(row) for row in found] == [[0, 1], [1], [], [0]]
    (tmp_path / "data.csv").write_text("prompt,image\nx,pictures/1.png\ny,\n")
    assert [shown(row) for row in read(tmp_path / "data.csv")] == [[1], []]


def test_the_column_of_images(tmp_path: Path) -> None:
    drawn(0).save(tmp_path / "0.png")
    drawn(1).save(tmp_path / "1.png")
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "images": "0.png", "image": "1.png", "view": ["1.png"]})
    (row,) = read(file)
    assert (shown(row), row.meta["image"], row.meta["view"]) == ([0], "1.png", ["1.png"])
    (row,) = read(file, image_key="view")
    assert (shown(row), row.meta["image"]) == ([1], "1.png")
    # columns without images are ordinary columns, and marks without such a column are ordinary text
    file = jsonl(tmp_path / "b.jsonl", {"prompt": "x", "images": 3, "image": [1]}, {"prompt": "<image>"})
    row, marked = read(file)
    assert (row.text, row.images, row.meta) == ("x", (), {"images": 3, "image": [1]})
    assert (marked.text, marked.images) == ("<image>", ())
    write_parquet(tmp_path / "c.parquet", [{"prompt": "x", "images": 3}])
    assert read(tmp_path / "c.parquet") == [Prompt("x", 0, {"images": 3})]


def test_marks_are_not_read_as_texts(tmp_path: Path) -> None:
    """If the row has a column of videos, or of images in an unknown form."""
    pixels = [[[0, 0, 0], [9, 9, 9]]]
    pq.write_table(pa.table({"prompt": ["<image>"], "image": [pixels]}), tmp_path / "a.parquet")
    forms = "none of them is the bytes of an image file, its path beside the data file, or {bytes, path}"
    with refused(f"{KEY}: {tmp_path / 'a.parquet'}, row 0: prompt has <image>, and the row a column 'image'; {forms}"):
        read(tmp_path / "a.parquet")
    file = jsonl(tmp_path / "b.jsonl", {"prompt": user("see <video>"), "videos": ["a.mp4"], "images": ["0.png"]})
    with refused(f"{KEY}: {file}:1: prompt has <video>, and the row a column 'videos'; videos are not read"):
        read(file)


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.list_(pa.large_binary()), pa.list_(pa.binary(), 1)], ids=str)
def test_other_columns_of_bytes(tmp_path: Path, kind: pa.DataType) -> None:
    cell = png(0) if kind == pa.large_binary() else [png(0)]
    pq.write_table(pa.table({"prompt": ["<image>"], "images": pa.array([cell], kind)}), tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet")
    assert shown(row) == [0]


@pytest.mark.parametrize(
    ("prompt", "images", "places"),
    [
        ("<image> and <image>", 1, 2),
        ("no <image>", 0, 1),
        (user(IMAGE, text("x")), 2, 1),
        (user(text("x"), IMAGE), 0, 1),
        ([{"role": "system", "content": "<image>"}, *user("<image>")], 1, 2),
    ],
)
def test_a_place_for_each_image(tmp_path: Path, prompt: Any, images: int, places: int) -> None:
    drawn(0).save(tmp_path / "0.png")
    good = {"prompt": "a", "images": ["0.png"]}
    file = jsonl(tmp_path / "a.jsonl", good, {"prompt": prompt, "images": ["0.png"] * images})
    with refused(
        f"{KEY}: {file}:2: prompt has places for {places} images (<image>, or parts {{type: image}}), but the row has "
        f"{images}"
    ):
        read(file)


def test_parts_and_prompts_that_are_refused(tmp_path: Path) -> None:
    drawn(0).save(tmp_path / "0.png")
    file = jsonl(tmp_path / "a.jsonl", {"prompt": user(IMAGE | {"image": "0.png"}), "images": ["0.png"]})
    with refused(f"{KEY}: {file}:1: the row has images in parts of prompt and in the column `images`; expected one"):
        read(file)
    file = jsonl(tmp_path / "b.jsonl", {"prompt": " ", "images": []}, {"prompt": "x", "images": ["0.png"]})
    with refused(f"{KEY}: {file}:1: the prompt is empty"):
        read(file)


def test_readers_of_texts_refuse_images(tmp_path: Path) -> None:
    drawn(0).save(tmp_path / "0.png")
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "images": ["0.png"]})
    rows = read(file)
    refuse_images(rows[:1], "nobody looks")
    with refused(f"{KEY}: {file}:2 has images, and nobody looks"):
        refuse_images(rows, "nobody looks")


def test_overlap_of_prompts_that_show_images(tmp_path: Path) -> None:
    """The same question about another image, or about none, is another prompt."""
    (tmp_path / "copy").mkdir()
    for i in range(3):
        drawn(i).save(tmp_path / f"{i}.bmp")
        drawn(i).save(tmp_path / "copy" / f"{i}.bmp")
    asked = [["0.bmp"], ["1.bmp", "0.bmp"], []]
    train = read(jsonl(tmp_path / "a.jsonl", *[{"prompt": "what?", "images": images} for images in asked]))
    for images, same in ((["0.bmp"], 1), (["1.bmp"], 0), (["0.bmp", "1.bmp"], 0), (["1.bmp", "0.bmp"], 1), ([], 1)):
        rows = [{"prompt": " what?", "images": images}, {"prompt": "else", "images": ["2.bmp"]}]
        assert held_out_overlap(train, read(jsonl(tmp_path / "copy" / "b.jsonl", *rows))) == same, images


def test_pictures_that_cannot_be_read(tmp_path: Path) -> None:
    """Reading their headers suffices to know the size, and to detect most of those that cannot be read."""
    whole = png(0)
    (tmp_path / "cut.png").write_bytes(whole[:-30])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "none.png").write_bytes(b"")
    for name, side in {"flat.png": 0, "huge.png": 2**17}.items():
        head = b"IHDR" + side.to_bytes(4, "big") * 2 + whole[24:29]
        (tmp_path / name).write_bytes(whole[:12] + head + zlib.crc32(head).to_bytes(4, "big") + whole[33:])
    names = ["cut.png", "text.png", "none.png", "flat.png", "huge.png", "gone.png", 3]
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "images": names})
    (row,) = read(file)
    assert row.images[0].size == (2, 4)
    with pytest.raises(ValueError, match=r":1: images\[0\]: the image cannot be read: "):
        row.images[0].pil()
    kinds = ("format is unknown", "is empty", "format is unknown", "decompression bomb", "No such file", "of type int")
    for i, problem in enumerate(kinds, 1):
        with pytest.raises(ValueError, match=problem) as error:
            assert row.images[i].size
        assert str(error.value).startswith(f"{KEY}: {file}:1: images[{i}]") and "\n" not in str(error.value)


def test_the_size_of_a_turned_picture(tmp_path: Path) -> None:
    for ending in ("jpg", "png", "webp", "tiff"):
        for orientation in (1, 3, 6, 8):
            exif = Pil.Exif()
            exif[0x0112] = orientation
            drawn(1).save(tmp_path / f"{orientation}.{ending}", exif=exif)
            (row,) = read(jsonl(tmp_path / "a.jsonl", {"prompt": "x", "image": f"{orientation}.{ending}"}))
            assert row.images[0].size == row.images[0].pil().size[::-1], (ending, orientation)
