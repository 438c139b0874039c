"""The judges of one rank: collects their questions about the samples and has the reward model answer them."""

import copy
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from phalanx.config.messages import told_as
from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.launch_env import Launch
from phalanx.engines.loading import Question
from phalanx.media.pictures import raw_file, to_uint8
from phalanx.rewards.base import RewardError, objection_of
from phalanx.rewards.call import DaemonPool
from phalanx.rewards.judge import Judge, PairJudge, asking
from phalanx.rewards.judge_model import RewardModel
from phalanx.rewards.judge_pairs import Comparison, Subject
from phalanx.types import Outputs, Prompt, copied

log = logging.getLogger(__name__)
T = TypeVar("T")
Asked = tuple[str | None, list[str]]  # a judge's opening about a sample, None without one, and its questions
Answers = dict[str, list[list[str]]]  # the answers about each sample, by judge
Rates = dict[str, list[tuple[float, float]]]  # see Comparison.win_rates, by judge of pairs


@dataclass(frozen=True)
class JudgeBatch:
    """A micro-batch: B prompts, and the questions of each judge about a sample of each prompt. Each frame of a video
    counts as a sample.

    files: files of images.
    shown: for each sample the indices in `files` of the images that the model sees: the sample itself or, if samples
        are texts, which the questions contain, the images of the prompt.
    subjects: the samples for comparisons of pairs; empty if there are none.
    """

    files: list[bytes]
    shown: list[tuple[int, ...]]
    prompts: list[Prompt]
    questions: dict[str, list[Asked]]
    subjects: list[Subject]


class JudgePool:
    """All judges, by the names of their terms. All ranks of the world create it, and call `ask`, at the same point.

    Questions are asked either all at once in `ask` or, with `beside`, for each micro-batch on a thread while the next
    one is sampled; all ranks of a domain must then call `submit` equally often. Questions about pairs are asked in
    `ask`, when all samples are there. `busy_s`: seconds from questions to answers, for all questions of the last `ask`.
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
        """Load the reward model. Raises ValueError if it cannot be used.

        forgives: a judge asks nothing about samples of rows that its `check_row` refuses. For the other arguments see
        phalanx.rewards.runner.RewardSet.
        """
        self._pair_judges = {name: judge for name, judge in judges.items() if isinstance(judge, PairJudge)}
        self._judges = {name: judge for name, judge in judges.items() if name not in self._pair_judges}
        self._of_text, self._context_size = outputs == "completions", context_size
        self._forgives = forgives
        launch = launch or Launch.from_env()
        self._rank = launch.rank
        self._model = RewardModel(cfg, timeout_s, text=self._of_text, pairs=bool(self._pair_judges), launch=launch)
        self._warned_of_images = False
        self._batches: list[JudgeBatch] = []  # submitted since the last `ask`
        self.busy_s = 0.0
        self._spent_s = 0.0  # since the last `ask`

        # if the model answers beside the sampling: a single thread, because collectives must keep their order
        self._thread = DaemonPool(1, "reward-model", device) if beside else None
        self._answers: list[Future[Answers]] = []  # one for each batch
        self._device = device
        # only the thread uses these
        self._stream: torch.cuda.Stream | None = None
        self._awake = ExitStack()
        self._is_awake = False

    def another(self) -> "JudgePool":
        """The same judges for another job in this process, with a queue of its own. Not for those with a thread."""
        assert self._thread is None, "a thread answers all questions in one order"
        other = copy.copy(self)
        other._batches, other._answers = [], []
        return other

    def submit(self, outputs: Outputs, prompts: list[Prompt], frames: int = 1) -> None:
        """Take images [B, 3, H, W] in 0..1, or completions, of B prompts; for videos, `frames` consecutive images each.
        Raises RewardError if a judge has no question about one, or if an earlier question could not be asked.
        """
        texts = [None] * len(prompts) if isinstance(outputs, Tensor) else outputs
        questions = {}
        for name, judge in self._judges.items():
            questions[name] = list(map(partial(_questions_of, name, judge, self._forgives), prompts, texts))
        files, shown = self._seen_images(outputs, prompts)
        subjects: list[Subject] = []
        if self._pair_judges and isinstance(outputs, Tensor):
            for i in range(0, len(prompts), frames):
                subjects.append(Subject(prompts[i], tuple(files[i : i + frames])))
        elif self._pair_judges:
            for prompt, text, numbers in zip(prompts, outputs, shown, strict=True):
                subjects.append(Subject(prompt, (text.encode(),), tuple(files[number] for number in numbers)))
        batch = JudgeBatch(files, shown, prompts, questions, subjects)
        self._batches.append(batch)
        if self._thread is not None and self._judges:
            self._answers.append(self._thread.submit(lambda: self._on_thread(lambda: self._ask_judges([batch]))))
            for answers in self._answers:
                if answers.done():
                    answers.result()  # raises if it has failed in the meantime

    def _seen_images(self, outputs: Outputs, prompts: list[Prompt]) -> tuple[list[bytes], list[tuple[int, ...]]]:
        """Files of images, and for each sample the indices of those that the model sees."""
        if isinstance(outputs, Tensor):
            files = list(map(raw_file, to_uint8(outputs)))
            return files, [(i,) for i in range(len(files))]
        if not self._model.reads_images:
            unseen = next((prompt for prompt in prompts if prompt.images), None)
            if unseen is not None and not self._warned_of_images:
                message = "reward.model.path: the model reads no images, so judges do not see those of the prompt %s"
                log.warning(message, unseen.place or f'"{unseen.text}"')
                self._warned_of_images = True
            return [], [()] * len(prompts)
        files, shown = [], []
        numbers: dict[int, int] = {}  # the samples of a prompt share its images
        for prompt in prompts:
            for image in prompt.images:
                if id(image) not in numbers:
                    numbers[id(image)] = len(files)
                    with told_as(RewardError):
                        files.append(image.encoded())
            shown.append(tuple(numbers[id(image)] for image in prompt.images))
        return files, shown

    def ask(self) -> tuple[list[Prompt], Answers, Rates]:
        """The prompts of all samples submitted since the last call, the answers about each by judge, and the win rates
        of each by judge of pairs.

        A collective: a rank that has submitted nothing only helps to answer the questions of others.
        """
        batches, self._batches = self._batches, []
        pending, self._answers = self._answers, []
        if self._thread is None:
            with self._model.awake():
                parts, rates = self._ask_all(batches, [lambda: self._ask_judges(batches)] if self._judges else [])
        else:
            parts, rates = self._ask_all(batches, [answers.result for answers in pending])
            self._thread.submit(self._put_asleep).result()  # after the last question
        self.busy_s, self._spent_s = self._spent_s, 0.0

        prompts = list(chain.from_iterable(batch.prompts for batch in batches))
        answers_of: Answers = {}
        for name in self._judges:
            answers_of[name] = list(chain.from_iterable(part[name] for part in parts))
        return prompts, answers_of, rates

    def _ask_all(self, batches: list[JudgeBatch], pending: list[Callable[[], Answers]]) -> tuple[list[Answers], Rates]:
        """The answers about single samples, from the functions `pending`, and then the win rates from comparisons. All
        ranks of the world take part in these, so a failure of the former on a rank is passed on to all of them.
        """
        if not self._pair_judges:
            return [answers() for answers in pending], {}
        parts, problem = [], None
        try:
            parts = [answers() for answers in pending]
        except RewardError as error:
            problem = str(error)
        subjects = list(chain.from_iterable(batch.subjects for batch in batches))
        comparison = Comparison(subjects, self._rank, self._context_size, problem)
        rates = {}
        for name, judge in self._pair_judges.items():
            rates[name] = comparison.win_rates(name, judge, self._ask_pairs, of_text=self._of_text)
        return parts, rates

    def _ask_pairs(self, files: list[bytes], questions: list[Question]) -> list[str]:
        """The model's answers, asked on the thread if there is one."""
        if self._thread is None:
            return self._ask_model(files, questions)
        return self._thread.submit(lambda: self._on_thread(lambda: self._ask_model(files, questions))).result()

    def _on_thread(self, ask: Callable[[], T]) -> T:
        """Call `ask` with the model awake, on a separate stream. The model stays awake until `_put_asleep`. Runs on the
        thread.
        """
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream()  # always the same, because the allocator caches memory per stream
            torch.cuda.set_stream(self._stream)
        if not self._is_awake:
            self._awake.enter_context(self._model.awake())
            self._is_awake = True
        return ask()

    def _put_asleep(self) -> None:
        """Let the model sleep until the next rollout. Runs on the thread."""
        self._awake.close()
        self._is_awake = False

    def _ask_judges(self, batches: list[JudgeBatch]) -> Answers:
        """The model's answers about all samples of `batches`; all ranks of the domain call it at once."""
        files: list[bytes] = []
        shown: list[tuple[int, ...]] = []
        for batch in batches:
            for numbers in batch.shown:
                shown.append(tuple(len(files) + number for number in numbers))
            files += batch.files

        # the questions of one judge about all samples, then those of the next; none on a rank without samples
        asked: dict[str, list[tuple[tuple[int, ...], Asked]]] = {}
        for name in self._judges:
            each = chain.from_iterable(batch.questions[name] for batch in batches)
            asked[name] = list(zip(shown, each, strict=True))
        each_asked = list(chain.from_iterable(asked.values()))
        descriptions: Iterator[str] = iter(())
        if any(judge.opens for judge in self._judges.values()):  # on all ranks, also on one that asks nothing
            openings: list[Question] = [(numbers, first) for numbers, (first, _) in each_asked if first is not None]
            descriptions = iter(self._ask_model(files, openings))
        questions: list[Question] = []
        for numbers, (first, texts) in each_asked:
            before = () if first is None else (first, next(descriptions))
            for text in texts:
                questions.append((numbers, (*before, text)))
        answers = iter(self._ask_model(files, questions))
        answers_of: Answers = {}
        for name, of_judge in asked.items():
            answers_of[name] = [list(islice(answers, len(texts))) for _, (_, texts) in of_judge]
        return answers_of

    def _ask_model(self, files: list[bytes], questions: list[Question]) -> list[str]:
        """The model's answers; adds the time that they take to `_spent_s`."""
        begin = time.perf_counter()
        answers = self._model.ask(files, questions)
        self._spent_s += time.perf_counter() - begin
        return answers


def _questions_of(name: str, judge: Judge, forgives: bool, prompt: Prompt, completion: str | None) -> Asked:
    """The questions of a judge about a sample of the prompt. Raises RewardError if it has none."""
    if forgives and objection_of(judge, prompt.text, prompt.meta) is not None:
        return None, []
    text = {} if completion is None else {"completion": completion}
    with asking(name, prompt):
        first = judge.opening(prompt.text, copied(prompt.meta) | text) if judge.opens else None
        questions = judge.questions(prompt.text, copied(prompt.meta) | text)
        if not isinstance(questions, list) or not questions:
            raise TypeError(f"questions returned {questions!r}; expected a list of at least one text")
    return first, questions
