"""Jobs of the kind of policy of examples/my_kind.py, whose samples have different numbers of actions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from examples.my_kind import FILE, WordConfig, WordModelConfig, WordRollout, Writer
from torch import Tensor, nn

from phalanx.distributed.mesh import World
from phalanx.models.trained import TrainedModel
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.types import JobError


class Critic(nn.Module):
    """A number for each of the letters [B, T]."""

    def __init__(self, config: WordModelConfig) -> None:
        super().__init__()
        self.writer = Writer(config)
        self.value = nn.Linear(len(self.writer.letters), 1)

    def forward(self, letters: Tensor) -> Tensor:
        return self.value(self.writer(letters))[..., 0]


ALGORITHM = '''"""GRPO on letters."""

from dataclasses import dataclass

from phalanx.algorithms import GroupAlgorithm, GroupConfig
from phalanx.functional.losses import clipped_ratio


@dataclass
class Config(GroupConfig):
    """Keys of `algorithm`."""

    clip_ratio: float = 0.2


class Algorithm(GroupAlgorithm):
    """Clipped ratios of single letters."""

    def loss(self, policy, batch):
        log_ratio = policy.replay(batch.trace).log_prob - batch.log_prob
        assert log_ratio.shape == batch.mask.shape == batch.weight.shape
        return clipped_ratio(log_ratio * batch.mask, batch.advantage, clip_ratio=self.config.clip_ratio)
'''

REWARD = '''"""Rewards of words."""


def count_a(completions, prompts, metadata):
    """The share of a's, and a little for length, so that hardly any two words score alike."""
    return [word.count("a") / len(word) + 0.01 * len(word) for word in completions]
'''


def word_config(folder: Path, *overrides: str) -> WordConfig:
    """A job of 4 prompts x 4 words in 2 updates; files go below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "letters.py").write_text(ALGORITHM)
    (folder / "count.py").write_text(REWARD)
    (folder / FILE).write_text("abcdefgh.\n")
    (folder / "train.txt").write_text("ab\ncd\nef\ngh\n")
    (folder / "held_out.txt").write_text("ba\ndc\nfe\n")
    return load_config(
        WordConfig,
        None,
        [
            f"model.path={folder}",
            "model.dtype=float32",
            f"data.train_files=[{folder}/train.txt]",
            "data.train_batch_size=4",
            "rollout.n=4",
            "actor.ppo_mini_batch_size=2",
            "actor.ppo_micro_batch_size_per_gpu=2",
            "optim.lr=1e-2",
            f"algorithm.name={folder}/letters.py",
            f"reward.functions=[{{path: '{folder}/count.py:count_a'}}]",
            "trainer.total_training_steps=2",
            "trainer.logger=[]",
            "trainer.save_freq=-1",
            f"trainer.output_dir={folder / 'out'}",
            *overrides,
        ],
    )


def small(module: Callable[[WordModelConfig], nn.Module], world: World, cfg: Any, seed: int) -> TrainedModel:
    """A Writer or Critic over the mesh, sharded by parallel.fsdp_size."""
    torch.manual_seed(seed)
    made = module(cfg.model)
    blocks = [block for block in made.modules() if isinstance(block, nn.GRU)]
    return TrainedModel(made, blocks, world, cfg.model, cfg.parallel, torch.float32, seed=seed)


__all__ = ["Critic", "JobError", "WordRollout", "build", "small", "word_config"]
