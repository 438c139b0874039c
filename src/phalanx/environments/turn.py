"""The answers of environments, and the errors that end a job."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from phalanx.types import JobError

Message = dict[str, Any]  # of a chat: role, content and, if it is the model's, tool_calls

# of the call of a tool that this thread runs: the sample's seed, and the call's number in the conversation
CALL: ContextVar[tuple[Any, int]] = ContextVar("CALL", default=(0, 0))


class EnvironmentFailure(JobError):
    """Code of an environment failed. The message is one line with the environment, the method, its line and the row."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer to a turn of the model: messages to the model, a reward, and whether the sample ends."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
