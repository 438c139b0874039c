"""What --plan says of forward passes and arithmetic, against what a training step runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.scale import Mail

from phalanx.config.flow import FlowRLConfig
from phalanx.distributed.fsdp import local
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.telemetry.flops import peak_flops
from phalanx.tools.plan.batch import messages
from phalanx.tools.plan.blueprint import family_name
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from tests.helpers.jobs import PROMPTS, base_overrides, update
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import jitter, load_pipeline

TWO_EPOCHS, KL, SHARDED = "actor.ppo_epochs=2", "algorithm.kl_loss_coef=0.1", "parallel.fsdp_size=2"
MICRO = "actor.ppo_micro_batch_size_per_gpu"


def configure(model: Path, folder: Path, name: str, *overrides: str) -> FlowRLConfig:
    """A tiny job with an algorithm: 4 prompts x 4 images per step in 2 updates."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    base = [o for o in base_overrides(model, folder) if not o.startswith("algorithm.")]
    return load_config(
        FlowRLConfig, None, [*base, f"algorithm.name={name}", "rollout.micro_batch_size_per_gpu=4", *overrides]
    )


def step(cfg: FlowRLConfig) -> dict[str, Any]:
    """How many samples each forward pass of a training step had, the FLOPs that its utilisation goes by, bytes of weights
    that came from other ranks, and of teachers that are held.
    """
    t = build(cfg)
    seen: dict[str, list[int]] = {"trained": [], "viewed": [], "teacher": []}

    def counted(run: Callable[..., Any], who: str | None) -> Callable[..., Any]:
        def counting(trace: Any, *args: Any) -> Any:
            seen[who or ("trained" if torch.is_grad_enabled() else "viewed")].append(len(trace.clean))
            return run(trace, *args)

        return counting

    policies = [(t.policy, None), *((teacher.policy, name) for name, teacher in t.updater.teachers.items())]
    for policy, who in policies:
        policy.replay = counted(policy.replay, who)  # type: ignore[method-assign]
        policy.predict = counted(policy.predict, who)  # type: ignore[method-assign]
    pace: dict[str, float] = {}
    performance = t.updater.performance

    def in_a_second(samples: Any, log: Any, seconds: float) -> dict[str, float]:
        pace.update(performance(samples, log, 1.0))
        return {}

    t.updater.performance = in_a_second
    with Mail() as mail:
        with t.collector.rollout.awake():
            samples = t.collector.rollout.sample(
                t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
            )
        samples, reward, _ = t.collector.reward(samples, 0)
        update(t, samples, reward, 0)
    gathered = sum(size for (kind, _), size in mail.received.items() if kind == "gather")
    peak = peak_flops(t.world.device, t.policy.model.dtype)
    assert peak is not None
    teachers = [teacher.policy.model.transformer for teacher in t.updater.teachers.values()]
    held = sum(local(tensor).nbytes for e in teachers for tensor in [*e.parameters(), *e.buffers()])
    return seen | {"gathered": gathered, "held": held, "flops": pace["perf/cpu_hfu"] * t.world.size * peak}


def compare(cfg: FlowRLConfig, ranks: int) -> dict[str, list[int]]:
    """Of one rank, the samples of all passes."""
    took = run_ranks(step, ranks, cfg)[0]
    cfg.model.family = family_name(cfg.model)
    said = planned(cfg, Cluster(1, ranks))
    passes = {name: phase.passes for name, phase in said.ledger.phases.items()}
    assert len(took["trained"]) == said.state.micro_batches == passes["update"]
    assert len(took["viewed"]) == (passes["reference"] if "reference" in passes else 0)
    assert len(took["teacher"]) == (passes["teacher"] if "teacher" in passes else 0)
    plan = said.plan
    assert plan is not None and max(took["trained"]) == plan.first(1)
    assert sum(took["trained"]) == plan.epochs * plan.updates * plan.first(plan.passes)
    assert took.pop("flops") == pytest.approx(said.flops)
    gathered = sum(t.size for t in messages(said) if "gathered" in t.what)
    assert took.pop("gathered") == pytest.approx(gathered, rel=1e-3)
    assert took.pop("held") == sum(count(said).held[name] for name in said.frozen)
    return took


@pytest.mark.quick("pairs")
@pytest.mark.parametrize(
    ("name", "keys", "ranks", "trained", "viewed"),
    [
        # the transitions are the same in both epochs, and viewed once
        pytest.param("flow_grpo", [KL, TWO_EPOCHS], 1, [2] * 16, [2] * 8, id="transitions"),
        # awm looks at the policy's weights before each pass, and at the reference's
        pytest.param("awm", [KL, TWO_EPOCHS, SHARDED], 2, [2] * 8, [2] * 16, id="views of every epoch"),
        # the best and the worst of each prompt's 4 images; an update of 2 pairs has no more than 4 images a pass
        pytest.param("diffusion_dpo", [TWO_EPOCHS, f"{MICRO}=4"], 1, [4] * 4, [4] * 4, id="pairs"),
        pytest.param("diffusion_dpo", [TWO_EPOCHS, f"{MICRO}=1"], 1, [2] * 8, [2] * 8, id="less than a pair"),
        pytest.param("diffusion_dpo", [TWO_EPOCHS, f"{MICRO}=8"], 1, [4] * 4, [8] * 2, id="more than an update"),
        pytest.param("diffusion_dpo", [TWO_EPOCHS, f"{MICRO}=2"], 2, [2] * 4, [2] * 4, id="pairs of two ranks"),
        # 3 pairs an update are a pass of 2 and one of 1; all 6 of a step are viewed in 3
        pytest.param(
            "diffusion_dpo",
            ["data.train_batch_size=6", "actor.ppo_mini_batch_size=3", f"{MICRO}=4"],
            1,
            [4, 2] * 2,
            [4] * 3,
            id="pairs that fill no micro-batch",
        ),
    ],
)
def test_passes(
    name: str, keys: list[str], ranks: int, trained: list[int], viewed: list[int], sd3_folder: Path, tmp_path: Path
) -> None:
    cfg = configure(sd3_folder, tmp_path, name, *keys)
    assert compare(cfg, ranks) == {"trained": trained, "viewed": viewed, "teacher": []}


@pytest.mark.full
def test_a_guided_teacher_of_another_depth(sd3_folder: Path, tmp_path: Path) -> None:
    """The student, a LoRA over two ranks, samples without guidance; a view of its teacher is two branches of one block."""
    from diffusers import SD3Transformer2DModel

    pipeline = load_pipeline(sd3_folder)
    pipeline.transformer = SD3Transformer2DModel.from_config({**pipeline.transformer.config, "num_layers": 1})
    jitter(pipeline.transformer, seed=1)
    pipeline.save_pretrained(tmp_path / "teacher")
    keys = [f"algorithm.teacher_path={tmp_path / 'teacher'}", "algorithm.teacher_guidance=3"]
    shared = ["parallel.fsdp_size=2", "model.lora_rank=4", "model.dtype=bfloat16", "rollout.guidance_scale=1"]
    cfg = configure(sd3_folder, tmp_path / "job", "opd", *keys, *shared)
    assert compare(cfg, 2) == {"trained": [2] * 4, "viewed": [], "teacher": [2] * 4}
