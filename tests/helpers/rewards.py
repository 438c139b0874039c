"""Rewards as tests build and run them, and the messages about mistakes."""

from collections.abc import Callable
from typing import Any

import pytest

from phalanx.config.flow import FlowRewardConfig, FlowRewardFunctionConfig
from phalanx.rewards import RewardSet
from phalanx.types import Outputs, Prompt

BUILT_IN = (
    "aesthetic, background_consistency, blip_vqa, chosen, clip_score, dapo, edit_reward, environment, format, geneval, geo3k, gsm8k, "
    "hps_v2, hps_v3, http, image_reward, iou, jpeg_compressibility, jpeg_incompressibility, length, llm_judge, "
    "math, ocr, overlong, pairwise_judge, pickscore, preferred, reasoning_gym, self_certainty, "
    "subject_consistency, t2i_compbench, temporal_flickering, unified_reward, video_align, vlm_ocr"
)


def entry(
    name: str | None = None, path: str | None = None, weight: float = 1.0, **kwargs: Any
) -> FlowRewardFunctionConfig:
    return FlowRewardFunctionConfig(name=name, path=path, weight=weight, kwargs=kwargs)


def rewards(*functions: FlowRewardFunctionConfig, **settings: Any) -> RewardSet:
    return RewardSet(FlowRewardConfig(functions=list(functions), **settings), "cpu")


def scored(reward: RewardSet, *batches: tuple[Outputs, list[Prompt]]) -> dict[str, list[float]]:
    """The scores of all batches, by term."""
    for batch in batches:
        reward.submit(*batch)
    return {name: values.tolist() for name, values in reward.collect().items()}


def told(kind: type[Exception], do: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(kind) as error:
        do(*args, **kwargs)
    return str(error.value)
