"""Training jobs with a judge that can be checked: it is shown pictures in the place of the sampled images."""

from pathlib import Path
from typing import Any

import torch

from phalanx.types import Prompt
from tests.jobs import one_step, tiny_config
from tests.tiny_vlm import COLOURS, PICTURES, name, picture

PROMPTS = [f'the word "{colour}" on a wall' for colour in COLOURS] + ['"black"']
JUDGE = ("reward.model.dtype=float32", "reward.model.max_model_len=512", "reward.model.max_tokens=40")


def settings(judge: Path, *functions: str) -> list[str]:
    return [f"reward.functions=[{', '.join(functions)}]", f"reward.model.path={judge}", *JUDGE]


def config(model: Path, folder: Path, *overrides: str) -> Any:
    cfg = tiny_config(model, folder, *overrides)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return cfg


def shown(image: torch.Tensor) -> tuple[int, int]:
    """The picture that a test shows to the judge in the place of a sampled image, of which it depends alone."""
    return PICTURES[int(image.double().sum() * 1000) % len(PICTURES)]


def read(images: torch.Tensor) -> list[str]:
    """What stands in the pictures that are shown for these images."""
    return [name(*shown(image)) for image in images]


def step_and_terms(cfg: Any) -> dict[str, Any]:
    """One training step, whose rewards see pictures; returns what it gave, and the terms of the reward."""
    from phalanx.run import Run

    kept: dict[str, torch.Tensor] = {}
    submit, score = Run.submit, Run.score

    def show(self: Run, images: torch.Tensor, prompts: list[Prompt]) -> None:
        submit(self, torch.stack([picture(*shown(image)) for image in images]), prompts)

    def keep(self: Run) -> Any:
        reward, terms = score(self)
        kept.update(terms)
        return reward, terms

    Run.submit, Run.score = show, keep  # type: ignore[method-assign]
    return one_step(cfg) | {"terms": kept}
