"""Every recipe of block diffusion: it loads, its batches divide, and it trains, at tiny size, with its own settings."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run import block_diffusion_sft
from phalanx.run.rules import load_config
from tests.helpers.kinds import plan_of
from tests.helpers.llada2 import tiny_llada2
from tests.helpers.lm import REWARD, one_step
from tests.helpers.ranks import ROOT, run_ranks
from tests.unit.test_recipes import leaves, ranks_of

RECIPES = sorted((ROOT / "configs" / "block_diffusion").glob("*.yaml"))
# said in any case: what dFactory's recipes say
SAID = (
    "model.path",
    "data.max_prompt_length",
    "data.max_response_length",
    "block_diffusion.noise_range_low",
    "block_diffusion.noise_range_high",
    "optim.betas",
)
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)


def kind(path: Path) -> Any:
    return BlockDiffusionTaskConfig if path.stem.endswith("sft") else LMRLConfig


@recipes
def test_batches_divide(path: Path) -> None:
    cfg = load_config(kind(path), str(path), [])
    if path.stem.endswith("sft"):
        each = plan_of(cfg, ranks_of(path))
    else:
        each = plan_of(cfg, ranks_of(path)).per_rank // cfg.rollout.n
    assert each * ranks_of(path) == cfg.data.train_batch_size


@pytest.mark.parametrize("path", [path for path in RECIPES if "llada2" in path.stem], ids=lambda p: p.stem)
def test_holds_differences_only(path: Path) -> None:
    plain = dict(leaves(asdict(load_config(kind(path), None, ["model.path=x", "model.block_size=1"]))))
    cfg = dict(leaves(asdict(load_config(kind(path), str(path), []))))
    for key, _ in leaves(yaml.safe_load(path.read_text())):
        assert key in SAID or cfg[key] != plain[key], f"{path.name}: {key} is the default"
    assert cfg["trainer.experiment_name"] == path.stem


def trained(cfg: BlockDiffusionTaskConfig) -> list[dict[str, float]]:
    """The rows of metrics of a supervised job."""
    block_diffusion_sft.build(cfg).fit()
    return [json.loads(line) for line in (Path(cfg.trainer.output_dir) / "metrics.jsonl").read_text().splitlines()]


@recipes
def test_one_tiny_step(path: Path, tmp_path: Path, lm_folder: Path) -> None:
    """One step on one rank, with all of the recipe's settings but the model, its lengths and the batch."""
    rows = [{"question": f"Ann has {i} books.", "answer": f"so it is {i}\n#### {i}"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = lm_folder
    if "llada2" in path.stem:
        folder = tiny_llada2(tmp_path / "llada2")
    tiny = [f"model.path={folder}", "model.dtype=float32", "model.block_size=4", "parallel.fsdp_size=1"]
    tiny += [f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "data.val_files=[]", "data.train_batch_size=2"]
    tiny += ["data.max_prompt_length=64", "data.max_response_length=32", f"trainer.output_dir={tmp_path / 'out'}"]
    tiny += [
        "trainer.total_training_steps=1",
        "trainer.total_epochs=null",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
    ]
    tiny += ["rollout.val.max_response_length=null", "parallel.optimizer_offload=false"]
    if path.stem.endswith("sft"):
        tiny += ["block_diffusion.micro_batch_size_per_gpu=1", "parallel.expert_parallel=false"]
        (found,) = run_ranks(trained, 1, load_config(kind(path), str(path), tiny))
        row = found[-1]
        assert row["train/loss"] > 0 and row["train/masked_tokens"] > 0
    else:
        tiny += ["rollout.n=4", "actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=2"]
        tiny += ["model.mask_token='<|endoftext|>'", "model.attn_implementation=sdpa"]
        tiny += ["rollout.micro_batch_size_per_gpu=null"]
        (tmp_path / "reward.py").write_text(REWARD)
        tiny += [f"reward.functions=[{{path: '{tmp_path}/reward.py:evenness'}}]"]
        (result,) = run_ranks(one_step, 1, load_config(kind(path), str(path), tiny))
        row = result["row"]
        assert row["actor/first_ratio_error"] <= 1e-5
    assert row["actor/grad_norm"] > 0
