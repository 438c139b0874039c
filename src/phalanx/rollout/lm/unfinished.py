"""Unfinished responses of partial rollouts, and the conversations among them.

The environment of an unfinished conversation is on one rank, which goes on with it. After a resume it is made anew:
reset with the same seeds, it hears the recorded turns again, and must answer as it did.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from phalanx.rollout.lm.session import Drawn, Request
from phalanx.types import Prompt

log = logging.getLogger(__name__)
OF_TOKENS = {"tokens": torch.int32, "sampled": torch.bool}
OF_DRAWN = {"log_probs": torch.float32, "versions": torch.int32, "steps": torch.int32}
LISTS = OF_TOKENS | OF_DRAWN
# of a sample that is recorded: what the response has, or what is read again
_BESIDE = {"response", "sampled", "log_probs", "steps", "look"}


@dataclass(eq=False)
class Response:
    """The tokens of a response so far, of which `sampled` marks those that the model drew; of these, the
    log-probabilities under the weights that drew them, the training steps in which these were trained, and with block
    diffusion the denoising steps that unmasked them.

    record: of a conversation, as JSON: what its environment has added to the prompt, counted and rewarded so far, or at
    its end the sample. rank: the one that has its environment, or -1. first: this part begins the response.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    ended: bool = False
    record: str = ""
    rank: int = -1
    first: bool = False

    def beyond(self, request: Request, version: int) -> "Response":
        """The part that `request`, which goes on with it, has drawn with the weights after `version` steps."""
        new = Response(ended=request.ended or request.cut, first=not self.tokens)
        for name in LISTS.keys() - {"versions"}:
            vars(new)[name] = vars(request)[name][len(vars(self)[name]) :]
        new.versions = [version] * sum(new.sampled)
        return new

    def extend(self, new: Self) -> None:
        """Append what a round has drawn."""
        for name in LISTS:
            vars(self)[name] = vars(new)[name] if new.first else vars(self)[name] + vars(new)[name]
        self.ended, self.record, self.rank = new.ended, new.record, new.rank


class PausedTalks:
    """The unfinished conversations of this rank."""

    def __init__(self, rollout: Any) -> None:
        """rollout: an LMRollout with `talks`."""
        self._rollout, self._talks = rollout, rollout.talks
        self._live: dict[Response, Any] = {}  # phalanx.rollout.lm.conversations.Talk

    def open(self, responses: Sequence[Response], prompts: Sequence[Prompt], names: Sequence[tuple[int, ...]]) -> None:
        """Begin those of these conversations that have not begun, or bring them to where a checkpoint has them."""
        while new := [i for i, response in enumerate(responses) if response not in self._live]:
            self._begin([responses[i] for i in new], [prompts[i] for i in new], [names[i] for i in new])

    def draw(self, responses: Sequence[Response], tokens: int, version: int) -> list[Response]:
        """Go on with conversations until each has drawn so many `tokens`; returns what each has more."""
        talks = [self._live[response] for response in responses]
        for talk in talks:
            talk.request.go_on(tokens)
        self._talks.go_on(self._rollout, talks)
        samples = iter(self._talks.finished(self._rollout, [talk for talk in talks if talk.over]))
        parts = []
        for response, talk in zip(responses, talks, strict=True):
            part = response.beyond(talk.request, version)
            part.ended, part.rank, part.record = talk.over, self._rollout.world.rank, _state(talk)
            if talk.over:
                sample = vars(next(samples))
                told = {name: value for name, value in sample.items() if name not in _BESIDE}
                shown = {"added": talk.added, "shown": sample["look"] is not None}
                part.record = json.dumps(shown | {"sample": told}, default=str)
                del self._live[response]
            parts.append(part)
        return parts

    def _begin(
        self, responses: Sequence[Response], prompts: Sequence[Prompt], names: Sequence[tuple[int, ...]]
    ) -> None:
        """Begin conversations, or replay them. A response that an environment does not repeat loses its tokens."""
        talks = self._talks.begun(self._rollout, list(prompts), names, self._rollout.how)
        spoken: dict[int, Response] = {}
        for talk, response in zip(talks, responses, strict=True):
            talk.request.until = sum(response.sampled)
            if response.tokens and talk.added == json.loads(response.record)["added"]:
                spoken[id(talk.request)] = response
        again = [talk for talk in talks if id(talk.request) in spoken]
        self._talks.go_on(self._rollout, again, _Replay(spoken))
        changed = []
        for talk, response, prompt in zip(talks, responses, prompts, strict=True):
            if not response.tokens or (talk.request.tokens == response.tokens and _state(talk) == response.record):
                self._live[response] = talk
                continue
            changed.append(prompt.place)
            talk.conversation.paused = False
            talk.conversation.close()
            response.extend(Response(first=True))
        if changed:
            log.warning(
                "%d unfinished conversations are drawn again, the first one of %s: their environments, made anew after "
                "a resume, did not answer the recorded turns as before; expected answers that depend only on the "
                "turns, seed and sample_seed",
                *(len(changed), changed[0]),
            )

    def sample(self, prompt: Prompt, response: Response) -> Drawn:
        """The sample of a response that has ended, on any rank."""
        given: dict[str, Any] = {"sampled": response.sampled, "log_probs": response.log_probs}
        drawn: Drawn = self._talks.restored(prompt, json.loads(response.record), response=response.tokens, **given)
        return drawn


def _state(talk: Any) -> str:
    return json.dumps({"added": talk.added} | talk.conversation.account)


class _Replay:
    """See phalanx.rollout.lm.session.Session: repeats what was drawn before, while the answers between are the same."""

    def __init__(self, spoken: dict[int, Response]) -> None:
        self._spoken = spoken
        self._asked: list[Request] = []

    def add(self, request: Request) -> None:
        """See Session."""
        self._asked.append(request)

    def step(self) -> list[Request]:
        """See Session: a turn of each sample."""
        asked, self._asked = self._asked, []
        for request in asked:
            before, place = self._spoken[id(request)], len(request.tokens)
            rest = before.tokens[place:] if before.tokens[:place] == request.tokens else []
            request.over = not rest
            for token, log_prob in zip(rest, before.log_probs[request.drawn :], strict=False):
                if request.say([token], [log_prob]):
                    break
            request.ended = request.ended and bool(rest)
        return asked

    def close(self) -> None:
        """See Session."""
