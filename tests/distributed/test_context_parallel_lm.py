"""Context parallelism (Ulysses) of language models gives the same job as without it."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from phalanx.config.lm import LMRLConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.context_parallel import ContextGroup
from phalanx.models.lm import packing
from phalanx.models.lm.agreement import check_agreement
from phalanx.models.lm.load_folder import causal_lm
from phalanx.models.lm.model import CausalLM
from phalanx.models.lm.packing import Row
from phalanx.models.lm.value_model import ValueLM
from phalanx.run.world import start_world, stop_world
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.rehearsal import Rehearsal
from phalanx.training import update
from tests.distributed import test_conversations as talks
from tests.distributed import test_lm_algorithms
from tests.distributed.test_resume import stop_after
from tests.helpers.checks import refused
from tests.helpers.jobs import assert_same_weights, rows
from tests.helpers.llada2 import tiny_llada2
from tests.helpers.lm import fit, one_step, tiny_lm_config
from tests.helpers.plans import describe
from tests.helpers.ranks import run_ranks
from tests.numerics.test_agreement import Tokenizer

KEY = "parallel.ulysses_sequence_parallel_size"
KL = "algorithm.kl_loss_coef=0.04"
PACKED = "model.use_remove_padding=true"
KEPT = "rollout.top_k=9"
BUDGET = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=60")

COUNTED = """
import os
from pathlib import Path

def counted(completions, prompts, metadata):
    with open(Path(__file__).with_name("calls"), "a") as file:
        print(os.environ["RANK"], len(completions), file=file)
    return [float(sum(ord(c) % 2 == 0 for c in text) > len(text) / 2) for text in completions]
"""


def with_heads(folder: Path, base: Path, heads: int, keys: int) -> Path:
    """The tiny model with other numbers of query heads and key heads."""
    shutil.copytree(base, folder)
    config = AutoConfig.from_pretrained(base, num_attention_heads=heads, num_key_value_heads=keys, head_dim=16)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[config.eos_token_id] *= 4
    model.save_pretrained(folder)
    return folder


def assert_same(alone: dict[str, Any], shared: list[dict[str, Any]], size: int, *, packed: bool) -> None:
    """Equal texts, and everything else equal up to the order of sums. Ranks with the same samples agree bit by bit."""
    norm = alone["row"]["actor/grad_norm"]
    assert norm > 1e-4
    groups = shared[::size]
    assert [text for part in groups for text in part["texts"]] == alone["texts"]
    log_prob = torch.cat([part["log_prob"] for part in groups])
    torch.testing.assert_close(log_prob, alone["log_prob"], rtol=0, atol=1e-5, equal_nan=True)
    for rank, part in enumerate(shared):
        assert torch.equal(part["log_prob"].nan_to_num(), shared[rank // size * size]["log_prob"].nan_to_num())
        assert torch.equal(part["reward"], alone["reward"])
        # rollout and replay divide tokens in the same way; packed passes have other shapes, even with one rank
        assert part["row"]["actor/first_ratio_error"] <= (2e-6 if packed else 0)
        assert part["row"].keys() == alone["row"].keys()
        for key, value in alone["row"].items():
            assert part["row"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
        assert_same_weights(alone["weights"], part["weights"], 1e-3)


def models(attention: str) -> dict[str, tuple[PreTrainedConfig, dict[str, Any]]]:
    """Model configurations with 4 or 8 heads, named by their particularity."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 60, "max_position_embeddings": 64, "head_dim": 8}  # fmt: skip
    windows = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    if attention == "eager":
        capped = Gemma2Config(**sizes, num_key_value_heads=1, attn_logit_softcapping=0.5, **windows)
        return {"soft caps": (capped, {"attn_implementation": "eager"})}
    wide = Qwen3Config(**sizes | {"num_attention_heads": 8}, num_key_value_heads=4)
    learned = GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=60, n_positions=40, bos_token_id=0, eos_token_id=0)
    windowed = Qwen2Config(**sizes, num_key_value_heads=2, use_sliding_window=True, max_window_layers=0, **windows)
    return {
        "heads of keys in halves": (wide, {"gradient_checkpointing": True}),
        "one head of keys": (Qwen3Config(**sizes, num_key_value_heads=1), {}),
        "windows": (windowed, {}),
        "learned positions": (learned, {}),
    }


def passes(model: CausalLM | ValueLM, packed: bool, *, shared: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Scores of three samples of which one has no response in the first half of its positions, and the gradient of an
    uneven sum of them. With `shared`, the first and the last one have the same prompt, which is computed once.
    """
    lengths, starts, generator = [20, 13, 15 if shared else 5], [15, 2, 1], torch.Generator().manual_seed(0)
    ids, at = torch.randint(3, 60, (3, 20), generator=generator), torch.arange(1, 20)
    if shared:
        starts[0] = starts[2] = 11
        ids[2, :11] = ids[0, :11]
    predicting = (at >= torch.tensor(starts)[:, None]) & (at < torch.tensor(lengths)[:, None])
    given = (ids, predicting) if isinstance(model, ValueLM) else (ids, predicting, 0.7)
    prompts = [(starts[i], tuple(ids[i, : starts[i]].tolist())) for i in range(3)] if shared else None
    result = model(*given, Row.of(ids, lengths, starts, prompts) if packed else None)
    scores = [result] if isinstance(result, Tensor) else list(result)
    model.zero_grad()
    sum((torch.linspace(0.5, 2, len(some)) * some).sum() for some in scores).backward()
    return scores, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def differences(attention: str) -> dict[str, float]:
    """Largest differences of scores and gradients with and without shared positions, for each model and pass."""
    world = start_world(ParallelConfig(ulysses_sequence_parallel_size=dist_size()))
    found: dict[str, float] = {}
    for name, (config, keys) in models(attention).items():
        kind = LMModelConfig(path="any", dtype="float32", **keys)
        for critic, packed, once in (
            (False, False, False),
            (False, True, False),
            (True, True, False),
            (False, True, True),
        ):
            if once and attention != "sdpa":
                continue
            torch.manual_seed(0)
            lm = AutoModelForCausalLM.from_config(config, attn_implementation=kind.attn_implementation).eval()
            causal = causal_lm(lm, replace(kind, use_remove_padding=packed), chunk=3)
            alone = ValueLM(causal) if critic else causal
            if critic:
                torch.nn.init.normal_(alone.value.weight, std=0.05)
            expected, gradients = passes(alone, packed, shared=once)
            causal.share_positions(world, kind.attn_implementation)
            alone.context = causal.context
            scores, parts = passes(alone, packed, shared=once)
            for part in parts:
                torch.distributed.all_reduce(part)
            largest = 0.0  # relative to the largest number if that exceeds 1
            for one, other in zip([*expected, *gradients], [*scores, *parts], strict=True):
                largest = max(largest, float(((one - other).abs().max() / one.abs().max().clamp(min=1)).detach()))
            found[f"{name}, {critic=}, {packed=}, {once=}"] = largest
    stop_world()
    return found


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.quick("eager-2")
@pytest.mark.parametrize(
    ("attention", "ranks"), [("sdpa", 2), ("eager", 2), pytest.param("sdpa", 4, marks=pytest.mark.full)]
)
def test_the_same_scores_and_gradient(attention: str, ranks: int) -> None:
    """Padded and packed, for the policy and a critic; also if a rank has none of the tokens that are scored."""
    for found in run_ranks(differences, ranks, attention):
        assert len(found) >= 3
        assert max(found.values()) < 1e-5, found


def tried(config: PreTrainedConfig) -> str:
    """The message of the check at load for a model whose positions are shared."""
    world = start_world(ParallelConfig(ulysses_sequence_parallel_size=2))
    kind, lm = LMModelConfig(path="any", dtype="float32"), AutoModelForCausalLM.from_config(config).eval()
    model = causal_lm(lm, kind, chunk=3)
    model.share_positions(world, "sdpa")
    with pytest.raises(ValueError) as error:
        check_agreement(model, kind, Tokenizer(), world.device, decodes=False)
    stop_world()
    return str(error.value)


def test_a_model_without_the_interface_is_seen_at_load() -> None:
    config = BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=4)
    for message in run_ranks(tried, 2, config):
        assert re.match("model.path: 'any': .*Bloom.* passes over padded samples", message)
        assert message.endswith(f"; set {KEY} to 1")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen3Config(num_attention_heads=3, num_key_value_heads=3),
         "does not divide the model's 3 attention heads; nearest that does: 1 or 3"),
        (Qwen3Config(layer_types=["linear_attention"], num_hidden_layers=1),
         "needs layers of attention, and qwen3 has others (linear_attention); set it to 1"),
        (Qwen3Config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
         "does not work with the positions of qwen3 (rope_type dynamic), whose angles depend on the longest of a pass; "
         "set it to 1"),
    ],
    ids=["heads", "layers", "positions"],
)  # fmt: skip
def test_what_a_model_cannot_share(config: PreTrainedConfig, message: str) -> None:
    config.vocab_size, config.num_hidden_layers = 8, 1
    with torch.device("meta"):
        lm = Qwen3ForCausalLM._from_config(config)
    group: Any = None  # nothing is sent
    with refused(f"{KEY}: 2 {message}", ValueError):
        packing.spread(lm, ContextGroup(group, 2, 0), "sdpa")


def one_step_with_exchanges(cfg: LMRLConfig) -> dict[str, Any]:
    """One step, and how many times ranks exchanged samples in it."""
    with patch.object(update, "exchanged", wraps=update.exchanged) as exchanged:
        return one_step(cfg) | {"exchanges": exchanged.call_count}


@pytest.mark.quick("lora")
@pytest.mark.parametrize(
    ("ranks", "size", "heads", "keys"),
    [
        (2, 2, (4, 2), ("model.lora_rank=4", "parallel.fsdp_size=1")),
        (4, 2, (4, 1), ("parallel.fsdp_size=2", "model.gradient_checkpointing=true", KEPT, PACKED, *BUDGET)),
        pytest.param(4, 4, (4, 2), ("parallel.fsdp_size=4",), marks=pytest.mark.long),
    ],
    ids=["lora", "full-2x2", "full-4"],
)
def test_the_same_step(
    ranks: int, size: int, heads: tuple[int, int], keys: tuple[str, ...], lm_folder: Path, tmp_path: Path
) -> None:
    """With fewer key heads than ranks, and with as many, and with truncated distributions, whose kept tokens each rank has
    of its positions. If passes have a budget, groups exchange samples.
    """
    model = with_heads(tmp_path / "model", lm_folder, *heads)
    plain = [key.replace("=60", "=120") for key in keys if "fsdp" not in key]
    alone = run_ranks(one_step, ranks // size, tiny_lm_config(model, tmp_path / "alone", KL, *plain))
    first = alone[0] | {"texts": [text for part in alone for text in part["texts"]]}
    first["log_prob"] = torch.cat([part["log_prob"] for part in alone])
    cfg = tiny_lm_config(model, tmp_path / "shared", KL, *keys, f"{KEY}={size}")
    shared = run_ranks(one_step_with_exchanges, ranks, cfg)
    assert_same(first, shared, size, packed=PACKED in keys)
    assert all(part["exchanges"] == (ranks > size) for part in shared)


FEATURES: dict[str, tuple[str, ...]] = {
    "blocks": ("model.block_size=4", "rollout.threshold=0.02"),
    "experts": ("parallel.expert_parallel=true", "parallel.fsdp_size=2"),
    "prompts once": (PACKED, "model.use_prefix_grouper=true", "parallel.fsdp_size=2"),
}


@pytest.mark.full
@pytest.mark.parametrize("feature", FEATURES)
def test_the_same_step_with(feature: str, lm_folder: Path, blocks_folder: Path, tmp_path: Path) -> None:
    """Blocks, whose states attend by a mask of the whole row; experts on ranks that share samples; prompts once."""
    folder = {"blocks": blocks_folder}.get(feature, lm_folder)
    if feature == "experts":
        folder = tiny_llada2(tmp_path / "model")
    model = folder if feature == "experts" else with_heads(tmp_path / "model", folder, 4, 2)
    plain = [key for key in FEATURES[feature] if not key.startswith("parallel")]
    (alone,) = run_ranks(one_step, 1, tiny_lm_config(model, tmp_path / "alone", KL, *plain))
    cfg = tiny_lm_config(model, tmp_path / "shared", KL, *FEATURES[feature], f"{KEY}=2")
    assert_same(alone, run_ranks(one_step, 2, cfg), 2, packed=feature != "blocks")


def long_job(model: Path, folder: Path, *keys: str) -> LMRLConfig:
    """PPO with redrawn samples, and three validation prompts, which two ranks cannot share evenly."""
    folder.mkdir(parents=True)
    (folder / "counted.py").write_text(COUNTED)
    (folder / "held_out.jsonl").write_text(
        '{"prompt": "Ann has 9 books."}\n{"prompt": "Tim has 2."}\n{"prompt": "Hi"}\n'
    )
    fixed = [
        "algorithm.name=ppo", "critic.optim.lr=1e-3", "rollout.n=6", "rollout.micro_batch_size_per_gpu=3", "optim.eps=1e-3",
        "rollout.max_draws_per_prompt=2", "trainer.total_training_steps=4", "trainer.save_freq=2",
        "trainer.test_freq=2", "trainer.log_val_generations=3", f"data.val_files=[{folder / 'held_out.jsonl'}]",
    ]  # fmt: skip
    cfg = tiny_lm_config(model, folder, *fixed, *keys)
    cfg.reward.functions[0].path = f"{folder / 'counted.py'}:counted"
    return cfg


@pytest.mark.long
def test_a_run_resumes_with_and_without(lm_folder: Path, tmp_path: Path) -> None:
    model = with_heads(tmp_path / "model", lm_folder, 4, 2)
    plain = long_job(model, tmp_path / "plain", "trainer.balance_batch=false")
    alone = run_ranks(fit, 1, plain)[0]
    shared = long_job(model, tmp_path / "shared", f"{KEY}=2", "parallel.fsdp_size=2")
    weights = run_ranks(fit, 2, shared)
    for name, value in alone.items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=2e-5)
        assert torch.equal(weights[0][name], weights[1][name])

    def assert_same_rows(name: str) -> None:
        for one, other in zip(rows(tmp_path / name / "out"), rows(tmp_path / "plain" / "out"), strict=True):
            assert one.keys() == other.keys()
            for key, value in other.items():
                assert one[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key

    assert_same_rows("shared")
    # each sample is scored once, half of them on each rank
    counts = {}
    for name in ("plain", "shared"):
        calls = [tuple(map(int, line.split())) for line in (tmp_path / name / "calls").read_text().splitlines()]
        counts[name] = [sum(count for rank, count in calls if rank == r) for r in range(2)]
    assert sum(counts["shared"]) == sum(counts["plain"])
    assert abs(counts["shared"][0] - counts["shared"][1]) <= 8
    # from the second step on: bitwise the same again, also on separate ranks
    wanted = rows(tmp_path / "shared" / "out")
    stop_after(tmp_path / "shared", 2)
    again = run_ranks(fit, 2, shared)[0]
    assert rows(tmp_path / "shared" / "out") == wanted
    assert all(torch.equal(again[name], value) for name, value in weights[0].items())
    stop_after(tmp_path / "shared", 2)
    run_ranks(fit, 2, long_job(model, tmp_path / "apart", f"trainer.output_dir={tmp_path / 'shared' / 'out'}"))
    assert_same_rows("shared")


@pytest.mark.long
def test_a_teacher(lm_folder: Path, tmp_path: Path) -> None:
    keys = test_lm_algorithms.distilled(lm_folder)
    model = with_heads(tmp_path / "model", lm_folder, 4, 2)
    (alone,) = run_ranks(one_step, 1, tiny_lm_config(model, tmp_path / "alone", *keys))
    assert alone["row"]["actor/teacher_kl"] > 1e-3
    for part in run_ranks(one_step, 2, tiny_lm_config(model, tmp_path / "shared", *keys, f"{KEY}=2")):
        for key, value in alone["row"].items():
            assert part["row"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


@pytest.mark.full
def test_conversations(lm_folder: Path, tmp_path: Path) -> None:
    """Each sample is drawn on one of the ranks that train on it."""
    cfg = talks.job(lm_folder, tmp_path / "alone", PACKED)
    (alone,) = run_ranks(talks.one_step, 1, cfg)
    cfg = talks.job(lm_folder, tmp_path / "shared", PACKED, f"{KEY}=2")
    for part in run_ranks(talks.one_step, 2, cfg):
        assert part["conversations"] == alone["conversations"]
        assert torch.equal(part["reward"], alone["reward"]) and torch.equal(part["earned"], alone["earned"])
        for key, value in alone["row"].items():
            assert part["row"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


def test_the_plan_divides_activations(lm_folder: Path, tmp_path: Path) -> None:
    model = with_heads(tmp_path / "model", lm_folder, 4, 2)
    long = ("data.max_response_length=448", "actor.log_prob_chunk_size=16", "model.use_remove_padding=true")

    def plan(*keys: str) -> Rehearsal:
        return planned(tiny_lm_config(model, tmp_path, *long, *keys), Cluster(1, 4))

    alone, shared = plan(), plan(f"{KEY}=2", "data.train_batch_size=2", "actor.ppo_mini_batch_size=1")
    whole, half = (p.ledger.phases["update"] for p in (alone, shared))
    assert 0.45 < (half.peak - half.before - half.gathered) / (whole.peak - whole.before - whole.gathered) < 0.62
    assert shared.plan is not None and shared.plan.per_rank == 4
    assert shared.flops == pytest.approx(alone.flops / 2, rel=1e-3)
    assert "context groups  0-1 | 2-3: each has its own samples" in describe(shared)
