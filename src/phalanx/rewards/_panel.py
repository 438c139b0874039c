"""The judges of one rank: what they ask about the sampled images, and when."""

import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config.schema import RewardModelConfig
from phalanx.rewards._base import RewardError, to_uint8
from phalanx.rewards._judge import Judge
from phalanx.rewards._model import RewardModel
from phalanx.rewards._pool import DaemonPool
from phalanx.types import Prompt

Answers = dict[str, list[str]]  # by judge, an answer about each image


@dataclass(frozen=True)
class Sheet:
    """Images uint8 [B, 3, H, W] of B prompts, and by judge a question about each."""

    images: Tensor
    prompts: list[Prompt]
    questions: dict[str, list[str]]


class Panel:
    """`judges` by the name of their term. All ranks of the world make it, and `ask`, at the same point.

    Either all is asked at once in `ask`, or (`beside`) each micro-batch on a thread, while the next is sampled; then
    all ranks of a domain must `submit` equally often. `busy_s`: seconds from questions to answers, of the last `ask`.
    """

    def __init__(
        self,
        judges: dict[str, Judge],
        cfg: RewardModelConfig,
        timeout_s: float,
        *,
        device: torch.device,
        beside: bool,
    ) -> None:
        """Load the reward model; ValueError where it cannot be used."""
        self._judges = judges
        self._model = RewardModel(cfg, timeout_s)
        self._thread = DaemonPool(1, "reward-model") if beside else None  # one: collectives keep their order
        self._awake, self._is_awake = ExitStack(), False  # the thread's
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._sheets: list[Sheet] = []
        self._asked: list[Future[Answers]] = []
        self._spent_s = self.busy_s = 0.0

    def submit(self, images: Tensor, prompts: list[Prompt]) -> None:
        """Take images [B, 3, H, W] in 0..1 of B prompts. RewardError where a judge cannot ask about one, or where an
        earlier question could not be asked.
        """
        questions = {
            name: [_question(name, judge, prompt) for prompt in prompts] for name, judge in self._judges.items()
        }
        sheet = Sheet(to_uint8(images), prompts, questions)
        self._sheets.append(sheet)
        if self._thread is not None:
            self._asked.append(self._thread.submit(lambda: self._ask_beside(sheet)))
            for call in self._asked:
                if call.done():
                    call.result()

    def ask(self) -> tuple[list[Prompt], Answers]:
        """The prompts of all that was submitted, which is forgotten, and by judge an answer about the image of each.

        A collective: where this rank has submitted nothing, it answers the questions of others.
        """
        sheets, asked = self._sheets, self._asked
        self._sheets, self._asked = [], []
        if self._thread is None:
            with self._model.awake():
                parts = [self._answers(sheets)]
        else:
            rest = self._thread.submit(self._rest)
            parts = [call.result() for call in asked]
            rest.result()
        self.busy_s, self._spent_s = self._spent_s, 0.0
        prompts = [prompt for sheet in sheets for prompt in sheet.prompts]
        return prompts, {name: [answer for part in parts for answer in part[name]] for name in self._judges}

    def _ask_beside(self, sheet: Sheet) -> Answers:
        """On the thread: the model stays awake until `_rest`, on a stream of its own."""
        if self._device.type == "cuda" and self._stream is None:
            torch.cuda.set_device(self._device)  # a thread begins on the first one
            self._stream = torch.cuda.Stream()  # one for good: the allocator keeps memory by stream
            torch.cuda.set_stream(self._stream)
        if not self._is_awake:
            self._awake.enter_context(self._model.awake())
            self._is_awake = True
        return self._answers([sheet])

    def _rest(self) -> None:
        """On the thread: the model may sleep."""
        self._awake.close()
        self._is_awake = False

    def _answers(self, sheets: list[Sheet]) -> Answers:
        """One batch of questions about all `sheets`, on all ranks of the domain at once."""
        begin = time.perf_counter()
        images = torch.cat([s.images for s in sheets]) if sheets else torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
        asked = {name: [text for s in sheets for text in s.questions[name]] for name in self._judges}
        answers = self._model.ask(images, [each for texts in asked.values() for each in enumerate(texts)])
        self._spent_s += time.perf_counter() - begin
        count = len(images)
        return {name: answers[i * count : (i + 1) * count] for i, name in enumerate(self._judges)}


def _question(name: str, judge: Judge, prompt: Prompt) -> str:
    """What a judge asks about an image of the prompt; RewardError where it cannot ask."""
    try:
        return judge.question(prompt.text, prompt.meta)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise RewardError(
            f"reward {name!r} has no question: {type(error).__name__}: {text} on the prompt "
            f'"{prompt.text}"; its data has {", ".join(prompt.meta) or "no columns"}'
        ) from error
