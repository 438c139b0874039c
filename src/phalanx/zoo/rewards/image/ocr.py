"""Reward: how well an OCR engine reads the prompt's text in the image (Flow-GRPO, arXiv 2505.05470, section 4.2).

`1 - min(1, Levenshtein(target, read) / len(target))`, both in lower case and without spaces; the target is
`metadata["ground_truth"]`. The engine is PP-OCRv6 small, whose ONNX files come with the installed rapidocr package.

Deviations from flow_grpo: (1) PP-OCRv6 on onnxruntime instead of PP-OCRv4 on Paddle; (2) a target that is contained in
a longer text scores 1 only with `contains`, because this rewards images full of text.
"""

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.media.pictures import to_uint8
from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.zoo.rewards._recall import Kind, matched, target_of

RECOGNISER = "models/PP-OCRv6_rec_small.onnx"
_LINE_HEIGHT = 48  # pixels: the height of a line that the recogniser was trained on
_BATCH = 16


class Ocr(RewardWithExtras):
    """Reads images and compares the text with the target.

    detect: find lines of text, then read them in reading order; False: the whole image is one line of text, which is
        a hundred times faster for small images of a word.
    contains: score 1 if the text contains the target.
    threads: threads of onnxruntime per call; with reward.num_workers several calls run at once.
    exact: score 1 if the text equals the target, and 0 otherwise.
    recall: score the fraction of the target's "words" or "characters" that were read, in any order.
    column: column of the data with the target, a text or a list of texts, which are joined with spaces.
    """

    def __init__(
        self,
        detect: bool = True,
        contains: bool = False,
        threads: int = 1,
        exact: bool = False,
        recall: Kind | None = None,
        column: str = "ground_truth",
    ) -> None:
        if recall and (contains or exact):
            raise ValueError(f"recall={recall!r} is given without contains and exact")
        for name in ("rapidocr", "onnxruntime"):
            if find_spec(name) is None:
                raise ValueError(f"the package {name} is not installed; pip install 'phalanx[ocr]'")
        package = find_spec("rapidocr")
        assert package is not None and package.origin is not None
        self._contains, self._exact, self._recall, self._column = contains, exact, recall, column
        if recall is not None:
            self.extras = ("matched", "expected")  # numbers of words or characters
        self._reader: _DetectingReader | _LineReader
        if detect:
            self._reader = _DetectingReader(threads)
        else:
            self._reader = _LineReader(Path(package.origin).parent / RECOGNISER, threads)

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[float] | RewardOutput:
        """B scores in 0..1 of images [B, 3, H, W] in 0..1."""
        targets = []
        for prompt, meta in zip(prompts, metadata, strict=True):
            targets.append(target_of(prompt, meta, self._column, self._recall))
        pairs = zip(targets, self.read(images), strict=True)
        if self._recall is None:
            return [self._text_score(_normalize_text(target), _normalize_text(text)) for target, text in pairs]
        counts = [matched(target, text, self._recall) for target, text in pairs]
        extras = dict(zip(self.extras, zip(*counts, strict=True), strict=True))
        return RewardOutput([right / expected for right, expected in counts], extras)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a target."""
        target_of(prompt, metadata, self._column, self._recall)

    def read(self, images: Tensor) -> list[str]:
        """The texts that the engine reads in images [B, 3, H, W] in 0..1."""
        return self._reader.read(to_uint8(images))

    def _text_score(self, target: str, read: str) -> float:
        from rapidfuzz.distance import Levenshtein

        if self._contains and target in read:
            return 1.0
        if self._exact:
            return float(target == read)
        return 1.0 - min(1.0, Levenshtein.distance(target, read) / len(target))


def _normalize_text(text: str) -> str:
    return "".join(text.lower().split())


class _LineReader:
    """Only the recogniser; all threads share one session."""

    def __init__(self, model: Path, threads: int) -> None:
        import onnxruntime

        if not model.is_file():
            raise ValueError(f"{model} is missing: this rapidocr has other models; expected rapidocr 3.10")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        characters = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *characters, " "]  # class 0 is CTC's blank

    def read(self, images: Tensor) -> list[str]:
        """Read images uint8 [B, 3, H, W] as B texts, by greedy CTC decoding: repeats are merged, blanks removed."""
        width = max(1, round(images.shape[3] * _LINE_HEIGHT / images.shape[2]))
        texts = []
        for part in images.flip(1).float().split(_BATCH):  # RGB to BGR
            # antialiasing keeps thin strokes if the image shrinks, and changes nothing if it is enlarged
            lines = F.interpolate(part, size=(_LINE_HEIGHT, width), mode="bilinear", antialias=True)
            (scores,) = self._session.run(None, {self._input: (lines / 127.5 - 1).numpy()})
            for classes in torch.from_numpy(scores.argmax(-1)):
                kept = torch.unique_consecutive(classes)
                texts.append("".join(self._characters[i] for i in kept.tolist()))
        return texts


class _DetectingReader(threading.local):
    """RapidOCR's pipeline: detection, then recognition of each line. Its stages keep state: one engine per thread."""

    _engine: Any = None  # this thread's, created by its first call

    def __init__(self, threads: int) -> None:
        self._params = {
            "Global.use_cls": False,
            "Global.log_level": "critical",  # it would warn of each image without text
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }

    def read(self, images: Tensor) -> list[str]:
        """Read images uint8 [B, 3, H, W] as B texts."""
        if self._engine is None:
            from rapidocr import RapidOCR

            self._engine = RapidOCR(params=self._params)
        pictures = images.flip(1).permute(0, 2, 3, 1).contiguous().numpy()  # BGR, as in OpenCV
        return [" ".join(self._engine(picture).txts or ()) for picture in pictures]
