"""Qwen-Image in vLLM-omni."""

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

from phalanx.zoo.engines.omni.pipeline import Pipeline


class Transformer(QwenImageTransformer2DModel):
    """vLLM-omni's transformer with the signature of diffusers' transformer."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **keywords: Any) -> Any:
        # diffusers takes the length of the text from its embeddings; vLLM-omni needs an argument
        lengths = [encoder_hidden_states.shape[1]] * len(hidden_states)
        return super().forward(hidden_states, encoder_hidden_states, txt_seq_lens=lengths, **keywords)


class QwenImagePipeline(Pipeline):
    """Qwen-Image; the policy does guidance and packing."""

    def __init__(self, *, od_config: Any) -> None:
        shape = get_transformer_config_kwargs(od_config.tf_model_config, QwenImageTransformer2DModel)
        super().__init__(Transformer(od_config=od_config, **shape), od_config)
