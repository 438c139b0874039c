"""Rewards: functions `(outputs, prompts, metadata) -> scores`, built in or the user's own.

Outputs are images, videos or completions; the name of the first parameter says which (see phalanx.rewards.base).

Every module of `image`, `text` and `judge` whose name has no leading underscore is a built-in reward, and its name is
the reward's name. The module holds either a class of that name in CamelCase (`clip_score.py`: `ClipScore`), which is
instantiated once with the configured kwargs, or a function of that name (`jpeg_compressibility.py`:
`jpeg_compressibility`), which gets the kwargs at each call. A new reward is one new file. A class derived from Judge
asks the reward model instead.
"""

import logging
from typing import Any

from phalanx.media.pictures import to_uint8
from phalanx.rewards.base import DeviceReward, PolicyReward, RewardError, RewardFunction, RewardOutput, RewardWithExtras
from phalanx.rewards.judge._base import Judge
from phalanx.rewards.runner import RewardSet

__all__ = [
    "DeviceReward",
    "Judge",
    "PolicyReward",
    "RewardError",
    "RewardFunction",
    "RewardOutput",
    "RewardSet",
    "RewardWithExtras",
    "to_uint8",
]


_BEFORE = {"Marked": RewardOutput, "Marking": RewardWithExtras}


def __getattr__(name: str) -> Any:
    """Names of before work for one release."""
    if name not in _BEFORE:
        raise AttributeError(f"module 'phalanx.rewards' has no attribute {name!r}")
    logging.getLogger(__name__).warning("phalanx.rewards.%s is now %s", name, _BEFORE[name].__name__)
    return _BEFORE[name]
