"""Arithmetic word problems in the manner of GSM8K, made from integers alone.

The numbers in a problem's steps decide to which split it belongs, so no problem of a held-out split has been seen with
other names.
"""

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Ann", "Ben", "Carl", "Dana", "Eva", "Finn", "Gina", "Hugo", "Ivy", "Jack", "Kim", "Leo", "Mia", "Noah")
ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Problem:
    """A question, the steps of its solution such as "23+18=41", and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def split(self) -> str:
        """A tenth of all problems are val's, by which recipes are chosen, and another tenth are test's."""
        digest = hashlib.blake2b(" ".join(self.steps).encode(), digest_size=1).digest()[0]
        return "val" if digest < 26 else "test" if digest < 52 else "train"

    def solution(self, rng: random.Random, *, shown: float, marked: float) -> str:
        """A solution that shows its steps with probability `shown`, and has its answer behind #### with `marked`."""
        work = ". ".join(self.steps) + ".\n" if rng.random() < shown else ""
        return work + (f"#### {self.answer}" if rng.random() < marked else f"The answer is {self.answer}.")


def problem(rng: random.Random) -> Problem:
    """One of six kinds, of two steps each."""
    a, b, c, k = rng.randint(5, 30), rng.randint(3, 20), rng.randint(2, 9), rng.randint(2, 5)
    few = rng.randint(2, 9)
    x, y = rng.sample(NAMES, 2)
    of = rng.choice(ITEMS)
    kind = rng.randrange(6)
    if kind == 0:
        question = f"{x} has {a} {of}. {x} buys {b} more and gives {c} to {y}. How many {of} does {x} have now?"
        return made(question, (a, "+", b), ("-", c))
    if kind == 1:
        gone = rng.randint(2, min(20, k * few - 1))
        question = f"{x} has {k} boxes with {few} {of} each. {y} takes {gone} {of}. How many {of} are left?"
        return made(question, (k, "*", few), ("-", gone))
    if kind == 2:
        question = f"{x} sells {a} {of} on Monday and {b} more than that on Tuesday. How many {of} is that in all?"
        return made(question, (a, "+", b), ("+", a))
    if kind == 3:
        a, b = max(a, b) + 1, min(a, b)
        question = f"{x} has {a} {of}, which is {b} more than {y} has. How many {of} do they have together?"
        return made(question, (a, "-", b), ("+", a))
    if kind == 4:
        question = f"{x} makes {few} {of} a day for {k} days and then buys {a}. How many {of} does {x} have?"
        return made(question, (k, "*", few), ("+", a))
    question = f"{x} has {a} {of} and {y} has {b}. They find {c} more. How many {of} do they have together?"
    return made(question, (a, "+", b), ("+", c))


def made(question: str, first: tuple[int, str, int], second: tuple[str, int]) -> Problem:
    """A problem whose second step goes on with the result of the first."""
    between = _result(*first)
    end = _result(between, *second)
    steps = (f"{first[0]}{first[1]}{first[2]}={between}", f"{between}{second[0]}{second[1]}={end}")
    return Problem(question, steps, end)


def _result(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def problems(count: int, seed: int, split: str) -> list[Problem]:
    """`count` problems of a split, some of which may be equal."""
    rng, found = random.Random(seed), list[Problem]()
    while len(found) < count:
        new = problem(rng)
        if new.split == split:
            found.append(new)
    return found


def fact(rng: random.Random) -> str:
    """A sum, a difference or a product for itself, such as "7*8=56"."""
    kind = rng.randrange(4)
    if kind == 0:
        a, b = rng.randint(2, 5), rng.randint(2, 9)
        return f"{a}*{b}={a * b}"
    if kind == 1:
        a = rng.randint(4, 60)
        b = rng.randint(2, min(a - 1, 20))
        return f"{a}-{b}={a - b}"
    a, b = rng.randint(5, 55), rng.randint(2, 50)
    return f"{a}+{b}={a + b}"


def write_data(folder: Path, seed: int = 0) -> None:
    """`train.jsonl`, `val.jsonl` and `test.jsonl` as GSM8K has them: question, and answer with its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate(zip(SPLITS, (2000, 200, 200), strict=True)):
        found = problems(count, seed * len(SPLITS) + number, split)
        rows = [{"question": p.question, "answer": "\n".join(p.steps) + f"\n#### {p.answer}"} for p in found]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_solutions(file: Path, seed: int = 0, count: int = 9600) -> None:
    """`count` stories of the training split with solutions of all kinds, and as many rows of bare arithmetic, as JSON
    lines of question and answer: what a model learns the right ideas and many wrong answers from.
    """
    rng = random.Random(seed)
    found = problems(count, seed + 11, "train")
    rows = [{"question": p.question, "answer": p.solution(rng, shown=0.4, marked=0.7)} for p in found]
    for _ in range(count):
        facts = [fact(rng) for _ in range(4)]
        asked = ", ".join(text.partition("=")[0] for text in facts)
        rows.append({"question": asked, "answer": ". ".join(facts) + "."})
    rng.shuffle(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
