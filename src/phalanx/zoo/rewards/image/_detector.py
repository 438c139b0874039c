"""A frozen Mask2Former for COCO's objects on the rank's device, which finds boxes and masks in images.

GenEval's detector is mmdetection's Mask2Former with a Swin-S. The weights published for transformers have the same
architecture and data, but come from another training run. As in mmdetection, masks are resized before they are
binarised, and a detection's score is that of its class times the mean probability of its mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, Mask2FormerConfig, Mask2FormerModel, Mask2FormerPreTrainedModel

from phalanx.media.pictures import to_uint8
from phalanx.zoo.rewards.image._clip import load_model, load_part
from phalanx.zoo.rewards.image._geneval_rules import CLASSES, Detection

_KIND = "a Mask2Former for COCO's instances"


class _Segmenter(Mask2FormerPreTrainedModel):
    """Mask2FormerForUniversalSegmentation, with the same names of weights, without its loss, which needs SciPy."""

    def __init__(self, config: Mask2FormerConfig) -> None:
        super().__init__(config)
        self.model = Mask2FormerModel(config)
        self.class_predictor = nn.Linear(config.hidden_dim, config.num_labels + 1)
        self.post_init()

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of classes [B, queries, 81] and of masks [B, queries, h / 4, w / 4] for pixels [B, 3, h, w]."""
        out = self.model(pixel_values=pixels, output_hidden_states=True)
        states: Tensor = out.transformer_decoder_intermediate_states[-1]  # [queries, B, width]
        return self.class_predictor(states.transpose(0, 1)), out.masks_queries_logits[-1]


class Detector:
    """The detector, loaded from a folder or hub id. Raises ValueError for another model.

    edges: images are resized such that their shorter side has edges[0] pixels and the longer one at most edges[1].
    """

    def __init__(self, model: str, device: str, edges: Sequence[int], name: str = "model") -> None:
        config = load_part(AutoConfig, model, name, _KIND)
        if config.model_type != "mask2former" or config.num_labels != len(CLASSES):
            raise ValueError(
                f"{name}={model!r} is a model of type {config.model_type} with {config.num_labels} classes; expected "
                f"{_KIND}, which has {len(CLASSES)}"
            )
        self._segmenter: Any = load_model(_Segmenter, model, name, _KIND).to(device)
        size = dict(zip(("shortest_edge", "longest_edge"), edges, strict=True))
        self._processor = load_part(AutoImageProcessor, model, name, size=size)
        self._device = torch.device(device)

    @torch.no_grad()
    def __call__(self, image: Tensor, threshold: float) -> dict[str, list[Detection]]:
        """Detections in an image [3, H, W] in 0..1 with a score above `threshold`, by class; masks on the device."""
        pixels = self._processor(images=[to_uint8(image[None])[0]], return_tensors="pt")["pixel_values"]
        classes, masks = self._segmenter(pixels.to(self._device))
        scores, flat = classes[0].softmax(-1)[:, :-1].flatten().topk(len(classes[0]))
        certain = scores > threshold  # final scores are not larger, and so fewer masks need to be resized
        scores, flat = scores[certain], flat[certain]
        detected: dict[str, list[Detection]] = {}
        for score, label, query in zip(scores, flat % len(CLASSES), flat // len(CLASSES), strict=True):
            logits = F.interpolate(masks[:, query, None], pixels.shape[2:], mode="bilinear", align_corners=False)
            logits = F.interpolate(logits, image.shape[1:], mode="bilinear", align_corners=False)[0, 0]
            mask = logits > 0
            if not mask.any():
                continue
            score = float(score * logits.sigmoid()[mask].mean())
            if score > threshold:
                detected.setdefault(CLASSES[label], []).append(Detection(_mask_box(mask), score, mask))
        return detected


def _mask_box(mask: Tensor) -> tuple[float, float, float, float]:
    """The box (left, top, right, bottom) of a mask [H, W]; right and bottom are exclusive."""
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
