"""Environments and tools that a language model talks to, inside each rank: see docs/environments.md.

`base` has what they give back, `registry` reads the configuration, `tools` makes functions and methods callable by a
model, `pool` runs them, and a `conversation` is that of one sample.
"""

from phalanx.environments.base import EnvironmentFailure, Message, Turn
from phalanx.environments.conversation import Conversation
from phalanx.environments.environments import Environments

__all__ = ["Conversation", "EnvironmentFailure", "Environments", "Message", "Turn"]
