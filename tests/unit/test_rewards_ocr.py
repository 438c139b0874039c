"""The OCR reward on real pictures with the real engine."""

import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from phalanx.rewards import RewardError
from phalanx.types import Prompt
from phalanx.zoo.rewards.image.ocr import Ocr
from tests.helpers.rewards import entry, rewards, scored, told


def picture(lines: dict[tuple[int, int], str], size: tuple[int, int], font: int, colour: str = "black") -> Tensor:
    """Text at (x, y) positions on a pale picture of (width, height) -> [3, H, W] in 0..1."""
    image = Image.new("RGB", size, (235, 240, 200))
    draw = ImageDraw.Draw(image)
    for position, text in lines.items():
        draw.text(position, text, font=ImageFont.load_default(font), fill=colour)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def words(*texts: str) -> Tensor:
    """Small pictures [B, 3, 24, 48] of one word each, as the quickstart has them."""
    return torch.stack([picture({(5, 3): text}, (48, 24), 16) for text in texts])


@pytest.fixture(scope="module")
def line_ocr() -> Ocr:
    return Ocr(detect=False)


@pytest.fixture(scope="module")
def page_ocr() -> Ocr:
    return Ocr()


def metas(*targets: str) -> list[dict[str, Any]]:
    return [{"ground_truth": target} for target in targets]


@pytest.mark.parametrize("name", ["rapidocr", "onnxruntime"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError) as error:
        Ocr()
    assert str(error.value) == f"the package {name} is not installed; pip install 'phalanx[ocr]'"


def test_the_recogniser_reads_words(line_ocr: Ocr) -> None:
    texts = [f"{i * 37 % 1000:03d}" for i in range(1, 20)]  # more than one batch
    assert line_ocr.read(words(*texts)) == texts
    assert line_ocr.read(torch.full((1, 3, 24, 48), 0.5)) == [""]


def test_the_recogniser_sees_colours_as_it_was_trained(line_ocr: Ocr) -> None:
    """The reader's input is checked against its definition, so that red and blue are not swapped."""
    image = picture({(5, 3): "41"}, (48, 24), 16, colour="red").unsqueeze(0)
    seen: dict[str, Any] = {}

    class Spy:
        def run(self, names: None, feed: dict[str, Any]) -> list[Any]:
            seen.update(feed)
            return session.run(names, feed)

    reader: Any = line_ocr._reader
    session = reader._session
    reader._session = Spy()
    try:
        line_ocr.read(image)
    finally:
        reader._session = session
    (batch,) = seen.values()
    assert batch.shape == (1, 3, 48, 96) and batch.dtype == np.float32
    pixels = image[0] * 255  # RGB
    # exactly 2x bilinear enlargement keeps the corner pixel
    np.testing.assert_allclose(batch[0, :, 0, 0], pixels.flip(0)[:, 0, 0] / 127.5 - 1, atol=1e-6)


def test_wide_and_tall_pictures_keep_their_aspect(line_ocr: Ocr) -> None:
    wide = picture({(4, 2): "hello world 2024"}, (160, 24), 18).unsqueeze(0)
    large = picture({(20, 30): "harbour"}, (512, 192), 120).unsqueeze(0)
    assert [t.replace(" ", "") for t in line_ocr.read(wide)] == ["helloworld2024"]
    assert line_ocr.read(large) == ["harbour"]


def test_score_is_one_minus_the_relative_edit_distance(line_ocr: Ocr) -> None:
    images = words("123", "123", "123", "123", "123", "123")
    targets = metas("123", "1 2 3", "124", "12", "9", "45678")
    # 12: one insertion of two characters; 9: three edits of one, cut at 0
    assert line_ocr(images, ["p"] * 6, targets) == pytest.approx([1, 1, 2 / 3, 1 / 2, 0, 0])


def test_case_and_spaces_do_not_count(line_ocr: Ocr) -> None:
    image = picture({(4, 2): "Open Now"}, (96, 24), 18).unsqueeze(0)
    assert line_ocr(image, ["p"], metas("OPENnow ")) == [1.0]


def test_contains_is_an_option() -> None:
    image, lenient, strict = words("1234"), Ocr(detect=False, contains=True), Ocr(detect=False)
    assert lenient(image, ["p"], metas("23")) == [1.0]
    assert strict(image, ["p"], metas("23")) == [0.0]
    assert lenient(image, ["p"], metas("1239")) == strict(image, ["p"], metas("1239")) == [0.75]


def test_detection_finds_lines_in_reading_order(page_ocr: Ocr) -> None:
    page = picture({(150, 20): "SECOND", (20, 20): "FIRST", (60, 110): "third"}, (288, 160), 28, "navy")
    blank = torch.full_like(page, 0.8)
    images = torch.stack([page, blank])
    assert page_ocr.read(images) == ["FIRST SECOND third", ""]
    assert page_ocr(images, ["p", "p"], metas("first second third", "x")) == [1.0, 0.0]


@pytest.mark.long
def test_two_workers_read_what_one_reads(page_ocr: Ocr) -> None:
    """The detecting engine keeps state between its stages, so each worker has its own."""
    pages = [picture({(20, 20): f"word {i}", (40, 70): f"{i}{i}{i}"}, (160, 110), 28) for i in range(4)]
    targets = metas(*(f"word{i}{i}{i}{i}" for i in range(4)))
    batches = [(page.unsqueeze(0), [Prompt("p", 0, meta)]) for page, meta in zip(pages, targets, strict=True)]
    scores = scored(rewards(entry("ocr"), num_workers=2), *batches)["ocr"]
    expected = page_ocr(torch.stack(pages), ["p"] * 4, targets)
    assert scores == pytest.approx(expected) and min(scores) > 0.8


@pytest.mark.parametrize(
    ("meta", "found"),
    [({}, "no ground_truth"), ({"ground_truth": " "}, "ground_truth ' '"), ({"ground_truth": 7}, "ground_truth 7")],
)
def test_a_prompt_without_target_is_named(meta: dict[str, Any], found: str) -> None:
    batch = words("1"), [Prompt("a cat", 0, meta)]
    assert told(RewardError, scored, rewards(entry("ocr", detect=False)), batch) == (
        f"reward 'ocr' raised ValueError: {found} for the prompt \"a cat\" (expected a text in double quotes "
        'in the prompt, or a column ground_truth in the data) on the prompt "a cat"'
    )


def test_reading_overlaps_with_torch_on_the_main_thread() -> None:
    """Both release the GIL: the engine reads while this thread multiplies matrices."""
    reward = rewards(entry("ocr", detect=False))
    images = words(*["123"] * 16)
    prompts = [Prompt('"123"', 0, {"ground_truth": "123"})] * 16
    matrix = torch.rand(500, 500)
    spans = []
    for _ in range(4):
        reward.submit(images, prompts)
        begin = time.perf_counter()
        for _ in range(12):
            matrix @ matrix
        spans.append((begin, time.perf_counter()))
    assert reward.collect()["ocr"].tolist() == [1.0] * 64
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans for b in reward.spans)
    assert both > 0.2 * min(reward.busy_s, sum(end - begin for begin, end in spans))
