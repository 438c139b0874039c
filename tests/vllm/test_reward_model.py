"""The reward model in vLLM over several ranks: its answers are right, and the same whatever the placement."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from phalanx.config.schema import RewardModelConfig
from phalanx.rewards.unified_reward import UnifiedReward
from phalanx.rewards.vlm_ocr import VlmOcr
from tests.ranks import run_ranks
from tests.tiny_vlm import PICTURES, grades, name, picture

QUESTIONS = (VlmOcr.template, UnifiedReward.template.format(prompt="a red thing"))


def section(model: Path, **settings: Any) -> RewardModelConfig:
    return RewardModelConfig(path=str(model), dtype="float32", **{"max_model_len": 512, "max_tokens": 40, **settings})


def process_state() -> list[Any]:
    """What vLLM changes in passing."""
    arrays = np.random.get_state()
    return [
        (torch.get_rng_state().tolist(), str(arrays), random.getstate()),
        (dict(os.environ), torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()),
    ]


def ask(cfg: RewardModelConfig, shares: list[list[int]]) -> list[list[str]]:
    """On each rank: ask twice about its share of PICTURES; returns the answers of both times."""
    from phalanx.rewards._model import RewardModel

    own = [PICTURES[i] for i in shares[dist.get_rank()]]
    before = process_state()
    model = RewardModel(cfg, timeout_s=60.0)
    images = [(picture(*each) * 255).byte() for each in own]
    stack = torch.stack(images) if images else torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    questions = [(i, text) for i in range(len(own)) for text in QUESTIONS]
    answers = [model.ask(stack, questions) for _ in range(2)]
    assert process_state() == before
    total = torch.ones(1)
    dist.all_reduce(total)  # our world lives on
    assert total.item() == dist.get_world_size()
    return answers


def expected(share: list[int]) -> list[str]:
    return [text for colour, lit in (PICTURES[i] for i in share) for text in (name(colour, lit), grades(1 + lit))]


RAGGED = [[0, 1, 2, 3, 4, 5, 6], [7], [], [8, 9, 10, 11, 12, 13, 14]]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 4}),
        (4, {"placement": "ranks 2-3", "tensor_parallel_size": 2}),
        (4, {"placement": "ranks 1-2"}),
    ],
)
def test_answers_are_right_wherever_the_model_stands(judge_model: Path, world: int, settings: dict[str, Any]) -> None:
    shares = {1: [list(range(15))], 2: [list(range(15)), []], 4: RAGGED}[world]
    got = run_ranks(ask, world, section(judge_model, **settings), shares, timeout=200)
    for answers, share in zip(got, shares, strict=True):
        assert answers == [expected(share)] * 2
