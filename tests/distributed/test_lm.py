"""Language models in the loop: all layouts agree, and a resumed run equals one that was not stopped."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.lm import LMRLConfig
from tests.helpers.jobs import assert_same_weights, rows
from tests.helpers.lm import fit, one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks

LORA = ("model.lora_rank=4",)
KL = "algorithm.kl_loss_coef=0.04"


def joined(parts: list[dict[str, Any]], key: str) -> Any:
    if isinstance(parts[0][key], list):
        return [text for part in parts for text in part[key]]
    return torch.cat([part[key] for part in parts])


@pytest.mark.full
@pytest.mark.parametrize("kind", [LORA, ()], ids=["lora", "full"])
def test_layouts_agree(kind: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """Replicas, shards and both sample the same texts with bit-identical log-probs, and take the same step."""
    keys = (*kind, KL)
    (alone,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "alone", *keys))
    assert alone["row"]["actor/first_ratio_error"] == 0
    assert not alone["mask"].all() and alone["mask"].any(1).all()  # of different lengths
    norm = alone["row"]["actor/grad_norm"]
    assert norm > 1e-4
    for ranks, shards in ((2, 1), (2, 2), (4, 2)):
        cfg = tiny_lm_config(lm_folder, tmp_path / f"{ranks}_{shards}", *keys, f"parallel.fsdp_size={shards}")
        parts = run_ranks(one_step, ranks, cfg)
        assert joined(parts, "texts") == alone["texts"]
        assert torch.equal(joined(parts, "log_prob"), alone["log_prob"])
        assert torch.equal(parts[0]["reward"], alone["reward"])
        for part in parts:
            assert part["row"]["actor/first_ratio_error"] == 0
            assert part["row"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)


@pytest.mark.parametrize("keys", [("actor.loss_agg_mode=seq-mean-token-mean",), ("algorithm.importance=sequence",)])
def test_micro_batches_are_no_part_of_the_gradient(keys: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    steps = []
    for size in (1, 4):
        cfg = tiny_lm_config(lm_folder, tmp_path / str(size), *keys, f"actor.ppo_micro_batch_size_per_gpu={size}")
        steps += run_ranks(one_step, 1, cfg)
    one, other = steps
    assert one["texts"] == other["texts"]
    assert one["row"]["actor/grad_norm"] == pytest.approx(other["row"]["actor/grad_norm"], rel=1e-5)
    assert_same_weights(one["weights"], other["weights"], 1e-3)


def test_gradient_checkpointing_and_chunks_change_nothing(lm_folder: Path, tmp_path: Path) -> None:
    """Recomputed layers, and logits of 5 tokens at a time."""
    (plain,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "plain"))
    keys = ("model.gradient_checkpointing=true", "actor.log_prob_chunk_size=5")
    (thrifty,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "thrifty", *keys))
    assert plain["texts"] == thrifty["texts"]
    assert thrifty["row"]["actor/grad_norm"] == pytest.approx(plain["row"]["actor/grad_norm"], rel=1e-5)
    assert_same_weights(plain["weights"], thrifty["weights"], 1e-3)


def compiled_step(cfg: LMRLConfig) -> dict[str, Any]:
    torch.compile = partial(torch.compile, backend="eager")  # to make code of the graphs takes the compiler minutes
    return one_step(cfg)


@pytest.mark.long
@pytest.mark.full
def test_compiled_layers_take_the_same_step(lm_folder: Path, tmp_path: Path) -> None:
    """With shards and recomputed layers; they decode, and old log-probs use the graph of the update."""
    keys = (*LORA, KL)
    (plain,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "plain", *keys))
    fast = ("model.compile=true", "model.gradient_checkpointing=true", "parallel.fsdp_size=2")
    parts = run_ranks(compiled_step, 2, tiny_lm_config(lm_folder, tmp_path / "fast", *keys, *fast), timeout=200)
    assert joined(parts, "texts") == plain["texts"]
    assert all(part["row"]["actor/first_ratio_error"] == 0 for part in parts)
    assert parts[0]["row"]["actor/grad_norm"] == pytest.approx(plain["row"]["actor/grad_norm"], rel=1e-4)
    assert_same_weights(plain["weights"], parts[0]["weights"], 1e-3)


def test_a_resumed_run_keeps_its_alpha_and_its_library(lm_folder: Path, tmp_path: Path) -> None:
    """If the key is null, the checkpoint's library is used; another one, or another alpha, is refused."""

    def job(steps: int, *keys: str) -> LMRLConfig:
        lora = ("model.lora_rank=4", "trainer.save_freq=1", f"trainer.total_training_steps={steps}")
        return tiny_lm_config(lm_folder, tmp_path, *lora, *keys)

    run_ranks(fit, 1, job(1, "model.cpu_linear=onednn", "model.lora_alpha=8"))
    run_ranks(fit, 1, job(2))  # 8 is the default of rank 4
    config = (tmp_path / "out" / "config.yaml").read_text()
    assert "cpu_linear: onednn" in config
    for key, saved, given in (("lora_alpha", "8", "12.0"), ("cpu_linear", "onednn", "torch")):
        with pytest.raises(
            Exception, match=rf"holds {key} {saved}(\.0)?, this run has {given}; give another trainer\.out"
        ):
            run_ranks(fit, 1, job(3, f"model.{key}={given}"))


@pytest.mark.full
def test_a_resumed_run_keeps_its_prompts(lm_folder: Path, tmp_path: Path) -> None:
    """A template with today's date uses the day on which the run began; other template variables are refused."""
    model, template = Path(shutil.copytree(lm_folder, tmp_path / "model")), tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }} {{ tone }} {{ messages[0].content }}")

    def job(folder: str, steps: int, *keys: str) -> LMRLConfig:
        own = ("trainer.save_freq=1", f"trainer.total_training_steps={steps}", *keys)
        return tiny_lm_config(model, tmp_path / folder, *own)

    kind, day = "data.chat_template_kwargs={tone: kind}", "data.chat_template_date=2024-07-26"
    run_ranks(fit, 1, job("whole", 2, kind, day))
    run_ranks(fit, 1, job("parts", 1, kind, day))
    run_ranks(fit, 1, job("parts", 2, kind))
    assert rows(tmp_path / "parts" / "out") == rows(tmp_path / "whole" / "out")
    with pytest.raises(Exception, match="holds chat_template_date 2024-07-26, this run has 2024-07-27; give another"):
        run_ranks(fit, 1, job("parts", 3, kind, "data.chat_template_date=2024-07-27"))
    with pytest.raises(Exception, match=r"holds chat_template_kwargs {'tone': 'kind'}, this run has {}; give another"):
        run_ranks(fit, 1, job("parts", 3))


@pytest.mark.full
def test_a_resumed_run_is_the_run(lm_folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with the reference and resampled prompts."""
    keys = (KL, "rollout.max_num_gen_batches=2", "parallel.fsdp_size=2", "trainer.save_freq=2")
    whole = run_ranks(fit, 2, tiny_lm_config(lm_folder, tmp_path / "a", *keys, "trainer.total_training_steps=4"))[0]
    run_ranks(fit, 2, tiny_lm_config(lm_folder, tmp_path / "b", *keys, "trainer.total_training_steps=2"))
    again = run_ranks(fit, 2, tiny_lm_config(lm_folder, tmp_path / "b", *keys, "trainer.total_training_steps=4"))[0]
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert rows(tmp_path / "a" / "out") == rows(tmp_path / "b" / "out")


def test_equal_rewards_are_drawn_again(lm_folder: Path, tmp_path: Path) -> None:
    """Each attempt resamples only groups with equal rewards; their number may differ between ranks."""
    cfg = tiny_lm_config(
        lm_folder, tmp_path, "rollout.max_draws_per_prompt=3", "trainer.total_training_steps=1", "rollout.n=2"
    )
    reward = "def longer(completions, prompts, metadata):\n    return [float(len(c) > 30) for c in completions]\n"
    (tmp_path / "reward.py").write_text(reward)
    cfg.reward.functions[0].path = f"{tmp_path}/reward.py:longer"
    run_ranks(fit, 2, cfg)
    (row,) = rows(tmp_path / "out")
    assert row["rollout/resampled_ratio"] > 0
    assert 0 < row["response/length_mean"] <= 12


def test_truncated_responses_can_be_left_out(lm_folder: Path, tmp_path: Path) -> None:
    """Responses of maximum length without an end token; the others keep all tokens."""
    (plain,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "plain"))
    (step,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "masked", "rollout.mask_truncated=true"))
    before, lengths = plain["mask"].sum(1), step["mask"].sum(1)
    gone = lengths == 0
    assert gone.any() and (lengths > 0).any()
    assert (before[gone] == 12).all() and torch.equal(lengths[~gone], before[~gone])
    assert step["row"]["actor/grad_norm"] != plain["row"]["actor/grad_norm"]
