"""Responses decoded together on GPUs: as many as have room for their keys and values, on all ranks, with the same tokens."""

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, MambaConfig, Qwen3Config

from phalanx.rollout.lm.together import SHARE, fitting_together, token_bytes
from phalanx.run.rl import build
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import free_port, run_ranks
from tests.pretended import cuda
from tests.pretended.jobs import pretend

NULL = "rollout.micro_batch_size_per_gpu=null"
EACH = 2 * 2 * (64 + 12) * 32 * 4  # bytes of a response: keys and values of 2 layers, a head of 32, in float32


@pytest.mark.parametrize(
    ("count", "memory", "ranks", "together"),
    [
        (640, None, 1, 640),  # no GPU
        (640, 1000, 1, 214),  # 300 fit: three parts of 214
        (640, 1000, 2, 160),  # of which a rank has 320: two parts
        (300, 1000, 1, 300),
        (600, 1000, 2, 600),
        (8, 1, 1, 1),  # none fits
    ],
)
def test_equal_parts(count: int, memory: int | None, ranks: int, together: int) -> None:
    assert fitting_together(count, 1, memory, ranks) == together


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (GPT2Config(n_layer=3, n_head=4, n_embd=64), 2 * 3 * 64 * 2),  # other names
        (Qwen3Config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8), 2 * 3 * 2 * 8 * 2),
        (MambaConfig(), 0),
    ],
)
def test_bytes_of_a_token(settings: Any, size: int) -> None:
    assert token_bytes(settings, 2) == size


def sampled(cfg: Any, memory: list[int], port: int) -> tuple[int, list[list[str]]]:
    """How many responses a rank decodes together with a GPU of this memory; its responses so, and all together."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda.MEMORY = memory[int(os.environ["RANK"])]
    record = pretend()
    collector = build(cfg).collector
    together, found = collector.rollout.micro_batch_size, []
    for collector.rollout.micro_batch_size in (together, 8):
        with collector.rollout.awake():
            samples = collector.rollout.sample(collector.prompts.batch(0), seed=0, step=0, each=lambda *_: None)
        found.append(samples.outputs)
    assert not record.faults, "\n".join(record.faults)
    return together, found


@pytest.mark.full
def test_ranks_decode_as_many_as_the_smallest_gpu_holds(lm_folder: Path, tmp_path: Path) -> None:
    """The other GPU could hold all 8 responses; the plan knows the number, and the tokens are the same."""
    cfg, few = tiny_lm_config(lm_folder, tmp_path, NULL), int(3.5 * EACH / SHARE)
    for together, (split, whole) in run_ranks(sampled, 2, cfg, [100 * few, few], free_port(), init=False):
        assert together == 3 and split == whole and len({len(text) for text in whole}) > 1
    assert planned(cfg, Cluster(1, 2, few)).plan.rollout_micro == 3
    assert planned(cfg, Cluster(1, 2)).plan.rollout_micro == 8
