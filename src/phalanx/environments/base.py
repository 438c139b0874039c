"""The answers of environments, and the errors that end a job."""

from dataclasses import dataclass, field
from typing import Any

from phalanx.types import JobError

Message = dict[str, Any]  # of a chat: role, content and, of the model, tool_calls


class EnvironmentFailure(JobError):
    """Code of an environment failed; the message is one line with the environment, the tool, the line and the row."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer to a turn of the model: messages for it, a reward, and whether that was the last one."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
