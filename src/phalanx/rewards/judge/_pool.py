"""The judges of one rank: what they ask about the samples, and when."""

import logging
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from phalanx.config.messages import reason
from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.launch import Launch
from phalanx.media.pictures import raw_file, to_uint8
from phalanx.rewards.base import RewardError, copied
from phalanx.rewards.call import DaemonPool
from phalanx.rewards.judge._base import Judge
from phalanx.rewards.judge._model import RewardModel
from phalanx.types import Outputs, Prompt

log = logging.getLogger(__name__)
Answers = dict[str, list[str]]  # by judge, an answer about each sample


@dataclass(frozen=True)
class JudgeBatch:
    """B prompts, and by judge a question about a sample of each. `shown` are the numbers in `files` of the images that
    come with it: the sample itself, or those of the prompt where texts are judged, which the questions hold.
    """

    files: list[bytes]
    shown: list[tuple[int, ...]]
    prompts: list[Prompt]
    questions: dict[str, list[str]]


class JudgePool:
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
        outputs: str,
        device: torch.device,
        beside: bool,
        launch: Launch | None = None,
    ) -> None:
        """Load the reward model for `outputs`, images or completions; ValueError where it cannot be used."""
        self._judges = judges
        self._of_text = outputs == "completions"
        self._model = RewardModel(cfg, timeout_s, text=self._of_text, launch=launch)
        self._warned_of_images = False
        self._batches: list[JudgeBatch] = []  # submitted, and not yet handed out by `ask`
        self.busy_s = 0.0
        self._spent_s = 0.0  # since the last `ask`

        # only where it answers beside the sampling; one thread, since collectives must keep their order
        self._thread = DaemonPool(1, "reward-model") if beside else None
        self._answers: list[Future[Answers]] = []  # of each of the batches
        self._device = device
        # what follows belongs to the thread
        self._stream: torch.cuda.Stream | None = None
        self._awake = ExitStack()
        self._is_awake = False

    def submit(self, outputs: Outputs, prompts: list[Prompt]) -> None:
        """Take images [B, 3, H, W] in 0..1, or completions, of B prompts. RewardError where a judge cannot ask about
        one, or where an earlier question could not be asked.
        """
        texts = [None] * len(prompts) if isinstance(outputs, Tensor) else outputs
        questions = {}
        for name, judge in self._judges.items():
            questions[name] = list(map(partial(_question, name, judge), prompts, texts))
        batch = JudgeBatch(*self._seen(outputs, prompts), prompts, questions)
        self._batches.append(batch)
        if self._thread is not None:
            self._answers.append(self._thread.submit(lambda: self._ask_beside(batch)))
            for answers in self._answers:
                if answers.done():
                    answers.result()  # raises what has failed meanwhile

    def _seen(self, outputs: Outputs, prompts: list[Prompt]) -> tuple[list[bytes], list[tuple[int, ...]]]:
        """Files of images, and for each sample the numbers of those that the model is shown."""
        if isinstance(outputs, Tensor):
            files = list(map(raw_file, to_uint8(outputs)))
            return files, [(i,) for i in range(len(files))]
        if not self._model.reads_images:
            unseen = next((prompt for prompt in prompts if prompt.images), None)
            if unseen is not None and not self._warned_of_images:
                message = (
                    "reward.model.path: the model reads no images, so that judges do not see those of the prompt %s"
                )
                log.warning(message, unseen.place or f'"{unseen.text}"')
                self._warned_of_images = True
            return [], [()] * len(prompts)
        files, shown = [], []
        numbers: dict[int, int] = {}  # the samples of a prompt share its images
        for prompt in prompts:
            for image in prompt.images:
                if id(image) not in numbers:
                    numbers[id(image)] = len(files)
                    try:
                        files.append(image.encoded())
                    except ValueError as error:
                        raise RewardError(str(error)) from error
            shown.append(tuple(numbers[id(image)] for image in prompt.images))
        return files, shown

    def ask(self) -> tuple[list[Prompt], Answers]:
        """The prompts of all that was submitted, which is forgotten, and by judge an answer about each.

        A collective: where this rank has submitted nothing, it answers the questions of others.
        """
        batches, self._batches = self._batches, []
        pending, self._answers = self._answers, []
        if self._thread is None:
            with self._model.awake():
                parts = [self._ask_model(batches)]
        else:
            asleep = self._thread.submit(self._sleep)  # behind the last batch
            parts = [answers.result() for answers in pending]
            asleep.result()
        self.busy_s, self._spent_s = self._spent_s, 0.0

        prompts = list(chain.from_iterable(batch.prompts for batch in batches))
        answers_of: Answers = {}
        for name in self._judges:
            answers_of[name] = list(chain.from_iterable(part[name] for part in parts))
        return prompts, answers_of

    def _ask_beside(self, batch: JudgeBatch) -> Answers:
        """On the thread: ask about one batch. The model stays awake until `_sleep`, on a separate stream."""
        if self._device.type == "cuda" and self._stream is None:
            torch.cuda.set_device(self._device)  # a thread begins on the first one
            self._stream = torch.cuda.Stream()  # one for good: the allocator keeps memory by stream
            torch.cuda.set_stream(self._stream)
        if not self._is_awake:
            self._awake.enter_context(self._model.awake())
            self._is_awake = True
        return self._ask_model([batch])

    def _sleep(self) -> None:
        """On the thread: the model may sleep until the next rollout."""
        self._awake.close()
        self._is_awake = False

    def _ask_model(self, batches: list[JudgeBatch]) -> Answers:
        """The model's answers about all samples of `batches`, on all ranks of the domain at once."""
        begin = time.perf_counter()
        files: list[bytes] = []
        shown: list[tuple[int, ...]] = []
        for batch in batches:
            for numbers in batch.shown:
                shown.append(tuple(len(files) + number for number in numbers))
            files += batch.files

        # one judge after the other, each about all samples; a rank without samples takes part with none
        questions: list[tuple[tuple[int, ...], str]] = []
        for name in self._judges:
            texts = chain.from_iterable(batch.questions[name] for batch in batches)
            questions += zip(shown, texts, strict=True)
        count = len(shown)
        answers = self._model.ask(files, questions)
        self._spent_s += time.perf_counter() - begin
        return {name: answers[i * count : (i + 1) * count] for i, name in enumerate(self._judges)}


def _question(name: str, judge: Judge, prompt: Prompt, completion: str | None) -> str:
    """The question of a judge about a sample of the prompt; RewardError where it cannot ask."""
    text = {} if completion is None else {"completion": completion}
    try:
        return judge.question(prompt.text, copied(prompt.meta) | text)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise RewardError(
            f"reward {name!r} has no question: {reason(error)} on the prompt "
            f'"{prompt.text}"; its data has {", ".join(prompt.meta) or "no columns"}'
        ) from error
