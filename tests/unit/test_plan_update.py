"""The peak of a sharded update, against FSDP2 itself as one rank of eight on the meta device."""

import pytest

from phalanx.config import load
from phalanx.config.lm import LMRLConfig
from phalanx.plan.blueprint import fetch
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster
from phalanx.plan.lm import FILES
from phalanx.plan.memory import count
from tests.plans import phases_of
from tests.ranks import ROOT
from tests.referee import referee

QUICKSTART, EIGHT = ROOT / "configs" / "grpo" / "quickstart.yaml", Cluster(1, 8)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH = ("data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "rollout.n=8", "parallel.fsdp_size=8")
CHECKPOINTING, MICRO = "model.gradient_checkpointing=true", "actor.ppo_micro_batch_size_per_gpu"


def config(*keys: str) -> LMRLConfig:
    cfg = load(LMRLConfig, str(QUICKSTART), [f"model.path={MODEL}", *BATCH, *keys])
    cfg.model.path = fetch(cfg.model.path, None, FILES)
    return cfg


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param([CHECKPOINTING, f"{MICRO}=16"], id="one pass"),
        pytest.param([f"{MICRO}=16", "parallel.reshard_after_forward=false"], id="one pass, not resharded"),
        pytest.param([CHECKPOINTING, f"{MICRO}=8"], id="two passes"),
        pytest.param([CHECKPOINTING, f"{MICRO}=4"], id="four passes"),
        pytest.param([CHECKPOINTING, f"{MICRO}=16", "model.lora_rank=16"], id="LoRA"),
    ],
)
def test_the_update_is_that_of_fsdp(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = count(planned(config(*keys), EIGHT))
    held = sum(memory.held.values())
    took = held + referee(config(*keys), EIGHT, monkeypatch)
    assert held + phases_of(memory)["update"].total == pytest.approx(took, rel=0.02)
