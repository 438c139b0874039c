"""Environments and tools that a language model talks to, inside each rank: see docs/environments.md.

`base` has what they give back, `registry` reads the configuration, `tools` makes functions and methods callable by a
model, `pool` runs them, a `conversation` is that of one sample, and a `harness` runs a loop of the user's own.
"""

from phalanx.environments.base import EnvironmentFailure, Message, Turn
from phalanx.environments.conversation import Conversation
from phalanx.environments.environments import Environments
from phalanx.environments.harness import Chat, ConversationEnded

__all__ = ["Chat", "Conversation", "ConversationEnded", "EnvironmentFailure", "Environments", "Message", "Turn"]
