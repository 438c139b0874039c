"""The judges of one rank: what they ask about the samples, and when."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.config.messages import reason
from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.launch import Launch
from phalanx.media.pictures import raw_file, to_uint8
from phalanx.rewards.base import RewardError, copied, objection_of
from phalanx.rewards.call import DaemonPool
from phalanx.rewards.judge._base import Judge, PairJudge
from phalanx.rewards.judge._model import Question, RewardModel
from phalanx.rewards.judge._pairs import Comparison, Subject
from phalanx.types import Outputs, Prompt

log = logging.getLogger(__name__)
T = TypeVar("T")
Asked = tuple[str | None, list[str]]  # what a judge opens with about a sample, and its questions
Answers = dict[str, list[list[str]]]  # by judge, the answers about each sample
Rates = dict[str, list[tuple[float, float]]]  # by judge of pairs, see Comparison.win_rates


@dataclass(frozen=True)
class JudgeBatch:
    """B prompts, and by judge what it asks about a sample of each. `shown` are the numbers in `files` of images that
    come with it: the sample itself, or those of the prompt where texts are judged, which the questions hold. Of a video
    there are `frames` of all of these. `texts` are the samples where they are texts.
    """

    files: list[bytes]
    shown: list[tuple[int, ...]]
    prompts: list[Prompt]
    questions: dict[str, list[Asked]]
    frames: int
    texts: list[str]

    @property
    def subjects(self) -> list[Subject]:
        """The samples, as they are compared."""
        subjects = []
        for i, text in enumerate(self.texts):
            beside = tuple(self.files[number] for number in self.shown[i])
            subjects.append(Subject(self.prompts[i], (text.encode(),), beside))
        if not self.texts:
            for i in range(0, len(self.prompts), self.frames):
                subjects.append(Subject(self.prompts[i], tuple(self.files[i : i + self.frames])))
        return subjects


class JudgePool:
    """`judges` by the name of their term. All ranks of the world make it, and `ask`, at the same point.

    Either all is asked at once in `ask`, or (`beside`) each micro-batch on a thread, while the next is sampled; then
    all ranks of a domain must `submit` equally often. Pairs are asked about in `ask`, when all samples are there.
    `busy_s`: seconds from questions to answers, of the last `ask`.
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
        forgives: bool = False,
        launch: Launch | None = None,
        context_size: int = 1,
    ) -> None:
        """Load the reward model for `outputs`, images or completions; ValueError if it cannot be used. Samples of
        `context_size` neighbours are dealt out to them one by one. `forgives`: about samples of rows that a judge's
        `check_row` refuses it asks nothing.
        """
        self._pair_judges = {name: judge for name, judge in judges.items() if isinstance(judge, PairJudge)}
        self._judges = {name: judge for name, judge in judges.items() if name not in self._pair_judges}
        self._of_text, self._context_size = outputs == "completions", context_size
        self._forgives = forgives
        launch = launch or Launch.from_env()
        self._rank = launch.rank
        pairs = bool(self._pair_judges)
        self._model = RewardModel(cfg, timeout_s, text=self._of_text, pairs=pairs, launch=launch)
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

    def submit(self, outputs: Outputs, prompts: list[Prompt], frames: int = 1) -> None:
        """Take images [B, 3, H, W] in 0..1, or completions, of B prompts; of videos `frames` of each, one after the
        other. RewardError where a judge cannot ask about one, or where an earlier question could not be asked.
        """
        texts = [None] * len(prompts) if isinstance(outputs, Tensor) else outputs
        questions = {}
        for name, judge in self._judges.items():
            questions[name] = list(map(partial(_asked, name, judge, self._forgives), prompts, texts))
        completions = [] if isinstance(outputs, Tensor) else outputs
        batch = JudgeBatch(*self._seen(outputs, prompts), prompts, questions, frames, completions)
        self._batches.append(batch)
        if self._thread is not None and self._judges:
            self._answers.append(self._thread.submit(lambda: self._ask_beside([batch])))
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

    def ask(self) -> tuple[list[Prompt], Answers, Rates]:
        """The prompts of all that was submitted, which is forgotten, and by judge an answer about each; by judge of
        pairs the win rate of each sample.

        A collective: where this rank has submitted nothing, it answers the questions of others.
        """
        batches, self._batches = self._batches, []
        pending, self._answers = self._answers, []
        if self._thread is None:
            with self._model.awake():
                parts, rates = self._ask_all(batches, [lambda: self._ask_judges(batches)] if self._judges else [])
        else:
            parts, rates = self._ask_all(batches, [answers.result for answers in pending])
            self._thread.submit(self._sleep).result()  # behind the last question
        self.busy_s, self._spent_s = self._spent_s, 0.0

        prompts = list(chain.from_iterable(batch.prompts for batch in batches))
        answers_of: Answers = {}
        for name in self._judges:
            answers_of[name] = list(chain.from_iterable(part[name] for part in parts))
        return prompts, answers_of, rates

    def _ask_all(self, batches: list[JudgeBatch], asked: list[Callable[[], Answers]]) -> tuple[list[Answers], Rates]:
        """The answers about single samples, and then the win rates of pairs, which all ranks of the world need one
        another for: where the first ones fail on a rank, it tells all.
        """
        if not self._pair_judges:
            return [answers() for answers in asked], {}
        parts, problem = [], None
        try:
            parts = [answers() for answers in asked]
        except RewardError as error:
            problem = str(error)
        subjects = list(chain.from_iterable(batch.subjects for batch in batches))
        comparison = Comparison(subjects, self._rank, self._context_size, problem)
        rates = {}
        for name, judge in self._pair_judges.items():
            rates[name] = comparison.win_rates(name, judge, self._ask_pairs, of_text=self._of_text)
        return parts, rates

    def _ask_pairs(self, files: list[bytes], questions: list[Question]) -> list[str]:
        """The model's answers, on the thread where it has one."""
        if self._thread is None:
            return self._ask_model(files, questions)
        return self._thread.submit(lambda: self._on_thread(lambda: self._ask_model(files, questions))).result()

    def _ask_beside(self, batches: list[JudgeBatch]) -> Answers:
        """On the thread: ask about some batches."""
        return self._on_thread(lambda: self._ask_judges(batches))

    def _on_thread(self, ask: Callable[[], T]) -> T:
        """Ask on the thread. The model stays awake until `_sleep`, on a separate stream."""
        if self._device.type == "cuda" and self._stream is None:
            torch.cuda.set_device(self._device)  # a thread begins on the first one
            self._stream = torch.cuda.Stream()  # one for good: the allocator keeps memory by stream
            torch.cuda.set_stream(self._stream)
        if not self._is_awake:
            self._awake.enter_context(self._model.awake())
            self._is_awake = True
        return ask()

    def _sleep(self) -> None:
        """On the thread: the model may sleep until the next rollout."""
        self._awake.close()
        self._is_awake = False

    def _ask_judges(self, batches: list[JudgeBatch]) -> Answers:
        """The model's answers about all samples of `batches`, on all ranks of the domain at once."""
        files: list[bytes] = []
        shown: list[tuple[int, ...]] = []
        for batch in batches:
            for numbers in batch.shown:
                shown.append(tuple(len(files) + number for number in numbers))
            files += batch.files

        # one judge after the other, each about all samples; a rank without samples takes part with none
        asked: dict[str, list[tuple[tuple[int, ...], Asked]]] = {}
        for name in self._judges:
            each = chain.from_iterable(batch.questions[name] for batch in batches)
            asked[name] = list(zip(shown, each, strict=True))
        openings: list[Question] = []
        opens = False
        for name, of_judge in asked.items():
            if self._judges[name].opens:
                opens = True
                openings += [(numbers, first) for numbers, (first, _) in of_judge if first is not None]
        descriptions = iter(self._ask_model(files, openings) if opens else [])
        questions: list[Question] = []
        for numbers, (first, texts) in chain.from_iterable(asked.values()):
            before = () if first is None else (first, next(descriptions))
            for text in texts:
                questions.append((numbers, (*before, text)))
        answers = iter(self._ask_model(files, questions))
        answers_of: Answers = {}
        for name, of_judge in asked.items():
            answers_of[name] = [list(islice(answers, len(texts))) for _, (_, texts) in of_judge]
        return answers_of

    def _ask_model(self, files: list[bytes], questions: list[Question]) -> list[str]:
        """The model's answers, and the time that they take."""
        begin = time.perf_counter()
        answers = self._model.ask(files, questions)
        self._spent_s += time.perf_counter() - begin
        return answers


def _asked(name: str, judge: Judge, forgives: bool, prompt: Prompt, completion: str | None) -> Asked:
    """The questions of a judge about a sample of the prompt; RewardError where it cannot ask."""
    if forgives and objection_of(judge, prompt.text, prompt.meta) is not None:
        return None, []
    text = {} if completion is None else {"completion": completion}
    try:
        first = judge.opening(prompt.text, copied(prompt.meta) | text) if judge.opens else None
        questions = judge.questions(prompt.text, copied(prompt.meta) | text)
        if not isinstance(questions, list) or not questions:
            raise TypeError(f"questions returned {questions!r}; expected a list of one text or more")
        return first, questions
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise RewardError(
            f"reward {name!r} has no question: {reason(error)} on the prompt "
            f'"{prompt.text}"; its data has {", ".join(prompt.meta) or "no columns"}'
        ) from error
