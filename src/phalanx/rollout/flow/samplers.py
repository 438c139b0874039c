"""The samplers of training and validation, from the configuration and what the model supports."""

from dataclasses import replace
from typing import Any

from phalanx.config.flow import FlowRolloutConfig, FlowValRolloutConfig
from phalanx.functional.flow import Sampler
from phalanx.media.videos import can_write
from phalanx.models.flow.family import FlowModel


def train_sampler(c: FlowRolloutConfig, model: FlowModel | type[FlowModel]) -> Sampler:
    """The sampler of training. Raises ValueError for settings that the model does not support."""
    guidance, embedded = _guidance_scales(c, model)
    assert guidance is not None
    check_noise(c, c)
    return Sampler(
        num_inference_steps=c.num_inference_steps,
        height=c.height,
        width=c.width,
        guidance=guidance,
        noise_level=c.noise_level,
        sde_type=c.sde_type,
        embedded_guidance=embedded,
        solver=c.solver,
        compression=c.ode_compression,
        num_frames=c.num_frames,
        guidance_2=c.guidance_scale_2,
    )


def val_sampler(c: FlowRolloutConfig, model: FlowModel | type[FlowModel]) -> Sampler:
    """The sampler of validation: that of training with the changes of rollout.val, and without skipped steps."""
    v, train = c.val, train_sampler(c, model)
    check_noise(c, v)
    guidance, embedded = _guidance_scales(v, model)
    solver = c.solver if v.solver is None else v.solver
    if solver != "euler" and v.noise_level > 0:
        raise ValueError(f"{v:solver}: {solver} takes steps without noise; set {v:noise_level}=0, or {v:solver}=euler")
    return replace(
        train,
        num_inference_steps=v.num_inference_steps or train.num_inference_steps,
        height=v.height or train.height,
        width=v.width or train.width,
        guidance=train.guidance if guidance is None else guidance,
        noise_level=v.noise_level,
        embedded_guidance=train.embedded_guidance if embedded is None else embedded,
        solver=solver,
        compression=1.0,
        num_frames=v.num_frames or train.num_frames,
        guidance_2=train.guidance_2 if v.guidance_scale_2 is None else v.guidance_scale_2,
    )


def check_noise(c: FlowRolloutConfig, section: FlowRolloutConfig | FlowValRolloutConfig) -> None:
    """Raise ValueError for a noise level that cps does not define: sin(eta pi / 2) decreases above 1."""
    if c.sde_type == "cps" and section.noise_level > 1:
        level = section.noise_level
        raise ValueError(f"{section:noise_level}: {level:g} is more than 1, the maximum with {c:sde_type}=cps")


def check_frames(section: Any, model: FlowModel | type[FlowModel]) -> None:
    """Raise ValueError for videos that the model cannot generate, or that cannot be written."""
    frames = section.num_frames
    if frames == 1 and model.makes_videos and model.image_column is not None:
        raise ValueError(f"{section:num_frames}: 1 is only the given image; expected more frames, which follow it")
    if frames is None or frames == 1:
        return
    if not model.makes_videos:
        raise ValueError(
            f"{section:num_frames}: {frames}: {model.pipeline_class} makes images, not videos; set it to 1"
        )
    if not can_write():
        raise ValueError(f"{section:num_frames}: {frames}: videos need PyAV with libx264; pip install 'phalanx[video]'")


def check_guidance(section: Any, model: FlowModel | type[FlowModel]) -> None:
    """Raise ValueError if `section` sets a guidance scale that has no effect on the model."""
    effective = (model.guidance_key, model.embedded_guidance_key)
    second = section.guidance_scale_2
    if second is not None and not model.second_guidance:
        raise ValueError(
            f"{section:guidance_scale_2}: {second:g} needs a model with two transformers; this one has one"
        )
    first = section.guidance_scale
    if second is not None and first is not None and first <= 1:
        raise ValueError(
            f"{section:guidance_scale_2}: {second:g} has no effect where {section:guidance_scale} is not above 1, as "
            "in diffusers"
        )
    for key in ("guidance_scale", "true_cfg_scale"):
        value = getattr(section, key)
        if value is None or value <= 1:
            continue
        if model.distilled and key == model.guidance_key:
            raise ValueError(
                f"{section:{key}}: {value:g}: the model is distilled to do without classifier-free guidance; set it "
                "to 1"
            )
        if key not in effective:
            raise ValueError(
                f"{section:{key}}: {value:g} has no effect on this model; its guidance is "
                f"{section:{model.guidance_key}}"
            )


def _guidance_scales(section: Any, model: FlowModel | type[FlowModel]) -> tuple[float | None, float | None]:
    """The scales of classifier-free guidance and of embedded guidance, which the model takes as an input.

    Raises ValueError for guidance and videos that the model does not support.
    """
    check_guidance(section, model)
    check_frames(section, model)
    # the meaning of a key depends on the model: guidance_scale is the former for SD3, the latter for FLUX.1-dev
    key = model.embedded_guidance_key
    return getattr(section, model.guidance_key), None if key is None else getattr(section, key)
