"""SD3 and SD3.5 in vLLM-omni."""

from typing import Any

from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel

from phalanx.rollout._omni_pipeline import Pipeline


class SD3Pipeline(Pipeline):
    """Its transformer is called as diffusers' is."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(SD3Transformer2DModel(od_config=od_config), od_config)
