"""GenEval: its rules by hand, its detector against transformers' post-processing of a tiny Mask2Former, the reward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.types import Prompt
from phalanx.zoo.rewards._boxes import iou
from phalanx.zoo.rewards.image._detector import Detector, _Segmenter
from phalanx.zoo.rewards.image._geneval_rules import (
    CLASSES,
    COLORS,
    Detection,
    check,
    fraction,
    kept,
    relations,
    verdict,
)
from tests.helpers.rewards import entry, rewards, told
from tests.unit.test_rewards_clip import clip_folder, pil, random_images, reference  # noqa: F401

EDGES = (128, 192)  # of images that are resized for the tiny detector
SIZE = 384  # of one that is not: transformers reads masks at this size


def at(left: float, top: float, right: float, bottom: float, score: float = 0.95) -> Detection:
    return Detection((left, top, right, bottom), score)


def judged(detected: dict[str, list[Detection]], row: dict[str, Any], *colors: str) -> tuple[bool, float]:
    """GenEval's verdict and the fraction of fulfilled rules; objects get the colours in the order of the questions."""
    row = {"tag": "", **row}
    check(row)

    def colors_of(name: str, objects: tuple[Detection, ...]) -> list[str]:
        return list(colors[: len(objects)])

    return verdict(detected, row, colors_of, 0.1), fraction(detected, row, colors_of, 0.1)


# --- the rules


@pytest.mark.parametrize(
    ("objects", "expected"),
    [(0, (False, 0.0)), (1, (False, 0.5)), (2, (True, 1.0)), (3, (False, 0.5)), (5, (False, -0.5))],
)
def test_counting(objects: int, expected: tuple[bool, float]) -> None:
    row = {"include": [{"class": "dog", "count": 2}], "exclude": [{"class": "dog", "count": 3}]}
    assert judged({"dog": [at(0, 0, 9, 9)] * objects} if objects else {}, row) == expected


def test_more_objects_than_expected_are_right_unless_excluded() -> None:
    row = {"include": [{"class": "dog", "count": 1}]}
    assert judged({"dog": [at(0, 0, 9, 9)] * 2, "cat": [at(0, 0, 9, 9)]}, row) == (True, 0.0)


def test_two_objects() -> None:
    row = {"include": [{"class": "dog", "count": 1}, {"class": "tv remote", "count": 1}]}
    assert judged({"dog": [at(0, 0, 9, 9)]}, row) == (False, 0.5)
    assert judged({"dog": [at(0, 0, 9, 9)], "tv remote": [at(0, 0, 9, 9)]}, row) == (True, 1.0)


@pytest.mark.parametrize(
    ("colors", "expected"),
    [(["red", "red"], (True, 1.0)), (["red", "blue"], (False, 0.75)), (["blue", "blue"], (False, 0.5))],
)
def test_colors(colors: list[str], expected: tuple[bool, float]) -> None:
    row = {"include": [{"class": "car", "count": 2, "color": "red"}]}
    assert judged({"car": [at(0, 0, 9, 9), at(9, 0, 20, 9)]}, row, *colors) == expected
    assert judged({"car": [at(0, 0, 9, 9)]}, row, *colors) == (False, 0.25)  # half the count, and no colour


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((60, 0, 80, 20), {"right of"}),
        ((0, 60, 20, 80), {"below"}),
        # centres 40 and 40 away, 36 of each behind the sizes: 36 / 56.6 = 0.64
        ((40, 40, 60, 60), {"right of", "below"}),
        # 4 pixels on one axis are the sizes' part of it, 0.1 * (20 + 20)
        ((4, 0, 24, 20), set()),
        # 8 - 4 of 8 is half, and not more
        ((8, 0, 28, 20), set()),
        ((9, 0, 29, 20), {"right of"}),
        ((0, 0, 20, 20), set()),
    ],
)
def test_relations(box: tuple[float, float, float, float], expected: set[str]) -> None:
    a, b = at(*box), at(0, 0, 20, 20)
    assert relations(a, b, 0.1) == expected
    opposite = {"right of": "left of", "below": "above"}
    assert relations(b, a, 0.1) == {opposite[each] for each in expected}


def test_position() -> None:
    row = {"include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}]}
    dog, left, right = at(50, 0, 70, 20), at(0, 0, 20, 20), at(100, 0, 120, 20)
    assert judged({"dog": [dog], "cat": [left]}, row) == (True, 1.0)
    assert judged({"dog": [dog], "cat": [right]}, row) == (False, 2 / 3)
    assert judged({"cat": [left]}, row) == (False, 1 / 3)  # no dog to be left of
    assert judged({"dog": [dog]}, row) == (False, 1 / 3)  # no cat: neither count nor position
    assert judged({"dog": [dog], "cat": [left, right]}, row) == (True, 1 / 3)  # the most certain cat is left of it


def test_detections_that_count() -> None:
    a, b, c = at(0, 0, 9, 9, 0.5), at(0, 0, 9, 4, 0.7), at(50, 50, 60, 60, 0.3)
    assert iou(a.box, b.box, 1) == pytest.approx(0.5)  # 50 of 100 pixels
    assert kept([a, b, c], 0.3, 16, 1.0) == [b, a]  # strictly above the threshold
    assert kept([a, b, c], 0.2, 2, 1.0) == [b, a]
    assert kept([a, b, c], 0.2, 16, 0.5) == [b, c]
    assert kept([a, b, c], 0.2, 16, 0.51) == [b, a, c]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "tag None; expected GenEval's, such as counting"),
        ({"tag": "colors"}, "no lists include and exclude; expected those of GenEval's evaluation_metadata.jsonl"),
        (
            {"tag": "", "include": [{"class": "remote", "count": 1}]},
            "include[0]: {'class': 'remote', 'count': 1} has no class of COCO under GenEval's name, such as dog or tv remote",
        ),
        (
            {"tag": "", "include": [{"class": "dog", "count": 1}], "exclude": [{"class": "dog"}]},
            "exclude[0]: count None; expected an integer, at least 1",
        ),
        (
            {"tag": "", "include": [{"class": "dog", "count": 1, "color": "grey"}]},
            f"include[0]: color 'grey'; expected one of {', '.join(COLORS)}",
        ),
        (
            {"tag": "", "include": [{"class": "dog", "count": 1, "position": ["above", 0]}]},
            "include[0]: position ['above', 0]; expected [left of | right of | above | below, the index of an earlier "
            "object]",
        ),
    ],
)
def test_rows_that_are_not_genevals(row: dict[str, Any], message: str) -> None:
    assert told(ValueError, check, row) == message


# --- the detector


def save_detector(folder: Path, classes: int = len(CLASSES)) -> Path:
    from transformers import Mask2FormerConfig, Mask2FormerImageProcessorPil, SwinConfig

    swin = SwinConfig(
        image_size=32, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=4, out_features=[*STAGES]
    )
    config = Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        dim_feedforward=32, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=8, num_labels=classes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = _Segmenter(config)
        torch.nn.init.normal_(model.model.transformer_module.queries_features.weight, std=3.0)  # queries that differ
        torch.nn.init.normal_(model.class_predictor.weight, std=2.0)  # certain classes
    model.save_pretrained(folder)
    # the published folders squeeze images to this
    Mask2FormerImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


STAGES = ("stage1", "stage2", "stage3", "stage4")


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_detector(tmp_path_factory.mktemp("detector"))


def test_detections_are_those_of_the_processor(detector_folder: Path) -> None:
    """transformers' own post-processing of the same logits, for an image that needs no resizing."""
    image = random_images(SIZE, SIZE, 1)[0]
    from types import SimpleNamespace

    from transformers import Mask2FormerImageProcessorPil

    processor = Mask2FormerImageProcessorPil.from_pretrained(detector_folder)
    with torch.no_grad():
        pixels = processor(images=pil(image[None]), return_tensors="pt").pixel_values
        classes, masks = _Segmenter.from_pretrained(detector_folder).eval()(pixels)
    logits = SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks)
    (expected,) = processor.post_process_instance_segmentation(logits, threshold=0.05, return_binary_maps=True)
    detected = Detector(str(detector_folder), "cpu", (SIZE, SIZE))(image, 0.05)
    actual = sorted((each.score, name, each) for name, objects in detected.items() for each in objects)
    order = sorted(expected["segments_info"], key=lambda segment: segment["score"])
    assert len(actual) == len(order) >= 4
    for (score, name, each), segment in zip(actual, order, strict=True):
        assert (score, name) == (pytest.approx(segment["score"], abs=1e-5), CLASSES[segment["label_id"]])
        mask = expected["segmentation"][segment["id"]].bool()
        assert each.mask is not None and torch.equal(each.mask, mask)
        rows, columns = mask.numpy().nonzero()
        assert each.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


def test_other_models_are_refused(tmp_path: Path, clip_folder: Path) -> None:  # noqa: F811
    message = told(ValueError, rewards, entry("geneval", detector=str(clip_folder), clip_model=str(clip_folder)))
    assert message == (
        f"reward.functions[0] (geneval): detector={str(clip_folder)!r} is a model of type clip with 2 classes; expected "
        "a Mask2Former for COCO's instances, which has 80"
    )


# --- the reward


def test_the_reward(detector_folder: Path, clip_folder: Path) -> None:  # noqa: F811
    image = random_images(80, 100, 1)[0]
    threshold = 0.05
    detected = Detector(str(detector_folder), "cpu", EDGES)(image, threshold)
    first, name = max(
        ((each, name) for name, objects in detected.items() for each in objects), key=lambda x: x[0].score
    )
    absent = next(each for each in CLASSES if each not in detected)

    # the colour of the object by transformers' CLIP: of its crop, in which all else is #999
    assert first.mask is not None and not first.mask.all()
    grey = Image.new("RGB", (100, 80), "#999")
    crop = Image.composite(pil(image[None])[0], grey, Image.fromarray(first.mask.numpy())).crop(first.box)
    templates = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
    texts = [template.format(color, name) for template in templates for color in COLORS]
    out = reference(clip_folder, torch.tensor(np.array(crop)).permute(2, 0, 1)[None] / 255, texts)
    vectors = torch.nn.functional.normalize(out.text_embeds.view(3, len(COLORS), -1).mean(0), dim=-1)
    color = COLORS[int((vectors @ out.image_embeds[0]).argmax())]
    other = next(each for each in COLORS if each != color)

    rows: list[dict[str, Any]] = [
        {"tag": "counting", "include": [{"class": name, "count": 1}]},
        {"tag": "single_object", "include": [{"class": name, "count": 1}]},
        {"tag": "single_object", "include": [{"class": absent, "count": 1}]},
        {"tag": "two_object", "include": [{"class": name, "count": 1}, {"class": absent, "count": 1}]},
        {"tag": "colors", "include": [{"class": name, "count": 1, "color": color}]},
        {"tag": "colors", "include": [{"class": name, "count": 1, "color": other}]},
    ]
    expected, correct = [0.0, 1.0, 0.0, 0.5, 1.0, 0.5], [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    kwargs = {
        "detector": str(detector_folder),
        "clip_model": str(clip_folder),
        "threshold": threshold,
        "max_objects": 1,
    }
    for strict in (False, True):
        # no object is as certain as the threshold of counting
        reward = rewards(entry("geneval", counting_threshold=1.0, strict=strict, **kwargs))
        reward.submit(image.expand(len(rows), -1, -1, -1), [Prompt("", i, row) for i, row in enumerate(rows)])
        scores = reward.collect()
        assert scores["geneval_correct"].tolist() == correct
        assert scores["geneval"].tolist() == pytest.approx(correct if strict else expected)
    assert reward.terms[0].objection("", {}) == "tag None; expected GenEval's, such as counting"
