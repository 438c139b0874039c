"""Block diffusion in the loop: all layouts agree, and a resumed run equals one that was not stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.config.lm import LMRLConfig
from phalanx.config.ranges import ESTIMATES
from phalanx.config.tasks import ExportConfig
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from tests.helpers.checks import refused
from tests.helpers.jobs import assert_same_weights, first_step, rows
from tests.helpers.lm import fit, fit_sft, tiny_lm_config, tiny_sft_config
from tests.helpers.ranks import run_ranks

BLOCKS = ("model.block_size=4", "rollout.threshold=0.02", "algorithm.kl_loss_coef=0.04")
BUDGET = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=160")
KINDS = {"full": (), "lora": ("model.lora_rank=4",), "budget": BUDGET}


def steps(cfgs: dict[str, LMRLConfig]) -> dict[str, Any]:
    """The first step of each job (see first_step), with the responses and the step in which each token was unmasked."""
    from phalanx.run.rl import build

    found = {}
    for name, cfg in cfgs.items():
        samples, step = first_step(build, cfg)
        found[name] = step | {"texts": samples.outputs, "order": samples.trace.step, "mask": samples.mask}
    return found


def of_kinds(model: Path, folder: Path, *keys: str) -> dict[str, LMRLConfig]:
    return {name: tiny_lm_config(model, folder / name, *BLOCKS, *own, *keys) for name, own in KINDS.items()}


@pytest.mark.full
def test_layouts_agree(blocks_folder: Path, tmp_path: Path) -> None:
    """Replicas of shards unmask the same tokens in the same order with bit-identical log-probs, and take the same step;
    so do passes with a token budget, up to rounding.
    """
    (alone,) = run_ranks(steps, 1, of_kinds(blocks_folder, tmp_path / "alone"))
    for one in alone.values():
        assert one["order"][one["mask"]].unique().numel() > 2 and one["row"]["actor/grad_norm"] > 1e-4
        assert not one["mask"].all()  # of different lengths
    assert alone["full"]["texts"] == alone["budget"]["texts"]
    assert_same_weights(alone["full"]["weights"], alone["budget"]["weights"], 1e-3)
    parts = run_ranks(steps, 4, of_kinds(blocks_folder, tmp_path / "four", "parallel.fsdp_size=2"))
    for name, one in alone.items():
        assert [text for part in parts for text in part[name]["texts"]] == one["texts"]
        assert torch.equal(torch.cat([part[name]["order"] for part in parts]), one["order"])
        log_prob = torch.cat([part[name]["log_prob"] for part in parts])
        if name != "budget":
            assert torch.equal(log_prob, one["log_prob"])
        torch.testing.assert_close(log_prob, one["log_prob"], rtol=1e-5, atol=1e-5)
        for part in parts:
            assert part[name]["row"]["actor/first_ratio_error"] <= (1e-5 if name == "budget" else 0)
            assert part[name]["row"]["actor/grad_norm"] == pytest.approx(one["row"]["actor/grad_norm"], rel=1e-5)
        assert_same_weights(one["weights"], parts[0][name]["weights"], 1e-3)


def drawn_lengths(cfg: LMRLConfig) -> tuple[dict[str, float], list[list[int]]]:
    """A rollout's metrics of its responses, and their tokens."""
    from phalanx.run.rl import build

    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    ids = samples.trace.ids[samples.trace.responses].split(samples.trace.lengths.tolist())
    return t.collector.rollout.metrics(samples, torch.zeros(len(ids))), [tokens.tolist() for tokens in ids]


def test_a_response_is_as_long_as_up_to_its_end(blocks_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_lm_config(blocks_folder, tmp_path, *BLOCKS, "data.max_response_length=80")
    ((row, responses),) = run_ranks(drawn_lengths, 1, cfg)
    end = AutoTokenizer.from_pretrained(blocks_folder).eos_token_id
    lengths = [tokens.index(end) + 1 if end in tokens else len(tokens) for tokens in responses]
    assert row["response/length_mean"] == sum(lengths) / 16 < sum(map(len, responses)) / 16
    assert (row["response/length_min"], row["response/length_max"]) == (min(lengths), max(lengths))


@pytest.mark.full
def test_every_estimate_trains(blocks_folder: Path, tmp_path: Path) -> None:
    """The old log-probs use the same masks as the training; the estimate does not affect the samples."""
    cfgs = {
        name: tiny_lm_config(blocks_folder, tmp_path / name, *BLOCKS, f"actor.log_prob_estimate={name}")
        for name in ESTIMATES
    }
    distilled = ("algorithm.name=distillation", f"algorithm.teacher_path={blocks_folder}")
    once = "actor.ppo_mini_batch_size=4"
    cfgs["distilled"] = tiny_lm_config(blocks_folder, tmp_path / "distilled", *BLOCKS, *distilled, once)
    parts = run_ranks(steps, 2, cfgs)
    for name in ESTIMATES:
        row = parts[0][name]["row"]
        assert row["actor/first_ratio_error"] == 0 and 1e-4 < row["actor/grad_norm"] < 1e3
        assert parts[0][name]["texts"] == parts[0]["trace"]["texts"]
    # its teacher is the model itself
    assert parts[0]["distilled"]["row"]["actor/teacher_kl"] == pytest.approx(0, abs=1e-6)
    norms = {parts[0][name]["row"]["actor/grad_norm"] for name in ESTIMATES}
    assert len(norms) == len(ESTIMATES)


def in_turn(cfgs: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Run jobs of either kind one after the other; returns the weights of each."""
    return [fit(cfg) if isinstance(cfg, LMRLConfig) else fit_sft(cfg) for cfg in cfgs]


@pytest.mark.long
def test_a_resumed_run_is_the_run(blocks_folder: Path, lm_folder: Path, tmp_path: Path) -> None:
    """Bit for bit, also if a mask token was added; on another number of ranks up to rounding."""

    def jobs(name: str, total: int) -> list[Any]:
        shared = ("parallel.fsdp_size=2", "trainer.save_freq=2", f"trainer.total_training_steps={total}")
        noise = ("actor.log_prob_estimate=coupled", "rollout.max_num_gen_batches=2", *BLOCKS)
        sft = ("block_diffusion.noise_per_block=true", "block_diffusion.ema={decay: 0.7, warmup: false}")
        return [
            tiny_lm_config(blocks_folder, tmp_path / f"{name}_rl", *noise, *shared),
            tiny_sft_config(lm_folder, tmp_path / f"{name}_sft", *sft, *shared),
        ]

    whole, other = jobs("whole", 4), jobs("other", 2)
    weights = run_ranks(in_turn, 2, [*whole, *jobs("part", 2), *jobs("part", 4), *other])[0]
    for one, again in zip(weights[:2], weights[4:6], strict=True):
        assert all(torch.equal(value, again[name]) for name, value in one.items())
    on_one = [replace(cfg, parallel=replace(cfg.parallel, fsdp_size=1)) for cfg in jobs("other", 4)]
    run_ranks(in_turn, 1, on_one)
    for kind in ("rl", "sft"):
        wanted = rows(tmp_path / f"whole_{kind}" / "out")
        assert rows(tmp_path / f"part_{kind}" / "out") == wanted and len(wanted) == 4
        for row, expected in zip(rows(tmp_path / f"other_{kind}" / "out"), wanted, strict=True):
            assert row.keys() == expected.keys()
            for key in {"reward/mean", "train/loss", "actor/grad_norm"} & expected.keys():
                assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), key


LORA = ("model.lora_rank=4", "optim.lr=1e-1")
IDS = torch.arange(3, 60).reshape(3, 19)


def taught(cfg: Any) -> dict[str, torch.Tensor]:
    """The logits of a supervised job's final model, with each kind of weights."""
    from phalanx.run.block_diffusion_sft import build

    job = build(cfg)
    job.fit()
    causal = torch.ones(3, 1, 19, 19, dtype=torch.bool).tril()

    def logits() -> torch.Tensor:
        with torch.no_grad(), job.policy.unsharded():
            return job.policy.trained.module(input_ids=IDS, attention_mask=causal).logits

    found = {"model": logits()}
    if job.job.state.ema is not None:
        with job.policy.using("ema"):
            found["ema"] = logits()
    return found


@pytest.mark.full
def test_an_export_has_the_mask_token(lm_folder: Path, tmp_path: Path) -> None:
    """transformers loads it, and RL can start from it; an adapter would lack the token."""
    ema, base = "block_diffusion.ema={decay: 0.7, warmup: false}", AutoTokenizer.from_pretrained(lm_folder)
    model = stock(lm_folder)
    model.resize_token_embeddings(len(base))  # no room for one more
    model.save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    cfg = tiny_sft_config(tmp_path / "base", tmp_path / "full", "trainer.save_freq=2", "optim.lr=1e-2", ema)
    logits = run_ranks(taught, 2, cfg)[0]
    assert (logits["model"] - logits["ema"]).abs().max() > 1e-2
    for name in ("model", "ema"):
        exported = export(tmp_path / name, tmp_path / "full" / "out", f"weights={name}")
        assert torch.allclose(logits_of(stock(exported)), logits[name], atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert base.mask_token is None and tokenizer.mask_token == "<|mask|>"
    assert tokenizer.mask_token_id == len(base) == len(tokenizer) - 1 == stock(exported).config.vocab_size - 1
    assert (tokenizer.chat_template, tokenizer.eos_token) == (base.chat_template, base.eos_token)
    (found,) = run_ranks(steps, 1, {"on": tiny_lm_config(exported, tmp_path / "on", *BLOCKS)})
    assert found["on"]["row"]["actor/grad_norm"] > 1e-4

    (logits,) = run_ranks(taught, 1, tiny_sft_config(lm_folder, tmp_path / "lora", "trainer.save_freq=2", *LORA))
    with refused(
        "merge_lora: false would omit the mask token that the run added to the model, which is not part of its LoRA; "
        "set it to true"
    ):
        export(tmp_path / "adapter", tmp_path / "lora" / "out")
    merged = export(tmp_path / "merged", tmp_path / "lora" / "out", "merge_lora=true")
    assert torch.allclose(logits_of(stock(merged)), logits["model"], atol=1e-4)
    assert AutoTokenizer.from_pretrained(merged).mask_token == "<|mask|>"


def test_an_adapter_of_a_model_with_a_mask_token(blocks_folder: Path, tmp_path: Path) -> None:
    (logits,) = run_ranks(taught, 1, tiny_sft_config(blocks_folder, tmp_path, "trainer.save_freq=2", *LORA))
    adapter = export(tmp_path / "adapter", tmp_path / "out")
    model = PeftModel.from_pretrained(stock(blocks_folder), adapter)
    assert torch.allclose(logits_of(model), logits["model"], atol=1e-4)
    assert AutoTokenizer.from_pretrained(adapter).mask_token == "<|mask|>"
    # and supervised training starts from it
    keys = (f"model.lora_path={adapter}", "optim.lr=1e-12")
    (then,) = run_ranks(taught, 1, tiny_sft_config(blocks_folder, tmp_path / "then", *keys))
    assert torch.allclose(then["model"], logits["model"], atol=1e-4)
    assert not torch.allclose(then["model"], logits_of(stock(blocks_folder)), atol=1e-2)


def export(folder: Path, checkpoint: Path, *overrides: str) -> Path:
    Export(load_config(ExportConfig, None, [f"checkpoint={checkpoint}", f"output_dir={folder}", *overrides])).run()
    return folder


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
