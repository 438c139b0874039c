"""Multi-turn samples with vLLM in each rank's process: a turn is a request, and the prefix cache has the turns before.

All ranks of a replica must add the same requests before the same engine steps. They exchange the new turns there; each
rank knows the rest of every conversation from its engine's responses.
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
from phalanx.rollout.lm.vllm_rollout import VllmRollout
from phalanx.types import JobError, Samples

ARRIVALS = 8  # with environment.join=0, the number of engine steps between two exchanges among a replica's ranks


class VllmConversationRollout(ConversationRollout):
    """See phalanx.types.Rollout. The engine, its weights and their verification are those of VllmRollout."""

    facts = VllmRollout.facts

    def __init__(self, *args: Any, **options: Any) -> None:
        """Raises ValueError for a model whose conversations cannot be rendered, or that vLLM rejects."""
        super().__init__(*args, **options)
        self.turns = VllmRollout(self.policy, self.config, self.world, self.micro_batch_size, self.passes)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """See VllmRollout."""
        with self.turns.awake():
            yield

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics of conversations, and the engine's error on the probe after the last refresh."""
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
class _Request:
    """A rank's request for a turn; `new` are the tokens that were added to the conversation since its last request."""

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
    """As phalanx.rollout.lm.converse: hold this rank's conversations, together with those of the replica's other ranks.

    The ranks may have different numbers of conversations, or none. If another rank fails, all conversations end early;
    a failure on this rank is raised as JobError.
    """
    spoken = [Spoken(decoding.limit) for _ in prompts]
    heard: dict[int, Future[Any]] = {}  # by samples that wait for an answer
    rows: dict[tuple[int, int], list[int]] = {}  # the tokens of every conversation of the replica, by rank and sample
    new = [_Request(i, prompt, decoding.limit, _seed(names[i], spoken[i])) for i, prompt in enumerate(prompts)]
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
                        new.append(_Request(sample, answer, room, _seed(names[sample], spoken[sample])))
            except JobError as error:
                failure = error
            everyone = requests.gather((new, bool(heard), failure is not None))
            new = []
            if any(failed for _, _, failed in everyone):
                break
            for rank, (of_rank, _, _) in enumerate(everyone):
                for request in of_rank:
                    row = rows.setdefault((rank, request.sample), [])
                    row += request.new
                    sampling = Sampling(request.room, decoding.temperature, decoding.truncation, decoding.ends, [])
                    requests.add((rank, request.sample), list(row), request.seed, sampling)
            if not requests.running:
                if any(waits for _, waits, _ in everyone):
                    continue
                break
        for (rank, sample), response, log_probs in requests.step():
            rows[rank, sample] += response
            if rank == requests.rank:
                for token in response:
                    spoken[sample].say(token)
                spoken[sample].log_probs += log_probs
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
    """The seed of the next turn of a conversation."""
    return fold_in(*name, spoken.drawn)
