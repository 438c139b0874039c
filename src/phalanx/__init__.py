"""Phalanx: reinforcement learning of flow-matching image models under plain torchrun."""

__version__ = "0.1.0"
