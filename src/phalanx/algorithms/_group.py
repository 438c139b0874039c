"""What the algorithms share: advantages within prompt groups, and which samples are trained on."""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.config.load import ConfigError, arg
from phalanx.config.schema import AlgorithmConfig, RolloutConfig
from phalanx.functional.advantage import group_advantage, informative, top_and_bottom
from phalanx.types import Batch, Expert, Policy


@dataclass
class GroupConfig(AlgorithmConfig):
    """Keys of `algorithm` that all algorithms with advantages have, but those that `unused` names."""

    unused: ClassVar[tuple[str, ...]] = ()

    adv_clip_max: float = arg(5.0, "advantages are clamped to +- this", gt=0)
    global_std: bool = arg(False, "divide advantages by the std of all rewards, not of the group's")
    norm_adv_by_std_in_grpo: bool = arg(True, "divide advantages by a std at all; false is Dr.GRPO")
    group_filter: str = arg(
        "all", "train on all images of a prompt, or on the best and worst alone", choices=("all", "top_bottom")
    )
    group_filter_k: int = arg(4, "images of each end that group_filter=top_bottom keeps", ge=1)

    def check(self, rollout: RolloutConfig) -> None:
        """Raise ConfigError for a key that means nothing to this algorithm, where it is set."""
        defaults = {f.name: f.default for f in fields(self)}
        for key in self.unused:
            if vars(self)[key] != defaults[key]:
                raise ConfigError(
                    f"algorithm.{key}: {vars(self)[key]} means nothing to algorithm.name={self.name}; leave it out"
                )


class GroupRule:
    """An algorithm that compares the images of each prompt; see phalanx.types.Algorithm."""

    forward = False
    behaviour: str | None = None
    others: tuple[str, ...] = ()
    averages: tuple[str, ...] = ()
    experts: tuple[Expert, ...] = ()

    def __init__(self, config: GroupConfig) -> None:
        self.group = config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] advantages of the world's N samples, clamped."""
        c = self.group
        values = group_advantage(reward, group_id, global_std=c.global_std, normalize=c.norm_adv_by_std_in_grpo)
        return values.clamp(-c.adv_clip_max, c.adv_clip_max)

    def counts(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: samples of groups whose rewards differ, those that group_filter keeps."""
        chosen = informative(reward, group_id)
        if self.group.group_filter == "top_bottom":
            chosen &= top_and_bottom(reward, group_id, self.group.group_filter_k)
        return chosen

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N, 1]: each sample for itself."""
        return torch.arange(len(reward))[:, None]

    def decay(self, name: str, step: int) -> float:
        """Only algorithms with `averages` are asked."""
        raise AssertionError(f"{name} is no average of this algorithm")

    def view(self, policy: Policy, batch: Batch) -> Tensor:
        """Only algorithms with `others` are asked."""
        raise AssertionError("this algorithm looks at no other weights")
