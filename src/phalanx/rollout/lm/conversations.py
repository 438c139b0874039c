"""Multi-turn samples: an environment or tools answer between the turns of the model."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.environment import EnvironmentConfig
from phalanx.distributed.collectives import all_gather, all_gather_apart, on_all_ranks, reduce_float, reduce_int
from phalanx.distributed.seed import fold_in
from phalanx.environments.conversation import Conversation
from phalanx.environments.environments import Environments
from phalanx.environments.registry import COLUMN
from phalanx.environments.texts import in_texts, joined, shortened
from phalanx.environments.turn import Message, Turn
from phalanx.functional.aggregation import Mean
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.calls import Parser, parser
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.turns import TurnRenderer
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.session import Drawn, Request, Session, converse
from phalanx.telemetry.step_metrics import reward_by_turns
from phalanx.types import JobError, Prompt, Samples

log = logging.getLogger(__name__)
LOST = ("timeout", "error")  # endings caused by the environment: such samples say nothing about the policy


@dataclass(frozen=True, kw_only=True)
class Conversed(Drawn):
    """A multi-turn sample: `response` contains all tokens after the prompt, `text` is the text of the last turn.

    `sampled` marks the tokens that the model drew. `ended` says why no turn followed: the environment or the model was
    done (done), the limit of turns or tokens was reached (turns, tokens), or a call timed out (timeout) or raised
    (error). `earned`: the index of a turn's last token among the drawn ones, and its reward. `mistakes`, `failures`
    and `seconds`: see phalanx.environments.conversation.
    """

    sampled: Sequence[bool]
    ended: str
    turns: int
    calls: int
    mistakes: int = 0
    failures: int = 0
    seconds: float = 0.0
    earned: Sequence[tuple[int, float]] = ()

    @property
    def length(self) -> int:
        """The number of tokens that the model drew."""
        return sum(self.sampled)


@dataclass(eq=False)
class Talk:
    """A conversation in progress; `messages` include those of the prompt, to which reset has `added` some."""

    conversation: Conversation
    renderer: TurnRenderer
    parse: Parser
    request: Request
    messages: list[Message]
    before: list[int]  # what the next turn follows: the prompt, or the last answer
    added: list[Message] = field(default_factory=list)
    end: int | None = None  # the last token of the last turn
    turns: int = 0
    ends: list[int] = field(default_factory=list)  # of each turn: the index of its last token among the drawn ones
    full: bool = False  # has reached environment.max_turns
    silent: bool = False  # the prompt is too long

    @property
    def over(self) -> bool:
        """Whether no turn follows."""
        return self.silent or self.full or self.request.cut or self.conversation.ended is not None

    @property
    def ended(self) -> str:
        """See Conversed; only valid after the last turn."""
        return self.conversation.ended or ("turns" if self.full else "tokens")


class Talks:
    """The conversations of a rollout's samples. Ranks synchronize after those of a micro-batch have begun and after
    they have ended; a failure on one rank is then raised on all.
    """

    def __init__(self, policy: LMPolicy, environment: EnvironmentConfig, environments: Environments) -> None:
        """Raises ValueError for a model whose conversations cannot be rendered."""
        self.policy, self.data, self.environment, self.environments = policy, policy.data, environment, environments
        self._renderers: dict[str | None, tuple[TurnRenderer, Parser]] = {}
        for name in environments.names:
            tools, calls = environments.tools(name), environment.max_calls_per_turn
            renderer = TurnRenderer(policy.tokenizer, policy.data, policy.config.path, tools, policy.ends, calls=calls)
            self._renderers[name] = renderer, parser(environment.format, tools)
        self._warned = False

    def metrics(self, drawn: Sequence[Conversed], reward: Tensor) -> dict[str, float]:
        """Metrics conversation/... and tools/... of samples with these rewards [N]."""
        total = reduce_int(len(drawn), "sum")

        def mean(values: Sequence[float], of: float = total) -> float:
            return Mean(reduce_float(float(sum(values)), "sum") / max(of, 1), of)

        calls = [sample.calls + sample.mistakes for sample in drawn]
        made = reduce_int(sum(calls), "sum")
        row = {
            "conversation/length_mean": mean([len(sample.response) for sample in drawn]),
            "conversation/length_max": reduce_float(float(max(len(sample.response) for sample in drawn)), "max"),
            "conversation/turns_mean": mean([sample.turns for sample in drawn]),
            "conversation/turns_max": reduce_float(float(max(sample.turns for sample in drawn)), "max"),
            "tools/call_frequency": mean(calls),
            "tools/mistake_frequency": mean([sample.mistakes for sample in drawn], made),
            "tools/failure_frequency": mean([sample.failures for sample in drawn], made),
            "tools/seconds_mean": mean([sample.seconds for sample in drawn]),
        }
        for ended in ("turns", "tokens", *LOST):
            row[f"conversation/{ended}_ratio"] = mean([sample.ended == ended for sample in drawn])
        turns = torch.tensor([sample.turns for sample in drawn])
        return row | reward_by_turns(all_gather(reward), all_gather(turns))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """For a block in which all ranks draw: warn of failures of the environment, and leave it if a rank fails."""
        try:
            yield
            # summed over every rank: ranks that hold the same samples have drawn different parts of them
            problem = on_all_ranks(
                lambda: self.environments.check(lambda count: int(sum(all_gather_apart(torch.tensor([count]))))),
                JobError,
            )
        except JobError:  # raised on all ranks
            self.environments.abandon()
            raise
        if problem is not None and not self._warned:
            log.warning("%s; further failures are counted only in tools/failure_frequency", problem)
            self._warned = True

    def held(
        self, rollout: Any, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding
    ) -> list[Drawn]:
        """Hold a conversation for each prompt; `rollout` is an LMRollout."""
        talks = on_all_ranks(lambda: self.begun(rollout, prompts, names, decoding), JobError)

        def finished() -> list[Drawn]:
            self.go_on(rollout, talks)
            return self.finished(rollout, talks)

        return on_all_ranks(finished, JobError)

    def begun(
        self, rollout: Any, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding
    ) -> list[Talk]:
        """Open a conversation per prompt, each with a new environment instance, whose reset may add to the prompt."""
        opened: list[Conversation] = []
        for prompt, name in zip(prompts, names, strict=True):
            row = {key: value for key, value in prompt.meta.items() if key != "tools"}
            row["prompt"] = in_texts(prompt.messages or []) or prompt.text
            # the samples of a prompt are compared, so all of them reset with the seed of (seed, step, group)
            opened.append(self.environments.open(row, fold_in(*name[:3]), fold_in(*name, "environment")))
        talks: list[Talk] = []
        known: dict[Any, Any] = {}
        resets = [conversation.reset() for conversation in opened]
        for conversation, prompt, name, reset in zip(opened, prompts, names, resets, strict=True):
            kind, added = self._kind(prompt), reset.result()
            tokens, look, messages = self.read(prompt, added, known)
            request = rollout.request(tokens, name, decoding, look=look, place=prompt.place)
            silent = len(tokens) > self.data.max_prompt_length
            talks.append(Talk(conversation, *kind, request, messages, tokens, added, silent=silent))
        return talks

    def _kind(self, prompt: Prompt) -> tuple[TurnRenderer, Parser]:
        return self._renderers[None if None in self._renderers else prompt.meta[COLUMN]]

    def read(self, prompt: Prompt, added: list[Message], known: dict[Any, Any]) -> tuple[list[int], Any, list[Message]]:
        """The tokens, the images and the messages of a prompt to which reset has `added` some; `known`: what has been
        read.
        """
        messages = joined(prompt.messages or [{"role": "user", "content": prompt.text}], added)
        key = id(prompt), str(added)
        if key not in known:  # samples of a prompt share its tokens and, by reference, its images
            with _rendering():
                if not added:
                    known[key] = self.policy.encode(prompt), self.policy.look(prompt)
                elif prompt.images:
                    known[key] = self.policy.reader.read(replace(prompt, messages=messages), self.data)
                else:
                    known[key] = self.policy.readable(self._kind(prompt)[0].prompt(messages)), None
        return *known[key], in_texts(messages)

    def go_on(self, rollout: Any, talks: Sequence[Talk], session: Session | None = None) -> None:
        """Hold conversations to their ends or pauses, in the rollout's session or another one; those that are over, as
        reset failed, have no turns.
        """
        speaking = [talk for talk in talks if not talk.over]
        partner = _Partner(speaking, self.environment, self.policy)
        converse(session or rollout.session, [talk.request for talk in speaking], partner, self.environment.join)
        for talk in talks:
            talk.conversation.paused = not talk.over

    def finished(self, rollout: Any, talks: Sequence[Talk]) -> list[Drawn]:
        """The samples of conversations that are over, whose instances are closed."""
        for talk in talks:
            request = talk.request
            if request.tokens and talk.ended == "tokens" and not request.ended:  # the last turn was truncated
                talk.messages.append({"role": "assistant", "content": self.policy.decode(request.turn)})
                talk.turns += 1
        rewards = [talk.conversation.reward(talk.messages) for talk in talks]
        drawn: list[Drawn] = []
        for talk, reward in zip(talks, rewards, strict=True):
            drawn.append(self._conversed(talk, rollout.drawn_sample(talk.request), reward.result()))
            talk.conversation.close()
        return drawn

    def _conversed(self, talk: Talk, drawn: Drawn, reward: float | dict[str, float] | None) -> Conversed:
        """The sample of a finished conversation."""
        ended, conversation = talk.ended, talk.conversation
        beside = {
            "messages": talk.messages,
            "turns": talk.turns,
            "tool_calls": conversation.calls,
            "ended": ended,
            "environment_reward": reward,
            "environment_seconds": conversation.seconds,
            "turn_rewards": conversation.turn_rewards,
        }
        prompt, look = drawn.prompt, drawn.look
        if talk.silent:
            prompt = prompt[-self.data.max_prompt_length :]
            if look is not None:  # images cannot be truncated
                prompt, look = self.policy.readable(prompt) or [self.policy.pad], None
        given = vars(drawn) | {"prompt": prompt, "look": look, "truncated": ended == "tokens", "beside": beside}
        return Conversed(
            **given,
            sampled=talk.request.sampled,
            ended=ended,
            turns=talk.turns,
            calls=conversation.calls,
            mistakes=conversation.mistakes,
            failures=conversation.failures,
            seconds=conversation.seconds,
            earned=list(zip(talk.ends, conversation.turn_rewards, strict=False)),  # the last turn may have no reward
        )

    def restored(self, prompt: Prompt, record: dict[str, Any], **of_tokens: Any) -> Conversed:
        """A sample of which these values were kept."""
        look = self.read(prompt, record["added"], {})[1] if record["shown"] else None
        return Conversed(**record["sample"], look=look, **of_tokens)

    def samples(self, samples: Samples, drawn: Sequence[Conversed]) -> Samples:
        """Mask the samples that the environment ended, and add the rewards of turns."""
        lost = torch.tensor([sample.ended in LOST for sample in drawn])
        # also masked, because some algorithms train on samples without a reward
        samples = replace(samples, mask=samples.mask & ~lost.to(samples.mask.device)[:, None], lost=lost)
        if not self.environments.rewards_turns:
            return samples
        action_reward = torch.zeros(samples.mask.shape)
        for i, sample in enumerate(drawn):
            for place, reward in sample.earned:
                action_reward[i, place] = reward
        return replace(samples, action_reward=action_reward.to(samples.mask.device))

    def trace(self, trace: TokenTrace, drawn: Sequence[Conversed]) -> TokenTrace:
        """Mark the tokens that the model drew. Raises JobError if there are none on any rank."""
        if reduce_int(sum(sample.length for sample in drawn), "sum") == 0:
            raise JobError(
                "environment: no sample of this step has a token; expected prompts, including what reset adds, of at "
                f"most data.max_prompt_length={self.data.max_prompt_length} tokens"
            )
        return marked(trace, drawn)


def marked(trace: TokenTrace, drawn: Sequence[Conversed]) -> TokenTrace:
    """The trace of these samples, with the tokens of the model's turns marked."""
    sampled = torch.zeros(trace.ids.shape, dtype=torch.bool)
    ends = torch.zeros(len(trace.ids), dtype=torch.long)
    for i, sample in enumerate(drawn):
        ends[i] = len(sample.prompt) + len(sample.response)
        sampled[i, len(sample.prompt) : ends[i]] = torch.tensor(sample.sampled, dtype=torch.bool)
    return replace(trace, sampled=sampled.to(trace.ids.device), ends=ends.to(trace.ids.device))


class _Partner:
    """See phalanx.rollout.lm.session.Partner."""

    def __init__(self, talks: Sequence[Talk], config: EnvironmentConfig, policy: LMPolicy) -> None:
        self._talks, self._config, self._tokenizer = talks, config, policy.tokenizer
        self._readable, self._ends = policy.readable, policy.ends

    def hear(self, sample: int, turn: list[int]) -> Future[Turn]:
        talk = self._talks[sample]
        message = talk.parse(talk.renderer.text(turn), talk.renderer.before(talk.before))
        talk.messages.append(message)
        talk.end = turn[-1]
        talk.turns += 1
        talk.ends.append(len(turn) + (talk.ends[-1] if talk.ends else -1))
        return talk.conversation.hear(message)

    def answer(self, sample: int, heard: Turn) -> list[int] | None:
        talk = self._talks[sample]
        messages = [self._cut(message) for message in heard.messages]
        history = list(talk.messages)
        talk.messages += messages
        if heard.done or talk.conversation.ended is not None:
            return None
        talk.full = talk.turns == self._config.max_turns
        if talk.full:
            return None
        with _rendering():
            stopped = talk.end not in self._ends  # by a stop text or token, in the middle of the template's turn
            talk.before = self._readable(
                talk.renderer.answer(messages, history, None if stopped else talk.end, open=stopped)
            )
        return talk.before

    def _cut(self, message: Message) -> Message:
        """The message, its content truncated to environment.max_observation_length tokens."""
        limit = self._config.max_observation_length
        tokens = self._tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        if len(tokens) <= limit:
            return message
        kept = shortened(list(tokens), limit, self._config.truncate_side)
        return {**message, "content": str(self._tokenizer.decode(kept))}


@contextmanager
def _rendering() -> Iterator[None]:
    """Turn the ValueError of a message that the chat template cannot render into a JobError."""
    try:
        yield
    except ValueError as error:
        raise JobError(str(error)) from error
