"""Pairwise comparisons of samples of a prompt, which may be on different ranks.

Each pair is judged by a rank that has one of the two samples. Win rates do not depend on the number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.config.messages import users_code
from phalanx.distributed.collectives import all_gather_object, exchange
from phalanx.distributed.seed import fold_in
from phalanx.engines.loading import Question
from phalanx.rewards.base import RewardError
from phalanx.rewards.judge import PairJudge, asking
from phalanx.types import Prompt, copied

Ask = Callable[[list[bytes], list[Question]], list[str]]
Place = tuple[int, int]  # a rank, and the index of a sample on this rank
TIE = 0.5


@dataclass(frozen=True)
class Subject:
    """A sample of this rank. `files`: its image, the frames of its video, or its text in UTF-8. `prompt_files`: the
    images of its prompt.
    """

    prompt: Prompt
    files: tuple[bytes, ...]
    prompt_files: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two samples, in the order in which they are shown, and the rank that asks about them."""

    first: Place
    second: Place
    asker: int


def pairings(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """The pairs (i, j), i < j, of `count` samples to compare: all pairs, or each sample with its `opponents` (an even
    number) nearest neighbours on a circle.
    """
    if opponents is None or opponents >= count - 1:
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    pairs = set()
    for i in range(count):
        for distance in range(1, opponents // 2 + 1):
            j = (i + distance) % count
            pairs.add((min(i, j), max(i, j)))
    return sorted(pairs)


class Comparison:
    """Comparisons of the samples of all ranks. All ranks of the world create it at the same point."""

    def __init__(self, subjects: Sequence[Subject], rank: int, context_size: int, problem: str | None) -> None:
        """Exchange the sizes of the samples. Raises RewardError, on all ranks, if a rank has a problem.

        subjects: this rank's samples. context_size: see phalanx.rewards.runner.RewardSet. problem: why this rank cannot
        continue.
        """
        self.subjects, self.rank, self.problem = subjects, rank, problem
        local = [(subject.prompt.group_id, tuple(map(len, subject.files))) for subject in subjects]
        samples: dict[Place, tuple[int, tuple[int, ...]]] = {}  # group, sizes of files
        for of_rank, each in enumerate(self._of_all(local)):
            samples |= {(of_rank, i): sample for i, sample in enumerate(each)}
        self._sizes = {at: sizes for at, (_, sizes) in samples.items()}
        # samples in the order of the step: by the first rank of their context, then as they were dealt out
        self._groups: dict[int, list[Place]] = {}
        for at in sorted(samples, key=lambda at: (at[0] // context_size, at[1], at[0])):
            self._groups.setdefault(samples[at][0], []).append(at)

    def win_rates(self, name: str, judge: PairJudge, ask: Ask, *, of_text: bool) -> list[tuple[float, float]]:
        """For each sample of this rank, the fraction of its comparisons that it wins, 1/2 if there are none, and the
        fraction whose answer could not be parsed. A collective; raises RewardError, on all ranks, if one fails.
        """
        pairs = self._all_pairs(judge)
        local = [pair for pair in pairs if pair.asker == self.rank]
        files = self._exchange_files(pairs)
        verdicts: list[float | None] = []
        questions: list[Question] = []
        shown: list[bytes] = []
        try:
            shown, questions = self._pair_questions(name, judge, local, files, of_text=of_text)
        except RewardError as error:
            self.problem = str(error)
        try:
            answers = ask(shown, questions)  # a collective of the domain, also of ranks with a problem
            if self.problem is None:
                verdicts = [self._parse_verdict(name, judge, *both) for both in zip(local, answers, strict=True)]
        except RewardError as error:
            self.problem = self.problem or str(error)
        return self._win_rates(pairs, self._of_all(verdicts))

    def _of_all(self, value: Any) -> list[Any]:
        """Every rank's value. Raises RewardError, on all ranks, if one has a problem."""
        gathered = all_gather_object((value, self.problem))
        for _, problem in gathered:
            if problem is not None:
                raise RewardError(problem)
        return [values for values, _ in gathered]

    def _all_pairs(self, judge: PairJudge) -> list[Pair]:
        """All pairs, the same list on all ranks."""
        pairs = []
        for group, places in self._groups.items():
            for i, j in pairings(len(places), judge.opponents):
                one, other = places[i], places[j]
                asker = (one if (i + j) % 2 == 0 else other)[0]
                swapped = judge.shuffle_order and fold_in("order of a pair", group, i, j) % 2 == 1
                orders = [(other, one) if swapped else (one, other)]
                if judge.both_orders:
                    orders = [(one, other), (other, one)]
                pairs += [Pair(*order, asker) for order in orders]
        return pairs

    def _exchange_files(self, pairs: list[Pair]) -> dict[Place, tuple[bytes, ...]]:
        """The files of all samples that this rank asks about, including those received from other ranks."""
        sent: dict[int, set[int]] = {}
        received: dict[int, set[int]] = {}
        for pair in pairs:
            for rank, number in (pair.first, pair.second):
                if rank == self.rank != pair.asker:
                    sent.setdefault(pair.asker, set()).add(number)
                elif rank != self.rank == pair.asker:
                    received.setdefault(rank, set()).add(number)
        parcels: dict[int, Tensor] = {}
        for rank, numbers in sent.items():
            joined = b"".join(file for number in sorted(numbers) for file in self.subjects[number].files)
            parcels[rank] = torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0).byte()
        files = {(self.rank, i): subject.files for i, subject in enumerate(self.subjects)}
        for rank, parcel in exchange(parcels, received).items():
            content, first = parcel.numpy().tobytes(), 0
            for number in sorted(received[rank]):
                parts = []
                for size in self._sizes[rank, number]:
                    parts.append(content[first : first + size])
                    first += size
                files[rank, number] = tuple(parts)
        return files

    def _pair_questions(
        self, name: str, judge: PairJudge, pairs: list[Pair], files: dict[Place, tuple[bytes, ...]], *, of_text: bool
    ) -> tuple[list[bytes], list[Question]]:
        """The files that the model sees for some pairs, and the questions, with indices of these files."""
        shown: list[bytes] = []
        numbers: dict[Any, tuple[int, ...]] = {}  # indices in `shown`, by group or sample

        def numbered(key: Any, new: tuple[bytes, ...]) -> tuple[int, ...]:
            if key not in numbers:
                numbers[key] = tuple(range(len(shown), len(shown) + len(new)))
                shown.extend(new)
            return numbers[key]

        questions: list[Question] = []
        for pair in pairs:
            subject = self._asked_about(pair)
            prompt, meta = subject.prompt, copied(subject.prompt.meta)
            with asking(name, prompt):
                if prompt.group_id not in numbers:  # the data's images are read only once for all pairs
                    numbered(prompt.group_id, subject.prompt_files or _source_files(judge, prompt))
                seen = numbers[prompt.group_id]
                if of_text:
                    meta |= {f"completion_{i}": files[at][0].decode() for i, at in ((1, pair.first), (2, pair.second))}
                else:
                    seen += numbered(pair.first, files[pair.first]) + numbered(pair.second, files[pair.second])
                    if len(files[pair.first]) > 1:
                        meta |= {"frames": len(files[pair.first])}
                questions.append((seen, judge.question(prompt.text, meta)))
        return shown, questions

    def _asked_about(self, pair: Pair) -> Subject:
        """This rank's sample in a pair that it asks about."""
        return self.subjects[(pair.first if pair.first[0] == self.rank else pair.second)[1]]

    def _parse_verdict(self, name: str, judge: PairJudge, pair: Pair, answer: str) -> float | None:
        """The share of a pair that its first sample wins, given the answer; None if it cannot be parsed."""
        prompt = self._asked_about(pair).prompt
        with users_code(f"reward {name!r} raised", f' on the prompt "{prompt.text}"', RewardError):
            verdict = judge.parse(answer, prompt.text, copied(prompt.meta))
        if verdict is not None and not (isinstance(verdict, int | float) and 0 <= verdict <= 1):
            raise RewardError(
                f"reward {name!r}: parse returned {verdict!r}; expected 1 for the first sample, 0 for the second, 1/2 "
                "for neither, or None"
            )
        return verdict

    def _win_rates(self, pairs: list[Pair], verdicts: list[list[float | None]]) -> list[tuple[float, float]]:
        """The win rates of this rank's samples, and the fractions of answers that could not be parsed."""
        count = len(self.subjects)
        wins, unparsed, total = [0.0] * count, [0] * count, [0] * count
        verdicts_of = [iter(of_rank) for of_rank in verdicts]
        for pair in pairs:
            verdict = next(verdicts_of[pair.asker])
            won = TIE if verdict is None else verdict
            for (rank, number), share in ((pair.first, won), (pair.second, 1 - won)):
                if rank == self.rank:
                    wins[number] += share
                    unparsed[number] += verdict is None
                    total[number] += 1
        rates = []
        for won, lost, asked in zip(wins, unparsed, total, strict=True):
            rates.append((won / asked, lost / asked) if asked else (TIE, 0.0))
        return rates


def _source_files(judge: PairJudge, prompt: Prompt) -> tuple[bytes, ...]:
    """The files of the images in the column `source_key` of the prompt's data."""
    if judge.source_key is None:
        return ()
    picture = prompt.meta[judge.source_key]
    return tuple(part.encoded() for part in picture.parts)
