"""The judges of one rank: what they ask about the sampled images, all in one batch."""

import torch
from torch import Tensor

from phalanx.config.schema import RewardModelConfig
from phalanx.rewards._base import RewardError, to_uint8
from phalanx.rewards._judge import Judge
from phalanx.rewards._model import Question, RewardModel
from phalanx.types import Prompt


class Panel:
    """`judges` by the name of their term. All ranks of the world make it, and `ask`, at the same point."""

    def __init__(self, judges: dict[str, Judge], cfg: RewardModelConfig, timeout_s: float) -> None:
        """Load the reward model; ValueError where it cannot be used."""
        self._judges = judges
        self._model = RewardModel(cfg, timeout_s)
        self._images: list[Tensor] = []
        self._prompts: list[Prompt] = []
        self._questions: dict[str, list[Question]] = {name: [] for name in judges}

    def submit(self, images: Tensor, prompts: list[Prompt]) -> None:
        """Note images [B, 3, H, W] in 0..1 of B prompts; RewardError where a judge cannot ask about one."""
        for name, judge in self._judges.items():
            for number, prompt in enumerate(prompts, len(self._prompts)):
                try:
                    question = judge.question(prompt.text, prompt.meta)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    text = " ".join(str(error).split())
                    raise RewardError(
                        f"reward {name!r} has no question: {type(error).__name__}: {text} on the prompt "
                        f'"{prompt.text}"; its data has {", ".join(prompt.meta) or "no columns"}'
                    ) from error
                self._questions[name].append((number, question))
        self._images.append(to_uint8(images))
        self._prompts.extend(prompts)

    def ask(self) -> tuple[list[Prompt], dict[str, list[str]]]:
        """Ask about all that was noted, and forget it: the prompts, and by judge an answer about the image of each.

        A collective: where this rank has noted nothing, it answers the questions of others.
        """
        images = torch.cat(self._images) if self._images else torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
        answers = self._model.ask(images, [question for asked in self._questions.values() for question in asked])
        prompts, count = self._prompts, len(self._prompts)
        self._images, self._prompts = [], []
        self._questions = {name: [] for name in self._judges}
        return prompts, {name: answers[i * count : (i + 1) * count] for i, name in enumerate(self._judges)}
