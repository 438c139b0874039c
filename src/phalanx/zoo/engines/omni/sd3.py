"""SD3 and SD3.5 in vLLM-omni."""

from typing import Any

from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

from phalanx.zoo.engines.omni.pipeline import Pipeline


class SD3Pipeline(Pipeline):
    """SD3 and SD3.5; the transformer has the signature of diffusers' transformer."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(SD3Transformer2DModel(od_config=od_config), od_config)
