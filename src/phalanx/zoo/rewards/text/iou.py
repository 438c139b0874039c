"""Reward: boxes in an image, by the overlap of the answer's boxes with those of the ground truth.

A box is given by its left, top, right and bottom sides as [x1, y1, x2, y2], in JSON or in a text, also as (x1, y1),
(x2, y2). The IoU of two boxes is the area of their intersection divided by that of their union.
"""

import json
import re
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.zoo.rewards._boxes import Box, area, iou
from phalanx.zoo.rewards.text import _answers

MOST = 64  # maximum boxes of an answer; an answer with more is scored 0
# bounded repetitions, so that no text takes quadratic time
_NUMBER = r"\s{0,9}([+-]?(?:\d{1,9}(?:\.\d{0,17})?|\.\d{1,17})(?:[eE][+-]?\d{1,2})?)\s{0,9}"
_BOX = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:[\])]\s{{0,9}})?,\s{{0,9}}[\[(]?{_NUMBER},{_NUMBER}[\])]")
Units = Literal["pixels", "unit", "thousand"]
Share = Annotated[float, Field(gt=0, le=1)]


class Iou:
    """The mean IoU of the boxes of the metadata's `ground_truth` and of the answer, matched one to one: the sum over
    matched pairs, divided by the larger number of boxes.

    The answer is the content of the last <answer> tags, or without them the text after </think>.

    threshold: a pair of boxes counts 1 if its IoU is at least this, else 0, instead of its IoU.
    coordinates, truth_coordinates: units of the answer and of the ground truth: pixels of the image, or fractions
        (unit) or thousandths (thousand) of its width and height.
    """

    def __init__(
        self, threshold: Share | None = None, coordinates: Units = "pixels", truth_coordinates: Units = "pixels"
    ) -> None:
        self._threshold, self._units, self._truth_units = threshold, coordinates, truth_coordinates

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        scores = []
        for completion, meta in zip(completions, metadata, strict=True):
            scores.append(self._match_score(boxes(answer(completion)), self._truth_boxes(meta), meta))
        return scores

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without valid boxes as ground truth, or with an unknown image size if needed."""
        self._truth_boxes(metadata)
        if self._units != self._truth_units and "pixels" in (self._units, self._truth_units):
            _image_size(metadata)

    def _truth_boxes(self, metadata: dict[str, Any]) -> list[Box]:
        value = metadata.get("ground_truth")
        truth = boxes(value if isinstance(value, str) else json.dumps(value, default=str))
        if not truth or len(truth) > MOST or not all(map(area, truth)):
            raise ValueError(
                f"iou needs a ground_truth for each prompt, a box [x1, y1, x2, y2] or a list of at most {MOST}; it has "
                f"{str(value)[-80:]!r}"
            )
        return truth

    def _match_score(self, given: list[Box], truth: list[Box], metadata: dict[str, Any]) -> float:
        if not 0 < len(given) <= MOST:
            return 0.0
        if self._units != self._truth_units:  # the IoU does not depend on the units if both boxes have the same
            given = _in_unit(given, self._units, metadata)
            truth = _in_unit(truth, self._truth_units, metadata)
        pairs = []
        for i, box in enumerate(given):
            pairs += [(iou(box, other), i, j) for j, other in enumerate(truth)]
        total, matched, matched_truth = 0.0, set[int](), set[int]()
        for value, i, j in sorted(pairs, key=lambda pair: -pair[0]):
            if i not in matched and j not in matched_truth:
                matched.add(i)
                matched_truth.add(j)
                total += value if self._threshold is None else float(value >= self._threshold)
        return total / max(len(given), len(truth))


def answer(text: str) -> str:
    """The part of a completion that is searched for boxes."""
    tagged = _answers.tagged(text)
    return text.rpartition("</think>")[2] if tagged is None else tagged


def boxes(text: str) -> list[Box]:
    """The boxes in a text, at most MOST + 1."""
    result = []
    for box in islice(_BOX.finditer(text), MOST + 1):
        left, top, right, bottom = map(float, box.groups())
        result.append((left, top, right, bottom))
    return result


def _in_unit(some: list[Box], units: str, metadata: dict[str, Any]) -> list[Box]:
    """Boxes converted to fractions of the image's width and height."""
    height, width = _image_size(metadata) if units == "pixels" else (1, 1) if units == "unit" else (1000, 1000)
    return [(left / width, top / height, right / width, bottom / height) for left, top, right, bottom in some]


def _image_size(metadata: dict[str, Any]) -> tuple[int, int]:
    """(height, width) of the prompt's image."""
    images = metadata.get("images", ())
    if len(images) != 1:
        raise ValueError(
            f"iou needs the image's size to convert boxes in pixels, and the prompt has {len(images)} images; "
            "expected 1"
        )
    size: tuple[int, int] = images[0].size
    return size
