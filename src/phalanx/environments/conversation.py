"""The conversation of one sample with its instance of an environment."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from phalanx.config.environment import EnvironmentConfig
from phalanx.config.messages import counted, cut, place, reason
from phalanx.config.secrets import hide
from phalanx.environments.pool import Outcome, Pool
from phalanx.environments.registry import Kind
from phalanx.environments.texts import Odd, messages_of, reward_of, text_of, turn_of
from phalanx.environments.tools import BadCall, Tool, accepted, unknown
from phalanx.environments.turn import CALL, EnvironmentFailure, Message, Turn
from phalanx.types import copied

_PROMPT = 2**20  # tokens that reset may add; the effective limit is data.max_prompt_length
T = TypeVar("T")
Ended = Literal["done", "timeout", "error"] | None


class Conversation:
    """A sample and its instance of an environment: `reset`, then `hear` for each turn, `reward` and `close`.

    The caller waits for each of these before the next one.

    ended: why there is no further turn. "done": the environment or the model is finished; "timeout": a call ran too
        long, and the instance is never called again; "error": a call raised. None: the conversation continues.
    calls: calls of tools or of step.
    failures: calls that raised or ran too long.
    mistakes: calls by the model that no tool accepts.
    seconds: time spent in the environment.
    paused: the caller goes on with it later; until then, `Environments.check` does not count it.
    turn_rewards: rewards of the steps, which sum to the reward; empty if the environment has get_reward.
    problem: the first failure, as one line.
    """

    def __init__(self, kind: Kind, row: dict[str, Any], pool: Pool, cfg: EnvironmentConfig) -> None:
        self._kind, self._pool, self._cfg = kind, pool, cfg
        self._row = row
        self._instance: Any = None
        self.turn_rewards: list[float] = []
        self._earned = 0.0 if "step" in kind.hooks else None  # sum of the rewards of steps and tools
        self.ended: Ended = None
        self.paused = False
        self.calls = self.failures = self.mistakes = 0
        self.seconds = 0.0
        self.problem: str | None = None
        self.closed: Future[Outcome | None] | None = None
        self._latest: Future[Any] | None = None

    def reset(self) -> Future[list[Message]]:
        """Make an instance and reset it. Returns the messages that it adds to the prompt; see `texts.joined`."""
        return self._submit_call(self._reset_instance())

    def hear(self, message: Message) -> Future[Turn]:
        """Answer a turn of the model: run its calls one after the other, or call step."""
        assert self.ended is None, self.ended
        return self._submit_call(
            self._step_instance(message) if "step" in self._kind.hooks else self._answer_calls(message)
        )

    def reward(self, messages: Sequence[Message] = ()) -> Future[float | dict[str, float] | None]:
        """The environment's reward: the result of get_reward, which may read all messages, or the sum over steps and
        tools; None if it gives none, or if a failure ended the sample.
        """
        return self._submit_call(self._final_reward(messages))

    @property
    def account(self) -> dict[str, Any]:
        """Counts and rewards so far, which an equal conversation has in common with this one."""
        counts = {"calls": self.calls, "mistakes": self.mistakes, "failures": self.failures}
        return counts | {"earned": self._earned, "turn_rewards": self.turn_rewards}

    def close(self) -> None:
        """Close the instance after the call in progress, unless one of its calls ran too long. `Environments.close`
        waits for it.
        """
        if self.closed is None and "close" in self._kind.hooks and self.ended != "timeout":
            self.closed = self._pool.submit(self._close_instance(self._latest))

    def _submit_call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        self._latest = future = self._pool.submit(coroutine)
        return future

    async def _close_instance(self, before: Future[Any] | None) -> Outcome | None:
        if before is not None and not before.done():
            await asyncio.wait({asyncio.wrap_future(before)})
        instance, self._instance = self._instance, None
        if instance is None or self.ended == "timeout":
            return None
        return await self._call_environment("close", instance.close)

    async def _reset_instance(self) -> list[Message]:
        made = await self._call_environment("__init__", self._kind.make)
        if made is None:
            return []
        self._instance = made.value
        if "reset" not in self._kind.hooks:
            return []

        def reset() -> Any:
            return self._instance.reset(**accepted(self._instance.reset, copied(self._row)))

        side = self._cfg.truncate_side
        outcome = await self._call_environment("reset", reset, lambda value: messages_of(value, _PROMPT, side, "reset"))
        return [] if outcome is None else outcome.value

    async def _step_instance(self, message: Message) -> Turn:
        self.calls += 1
        side, most = self._cfg.truncate_side, self._cfg.max_observation_length
        content = message if self._kind.whole else message["content"]
        outcome = await self._call_environment(
            "step", lambda: self._instance.step(content), lambda value: turn_of(value, most, side, "step")
        )
        if outcome is None:
            return Turn(done=True)
        turn: Turn = outcome.value
        if "get_reward" not in self._kind.hooks:
            self.turn_rewards.append(turn.reward)
        self._record_reward(turn)
        return turn

    def _record_reward(self, turn: Turn) -> None:
        """Record the reward of a step or a tool, and whether it ended the conversation."""
        self._earned = (self._earned or 0.0) + turn.reward
        if turn.done:
            self.ended = "done"

    async def _answer_calls(self, message: Message) -> Turn:
        """Run the tools that a message calls, and return their answers; a message without a call is the last one."""
        calls, limit = message.get("tool_calls") or [], self._cfg.max_calls_per_turn
        answers: list[Message] = []
        for call in calls[:limit]:
            name = call["function"]["name"]
            text = await self._run_call(name, call["function"]["arguments"])
            if self.ended is not None:
                return Turn(done=True)
            # the identifier that the model wrote, which some chat templates repeat
            written = {} if call.get("id") in (None, "") else {"tool_call_id": str(call["id"])}
            answers.append({"role": "tool", "name": str(name), "content": text} | written)
        problems = []
        left = len(calls) - len(answers)
        if left:
            problems.append(
                f"error: {counted(left, 'further call')} did not run: a turn may have {counted(limit, 'call')}"
            )
        if message.get("error"):
            problems.append(f"error: {message['error']}")
        self.mistakes += left + bool(message.get("error"))
        if problems:  # they join the last answer, since chat templates may refuse more answers than calls
            last = answers.pop() if answers else {"role": "tool", "content": ""}
            answers.append({**last, "content": "\n".join(filter(None, [last["content"], *problems]))})
        if not answers:
            self.ended = "done"
        return Turn(answers, done=not answers)

    async def _run_call(self, name: Any, arguments: Any) -> str:
        """Run a call of the model. Returns the text that the model reads."""
        try:
            if name not in self._kind.tools:
                raise unknown(name, self._kind.tools)
            tool = self._kind.tools[name]
            checked = tool.checked(arguments)
        except BadCall as mistake:
            self.mistakes += 1
            return f"error: {mistake}"
        self.calls += 1
        outcome = await self._call_environment(
            tool.name, self._tool_function(tool, checked), self._tool_text, observe=True
        )
        if outcome is None:
            return ""
        if outcome.error is not None:
            return f"error: {cut(reason(outcome.error), 500)}"
        if isinstance(outcome.value, Turn):
            self._record_reward(outcome.value)
            return "\n".join(message["content"] for message in outcome.value.messages)
        return str(outcome.value)

    def _tool_function(self, tool: Tool, arguments: dict[str, Any]) -> Callable[[], Any]:
        """A function that calls the tool; it is async if the tool is."""
        call = self._row["sample_seed"], self.calls
        if not tool.asynchronous:

            def begin() -> Any:
                CALL.set(call)
                return tool.run(self._instance, arguments)

            return begin

        async def run() -> Any:
            return await tool.run(self._instance, arguments)

        return run

    def _tool_text(self, value: Any) -> str | Turn:
        most, side = self._cfg.max_observation_length, self._cfg.truncate_side
        return turn_of(value, most, side, "the tool") if isinstance(value, Turn) else text_of(value, most, side)

    async def _final_reward(self, messages: Sequence[Message]) -> float | dict[str, float] | None:
        if self.ended in ("timeout", "error"):
            return None
        if "get_reward" not in self._kind.hooks:
            return self._earned
        kwargs = {"messages": copied(list(messages))} if self._kind.judges else {}
        outcome = await self._call_environment(
            "get_reward", lambda: self._instance.get_reward(**kwargs), lambda value: reward_of(value, "get_reward")
        )
        return None if outcome is None else outcome.value

    async def _call_environment(
        self,
        name: str,
        function: Callable[[], Any],
        convert: Callable[[Any], Any] = lambda value: value,
        *,
        observe: bool = False,
    ) -> Outcome | None:
        """Call code of the environment; None if a failure ended the conversation. Raises EnvironmentFailure with
        on_error=fail. `observe`: with on_error=observe, return an outcome with an error, for the model to read.
        """
        outcome = await self._pool.call(function, convert)
        self.seconds += outcome.seconds
        if outcome.error is None and not outcome.overdue:
            return outcome
        self.failures += 1
        line = self._failure_line(name, outcome)
        self.problem = self.problem or line
        if self._cfg.on_error == "fail":
            raise EnvironmentFailure(line) from outcome.error
        if outcome.overdue:
            self.ended = "timeout"
            return None
        if observe and self._cfg.on_error == "observe":
            return outcome
        self.ended = "error"
        return None

    def _failure_line(self, name: str, outcome: Outcome) -> str:
        """A description of a failed call, in one line."""
        error = outcome.error
        if outcome.overdue:
            what = f"{name} ran longer than environment.timeout_s={self._cfg.timeout_s:g} seconds"
        elif isinstance(error, Odd):
            what = str(error)
        else:
            assert error is not None
            what = f"{name} raised {reason(error)}{'' if isinstance(error, SystemExit) else place(error)}"
        return hide(f"environment {self._kind.label}: {what}, on {_row_name(self._row)}")


def _row_name(row: dict[str, Any]) -> str:
    """The name of a row of the data in messages, by its prompt."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    return f'the row with the prompt "{cut(" ".join(str(prompt).split()), 120)}"'
