"""Rewards: functions `(images, prompts, metadata) -> scores`, built in or the user's own.

Every module of this package whose name has no leading underscore is a built-in reward, and its name is the reward's
name. The module holds either a class of that name in CamelCase (`clip_score.py`: `ClipScore`), which is instantiated
once with the configured kwargs, or a function of that name (`jpeg_compressibility.py`: `jpeg_compressibility`), which
gets the kwargs at each call. A new reward is one new file. A class derived from Judge asks the reward model instead.
"""

from phalanx.rewards._base import DeviceReward, Marked, Marking, RewardError, RewardFunction, to_uint8
from phalanx.rewards._judge import Judge
from phalanx.rewards._runner import RewardSet

__all__ = ["DeviceReward", "Judge", "Marked", "Marking", "RewardError", "RewardFunction", "RewardSet", "to_uint8"]
