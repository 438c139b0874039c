"""Rewards: functions `(outputs, prompts, metadata) -> scores`, built in or the user's own.

Outputs are images, videos or completions, depending on the name of the first parameter (see phalanx.rewards.base).

Every module of `image`, `video`, `text` and `judge` whose name has no leading underscore is a built-in reward, and its
name is the reward's name. The module holds either a class of that name in CamelCase (`clip_score.py`: `ClipScore`),
which is instantiated once with the configured kwargs, or a function of that name (`jpeg_compressibility.py`:
`jpeg_compressibility`), which gets the kwargs at each call. To add a reward, add a file. A class derived from Judge
does not compute scores itself: it asks the reward model.
"""

from phalanx.media.pictures import to_uint8
from phalanx.rewards.base import (
    DeviceReward,
    HasGradient,
    PolicyReward,
    RewardError,
    RewardOutput,
    RewardWithExtras,
    differentiable,
)
from phalanx.rewards.judge import Judge, PairJudge
from phalanx.rewards.runner import RewardSet

__all__ = [
    "DeviceReward",
    "HasGradient",
    "Judge",
    "PairJudge",
    "PolicyReward",
    "RewardError",
    "RewardOutput",
    "RewardSet",
    "RewardWithExtras",
    "differentiable",
    "to_uint8",
]
