"""GenEval's rules (arXiv 2310.11513): whether the objects that a detector finds in an image match the prompt.

A row of GenEval's evaluation_metadata.jsonl has a `tag`; `include`, a list of expected objects, each with a `class`, a
`count` and, if the prompt has one, a `color` or a `position` ([relation, index of an earlier object]); and `exclude`, a
list of classes with counts that are too many. Classes are COCO's, under GenEval's names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.zoo.rewards._boxes import Box, iou

CLASSES = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light"),
    *("fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow"),
    *("elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee"),
    *("skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard"),
    *("tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple"),
    *("sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch"),
    *("potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote"),
    *("computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock"),
    *("vase", "scissors", "teddy bear", "hair drier", "toothbrush"),
)
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
_NEAR = 1e-3  # smaller offsets in pixels count as none


@dataclass(frozen=True, eq=False)
class Detection:
    """An object in an image: `box` is (left, top, right, bottom) in pixels, `mask` [H, W] is True on the object."""

    box: Box
    score: float
    mask: Tensor | None = None


Detected = Mapping[str, Sequence[Detection]]  # by class, in descending order of scores
ColorsOf = Callable[[str, tuple[Detection, ...]], list[str]]  # class, objects -> the colour of each object


def kept(detections: Sequence[Detection], threshold: float, max_objects: int, max_overlap: float) -> list[Detection]:
    """The detections of one class that count: the `max_objects` best ones with a score above `threshold`; of two whose
    IoU is at least `max_overlap`, only the better one (with max_overlap=1, both). As in GenEval, a box's
    right and bottom sides belong to it.
    """
    certain = sorted((each for each in detections if each.score > threshold), key=lambda each: -each.score)
    chosen: list[Detection] = []
    for each in certain[:max_objects]:
        if max_overlap >= 1 or all(iou(other.box, each.box, 1) < max_overlap for other in chosen):
            chosen.append(each)
    return chosen


def relations(a: Detection, b: Detection, threshold: float) -> set[str]:
    """The relations of `a` to `b`. A relation holds if the offset between the centres along its axis, reduced by
    `threshold` times the sum of both sizes on that axis, is more than half of the distance between the centres.
    """
    offsets, beyond = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (a.box[low] + a.box[high] - b.box[low] - b.box[high]) / 2
        sizes = abs(a.box[high] - a.box[low]) + abs(b.box[high] - b.box[low])
        offsets.append(offset)
        beyond.append(math.copysign(max(abs(offset) - threshold * sizes, 0), offset))
    if max(map(abs, beyond)) < _NEAR:
        return set()
    x, y = (each / math.hypot(*offsets) for each in beyond)
    holds = dict(zip(RELATIONS, (x < -0.5, x > 0.5, y < -0.5, y > 0.5), strict=True))
    return {relation for relation in RELATIONS if holds[relation]}


def verdict(detected: Detected, row: Mapping[str, Any], colors_of: ColorsOf, position_threshold: float) -> bool:
    """GenEval's verdict: for each clause of `include` there are enough objects, the best of which have the expected
    colour and position, and for each clause of `exclude` there are fewer objects than its count.
    """
    groups, _ = _match_clauses(detected, row, colors_of, position_threshold, exact=False)
    too_many = [len(detected.get(clause["class"], ())) >= clause["count"] for clause in row.get("exclude") or ()]
    return None not in groups and not any(too_many)


def fraction(detected: Detected, row: Mapping[str, Any], colors_of: ColorsOf, position_threshold: float) -> float:
    """The mean score over the rules of `include`, at most 1 (arXiv 2505.05470). Counts, and colours of objects whose
    count is right, score 1 - |expected - actual| / expected; positions score 0 or 1. If the count is wrong, colour and
    position score 0.
    """
    _, parts = _match_clauses(detected, row, colors_of, position_threshold, exact=True)
    return sum(parts) / len(parts)


def _match_clauses(
    detected: Detected, row: Mapping[str, Any], colors_of: ColorsOf, position_threshold: float, *, exact: bool
) -> tuple[list[tuple[Detection, ...] | None], list[float]]:
    """For each clause of `include` the objects that fulfil it, None if it is not fulfilled; and a score for each rule.
    `exact`: a clause is not fulfilled by more objects than expected.
    """
    groups: list[tuple[Detection, ...] | None] = []
    parts: list[float] = []
    for clause in row["include"]:
        count, color, position = clause["count"], clause.get("color"), clause.get("position")
        objects = tuple(detected.get(clause["class"], ()))
        parts.append(1 - abs(count - len(objects)) / count)
        objects = objects if exact else objects[:count]
        fulfilled = len(objects) == count
        if not fulfilled and (color or position):
            parts.append(0.0)
        if fulfilled and color:
            right = colors_of(clause["class"], objects).count(color)
            parts.append(1 - abs(count - right) / count)
            fulfilled = right == count
        if fulfilled and position:
            relation, targets = position[0], groups[position[1]]
            fulfilled = targets is not None
            for a in objects:
                for b in targets or ():
                    fulfilled = fulfilled and relation in relations(a, b, position_threshold)
            parts.append(float(fulfilled))
        groups.append(objects if fulfilled else None)
    return groups, parts


def check(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a row that is not in GenEval's format."""
    if not isinstance(row.get("tag"), str):
        raise ValueError(f"tag {row.get('tag')!r}; expected GenEval's, such as counting")
    include, exclude = row.get("include"), row.get("exclude") or []
    if not isinstance(include, list) or not include or not isinstance(exclude, list):
        raise ValueError("no lists include and exclude; expected those of GenEval's evaluation_metadata.jsonl")
    for name, clauses in (("include", include), ("exclude", exclude)):
        for i, clause in enumerate(clauses):
            problem = _clause_problem(clause, i)
            if problem is not None:
                raise ValueError(f"{name}[{i}]: {problem}")


def _clause_problem(clause: Any, number: int) -> str | None:
    if not isinstance(clause, dict) or clause.get("class") not in CLASSES:
        return f"{clause!r} has no class of COCO under GenEval's name, such as dog or tv remote"
    count, color, position = clause.get("count"), clause.get("color"), clause.get("position")
    if not isinstance(count, int) or count < 1:
        return f"count {count!r}; expected an integer, at least 1"
    if color is not None and color not in COLORS:
        return f"color {color!r}; expected one of {', '.join(COLORS)}"
    if position is None:
        return None
    is_pair = isinstance(position, list | tuple) and len(position) == 2 and position[0] in RELATIONS
    if not is_pair or position[1] not in range(number):
        return f"position {position!r}; expected [{' | '.join(RELATIONS)}, the index of an earlier object]"
    return None
