"""A base in 4 bits (`model.quantization`): rollout and replay agree on every layout, and runs resume and export."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from phalanx.config.tasks import ExportConfig
from phalanx.models.lora import adapter_config
from phalanx.run.rules import load_config
from phalanx.telemetry.records import read_index
from phalanx.tools.export import Export
from tests.distributed import test_vision
from tests.helpers import jobs, lm
from tests.helpers.jobs import assert_same_weights, rows
from tests.helpers.llada2 import tiny_llada2
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import run_task

NF4 = ("model.lora_rank=4", "model.quantization=nf4")
SHARDED = "parallel.fsdp_size=2"
KINDS = {
    "flow": ("sd3_folder", jobs.tiny_config, jobs.one_step, ("rollout.micro_batch_size_per_gpu=4",)),
    "text": ("lm_folder", tiny_lm_config, lm.one_step, ()),
    "blocks": ("blocks_folder", tiny_lm_config, lm.one_step, ("model.block_size=4",)),
}


def log_probs(parts: list[dict[str, Any]]) -> torch.Tensor:
    return torch.cat([part["log_prob"] for part in parts])


@pytest.mark.seldom("flow-float32", "text-bfloat16", "blocks-float32", "blocks-bfloat16")
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_step_is_exact_on_every_layout(kind: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Rollout and replay are bit-equal, with a KL to the base, on one rank and on two that share the weights."""
    name, config, one_step, keys = KINDS[kind]
    folder = request.getfixturevalue(name)

    def step(ranks: int, *more: str) -> list[dict[str, Any]]:
        place = tmp_path / "_".join((str(ranks), *more)).replace("/", "")
        cfg = config(folder, place, *keys, *more, f"model.dtype={dtype}", "algorithm.kl_loss_coef=0.04")
        return run_ranks(one_step, ranks, cfg)

    (alone,) = step(1, *NF4)
    row = alone["row"]
    assert row["actor/first_ratio_error"] == 0 and row["actor/grad_norm"] > 1e-4 and row["actor/kl_ref"] > 0
    for more in ((), ("parallel.param_offload=true", "model.gradient_checkpointing=true")):
        parts = step(2, *NF4, SHARDED, *more)
        assert torch.equal(log_probs(parts), alone["log_prob"])
        assert parts[0]["row"]["actor/first_ratio_error"] == 0
        assert parts[0]["row"]["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-5)
        assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)


@pytest.mark.full
def test_a_run_is_resumed_and_exported(lm_folder: Path, tmp_path: Path) -> None:
    """Bit-equal, also on another layout; checkpoints and exports contain the LoRA, but not the base."""

    def job(folder: str, steps: int, *more: str) -> Any:
        keys = (*NF4, "trainer.save_freq=1", "actor.ema.decay=0.9", f"trainer.total_training_steps={steps}")
        return tiny_lm_config(lm_folder, tmp_path / folder, *keys, *more)

    whole = run_ranks(fit, 2, job("whole", 2, SHARDED))[0]
    run_ranks(fit, 2, job("parts", 1, SHARDED))
    again = run_ranks(fit, 2, job("parts", 2, SHARDED))[0]
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert rows(tmp_path / "whole" / "out") == rows(tmp_path / "parts" / "out")
    run_ranks(fit, 2, job("other", 1, SHARDED))
    elsewhere = run_ranks(fit, 1, job("other", 2))[0]
    assert_same_weights(whole, elsewhere, 1e-3)
    with pytest.raises(Exception, match=r"holds quantization nf4, this run has none; give another trainer\.output_dir"):
        run_ranks(fit, 1, job("other", 3, "model.quantization=null"))

    checkpoint = tmp_path / "whole" / "out" / "checkpoints" / "step_000002"
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert whole and all("lora_" in name for name in saved)
    cfg = load_config(
        ExportConfig, None, [f"checkpoint={checkpoint}", "weights=model", f"output_dir={tmp_path / 'lora'}"]
    )
    Export(cfg).run()
    exported = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert len(exported) == len(whole)
    for name, value in exported.items():
        ours = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(value, whole[f"lm.{ours}"])


@pytest.mark.full
def test_a_start_from_a_lora_is_exact_on_every_layout(lm_folder: Path, tmp_path: Path) -> None:
    """The LoRA stays beside the rounded weights, and is sharded with them."""
    stream, tensors = torch.Generator().manual_seed(0), {}
    for layer in ("self_attn.q_proj", "mlp.down_proj"):
        wide, narrow = load_file(lm_folder / "model.safetensors")[f"model.layers.0.{layer}.weight"].shape
        for name, size in (("lora_A", (3, narrow)), ("lora_B", (wide, 3))):
            key = f"base_model.model.model.layers.0.{layer}.{name}.weight"
            tensors[key] = torch.randn(size, generator=stream) * 0.1
    adapter_config(3, 3, ["q_proj", "down_proj"], "base", None).save_pretrained(tmp_path / "lora")
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    found = []
    for ranks, more in ((1, ()), (2, (SHARDED,)), (2, (SHARDED, "parallel.param_offload=true"))):
        keys = (*NF4, f"model.lora_path={tmp_path / 'lora'}", "algorithm.kl_loss_coef=0.04", *more)
        cfg = tiny_lm_config(lm_folder, tmp_path / str(len(found)), *keys, "model.dtype=bfloat16")
        found.append(run_ranks(lm.one_step, ranks, cfg))
    bare = run_ranks(lm.one_step, 1, tiny_lm_config(lm_folder, tmp_path / "bare", *NF4, "model.dtype=bfloat16"))
    assert not torch.equal(bare[0]["log_prob"], found[0][0]["log_prob"])
    for parts in found:
        assert torch.equal(log_probs(parts), found[0][0]["log_prob"])
        assert parts[0]["row"]["actor/first_ratio_error"] == 0
        assert parts[0]["row"]["actor/grad_norm"] == pytest.approx(found[0][0]["row"]["actor/grad_norm"], rel=1e-5)


@pytest.mark.long
def test_a_checkpoint_is_sampled_as_the_run_does(lm_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    keys = ("trainer.save_freq=2", "trainer.test_freq=2", f"data.val_files=[{prompts}]")
    run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path, *NF4, *keys))
    (kept,) = (tmp_path / "out" / "samples").glob("*/step_000002")
    file = tmp_path / "texts.jsonl"
    words = [f"checkpoint={tmp_path / 'out'}", f"prompt_file={prompts}", f"output_file={file}"]
    done = run_task(["tasks/generate.py", *words])
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert texts == [row["text"] for row in read_index(kept, "text")]


def compiled_step(cfg: Any) -> dict[str, Any]:
    torch.compile = partial(torch.compile, backend="eager")  # generating code for the graphs takes minutes
    return lm.one_step(cfg)


@pytest.mark.long
def test_compiled_blocks_are_exact(lm_folder: Path, tmp_path: Path) -> None:
    (plain,) = run_ranks(lm.one_step, 1, tiny_lm_config(lm_folder, tmp_path / "plain", *NF4))
    cfg = tiny_lm_config(lm_folder, tmp_path / "compiled", *NF4, "model.compile=true")
    (step,) = run_ranks(compiled_step, 1, cfg, timeout=200)
    assert step["row"]["actor/first_ratio_error"] == 0
    assert step["row"]["actor/grad_norm"] == pytest.approx(plain["row"]["actor/grad_norm"], rel=1e-4)


@pytest.mark.long
def test_prompts_with_images(vision_folder: Path, tmp_path: Path) -> None:
    """On one rank and on two that share the weights."""
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        keys = (*NF4, f"parallel.fsdp_size={ranks}", f"trainer.output_dir={out}")
        found.append(run_ranks(test_vision.job, ranks, test_vision.config_of(vision_folder, tmp_path, *keys))[0][0])
    for row, other in zip(*found, strict=True):
        assert row["actor/first_ratio_error"] == other["actor/first_ratio_error"] == 0
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)


@pytest.mark.long
def test_experts_on_ranks_of_their_own(tmp_path: Path) -> None:
    """They keep their dtype; the other layers are in 4 bits."""
    folder, norms = tiny_llada2(tmp_path, hidden_size=64), []
    for i, key in enumerate(("model.experts_implementation=batched_mm", "parallel.expert_parallel=true")):
        row = run_ranks(lm.one_step, 2, tiny_lm_config(folder, tmp_path / str(i), *NF4, SHARDED, key))[0]["row"]
        assert row["actor/first_ratio_error"] <= i * 1e-5  # gathered tokens are multiplied in another order
        norms.append(row["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
