"""Phalanx: reinforcement learning of flow, language and block-diffusion models under plain torchrun."""

__version__ = "0.1.0"
