"""--plan of ranks with roles of their own: who holds and does what, and what crosses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.run.roles import roles_of
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.batch import messages
from phalanx.tools.plan.jobs import planned, planned_role
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import Memory, count
from phalanx.tools.plan.rehearsal import RLRehearsal
from tests.helpers.jobs import tiny_config
from tests.helpers.lm import tiny_lm_config

APART = {"rollout": "0-1", "actor": "2-3"}
ENGINE = ("rollout.engine=vllm", "rollout.sleep=true")
THREE = {"rollout": "0-1", "inference": "2-3", "actor": "4-5"}


# -- memory and messages ------------------------------------------------------------------------------------------


def part(cfg: LMRLConfig, placement: dict[str, str], role: str, ranks: int = 4) -> RLRehearsal:
    cluster = Cluster(1, ranks)
    return planned_role(cfg, cluster, roles_of(placement, cluster.launch), role)


def names(memory: Memory) -> list[str]:
    return [phase.name for phase in memory.phases]


@pytest.mark.parametrize("keys", [(), ("model.lora_rank=4",), ("parallel.fsdp_size=2",)])
def test_who_holds_what(keys: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """The actor's update is that of a job on its ranks alone; where samples are drawn nothing is kept of an optimizer."""
    cfg = tiny_lm_config(lm_folder, tmp_path, *keys)
    together = count(planned(cfg, Cluster(1, 2)))
    rollout, actor = (count(part(cfg, APART, role)) for role in (ROLLOUT, ACTOR))
    together.held.pop("state before a step", None)  # an actor's step is not undone
    assert actor.held == together.held and "optimizer's state" not in rollout.held
    assert rollout.held.items() <= together.held.items()
    phases = {phase.name: phase for phase in together.phases}
    assert names(rollout) == ["weights from the actor", "rollout: sample", "rollout: log-probs"]
    assert names(actor) == ["weights from the actor", "update", "optimizer"]
    assert rollout.phases[1:] == [phases["rollout: sample"], phases["rollout: log-probs"]]
    assert actor.phases[1:] == [phases["update"], phases["optimizer"]]
    assert all(phase.gradients == 0 for phase in rollout.phases)


def test_who_takes_log_probs_again(lm_folder: Path, tmp_path: Path) -> None:
    """Of an engine's samples the inference, or where there is none the actor; of old samples the actor."""
    cfg = tiny_lm_config(lm_folder, tmp_path, *ENGINE)
    found = {role: names(count(part(cfg, THREE, role, 6), 10**10)) for role in THREE}
    assert found[INFERENCE] == ["weights from the actor", "rescore"]
    assert "rescore" not in found[ROLLOUT] + found[ACTOR]
    assert "rescore" in names(count(part(cfg, APART, ACTOR)))
    cfg = tiny_lm_config(lm_folder, tmp_path, "rollout.schedule=one_step_off")
    assert "rescore" in names(count(part(cfg, APART, ACTOR)))


def test_the_engine_is_where_samples_are_drawn(lm_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, "rollout.engine=vllm", "rollout.sleep=false")
    held = {role: count(part(cfg, THREE, role, 6), 10**10).held for role in THREE}
    assert [role for role in held if "sampling engine" in held[role]] == [ROLLOUT]
    asked = {role: {item.what for item in messages(part(cfg, THREE, role, 6))} for role in THREE}
    assert all("weights, gathered for the engine" in asked[role] for role in (ROLLOUT,))
    assert asked[INFERENCE] == {"weights, gathered to score samples"}
    assert "weights, gathered for other roles" in asked[ACTOR]


@pytest.mark.parametrize(("keys", "placement", "ranks"), [((), APART, 4), (ENGINE, THREE, 6), (ENGINE, APART, 4)])
def test_roles_share_the_arithmetic_of_a_step(
    keys: tuple[str, ...], placement: dict[str, str], ranks: int, lm_folder: Path, tmp_path: Path
) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, *keys)
    each = [part(cfg, placement, role, ranks).flops_of_role for role in placement]
    assert sum(each) == pytest.approx(planned(cfg, Cluster(1, 2)).flops, rel=1e-9) and min(each) > 0


def test_parts_of_a_step(lm_folder: Path, tmp_path: Path) -> None:
    """A rank draws a part at a time, and as much of it in a step."""
    keys = ("rollout.schedule=pipelined", "rollout.parts=2", "actor.ppo_mini_batch_size=4")
    piped = tiny_lm_config(lm_folder, tmp_path, *keys)
    whole = replace(piped, rollout=replace(piped.rollout, schedule="synchronous"))
    ours, theirs = part(piped, APART, ROLLOUT), part(whole, APART, ROLLOUT)
    assert 2 * ours.sent == theirs.sent and ours.flops_of_role == theirs.flops_of_role


def test_flow_models(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path)
    cfg.model.family = "sd3"
    cluster = Cluster(1, 4)
    together = planned(cfg, Cluster(1, 2))
    phases = {phase.name: phase for phase in count(together).phases}
    memory, flops = {}, 0
    for role in APART:
        job = planned_role(cfg, cluster, roles_of(APART, cluster.launch), role)
        memory[role], flops = count(job), flops + job.flops_of_role
    assert flops == pytest.approx(together.flops, rel=1e-9)
    assert names(memory[ROLLOUT])[:3] == ["encode prompts", "weights from the actor", "rollout: sample"]
    assert memory[ACTOR].phases[-2:] == [phases["update"], phases["optimizer"]]
    assert "images" in memory[ROLLOUT].host and "images" not in memory[ACTOR].host


# -- words --------------------------------------------------------------------------------------------------------


def section(text: str, title: str) -> list[str]:
    (found,) = [part.split("\n") for part in text.split("\n\n") if part.startswith(title)]
    return [re.sub(" +", " ", line.strip()) for line in found[1:]]


def test_a_plan_of_roles(lm_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, "rollout.schedule=one_step_off", "parallel.fsdp_size=2")
    cfg.placement = APART
    text = plan_job(cfg, {"nnodes": "2", "nproc": "2"})
    assert section(text, "Placement")[:2] == [
        "rollout 2 ranks, 0-1; 1 copy of the weights, each over 2 ranks",
        "actor 2 ranks, 2-3; 1 copy of the weights, each over 2 ranks",
    ]
    assert "schedule one_step_off" in section(text, "Batch")
    weights, samples = section(text, "What crosses")
    size = sum(p.numel() * 4 for p in planned(cfg, Cluster(1, 2)).policy.trained.module.parameters())
    assert weights == f"weights {size / 1e6:.2f} MB, all trained tensors, from rank 2 to each of 2 ranks that sample"
    assert samples.endswith("MB of 16 responses, from the rollout to the actor")
    each = {role: part(cfg, APART, role).flops_of_role / 1e12 for role in (ROLLOUT, ACTOR)}
    for row, (role, flops) in zip(section(text, "Arithmetic"), each.items(), strict=False):
        assert row == f"{role} {flops:.4g} TFLOP, {flops / 2:.4g} per rank"
    assert "warning" not in text


def test_a_group_that_crosses_nodes_is_named_by_its_ranks(lm_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, "parallel.fsdp_size=2")
    cfg.placement = {"rollout": "0,3", "actor": "1-2"}
    text = plan_job(cfg, {"nnodes": "2", "nproc": "2"})
    assert "warning: actor: ranks 1-2 share one copy of the weights and are on nodes 0 to 1:" in text
    assert "rollout: ranks" not in text  # whose weights are over as many ranks as a node has
    cfg.placement = {"rollout": "1/2", "actor": "rest"}
    text = plan_job(cfg, {"nnodes": "1:2", "nproc": "2"})
    assert text.startswith("Sizes\n  1 node x 2 = 2 ranks   refused: parallel.fsdp_size: 2 does not divide")
    assert "  2 nodes x 2 = 4 ranks  rollout 0-1, actor 2-3\n" in text


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"rollout": "0-1", "actor": "2"}, "placement: ranks 3 of 4 have no role (rollout 0-1, actor 2)"),
        (
            {"rollout": "0-2", "actor": "3"},
            "placement.rollout: 3 ranks do not divide 4 prompts x rollout.n 4 = 16 samples",
        ),
    ],
)
def test_what_is_refused(placement: dict[str, str], message: str, lm_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path)
    cfg.placement = placement
    with pytest.raises(ConfigError) as error:
        plan_job(cfg, {"nproc": "4"})
    assert str(error.value).startswith(message)
