"""Phalanx: RL post-training of image, video, language and block-diffusion models by plain torchrun."""

__version__ = "0.1.0"
