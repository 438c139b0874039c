"""Ranks that share the tokens of a language model's samples (Ulysses): the same job as without."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.jobs import assert_same_weights
from tests.lm import one_step, tiny_lm_config
from tests.ranks import run_ranks

KEY = "parallel.ulysses_sequence_parallel_size"
KL = "algorithm.kl_loss_coef=0.04"
PACKED = "model.use_remove_padding=true"
BUDGET = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=120")


def with_heads(folder: Path, base: Path, heads: int, keys: int) -> Path:
    """The tiny model with other numbers of heads, of queries and of keys."""
    shutil.copytree(base, folder)
    config = AutoConfig.from_pretrained(base, num_attention_heads=heads, num_key_value_heads=keys, head_dim=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[config.eos_token_id] *= 4
    model.save_pretrained(folder)
    return folder


def assert_same(alone: dict[str, Any], shared: list[dict[str, Any]], size: int, *, packed: bool) -> None:
    """The same texts, and the rest up to the order of sums; ranks that hold the same samples agree to the last bit."""
    norm = alone["row"]["actor/grad_norm"]
    assert norm > 1e-4
    groups = shared[::size]
    assert [text for part in groups for text in part["texts"]] == alone["texts"]
    log_prob = torch.cat([part["log_prob"] for part in groups])
    torch.testing.assert_close(log_prob, alone["log_prob"], rtol=0, atol=1e-5, equal_nan=True)
    for rank, part in enumerate(shared):
        assert torch.equal(part["log_prob"].nan_to_num(), shared[rank // size * size]["log_prob"].nan_to_num())
        assert torch.equal(part["reward"], alone["reward"])
        # rollout and replay share tokens alike; packed passes have other shapes, with one rank as well
        assert part["row"]["actor/first_ratio_error"] <= (2e-6 if packed else 0)
        assert part["row"].keys() == alone["row"].keys()
        for key, value in alone["row"].items():
            assert part["row"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
        assert_same_weights(alone["weights"], part["weights"], 1e-3)


@pytest.mark.parametrize(
    ("ranks", "size", "heads", "keys"),
    [
        (2, 2, (4, 2), ("model.lora_rank=4", PACKED, *BUDGET)),
        (4, 2, (4, 1), ("parallel.fsdp_size=2", "model.gradient_checkpointing=true")),
        pytest.param(4, 4, (4, 2), ("parallel.fsdp_size=4", PACKED), marks=pytest.mark.long),
    ],
    ids=["lora-packed", "full-2x2", "full-4"],
)
def test_the_same_step(
    ranks: int, size: int, heads: tuple[int, int], keys: tuple[str, ...], lm_folder: Path, tmp_path: Path
) -> None:
    """Of models with fewer heads of keys than ranks share them, and with as many."""
    model = with_heads(tmp_path / "model", lm_folder, *heads)
    plain = [key for key in keys if "fsdp" not in key]
    alone = run_ranks(one_step, ranks // size, tiny_lm_config(model, tmp_path / "alone", KL, *plain))
    first = alone[0] | {"texts": [text for part in alone for text in part["texts"]]}
    first["log_prob"] = torch.cat([part["log_prob"] for part in alone])
    cfg = tiny_lm_config(model, tmp_path / "shared", KL, *keys, f"{KEY}={size}")
    assert_same(first, run_ranks(one_step, ranks, cfg), size, packed=PACKED in keys)
