"""The reward iou: the overlap of an answer's boxes with those of the ground truth."""

import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from phalanx.media.pictures import Picture
from phalanx.zoo.rewards._boxes import iou
from phalanx.zoo.rewards.text.iou import MOST, Iou, boxes
from tests.helpers.checks import refused

TRUTH = [0, 0, 10, 10]
HALF = [0, 0, 10, 5]


def score(completion: str, truth: Any = TRUTH, images: tuple[Picture, ...] = (), **kwargs: Any) -> float:
    return Iou(**kwargs)([completion], [""], [{"ground_truth": truth, "images": images}])[0]


def picture(width: int, height: int) -> Picture:
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return Picture(file.getvalue, Path(), "place")


def test_the_overlap_of_two_boxes() -> None:
    assert iou((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert iou((0, 0, 10, 10), (5, 5, 15, 15)) == pytest.approx(25 / 175)
    assert iou((0, 0, 10, 10), (10, 0, 20, 10)) == 0
    assert iou((0, 0, 10, 10), (8, 8, 2, 2)) == iou((1, 1, 1, 1), (1, 1, 1, 1)) == 0  # sides in the wrong order


@pytest.mark.parametrize(
    "text",
    [
        "[0, 0, 10, 5]",
        '```json\n[{"bbox_2d": [0, 0, 10, 5], "label": "cat"}]\n```',
        "It is at (0,0),(10,5).",
        "<|box_start|>(0, 0), (10, 5)<|box_end|>",
        "[[0, 0], [10, 5]]",
        "<answer>[0.0, .0, 1e1, +5]</answer>",
        "<think>at [0, 0, 10, 10]</think> no, [0,0,10,5]",
        "[1, 2, 3, 4] <answer>[0, 0, 10, 5]</answer> [5, 6, 7, 8]",
    ],
)
def test_forms_of_answers(text: str) -> None:
    assert score(text) == 0.5
    assert boxes("[1, 2, 3] [1, 2, 3, 4, 5] [1, 2, 3, x] 1, 2, 3, 4") == []


@pytest.mark.parametrize(
    "truth", [[HALF], "[0, 0, 10, 5]", {"bbox": HALF}, [{"bbox_2d": HALF}], '{"bbox": [0,0,10,5]}']
)
def test_forms_of_ground_truths(truth: Any) -> None:
    assert score("[0, 0, 10, 5]", truth) == 1


def test_several_boxes_are_matched_one_by_one() -> None:
    truth = [TRUTH, [20, 20, 30, 30]]
    assert score("[20, 20, 30, 30] [0, 0, 10, 5]", truth) == 0.75
    assert score("[0, 0, 10, 10]", truth) == 0.5
    assert score("[0, 0, 10, 10] [0, 0, 10, 10]", truth) == 0.5
    assert score("[0, 0, 10, 10] [0, 0, 10, 10]") == 0.5  # an additional box costs
    assert score("[0, 0, 10, 10]" * (MOST + 1)) == score("nowhere") == 0
    assert score("[0, 0, 10, 5]", threshold=0.5) == 1
    assert score("[0, 0, 10, 4]", threshold=0.5) == 0


def test_units_of_boxes() -> None:
    image = (picture(200, 50),)
    assert score("[0.25, 0, 0.5, 1]", [50, 0, 100, 50], image, coordinates="unit") == 1
    assert score("[250, 0, 500, 1000]", [50, 0, 100, 50], image, coordinates="thousand") == 1
    assert score("[250, 0, 500, 1000]", [0.25, 0, 0.5, 1], coordinates="thousand", truth_coordinates="unit") == 1
    assert score("[250, 0, 500, 500]", [250, 0, 500, 1000], coordinates="thousand", truth_coordinates="thousand") == 0.5
    reward = Iou(coordinates="unit")
    reward.check_row("", {"ground_truth": TRUTH, "images": image})
    with refused("iou needs the image's size to convert boxes in pixels, and the prompt has 0 images; expected 1"):
        reward.check_row("", {"ground_truth": TRUTH})


def test_what_is_refused() -> None:
    for truth in (None, 3, [1, 2, 3], [5, 5, 1, 1], "the cat", [TRUTH] * (MOST + 1)):
        with pytest.raises(
            ValueError, match=r"iou needs a ground_truth for each prompt, a box \[x1, y1, x2, y2\] or a"
        ):
            Iou().check_row("", {"ground_truth": truth})


def test_hostile_texts_take_no_time() -> None:
    begin = time.thread_time()
    for part in ("[", "[1,", "[1, 2, 3, ", "[1,2,3,4", "[1,2,3,4]", "9", "[ ", "<answer>", "(1,1),(", "1e1,"):
        assert score(part * (200_000 // len(part))) == 0
    assert time.thread_time() - begin < 3
