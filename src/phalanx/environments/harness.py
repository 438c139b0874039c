"""Runs a user's own loop, `async solve(chat, row)`, as an environment: the loop requests the turns of the model."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from phalanx.config.messages import reason
from phalanx.environments.pool import Blocked
from phalanx.environments.turn import Message, Turn


class ConversationEnded(Exception):
    """There is no further turn, because the sample has reached its limit of turns or tokens."""


class Forked(ValueError):
    """A loop requested a turn of a conversation other than its sample's."""


class Chat:
    """The model, as seen by a loop: `await chat(messages)` returns its next turn, a message.

    `messages` must be those of the prompt and of all turns and answers so far, followed by new ones. Raises Forked for
    any others, and ConversationEnded if there is no further turn.
    """

    def __init__(self, prompt: list[Message]) -> None:
        self._history = list(prompt)
        self.asked: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
        self._reply: asyncio.Future[Message] | None = None
        self._ended = False

    async def __call__(self, messages: list[Message]) -> Message:
        if self._ended:
            raise ConversationEnded
        if self._reply is not None:
            raise Forked(
                "chat was called while another call waits for a turn; a sample is one conversation, and forks are not "
                "trained"
            )
        count = len(self._history)
        for i, known in enumerate(self._history):
            if i == len(messages) or any(messages[i].get(key) != known.get(key) for key in ("role", "content")):
                raise Forked(
                    f"the messages passed to chat differ from the conversation at index {i}; expected the {count} "
                    "messages so far, followed by new ones, as forks are not trained"
                )
        new = list(messages[count:])
        self._history += new
        self._reply = asyncio.get_running_loop().create_future()
        self.asked.set_result(new)
        try:
            reply = await self._reply
        finally:
            self._reply = None
        self._history.append(reply)
        return dict(reply)

    def answer(self, message: Message) -> None:
        """Pass the loop the turn that it waits for."""
        self.asked = asyncio.get_running_loop().create_future()
        if self._reply is None:
            raise RuntimeError("the loop no longer waits for the turn that it requested")
        self._reply.set_result(message)

    def end(self) -> None:
        """Tell the loop that there is no further turn."""
        self._ended = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConversationEnded())


class Harness:
    """An environment that runs a loop beside the sample's conversation. The loop's return value is the reward."""

    def __init__(self, solve: Callable[[Chat, dict[str, Any]], Awaitable[Any]]) -> None:
        self._solve = solve

    async def reset(self, **row: Any) -> list[Message]:
        """Run the loop up to its first request for a turn. Returns the messages that it adds to the prompt."""
        prompt = row["prompt"]
        self._chat = Chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        self._task = asyncio.ensure_future(self._run_solve(row))
        turn = await self._next_turn()
        if turn.done:
            raise ValueError("solve returned before it requested a turn")
        return turn.messages

    async def step(self, message: Message) -> Turn:
        """Pass the loop a turn of the model, and run it up to its next request."""
        self._chat.answer({key: value for key, value in message.items() if key != "error"})
        return await self._next_turn()

    async def get_reward(self) -> Any:
        """The loop's result; 0 if it is ended by ConversationEnded."""
        self._chat.end()
        try:
            return await self._task
        except ConversationEnded:
            return 0.0

    async def close(self) -> None:
        """Cancel a loop that still waits for a turn although its sample has ended."""
        self._task.cancel()

    async def _run_solve(self, row: dict[str, Any]) -> Any:
        try:
            return await self._solve(self._chat, row)
        except Blocked:
            raise
        except SystemExit as error:  # it would end the event loop that all samples share
            raise RuntimeError(f"solve ended by {reason(error)}") from error

    async def _next_turn(self) -> Turn:
        """The messages that precede the next turn that the loop requests, or a last Turn if it returns."""
        try:
            await asyncio.wait({self._task, self._chat.asked}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the call ran too long
            self._task.cancel()
            raise
        if self._chat.asked.done():
            return Turn(self._chat.asked.result())
        self._task.result()  # raises what the loop raised
        return Turn(done=True)
