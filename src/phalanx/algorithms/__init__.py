"""Learning rules, a file each, and the classes that new ones derive from."""

from phalanx.algorithms._forward import ForwardConfig, ForwardRule
from phalanx.algorithms._group import GroupConfig, GroupRule
from phalanx.algorithms._transitions import TransitionConfig, TransitionRule

__all__ = ["ForwardConfig", "ForwardRule", "GroupConfig", "GroupRule", "TransitionConfig", "TransitionRule"]
