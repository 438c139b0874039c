"""--plan names the fewest blocks that gradient checkpointing must recompute: so many fit, one less does not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.batch import messages
from phalanx.tools.plan.blueprint import family_name, fetch
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from phalanx.tools.plan.rehearsal import Rehearsal
from phalanx.tools.plan.warnings import ALLOWED, SPARE, fewer_blocks
from tests.helpers.jobs import tiny_config
from tests.helpers.ranks import ROOT

ON = "model.gradient_checkpointing=true"
GB = 10**9
Make = Callable[..., FlowRLConfig | LMRLConfig]


def qwen(*keys: str) -> LMRLConfig:
    """Of 24 layers."""
    keys = ("model.path=Qwen/Qwen2.5-0.5B-Instruct", "actor.ppo_micro_batch_size_per_gpu=32", ON, *keys)
    keys = ("algorithm.kl_loss_coef=0.1", "parallel.fsdp_size=2", *keys)  # of a reference, which is gathered
    cfg = load_config(LMRLConfig, str(ROOT / "configs" / "grpo" / "quickstart.yaml"), list(keys))
    cfg.model.path = fetch(cfg.model.path)
    return cfg


@pytest.fixture
def stable_diffusion(sd3_folder: Path, tmp_path: Path) -> Make:
    """Of 8 blocks, the first 4 of which keep more; to plan, its shapes are enough."""
    model = Path(shutil.copytree(sd3_folder, tmp_path / "model"))
    shapes = json.loads((model / "transformer" / "config.json").read_text())
    shapes |= {"num_layers": 8, "dual_attention_layers": list(range(4))}
    (model / "transformer" / "config.json").write_text(json.dumps(shapes))

    def make(*keys: str) -> FlowRLConfig:
        cfg = tiny_config(model, tmp_path, ON, *keys)
        cfg.model.family = family_name(cfg.model)
        return cfg

    return make


def update(job: Rehearsal) -> int:
    """The bytes on the device in an update."""
    memory = count(job)
    return sum(memory.held.values()) + next(phase.total for phase in memory.phases if phase.name == "update")


@pytest.mark.long
def test_of_layers_that_are_alike() -> None:
    assert_so_many_fit_and_one_less_does_not(qwen)


@pytest.mark.long
def test_of_blocks_that_are_not(stable_diffusion: Make) -> None:
    assert_so_many_fit_and_one_less_does_not(stable_diffusion)


def assert_so_many_fit_and_one_less_does_not(model: Make) -> None:
    job = planned(model(), Cluster(1, 4))
    before, every = (job.flops, count(job), messages(job)), update(job)
    number = len(job.policy.blocks)
    half = planned(model(f"model.gradient_checkpointing_blocks={number // 2}"), Cluster(1, 4))
    size = int(((every + update(half)) / 2 + ALLOWED) / (1 - SPARE))  # of a GPU with room for some of them
    found = fewer_blocks(job, size)
    assert found is not None
    assert (job.flops, count(job), messages(job)) == before  # trying leaves nothing behind
    blocks, flops = found
    assert number // 2 < blocks < number
    room = size * (1 - SPARE) - ALLOWED
    fewer = planned(model(f"model.gradient_checkpointing_blocks={blocks - 1}"), Cluster(1, 4))
    assert update(fewer) > room
    chosen = planned(model(f"model.gradient_checkpointing_blocks={blocks}"), Cluster(1, 4))
    assert update(chosen) <= room
    assert flops == chosen.flops


def test_blocks_that_are_not_recomputed_any_more(stable_diffusion: Make) -> None:
    """A plan tries several numbers of blocks in one process."""
    job = planned(stable_diffusion(), Cluster(1, 4))
    job.policy.recompute(len(job.policy.blocks))
    job.policy.recompute(1)
    assert ["recomputed" in vars(block) for block in job.policy.blocks] == [True] + [False] * 7


def test_none_need_be(sd3_folder: Path, tmp_path: Path) -> None:
    said = r"  fits too: model\.gradient_checkpointing=false; backward passes then repeat 0 instead of \d+ %"
    plan = {"nproc": "1", "gpu_memory_gb": "80"}
    assert re.search(said, plan_job(tiny_config(sd3_folder, tmp_path, ON), plan))
    assert "fits too" not in plan_job(tiny_config(sd3_folder, tmp_path), plan)
    assert "fits too" not in plan_job(tiny_config(sd3_folder, tmp_path, ON), {"nproc": "1"})


@pytest.mark.long
def test_all_have_to_be() -> None:
    every = update(planned(qwen(), Cluster(1, 4)))
    size = int((every + ALLOWED) / (1 - SPARE))
    assert fewer_blocks(planned(qwen(), Cluster(1, 4)), size + GB // 100) is None
    assert fewer_blocks(planned(qwen(), Cluster(1, 4)), size - GB) is None  # they do not fit either
