"""Rewards of videos: rewards of images score frames, whose mean counts; others take whole videos."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.flow import FlowRewardConfig, FlowRewardFunctionConfig
from phalanx.config.tasks import ServeRewardConfig
from phalanx.rewards import DeviceReward, Judge, RewardError, RewardOutput, RewardSet, RewardWithExtras
from phalanx.rewards.registry import build_terms
from phalanx.types import Prompt
from tests.helpers.rewards import rewards, scored, told

HERE = __name__
PROMPTS = [Prompt("a", 0, {"bonus": 0.0}), Prompt("b", 1, {"bonus": 10.0})]
# each frame of one shade: 0.0, 0.1, ... of the first video, twice that of the second
VIDEOS = (torch.arange(5) / 10)[None, :, None, None, None] * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
VIDEOS = VIDEOS.expand(2, 5, 3, 4, 6).contiguous()


def shade(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    assert images.ndim == 4 and len(images) == len(prompts) == len(metadata)
    return images.mean((1, 2, 3)) + torch.tensor([m["bonus"] for m in metadata])


def motion(videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    assert videos.ndim == 5 and len(videos) == len(prompts) == len(metadata)
    return [float((video[-1] - video[0]).mean()) for video in videos]


class Frames(DeviceReward):
    """Takes videos on the device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[int]:
        return [video.to(self.device).shape[0] for video in videos]


class Dark(RewardWithExtras):
    """Says which frames are below 0.15."""

    extras = ("dark",)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        found = images.mean((1, 2, 3))
        return RewardOutput(found, {"dark": (found < 0.15).float()})


def late_nan(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [0.0] * (len(images) - 1) + [float("nan")]


class Verdict(Judge):
    """Has a constant question."""

    template = "?"

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        return 0.0


def entry(name: str, **keys: Any) -> FlowRewardFunctionConfig:
    return FlowRewardFunctionConfig(path=f"{HERE}:{name}", **keys)


def score(samples: Tensor, *entries: FlowRewardFunctionConfig) -> dict[str, list[float]]:
    rows = scored(rewards(*entries), (samples, PROMPTS))
    return {name: [round(value, 4) for value in values] for name, values in rows.items()}


def test_which_frames_count() -> None:
    brighter_end = VIDEOS.clone()
    brighter_end[:, -1] += 0.3
    assert score(brighter_end, entry("shade", frames=1)) == {"shade": [0.2, 10.4]}  # the middle
    assert score(brighter_end, entry("shade", frames=2)) == {"shade": [0.35, 10.55]}  # both ends
    assert score(brighter_end, entry("shade")) == {"shade": [0.26, 10.46]}  # all five


def test_videos_as_a_whole() -> None:
    wanted = (entry("motion", frames=1), entry("Frames"), entry("shade", frames=2))
    assert score(VIDEOS, *wanted) == {"motion": [0.4, 0.8], "Frames": [5.0, 5.0], "shade": [0.2, 10.4]}
    # an image is a video of one frame
    assert score(VIDEOS[:, 3], *wanted) == {"motion": [0.0, 0.0], "Frames": [1.0, 1.0], "shade": [0.3, 10.6]}


def test_extras_are_shares_of_frames() -> None:
    assert score(VIDEOS, entry("Dark")) == {"Dark": [0.2, 0.4], "Dark_dark": [0.4, 0.2]}


def test_one_bad_frame_ends_the_job() -> None:
    with pytest.raises(RewardError, match=r"returned nan for 1 of 10 images on the prompt \"b\""):
        score(VIDEOS, entry("late_nan"))


def test_judges_look_at_the_same_frames() -> None:
    other = FlowRewardFunctionConfig(name="other", path=f"{HERE}:Verdict", frames=4)
    terms = build_terms([entry("Verdict", frames=4), other], "cpu", 0.0)
    assert [term.frames for term in terms] == [4, 4]
    cfg = FlowRewardConfig(functions=[entry("Verdict"), other])
    problem = "reward.functions: judges have frames 4, 8; give them the same number"
    assert told(ValueError, RewardSet, cfg, "cpu", 60.0) == problem


def test_a_server_takes_no_videos() -> None:
    from phalanx.tools.reward_server import RewardServer

    cfg = ServeRewardConfig(reward=FlowRewardConfig(functions=[entry("motion")]), port=0)
    problem = "reward.functions: motion takes videos, but the server receives images; use it in the job"
    assert told(ValueError, RewardServer, cfg) == problem
