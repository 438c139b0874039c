"""Samples of several turns by vLLM in each rank's process: a turn is a request, of which the prefix cache has the rest.

All ranks of a replica add the same requests before the same steps of their engines: there they tell each other what is
new, and each knows the rest from the engine's own responses.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.distributed.seed import fold_in
from phalanx.engines.vllm_text import Requests, Sampling
from phalanx.rollout.lm.conversations import ConversationRollout
from phalanx.rollout.lm.converse import Partner, Spoken, joining
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.vllm import VllmRollout
from phalanx.types import JobError, Samples

ARRIVALS = 8  # with environment.join=0, the steps between two exchanges of a replica's ranks


class VllmConversationRollout(ConversationRollout):
    """See phalanx.types.Rollout. The engine, its weights and their proof are those of samples of one turn."""

    facts = VllmRollout.facts

    def __init__(self, *args: Any, **options: Any) -> None:
        """Raises ValueError for a model whose conversations cannot be rendered, or that vLLM refuses."""
        super().__init__(*args, **options)
        self.turns = VllmRollout(self.policy, self.config, self.world, self.micro_batch_size, self.passes)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See VllmRollout."""
        with self.turns.awake():
            yield

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Those of all conversations, and how far the engine was off after the last renewal."""
        return super().metrics(samples, reward) | {"rollout/sync_error": self.turns.sync_error}

    def _speak(
        self,
        prompts: list[list[int]],
        looks: list[Any],
        names: Sequence[tuple[int, ...]],
        decoding: Decoding,
        partner: Partner,
    ) -> list[Spoken]:
        with self.turns.engine.requests() as requests:
            return converse(requests, prompts, names, decoding, partner, self.environment.join)


@dataclass(frozen=True)
class _Asked:
    """A turn that a rank asks for: the tokens that its conversation has got since the last one."""

    sample: int
    new: list[int]
    room: int
    seed: int


def converse(
    requests: Requests,
    prompts: list[list[int]],
    names: Sequence[tuple[int, ...]],
    decoding: Decoding,
    partner: Partner,
    join: int,
) -> list[Spoken]:
    """As phalanx.rollout.lm.converse: this rank's conversations, beside those of the replica's other ranks, which may
    have others, or none. Of a failure of another rank they end early; this rank's own is raised as JobError.
    """
    spoken = [Spoken(decoding.limit) for _ in prompts]
    heard: dict[int, Future[Any]] = {}  # of samples that wait for an answer
    rows: dict[tuple[int, int], list[int]] = {}  # all tokens of all conversations of the replica, by rank and sample
    asked = [_Asked(i, prompt, decoding.limit, _seed(names[i], spoken[i])) for i, prompt in enumerate(prompts)]
    failure: JobError | None = None
    every = join or (ARRIVALS if requests.ranks > 1 else 1)
    step = 0
    while True:
        if step % every == 0 or not requests.running:
            try:
                for sample in joining(heard, step, join, alone=not requests.running):
                    answer = partner.answer(sample, heard.pop(sample).result())
                    if answer is not None and spoken[sample].hear(answer):
                        room = decoding.limit - len(spoken[sample].tokens)
                        asked.append(_Asked(sample, answer, room, _seed(names[sample], spoken[sample])))
            except JobError as error:
                failure = error
            everyone = requests.gather((asked, bool(heard), failure is not None))
            asked = []
            if any(failed for _, _, failed in everyone):
                break
            for rank, (some, _, _) in enumerate(everyone):
                for ask in some:
                    row = rows.setdefault((rank, ask.sample), [])
                    row += ask.new
                    sampling = Sampling(ask.room, decoding.temperature, decoding.truncation, decoding.ends, [])
                    requests.add((rank, ask.sample), list(row), ask.seed, sampling)
            if not requests.running:
                if any(waits for _, waits, _ in everyone):
                    continue
                break
        for (rank, sample), response, log_probs in requests.step():
            rows[rank, sample] += response
            if rank == requests.rank:
                _said(spoken[sample], response, log_probs)
                if response[-1] in decoding.ends:
                    try:
                        heard[sample] = partner.hear(sample, spoken[sample].turn)
                    except JobError as error:  # the other ranks learn of it at the next exchange
                        failure = error
                else:
                    spoken[sample].cut = True
        step += 1
    if failure is not None:
        raise failure
    return spoken


def _seed(name: tuple[int, ...], spoken: Spoken) -> int:
    """That of the next turn of a conversation."""
    return fold_in(*name, spoken.drawn)


def _said(spoken: Spoken, response: list[int], log_probs: list[float]) -> None:
    """The model draws a turn."""
    for token in response:
        spoken.say(token)
    spoken.log_probs += log_probs
