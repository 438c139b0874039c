"""The samplers of training and validation, from the configuration and what the model supports."""

from dataclasses import replace
from typing import Any

from phalanx.config.flow import FlowRolloutConfig
from phalanx.functional.flow import Sampler
from phalanx.media.videos import can_write
from phalanx.models.flow.family import FlowModel


def train_sampler(c: FlowRolloutConfig, model: FlowModel | type[FlowModel]) -> Sampler:
    """The sampler of training. Raises ValueError for settings that the model does not support."""
    guidance, embedded = _guidance(c, model, "rollout.")
    assert guidance is not None
    check_noise(c.sde_type, c.noise_level, "rollout.noise_level")
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
    check_noise(c.sde_type, v.noise_level, "rollout.val.noise_level")
    guidance, embedded = _guidance(v, model, "rollout.val.")
    solver = c.solver if v.solver is None else v.solver
    if solver != "euler" and v.noise_level > 0:
        raise ValueError(
            f"rollout.val.solver: {solver} takes steps without noise; set rollout.val.noise_level=0, or "
            "rollout.val.solver=euler"
        )
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


def check_noise(sde_type: str, noise_level: float, key: str) -> None:
    """Raise ValueError for a noise level that cps does not define: sin(eta pi / 2) decreases above 1."""
    if sde_type == "cps" and noise_level > 1:
        raise ValueError(f"{key}: {noise_level:g} is more than 1, the maximum with rollout.sde_type=cps")


def check_frames(section: Any, model: FlowModel | type[FlowModel], prefix: str = "") -> None:
    """Raise ValueError for videos that the model cannot generate, or that cannot be written."""
    frames = section.num_frames
    if frames == 1 and model.makes_videos and model.image_column is not None:
        raise ValueError(f"{prefix}num_frames: 1 is only the given image; expected more frames, which follow it")
    if frames is None or frames == 1:
        return
    if not model.makes_videos:
        raise ValueError(f"{prefix}num_frames: {frames}: {model.pipeline_class} makes images, not videos; set it to 1")
    if not can_write():
        raise ValueError(f"{prefix}num_frames: {frames}: videos need PyAV with libx264; pip install 'phalanx[video]'")


def check_guidance(section: Any, model: FlowModel | type[FlowModel], prefix: str = "") -> None:
    """Raise ValueError if `section` sets a guidance scale that has no effect on the model."""
    effective = (model.guidance_key, model.embedded_guidance_key)
    second = section.guidance_scale_2
    if second is not None and not model.second_guidance:
        raise ValueError(f"{prefix}guidance_scale_2: {second:g} needs a model with two transformers; this one has one")
    first = section.guidance_scale
    if second is not None and first is not None and first <= 1:
        raise ValueError(
            f"{prefix}guidance_scale_2: {second:g} has no effect where {prefix}guidance_scale is not above 1, as in "
            "diffusers"
        )
    for key in ("guidance_scale", "true_cfg_scale"):
        value = getattr(section, key)
        if value is None or value <= 1:
            continue
        if model.distilled and key == model.guidance_key:
            raise ValueError(
                f"{prefix}{key}: {value:g}: the model is distilled to do without classifier-free guidance; set it to 1"
            )
        if key not in effective:
            raise ValueError(
                f"{prefix}{key}: {value:g} has no effect on this model; its guidance is {prefix}{model.guidance_key}"
            )


def _guidance(section: Any, model: FlowModel | type[FlowModel], prefix: str) -> tuple[float | None, float | None]:
    """The scales of classifier-free guidance and of embedded guidance, which the model takes as an input.

    Raises ValueError for guidance and videos that the model does not support.
    """
    check_guidance(section, model, prefix)
    check_frames(section, model, prefix)
    # the meaning of a key depends on the model: guidance_scale is the former for SD3, the latter for FLUX.1-dev
    key = model.embedded_guidance_key
    return getattr(section, model.guidance_key), None if key is None else getattr(section, key)
