"""Configurations of FlowGRPO for tests of loading, a custom algorithm, and the messages about mistakes."""

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.run.rules import load_config

ALGORITHM = """
from __future__ import annotations
from dataclasses import dataclass
from phalanx.algorithms import GroupAlgorithm
from phalanx.config.load import arg
from phalanx.config.run import AlgorithmConfig

@dataclass
class Config(AlgorithmConfig):
    temperature: float = arg(0.5, "how hot", gt=0)
    plain: int = 3

class Algorithm(GroupAlgorithm):
    def __init__(self, config):
        self.config = config

    def advantage(self, reward, group_id):
        return reward - reward.mean()

    def sample_mask(self, reward, group_id):
        return reward == reward

    def loss(self, policy, batch):
        return -batch.advantage[:, None] * policy.replay(batch.trace).log_prob, {}
"""


def train(*overrides: str, path: Path | str | None = None) -> FlowRLConfig:
    return load_config(FlowRLConfig, None if path is None else str(path), ["model.path=x", *overrides])


def refusal(*overrides: str, path: Path | str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        train(*overrides, path=path)
    message = str(error.value)
    assert "\n" not in message
    return message
