"""FLUX.2 Klein and Klein base: as FLUX.2 dev, with Qwen3 as text encoder and without an embedded guidance scale."""

from typing import Any

import torch

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.embeds import chat_tokens
from phalanx.zoo.families import flux2


class Model(flux2.Model):
    """FLUX.2 Klein. `rollout.guidance_scale` is the classifier-free guidance of Klein base.

    Klein itself is distilled to few steps without guidance: its pipeline ignores the scale, and here it is an error.
    """

    pipeline_class = "Flux2KleinPipeline"
    guidance_key = "guidance_scale"
    embedded_guidance_key = None
    distilled = False

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        self.distilled = self.pipeline.config.is_distilled

    def components(self, path: str) -> dict[str, Any]:
        return {}

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the chat template with the text."""
        tokenizer = self.pipeline.tokenizer
        return tokenizer, chat_tokens(tokenizer, texts, enable_thinking=False), max_length
