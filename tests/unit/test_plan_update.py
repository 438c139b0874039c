"""The peak of a sharded update, against FSDP2 itself as one rank of eight on the meta device."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.run import RunConfig
from phalanx.run.rules import load_config
from phalanx.tools.plan.blueprint import family_name, fetch
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from tests.helpers.jobs import tiny_config
from tests.helpers.llada2 import tiny_llada2
from tests.helpers.lm import tiny_lm_config
from tests.helpers.plans import flow_matching_config, phases_of
from tests.helpers.ranks import ROOT
from tests.helpers.referee import referee

QUICKSTART, EIGHT = ROOT / "configs" / "grpo" / "quickstart.yaml", Cluster(1, 8)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH = ("data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "rollout.n=8", "parallel.fsdp_size=8")
CHECKPOINTING, MICRO = "model.gradient_checkpointing=true", "actor.ppo_micro_batch_size_per_gpu"


def config(*keys: str) -> LMRLConfig:
    cfg = load_config(LMRLConfig, str(QUICKSTART), [f"model.path={MODEL}", *BATCH, *keys])
    cfg.model.path = fetch(cfg.model.path)
    return cfg


@pytest.mark.seldom("four passes, each reduced", "four passes", "one pass", "LoRA")
@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([CHECKPOINTING, f"{MICRO}=16"], id="one pass"),
        pytest.param([f"{MICRO}=16", "parallel.reshard_after_forward=false"], id="one pass, not resharded"),
        pytest.param([CHECKPOINTING, f"{MICRO}=8"], id="two passes"),
        pytest.param([CHECKPOINTING, f"{MICRO}=4"], id="four passes"),
        pytest.param([CHECKPOINTING, f"{MICRO}=4", "parallel.sync_each_batch=true"], id="four passes, each reduced"),
        pytest.param([CHECKPOINTING, f"{MICRO}=16", "model.lora_rank=16"], id="LoRA"),
    ],
)
def test_the_update_is_that_of_fsdp(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_agrees(lambda: config(*keys), monkeypatch)


def test_moments_on_the_host_take_no_memory_of_the_planning_one(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, "parallel.optimizer_offload=true")
    cfg.model.family = family_name(cfg.model)
    for state in planned(cfg, Cluster(1, 2)).state.optimizer.state().values():
        assert all(moment.is_meta for moment in state.values() if moment.dim() > 0)


def assert_agrees(make: Callable[[], RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned peak of the update is within 2 % of the referee's."""
    memory = count(planned(make(), EIGHT))
    held = sum(memory.held.values())
    took = held + referee(make(), EIGHT, monkeypatch)
    assert held + phases_of(memory)["update"].total == pytest.approx(took, rel=0.02)


SHARDED, HYBRID, OFFLOAD = "parallel.fsdp_size=8", "parallel.fsdp_size=2", "parallel.param_offload=true"
TINY = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=8", f"{MICRO}=4")
LORA = ("model.lora_rank=16", "model.dtype=bfloat16")
SIZE = ("rollout.height=64", "rollout.width=64")


def reshaped(folder: Path, part: str, **shapes: int) -> None:
    """Change the sizes in a part's configuration, of which a plan reads nothing else."""
    file = folder / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | shapes))


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([CHECKPOINTING, SHARDED], id="full"),
        pytest.param([CHECKPOINTING, SHARDED, *LORA], id="LoRA", marks=pytest.mark.long),
        pytest.param([CHECKPOINTING, HYBRID], id="four copies", marks=pytest.mark.long),
        pytest.param([CHECKPOINTING, SHARDED, OFFLOAD], id="offload", marks=pytest.mark.long),
        pytest.param(None, id="flow matching", marks=pytest.mark.long),
    ],
)
def test_a_flow_models_update(
    keys: list[str] | None, sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(sd3_folder, tmp_path / "model"))
    reshaped(
        model, "transformer", num_layers=4, num_attention_heads=8, attention_head_dim=32, caption_projection_dim=256
    )

    def make() -> FlowRunConfig:
        cfg: FlowRunConfig
        if keys is None:
            cfg = flow_matching_config(model, *SIZE, SHARDED, "flow_matching.micro_batch_size_per_gpu=4")
        else:
            cfg = tiny_config(model, tmp_path / "job", *TINY, *SIZE, *keys)
        cfg.model.family = family_name(cfg.model)
        return cfg

    assert_agrees(make, monkeypatch)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([HYBRID], id="four copies"),
        pytest.param([SHARDED, OFFLOAD], id="offload"),
        pytest.param([SHARDED, *LORA, "parallel.lora_sharding=replicate"], id="replicated LoRA"),
    ],
)
def test_a_qwen3s_update(keys: list[str], lm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_agrees(lambda: tiny_lm_config(lm_folder, tmp_path, *TINY, *keys), monkeypatch)


@pytest.mark.quick("full")
@pytest.mark.parametrize("keys", [[], LORA], ids=["full", "LoRA"])
def test_the_update_of_experts_in_blocks(keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llada2(tmp_path / "base")
    assert_agrees(lambda: tiny_lm_config(folder, tmp_path, *TINY, SHARDED, "model.block_size=4", *keys), monkeypatch)
