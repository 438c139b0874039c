"""Sampling sessions: requests go in, their tokens come out, step by step; every engine draws through one.

Turns, stop texts and limits are written once here: a session only draws the next tokens of its requests and reports
them with `Request.say`. The k-th uniform number of a sample decides the k-th token that the model draws in it,
regardless of the turn, the batch and the step, so its tokens depend on none of these, up to rounding. Answers join at
steps that are fixed in advance, so the drawn tokens do not depend on how long a tool takes.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from phalanx.distributed.seed import fold_in
from phalanx.rollout.lm.decode import Decoding
from phalanx.types import JobError


class StopTexts:
    """Detects stop `texts` in a response token by token. As in vLLM, special tokens are not part of the text."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt: list[int]) -> None:
        """`prompt`: the tokens before the response; `tokenizer` is backed by the tokenizers library."""
        self._tokenizer, self._texts = tokenizer.backend_tokenizer, texts
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=True)
        self._tail = ""  # the last characters, in which a stop text may begin
        self._kept = max(map(len, texts)) - 1

    def complete(self, token: int) -> bool:
        """Whether the next token completes one of the texts."""
        text = self._tail + self._next(token)
        self._tail = text[max(len(text) - self._kept, 0) :]
        return any(stop in text for stop in self._texts)

    def _next(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the library defines no exception type
            if not str(error).startswith("Invalid prefix"):
                raise
            # invalid bytes have broken the stream: start a new one, as vLLM does
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""


@dataclass(frozen=True)
class Drawn:
    """A sample: the tokens of its prompt and response, the response's text, and whether the limit truncated it.

    `log_probs`: the engine's log-probabilities of the response's tokens, if the engine is not exact. With block
    diffusion, `steps` are the denoising steps that unmasked the tokens, and `behind` counts the tokens after the end
    of the text. `beside`: further metadata for the reward. `look`: the images of the prompt, see TokenTrace.
    """

    prompt: list[int]
    response: list[int]
    text: str
    truncated: bool
    log_probs: Sequence[float] = ()
    steps: Sequence[int] = ()
    behind: int = 0
    beside: dict[str, Any] = field(default_factory=dict)
    look: Any = None

    @property
    def length(self) -> int:
        """The number of tokens that the model generated."""
        return len(self.response)


@dataclass(eq=False, kw_only=True)
class Request:
    """A sample in progress: the tokens of its prompt, and those after it.

    name: the random numbers of the sample are a function of it. room: the maximum number of tokens after the prompt.
    until: the sample pauses once the model has drawn so many tokens. look: the images of the prompt. stops: detects
    texts that end the response. keep: the sample may be added again, with further tokens after those of its turn.

    tokens: all after the prompt, of which `sampled` marks those that the model drew, `drawn` in number. log_probs: of
    these, if the engine computes them. steps: the denoising steps that unmasked them, with block diffusion. begin:
    where the last turn begins. behind: number of tokens after the one that ended the response. cut: the next token or
    answer did not fit. ended: the last turn has its end token or stop text. over: no token of it is drawn any more.
    """

    prompt: list[int]
    name: tuple[Any, ...]
    decoding: Decoding
    room: int
    until: int = sys.maxsize
    look: Any = None
    place: str = ""  # names the prompt in messages
    stops: StopTexts | None = None
    keep: bool = False
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    begin: int = 0
    drawn: int = 0
    behind: int = 0
    cut: bool = False
    ended: bool = False
    over: bool = False

    @property
    def turn(self) -> list[int]:
        """The tokens of the last turn."""
        return self.tokens[self.begin :]

    def rest(self, read: int) -> list[int]:
        """The tokens of the sample, from its prompt on, without the first `read`."""
        first = len(self.prompt)
        return self.tokens[read - first :] if read >= first else self.prompt[read:] + self.tokens

    @property
    def left(self) -> int:
        """The number of tokens that the model may still draw before an answer, the end or a pause."""
        return min(self.room - len(self.tokens), self.until - self.drawn)

    @property
    def seed(self) -> int:
        """A seed for the next turn of the sample, for engines that draw by a seed."""
        return fold_in(*self.name, self.drawn) if self.drawn else fold_in(*self.name)

    @cached_property
    def numbers(self) -> Tensor:
        """Uniform random numbers of the sample [draws x limit], one for each token that is drawn."""
        count = self.decoding.draws * self.decoding.limit
        if self.decoding.temperature == 0:
            return torch.zeros(count)
        # one generator per sample: with one for the batch, a sample would depend on its neighbors
        return torch.rand(count, generator=torch.Generator().manual_seed(fold_in(*self.name)))

    @property
    def number(self) -> float:
        """The uniform random number of the next token."""
        return float(self._numbers[self.drawn])

    @cached_property
    def _numbers(self) -> memoryview:
        return self.numbers.numpy().data

    def say(self, tokens: Sequence[int], log_probs: Sequence[float] = (), steps: Sequence[int] = ()) -> bool:
        """Append tokens that the model has drawn; returns whether the turn is over with them. After an end token or a
        stop text the others, drawn together with it, are `behind`.
        """
        self.ended = False
        for token in tokens:
            self.behind += self.ended
            self.ended = (
                self.ended or token in self.decoding.ends or (self.stops is not None and self.stops.complete(token))
            )
        self.tokens += tokens
        self.sampled += [True] * len(tokens)
        self.drawn += len(tokens)
        self.log_probs += log_probs
        self.steps += steps
        self.cut = not self.ended and len(self.tokens) >= self.room
        self.over = self.ended or self.left <= 0
        return self.over

    def go_on(self, tokens: int) -> None:
        """Let the model draw so many further tokens until the next pause."""
        self.until, self.over = self.drawn + tokens, False

    def hear(self, answer: list[int]) -> bool:
        """Append an answer, after which the next turn begins; False if it does not fit with at least one more token."""
        self.cut = len(self.tokens) + len(answer) >= self.room
        if not self.cut:
            self.tokens += answer
            self.sampled += [False] * len(answer)
            self.begin, self.over = len(self.tokens), self.left <= 0
        return not self.cut


@runtime_checkable
class Session(Protocol):
    """Draws the tokens of requests. A user's engine may be a class with these three methods and nothing else."""

    def add(self, request: Request) -> None:
        """Take a request; one that was kept comes again with further tokens, which are read before the next turn."""

    def step(self) -> list[Request]:
        """Draw further tokens, at least one in all, and `say` them; returns the requests whose turn is over."""

    def close(self) -> None:
        """Free what the requests held, after the last one is over; others may follow. JobError if logits were not
        finite.
        """


class Partner(Protocol):
    """The other side of the conversations: an environment or tools."""

    def hear(self, sample: int, turn: list[int]) -> Future[Any]:
        """Start answering a turn, which ends with an end token; `answer` takes the result of the future."""

    def answer(self, sample: int, heard: Any) -> list[int] | None:
        """The tokens of the answer, up to the model's next turn; None if the conversation is over."""


def converse(session: Session, requests: Sequence[Request], partner: Partner | None = None, join: int = 1) -> None:
    """Draw all requests to their ends or pauses, each a conversation with `partner` if there is one.

    join: answers join at every `join`-th step, or with 0 as they arrive; and whenever no sample is drawing.
    """
    places = {id(request): i for i, request in enumerate(requests)}
    heard: dict[int, Future[Any]] = {}  # by samples that wait for an answer
    drawing, step = len(requests), 0
    try:
        for request in requests:
            request.keep = partner is not None
            session.add(request)
        while drawing or heard:
            for request in session.step() if drawing else ():
                drawing -= 1
                request.keep = request.keep and request.ended
                if partner is not None and request.keep:
                    i = places[id(request)]
                    heard[i] = partner.hear(i, request.turn)
            step += 1
            for i in joining(heard, step, join, alone=not drawing):
                assert partner is not None, "answers are of a partner"
                answer = partner.answer(i, heard.pop(i).result())
                requests[i].keep = answer is not None and requests[i].hear(answer) and not requests[i].over
                if requests[i].keep:
                    session.add(requests[i])
                    drawing += 1
    except JobError:  # other ranks may wait in the session
        session.close()
        raise
    session.close()


def joining(heard: dict[int, Future[Any]], step: int, join: int, *, alone: bool) -> list[int]:
    """The samples whose answers join now, whether they have arrived or not. `alone`: no other sample is drawing."""
    if not heard:
        return []
    if join > 0:
        return sorted(heard) if alone or step % join == 0 else []
    if alone:
        wait(heard.values(), return_when=FIRST_COMPLETED)
    return sorted(sample for sample, future in heard.items() if future.done())
