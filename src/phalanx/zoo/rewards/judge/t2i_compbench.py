"""Reward: T2I-CompBench++'s questions to a vision-language model (arXiv 2307.06350), as its authors ask ShareGPT4V.

The model describes the image, and then grades it on a given scale: for prompts about colours, shapes and textures each
part of the prompt from 1 to 4, for other prompts the whole from 1 to 5. Each grade is mapped to a number in 0..1, and
the score is their product.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from phalanx.rewards.judge import Judge

ATTRIBUTES = ("color", "shape", "texture")
# the texts that ask for a description and for a grade, by category
QUESTIONS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# possessive, because judges in JSON mode may write blanks without end
_LEVEL = re.compile(r'"score"\s*+:\s*+"?+\s*+(\d++)(?:\.0++)?+\s*+"?+\s*+[,}]', re.IGNORECASE)
_OF_FOUR = {1: 0.1, 2: 0.2, 3: 0.75, 4: 1.0}
_OF_FIVE = {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.8, 5: 1.0}


class T2iCompbench(Judge):
    """`category`: that of all prompts, one of color, shape, texture, spatial, 3d_spatial, non_spatial, complex and
    numeracy; null: that in the data's column `category`. `describe`: ask for a description first. Rows of the first
    three categories have three lists with an item for each part: `phrases` (a green bench), `nouns` (bench) and
    `attributes` (green).
    """

    def __init__(self, category: str | None = None, describe: bool = True) -> None:
        if category is not None and category not in QUESTIONS:
            raise ValueError(f"category={category!r}; expected one of {', '.join(QUESTIONS)}")
        self._category, self.opens = category, describe

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a category, or without its parts."""
        category = self._category_of(metadata)
        if category not in QUESTIONS:
            raise ValueError(f"category {category!r}; expected one of {', '.join(QUESTIONS)}")
        if category not in ATTRIBUTES:
            return
        for name in ("phrases", "nouns", "attributes"):
            texts, phrases = metadata.get(name), metadata.get("phrases")
            if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
                raise ValueError(f"{name} {texts!r}; expected a list with a text for each part of the prompt")
            if isinstance(phrases, list) and len(texts) != len(phrases):
                raise ValueError(f"{name} has {len(texts)} texts, but phrases has {len(phrases)}")

    def _category_of(self, metadata: dict[str, Any]) -> Any:
        return self._category or metadata.get("category")

    def opening(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The request for a description."""
        category = self._category_of(metadata)
        return QUESTIONS[category]["describe"].format(category=category)

    def questions(self, prompt: str, metadata: dict[str, Any]) -> list[str]:
        """The requests for a grade, one for each part or one for the whole."""
        self.check_row(prompt, metadata)
        category = self._category_of(metadata)
        question = QUESTIONS[category]["grade"]
        if category not in ATTRIBUTES:
            return [question.format(prompt=prompt)]
        texts = []
        parts = zip(metadata["phrases"], metadata["nouns"], metadata["attributes"], strict=True)
        for phrase, noun, attribute in parts:
            texts.append(question.format(phrase=phrase, noun=noun, attribute=attribute))
        return texts

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """The number for the last grade in an answer; None if there is no grade, or if it is not on the scale."""
        level = next(iter(_LEVEL.findall(answer)[-1:]), "").lstrip("0")
        scale = _OF_FOUR if self._category_of(metadata) in ATTRIBUTES else _OF_FIVE
        return scale.get(int(level)) if len(level) == 1 else None  # int() refuses thousands of digits

    def score(self, answers: list[str], prompt: str, metadata: dict[str, Any]) -> float | None:
        """The product of the numbers for all answers; None if one of them cannot be parsed."""
        product = 1.0
        for answer in answers:
            share = self.parse(answer, prompt, metadata)
            if share is None:
                return None
            product *= share
        return product
