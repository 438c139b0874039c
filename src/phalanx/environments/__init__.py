"""Environments and tools that a language model talks to, inside each rank: see docs/environments.md.

`turn` defines the answers of environments, `registry` reads the configuration, `tools` makes functions and methods
callable by a model, `pool` runs them, `conversation` conducts the conversation of one sample, and `harness` runs a
user's own loop.
"""

from phalanx.environments.conversation import Conversation
from phalanx.environments.environments import Environments
from phalanx.environments.harness import Chat, ConversationEnded
from phalanx.environments.turn import EnvironmentFailure, Message, Turn

__all__ = ["Chat", "Conversation", "ConversationEnded", "EnvironmentFailure", "Environments", "Message", "Turn"]
