"""Which groups partial rollouts train, and when, for any lengths of responses."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.config.lm import LMRolloutConfig, PartialRolloutConfig
from phalanx.functional.tokens import TokenTrace
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.rollout.lm.partial import PartialRollout
from phalanx.rollout.lm.session import Request
from phalanx.training.exchange import deserialize
from phalanx.types import Prompt, Samples

PROMPTS, STEPS, LIMIT = 4, 12, 40


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Lengths:
    """A rollout whose responses have lengths given by their names: tokens 1, and 0 at the end."""

    facts, fps, noun, exact, micro_batch_size = None, 1, "samples", False, 64
    request, drawn_sample, text = LMRollout.request, LMRollout.drawn_sample, LMRollout.text
    talks, checked = None, LMRollout.checked
    awake, sample_validation = LMRollout.awake, LMRollout.sample_validation

    def __init__(self, drawn: int, length: Any) -> None:
        self.config = LMRolloutConfig(
            n=2, partial_rollout=PartialRolloutConfig(over_sampling_batch_size=drawn, tokens=4), max_staleness=2
        )
        self.world = SimpleNamespace(rank=0, size=1, data_rank=0, data_size=1)
        self.policy = SimpleNamespace(encode=lambda prompt: [int(prompt.text)], decode=str, look=lambda prompt: None)
        self.how, self.length, self.session = Decoding(LIMIT, 1.0, [0], 0), length, self
        self.asked: list[Request] = []

    def prepare(self, *_: Any) -> None:
        pass

    def add(self, request: Request) -> None:
        self.asked.append(request)

    def step(self) -> list[Request]:
        asked, self.asked = self.asked, []
        for request in asked:
            _, step, place, i = request.name
            length = self.length(step * PROMPTS + place, i)
            whole = [1] * LIMIT if length > LIMIT else [1] * (length - 1) + [0]
            tokens = whole[len(request.tokens) : request.room]
            assert request.say(
                tokens, [-1.0] * len(tokens), range(len(request.tokens), len(request.tokens) + len(tokens))
            )
        return asked

    def close(self) -> None:
        pass

    def gathered(self, drawn: Any, prompts: list[Prompt], index: torch.Tensor, seed: Any) -> Samples:
        mask = torch.ones(len(drawn), max(len(some.response) for some in drawn), dtype=torch.bool)
        return Samples(prompts, [], mask.float(), mask, None, index)


def batch(step: int) -> list[Prompt]:
    return [Prompt(str(step * PROMPTS + place), place, {}) for place in range(PROMPTS)]


@pytest.mark.parametrize("lengths", ["random", "first are long", "every third is long"])
@pytest.mark.parametrize("drawn", [4, 5, 12])
def test_each_group_once_and_in_time(drawn: int, lengths: str) -> None:
    def length(number: int, i: int) -> int:
        if lengths == "random":
            return int(random.Random(f"{number} {i}").lognormvariate(2, 1)) + 1
        return 60 if (number < 12 if lengths == "first are long" else number % 3 == 0) else 1

    rollout = PartialRollout(Lengths(drawn, length), PROMPTS)  # type: ignore[arg-type]
    rollout.begin(0, [])
    trained: list[str] = []
    for step in range(STEPS):
        waited = rollout.in_flight(step)
        rollout.prepare(batch, step, STEPS)
        samples = rollout.sample(batch(step), seed=0, step=step, each=lambda *_: None)
        assert samples.version is not None
        age = step - samples.version
        assert age.min() >= 0 and age.max() <= (0 if drawn == PROMPTS else 2)
        assert [prompt.group_id for prompt in samples.prompts] == [0, 0, 1, 1, 2, 2, 3, 3]
        trained += [prompt.text for prompt in samples.prompts[::2]]
        if step == 5:  # a checkpoint, from which another one goes on
            kept = rollout.in_flight(step + 1)
            before = rollout.in_flight(step)  # of a job that stops before the step has changed weights
            assert kept is not None and before is not None and waited is not None and torch.equal(before, waited)
            other = PartialRollout(Lengths(drawn, length), PROMPTS)  # type: ignore[arg-type]
            other.begin(step, [before])
            other.prepare(batch, step, STEPS)
            repeated = other.sample(batch(step), seed=0, step=step, each=lambda *_: None)
            assert repeated.prompts == samples.prompts and torch.equal(repeated.version, samples.version)
            rollout = PartialRollout(Lengths(drawn, length), PROMPTS)  # type: ignore[arg-type]
            rollout.begin(step + 1, [kept])
            again = rollout.in_flight(step + 1)
            assert again is not None and torch.equal(again, kept)
    assert sorted(map(int, trained)) == list(range(PROMPTS * STEPS))


def test_groups_whose_prompts_have_changed_are_drawn_again(caplog: pytest.LogCaptureFixture) -> None:
    first = PartialRollout(Lengths(12, lambda *_: 60), PROMPTS)  # type: ignore[arg-type]
    first.begin(0, [])
    first.prepare(batch, 0, STEPS)
    first.sample(batch(0), seed=0, step=0, each=lambda *_: None)
    kept = first.in_flight(1)
    assert kept is not None
    assert deserialize(kept, TokenTrace, torch.device("cpu")) == (None, 0)  # by another schedule
    other = PartialRollout(Lengths(12, lambda *_: 1), PROMPTS)  # type: ignore[arg-type]
    other.begin(1, [kept])
    other.prepare(lambda step: [Prompt("7", place, {}) for place in range(PROMPTS)], 1, STEPS)
    (line,) = caplog.messages
    assert line == "7 prompts have changed since the checkpoint: their responses are drawn again"
    assert other.sample(batch(1), seed=0, step=1, each=lambda *_: None).mask.shape[1] == LIMIT  # number 7 itself
