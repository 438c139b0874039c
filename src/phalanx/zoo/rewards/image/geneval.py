"""Reward: GenEval (arXiv 2310.11513): objects, counts, colours and positions, according to a detector and CLIP.

Thresholds and rules are those of github.com/djghosh13/geneval; the detector is a Mask2Former of transformers. CLIP
chooses an object's colour among ten for its crop, in which everything but the object is grey.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from phalanx.rewards.base import DeviceReward, RewardOutput, RewardWithExtras
from phalanx.zoo.rewards.image._clip import Clip
from phalanx.zoo.rewards.image._detector import Detector
from phalanx.zoo.rewards.image._geneval_rules import COLORS, Detection, check, fraction, kept, verdict

_TEMPLATES = ("a photo of a {color} {object}", "a photo of a {color}-colored {object}", "a photo of a {color} object")
_GREY = 153 / 255


class Geneval(RewardWithExtras, DeviceReward):
    """GenEval's score of images.

    detector, clip_model: folders or hub ids.
    strict: the score is GenEval's verdict, 0 or 1, rather than the fraction of fulfilled rules.
    threshold, counting_threshold: minimum score of detections; the second is for rows with the tag `counting`.
    max_objects, max_overlap: see phalanx.zoo.rewards.image._geneval_rules.kept.
    position_threshold: see phalanx.zoo.rewards.image._geneval_rules.relations.
    detector_size: pixels of the shorter side, and maximum pixels of the longer side, of the detector's input.
    """

    extras = ("correct",)  # GenEval's verdict

    def __init__(
        self,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        clip_model: str = "openai/clip-vit-large-patch14",
        strict: bool = False,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: PositiveInt = 16,
        max_overlap: float = 1.0,
        position_threshold: float = 0.1,
        detector_size: tuple[int, int] = (800, 1333),
        device: str = "cpu",
    ) -> None:
        if len(detector_size) != 2 or not 0 < detector_size[0] <= detector_size[1]:
            raise ValueError(f"detector_size={detector_size}; expected pixels of the shorter and the longer side")
        self._detector = Detector(detector, device, detector_size, "detector")
        self._clip = Clip(clip_model, device, name="clip_model")
        self._strict, self._thresholds = strict, (threshold, counting_threshold)
        self._max_objects, self._max_overlap, self._position_threshold = max_objects, max_overlap, position_threshold
        self._device = torch.device(device)
        self._colors: dict[str, Tensor] = {}  # unit vectors of the colours, by class of objects

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row that is not in GenEval's format."""
        check(metadata)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """B scores, at most 1, of images [B, 3, H, W] in 0..1."""
        scores, correct = [], []
        for image, row in zip(images.to(self._device), metadata, strict=True):
            check(row)
            threshold = self._thresholds[row["tag"] == "counting"]
            detected = {}
            for name, objects in self._detector(image, threshold).items():
                detected[name] = kept(objects, threshold, self._max_objects, self._max_overlap)

            @cache
            def colors_of(name: str, objects: tuple[Detection, ...], image: Tensor = image) -> list[str]:
                return self._classify_colors(image, name, objects)

            rules = (detected, row, colors_of, self._position_threshold)
            correct.append(float(verdict(*rules)))
            scores.append(correct[-1] if self._strict else fraction(*rules))
        return RewardOutput(scores, {"correct": correct})

    def _classify_colors(self, image: Tensor, name: str, objects: tuple[Detection, ...]) -> list[str]:
        """The colours of the objects, of class `name`, in an image [3, H, W]."""
        if name not in self._colors:
            texts = []
            for template in _TEMPLATES:
                texts += [template.format(color=color, object=name) for color in COLORS]
            vectors = self._clip.prompts(texts).view(len(_TEMPLATES), len(COLORS), -1)
            self._colors[name] = F.normalize(vectors.mean(0), dim=-1)
        chosen = []
        for each in objects:
            shown = image if each.mask is None else torch.where(each.mask, image, _GREY)
            left, top, right, bottom = map(round, each.box)
            similarity = self._clip.images(shown[None, :, top:bottom, left:right]) @ self._colors[name].T  # [1, 10]
            chosen.append(COLORS[int(similarity.argmax())])
        return chosen
