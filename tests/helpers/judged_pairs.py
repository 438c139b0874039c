"""Judges of pairs with checkable verdicts: the tiny judge's reading of two pictures, or its answer about two texts."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.reward import RewardModelConfig
from phalanx.rewards import PairJudge, RewardError
from phalanx.rewards.judge_pairs import pairings
from phalanx.rewards.judge_pool import JudgePool
from phalanx.types import Prompt
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.judged import images_of
from tests.helpers.rewards import told
from tests.helpers.tiny_vlm import COLOURS, PICTURES, picture

GROUPS = [[0, 1, 2, 3, 4, 6], [8, 14, 11, 2, 7, 4]]  # the PICTURES of two prompts
COUNT = sum(map(len, GROUPS))


def verdict_of(answer: str) -> float | None:
    """An arbitrary function of the answer that covers all verdicts."""
    if answer not in (*COLOURS, "black"):
        return None
    return {"red": 1.0, "green": 0.0, "blue": 0.5}.get(answer)


class Reading(PairJudge):
    """Asks for the text in two pictures."""

    template = VlmOcr.template

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        return verdict_of(answer)


class Broken(Reading):
    """Fails on the rank that asks about the prompt 1."""

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        return 7.0 if prompt == "1" else 0.5


def dealt(shares: Sequence[int]) -> list[int]:
    """The numbers of this rank's samples; rank r has the next `shares[r]` samples after those of earlier ranks."""
    rank = dist.get_rank()
    first = sum(shares[:rank])
    return list(range(first, first + shares[rank]))


def compared(cfg: RewardModelConfig, shares: Sequence[int], judge: PairJudge, **options: Any) -> Any:
    """On each rank: the win rates of its samples, submitted in micro-batches of 2; `context_size` ranks alternate."""
    pool = JudgePool(
        {"pairs": judge}, cfg, 60.0, outputs="images", device=torch.device("cpu"), **({"beside": False} | options)
    )
    numbers = dealt(shares)
    size = options.get("context_size", 1)
    if size > 1:
        numbers = list(range(COUNT))[dist.get_rank() :: size]
    both = [(PICTURES[shown], group) for group, pictures in enumerate(GROUPS) for shown in pictures]
    for first in range(0, len(numbers), 2):
        part = [both[i] for i in numbers[first : first + 2]]
        images = torch.stack([picture(*shown) for shown, _ in part])
        pool.submit(images, [Prompt(str(group), group, {}) for _, group in part])
    _, answers, rates = pool.ask()
    assert not answers
    return rates["pairs"]


def failed(cfg: RewardModelConfig, shares: Sequence[int], judge: PairJudge) -> str:
    """On each rank: the error message of a comparison that fails on one rank."""
    return told(RewardError, compared, cfg, shares, judge)


def plainly(cfg: RewardModelConfig, orders: dict[tuple[int, int, int], list[tuple[int, int]]]) -> list[Any]:
    """The win rates from answers to single questions; `orders`: the orders in which (group, i, j) is shown."""
    from phalanx.rewards.judge_model import RewardModel

    model = RewardModel(cfg, timeout_s=60.0, pairs=True)
    rates = []
    for group, pictures in enumerate(GROUPS):
        scores: list[list[float | None]] = [[] for _ in pictures]
        for i, j in pairings(len(pictures), None):
            for first, second in orders.get((group, i, j), []):
                with model.awake():
                    files = images_of([pictures[first], pictures[second]])
                    (answer,) = model.ask(files, [((0, 1), VlmOcr.template)])
                verdict = verdict_of(answer)
                scores[first].append(verdict)
                scores[second].append(None if verdict is None else 1 - verdict)
        for of_sample in scores:
            known = [0.5 if score is None else score for score in of_sample]
            rates.append((sum(known) / len(known), of_sample.count(None) / len(of_sample)))
    return rates
