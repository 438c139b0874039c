"""A kind of policy without images, for tests of the loop: a tiny recurrent writer of words of different lengths.

An action is a letter; a word ends with a full stop, which is an action, too, or at LIMIT letters. Samples thus have
different numbers of actions, and the loop gets them padded, with a mask.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import algorithms
from phalanx.config.engine_facts import EngineFacts
from phalanx.config.run import RLConfig, RunConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in
from phalanx.models.trained import TrainedModel
from phalanx.run import batch_plan
from phalanx.run.rl import build_trainer
from phalanx.run.rules import load_config
from phalanx.run.start import JobComponents, build_rewards, start_job
from phalanx.types import Each, JobError, Prompt, Replay, Samples

LETTERS = "abcdefgh."  # the last one ends a word
STOP = len(LETTERS) - 1
LIMIT = 7
PROMPTS = ["ab", "cd", "ef", "gh"]


class Writer(nn.Module):
    """Logits [B, T, V] of the letters that follow each of the letters [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 12)
        self.block = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        states, _ = self.block(self.embed(letters))
        return self.head(states)


class Critic(nn.Module):
    """A number for each of the letters [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()
        self.value = nn.Linear(len(LETTERS), 1)

    def forward(self, letters: Tensor) -> Tensor:
        return self.value(self.writer(letters))[..., 0]


@dataclass(frozen=True)
class Words:
    """letters [B, P + A]: a prompt of P letters, then the actions, padded with full stops."""

    letters: Tensor
    prompt: int

    def select(self, rows: Tensor) -> "Words":
        return Words(self.letters[rows], self.prompt)

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> "Words":
        return self


class WordPolicy:
    """See phalanx.training.components.TrainedPolicy."""

    def __init__(self, trained: TrainedModel) -> None:
        self.trained = trained

    def replay(self, trace: Words) -> Replay:
        logits = self.trained.module(trace.letters[:, :-1]).float().log_softmax(-1)
        chosen = logits.gather(2, trace.letters[:, 1:, None])[..., 0]
        return Replay(chosen[:, trace.prompt - 1 :])

    def predict(self, trace: Any, corrupted: Any) -> Tensor:
        raise AssertionError("words are not corrupted")

    def corrupt(self, samples: Samples, seeds: Sequence[int], *, levels: int, distribution: str) -> Any:
        raise AssertionError("words are not corrupted")

    def unsharded(self) -> AbstractContextManager[None]:
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        return self.trained.using(weights)

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        weights = sum(p.numel() for p in self.trained.module.parameters())
        return round(2 * weights * count * actions * (1 + references + 3 * updates))


class WordRollout:
    """See phalanx.types.Rollout. Each word has a separate random stream."""

    facts = EngineFacts()
    exact = True
    fps = 1
    noun = "words"

    def __init__(self, policy: WordPolicy, cfg: RunConfig, world: World) -> None:
        self.policy, self.cfg, self.world = policy, cfg, world
        self.micro_batch_size = cfg.data.train_batch_size * cfg.rollout.n  # all at once

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        pass

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad(), self.policy.unsharded():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        n, share = self.cfg.rollout.n, len(prompts) * self.cfg.rollout.n // self.world.size
        index = torch.arange(self.world.rank * share, (self.world.rank + 1) * share)
        mine = [prompts[i // n] for i in index.tolist()]
        words = self._write(mine, [fold_in(seed, step, i) for i in index.tolist()])
        letters = words.letters[:, words.prompt :]
        lengths = (letters == STOP).int().argmax(1) + 1
        lengths[(letters != STOP).all(1)] = LIMIT
        mask = torch.arange(LIMIT)[None] < lengths[:, None]
        each(["".join(LETTERS[c] for c in row[:k]) for row, k in zip(letters, lengths, strict=True)], mine)
        log_prob = self.policy.replay(words).log_prob
        return Samples(mine, [], log_prob, mask, words, index)

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        raise AssertionError("not asked for here")

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        raise AssertionError("not asked for here")

    def close(self) -> None:
        """See phalanx.types.Rollout."""

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        return {"response/length_mean": float(samples.mask.sum(1).float().mean())}

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        words = self._write(prompts, [fold_in(7, prompt.group_id) for prompt in prompts])
        each(["".join(LETTERS[c] for c in row) for row in words.letters[:, words.prompt :]], prompts)

    def _write(self, prompts: list[Prompt], seeds: list[int]) -> Words:
        rows = []
        for prompt, seed in zip(prompts, seeds, strict=True):  # one by one: the last bits depend on batch shapes
            stream = torch.Generator().manual_seed(seed)
            row = torch.tensor([[LETTERS.index(c) for c in prompt.text]])
            while row.shape[1] < len(prompt.text) + LIMIT:
                odds = self.policy.trained.module(row)[0, -1].float().softmax(-1)
                chosen = STOP if int(row[0, -1]) == STOP else int(torch.multinomial(odds, 1, generator=stream))
                row = torch.cat([row, torch.tensor([[chosen]])], 1)
            rows.append(row)
        return Words(torch.cat(rows), len(prompts[0].text))


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


def word_config(folder: Path, *overrides: str) -> RLConfig:
    """A job of 4 prompts x 4 words in 2 updates; files go below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "letters.py").write_text(ALGORITHM)
    (folder / "count.py").write_text(REWARD)
    return load_config(
        RLConfig,
        None,
        [
            "model.path=none",
            "model.dtype=float32",
            "data.train_files=[none]",
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


def small(module: Callable[[], nn.Module], world: World, cfg: RLConfig, seed: int) -> TrainedModel:
    """A Writer or Critic over the mesh, sharded by parallel.fsdp_size."""
    torch.manual_seed(seed)
    made = module()
    blocks = [block for block in made.modules() if isinstance(block, nn.GRU)]
    return TrainedModel(made, blocks, world, cfg.model, cfg.parallel, torch.float32, seed=seed)


def build(cfg: RLConfig) -> Any:
    """The job of a WordPolicy, in the same loop as other policies."""
    algorithm = algorithms.build(cfg.algorithm)
    batch_plan.check(cfg, algorithm)
    plan = batch_plan.plan(cfg, algorithm, Launch.from_env().world_size)
    world = start_job(cfg)
    rewards = build_rewards(cfg, world, outputs="completions")
    policy = WordPolicy(small(Writer, world, cfg, cfg.trainer.seed))
    rows = [Prompt(text, 0, {}) for text in PROMPTS]
    prompts = PromptStream(rows, cfg.data.train_batch_size, cfg.data.seed)
    held_out = {"held_out": [Prompt(text, i, {}) for i, text in enumerate(["ba", "dc", "fe"])]}
    rollout = WordRollout(policy, cfg, world)
    components = JobComponents(world, rewards, policy, rollout, held_out, noun=rollout.noun)
    return build_trainer(cfg, plan, algorithm, components, prompts)


__all__ = ["Critic", "JobError", "build", "small", "word_config"]
