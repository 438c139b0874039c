"""Conversations with one cache for all turns give the same tokens whenever answers join."""

from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx.models.lm.model import CausalLM
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.policy_session import PolicySession
from phalanx.rollout.lm.session import Request, converse
from phalanx.types import JobError
from tests.helpers.sessions import asked, decode

PROMPTS = [[5, 9, 11, 40], [7], [30, 31, 32, 33, 34, 35, 36, 37, 38]]
ROWS = [row for row in range(3) for _ in range(6)]
LIMIT, TURNS = 90, 4
HOW = Decoding(LIMIT, 1.0, range(3, 60), 0)  # a turn of this model has about seven tokens
ROOM = [LIMIT - 3 * (i % 5) for i in range(len(ROWS))]


def answer_to(sample: int, turn: int) -> list[int]:
    """Answers of different lengths, a few of them longer than the conversation so far."""
    return [100 + sample, *range(200, 200 + (sample * 7 + turn * 3) % 11 + 30 * (sample % 6 == 0))]


class Answers:
    """Answers each turn except the last one, some of them late."""

    def __init__(self, turns: int = TURNS, delay: float = 0.0) -> None:
        self.turns, self.delay, self.heard = turns, delay, [0] * len(ROWS)
        self.said: list[list[list[int]]] = [[] for _ in ROWS]

    def hear(self, sample: int, turn: list[int]) -> "Future[int]":
        """The number of the turn."""
        self.said[sample].append(turn)
        self.heard[sample] += 1
        future: Future[int] = Future()
        if self.delay and sample % 3 == 0:
            Timer(self.delay, future.set_result, [self.heard[sample]]).start()
        else:
            future.set_result(self.heard[sample])
        return future

    def answer(self, sample: int, turn: int) -> list[int] | None:
        """See phalanx.rollout.lm.session.Partner."""
        return None if turn == self.turns else answer_to(sample, turn)


@pytest.fixture(scope="module")
def model(lm_folder: Path) -> CausalLM:
    return CausalLM(AutoModelForCausalLM.from_pretrained(lm_folder, dtype=torch.float32).eval(), chunk=1024)


@pytest.fixture(scope="module")
def uniform() -> torch.Tensor:
    return torch.rand(len(ROWS), LIMIT, generator=torch.Generator().manual_seed(0))


def turn_by_turn(model: CausalLM, uniform: torch.Tensor) -> list[list[int]]:
    """Decode each turn separately after the whole conversation so far, as an engine without a cache would."""
    whole = []
    for i, row in enumerate(ROWS):
        tokens: list[int] = []
        drawn = 0
        for turn in range(1, TURNS + 1):
            how = Decoding(ROOM[i] - len(tokens), HOW.temperature, HOW.ends, HOW.pad)
            numbers = uniform[i : i + 1, drawn:]
            [said] = decode(model, [PROMPTS[row] + tokens], [0], numbers, how)
            tokens, drawn, answer = tokens + said, drawn + len(said), answer_to(i, turn)
            if said[-1] not in HOW.ends or turn == TURNS or len(tokens) + len(answer) >= ROOM[i]:
                break
            tokens += answer
        whole.append(tokens)
    return whole


def talk(
    model: Any, uniform: torch.Tensor, partner: Answers, join: int, forward: Any = None, *, masks: bool = True
) -> list[Request]:
    requests = asked(PROMPTS, ROWS, uniform, HOW, ROOM)
    session = PolicySession(forward or model, model.lm.config, torch.device("cpu"), len(ROWS), masks=masks)
    converse(session, requests, partner, join)
    return requests


def test_conversations_are_their_turns_one_after_the_other(model: CausalLM, uniform: torch.Tensor) -> None:
    """Independent of the steps at which answers join, and of their delays."""
    expected = turn_by_turn(model, uniform)
    for join, delay in ((1, 0.0), (8, 0.0), (8, 0.02), (1000, 0.0), (0, 0.02)):
        partner = Answers(delay=delay)
        spoken = talk(model, uniform, partner, join)
        assert [talked.tokens for talked in spoken] == expected, join
        for i, talked in enumerate(spoken):
            given: list[bool] = []
            for turn, said in enumerate(partner.said[i], 1):
                given += [True] * len(said) + [False] * len(answer_to(i, turn))
            assert talked.sampled == (given + [True] * LIMIT)[: len(talked.tokens)]
            assert talked.cut == (partner.heard[i] < TURNS or talked.turn[-1] not in HOW.ends)
    assert {len(partner.said[i]) for i in range(len(ROWS))} >= {2, 4}
    assert 0 < sum(talked.cut for talked in spoken) < len(ROWS)


def test_a_class_that_takes_no_finished_mask_talks_in_shared_columns(model: CausalLM, uniform: torch.Tensor) -> None:
    expected = [talked.tokens for talked in talk(model, uniform, Answers(), 8)]
    assert [talked.tokens for talked in talk(model, uniform, Answers(), 1000, masks=False)] == expected
    assert [talked.tokens for talked in talk(model, uniform, Answers(), 0, masks=False)] == expected


def test_one_turn_is_a_response_in_any_batch(model: CausalLM, uniform: torch.Tensor) -> None:
    requests = asked(PROMPTS, ROWS, uniform, HOW)
    converse(PolicySession(model, model.lm.config, torch.device("cpu"), len(ROWS)), requests, Answers(turns=1), 32)
    expected = decode(model, PROMPTS, ROWS, uniform, HOW)
    assert [talked.tokens for talked in requests] == expected
    for together in (1, 4, 7):  # the others take the places of those that have ended
        assert decode(model, PROMPTS, ROWS, uniform, HOW, together=together) == expected


def test_logits_that_are_not_finite(model: CausalLM, uniform: torch.Tensor) -> None:
    def forward(**keywords: torch.Tensor) -> object:
        out = model(**keywords)
        if keywords["input_ids"].shape[1] > 9:  # a pass with an answer
            out.logits[:, 0, 7] = torch.nan
        return out

    with pytest.raises(JobError, match=r"^model\.path: the model's logits contain NaN or infinity"):
        talk(model, uniform, Answers(), 8, forward)
