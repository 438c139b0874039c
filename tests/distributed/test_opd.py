"""On-policy distillation: a frozen teacher beside the policy, on every layout, with its own guidance and texts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.distributed.fsdp import local
from phalanx.models.flow.policy import build_policy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.training.update import StepLog
from tests.helpers.jobs import PROMPTS, base_overrides, fit, full_weights, rows, update
from tests.helpers.kinds import check
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import jitter, load_pipeline, tiny_sd3


def configure(model: Path, folder: Path, *overrides: str, teacher: Path | None = None) -> FlowRLConfig:
    """A tiny opd job; by default the teacher is the model itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    base = [o for o in base_overrides(model, folder) if not o.startswith(("algorithm.", "reward."))]
    fixed = ["rollout.micro_batch_size_per_gpu=4", "algorithm.name=opd", f"algorithm.teacher_path={teacher or model}"]
    return load_config(FlowRLConfig, None, [*base, *fixed, *overrides])


def moved(model: Path, folder: Path) -> Path:
    """A copy of a model folder with other weights in its transformer, but the same text encoders and VAE."""
    shutil.copytree(model, folder)
    transformer = load_pipeline(folder).transformer
    jitter(transformer, seed=5, std=0.02)
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def student_folder(sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(sd3_folder, tmp_path_factory.mktemp("models") / "student")


def one_step(cfg: FlowRLConfig) -> dict[str, Any]:
    """One training step, and the modules of the teacher."""
    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    samples, reward, scores = t.collector.reward(samples, 0)
    row = update(t, samples, reward, 0)
    teacher = t.updater.teachers["teacher"].policy
    own = t.policy.model
    return {
        "row": row | scores,
        "images": samples.outputs,
        "weights": full_weights(t.policy.trained.parameters),
        "trained": len(teacher.trained.parameters),
        "gradients": any(p.requires_grad for p in teacher.model.transformer.parameters()),
        "shared": teacher.model.text_encoders is own.text_encoders and teacher.model.vae is own.vae,
        "local": sum(local(p).numel() for p in teacher.model.transformer.parameters()),
    }


@pytest.mark.seldom("velocity")
@pytest.mark.quick("kl")
@pytest.mark.parametrize("loss_type", ["kl", "velocity"])
def test_nothing_to_learn_from_oneself(loss_type: str, sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path, f"algorithm.loss_type={loss_type}", "optim.weight_decay=0")
    seen = run_ranks(one_step, 1, cfg)[0]
    assert seen["row"][f"actor/teacher_{loss_type}"] == 0.0 and seen["row"]["actor/grad_norm"] == 0.0
    assert not any(key.startswith("reward/") for key in seen["row"])  # there is none
    assert seen["trained"] == 0 and not seen["gradients"] and seen["shared"]


def assert_same_step(model: Path, teacher: Path, folder: Path, *keys: str) -> None:
    """One rank takes the same step as two ranks that shard the weights of student and teacher."""
    one = run_ranks(one_step, 1, configure(model, folder, *keys, teacher=teacher))
    two = run_ranks(one_step, 2, configure(model, folder, *keys, "parallel.fsdp_size=2", teacher=teacher))
    assert torch.equal(one[0]["images"], torch.cat([part["images"] for part in two]))
    row, other = one[0]["row"], two[0]["row"]
    assert row.keys() == other.keys()
    for key in {"actor/grad_norm", "actor/teacher_kl", "actor/teacher_velocity"} & row.keys():
        assert row[key] > 1e-5 and other[key] == pytest.approx(row[key], rel=1e-5), key
    assert two[0]["local"] < 0.6 * one[0]["local"] and two[0]["trained"] == 0


@pytest.mark.quick("velocity")
@pytest.mark.parametrize("loss_type", ["kl", "velocity"])
def test_layouts_agree(loss_type: str, student_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    assert_same_step(student_folder, sd3_folder, tmp_path, f"algorithm.loss_type={loss_type}")


@pytest.mark.full
@pytest.mark.long
def test_qwen_image(qwen_folder: Path, tmp_path: Path) -> None:
    """Packed latents and true guidance; a LoRA learns from a teacher with full weights."""
    teacher = moved(qwen_folder, tmp_path / "teacher")
    assert_same_step(qwen_folder, teacher, tmp_path / "job", "model.lora_rank=4")


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["kl", "velocity"])
def test_the_student_comes_nearer(loss_type: str, student_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    keys = ("trainer.total_training_steps=16", "rollout.sde_window_range=[1,3]", "optim.lr=1e-3")
    cfg = configure(student_folder, tmp_path, f"algorithm.loss_type={loss_type}", *keys, teacher=sd3_folder)
    run_ranks(fit, 1, cfg)
    found = [row[f"actor/teacher_{loss_type}"] for row in rows(tmp_path / "out")]
    quarters = [sum(found[i : i + 4]) for i in range(0, 16, 4)]
    assert quarters == sorted(quarters, reverse=True), found
    assert quarters[-1] < 0.3 * quarters[0]


def test_rewards_are_reported_and_teach_nothing(student_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    plain = configure(student_folder, tmp_path, teacher=sd3_folder)
    scored = configure(
        student_folder, tmp_path, "reward.functions=[{name: jpeg_incompressibility}]", teacher=sd3_folder
    )
    one, two = run_ranks(one_step, 1, plain)[0], run_ranks(one_step, 1, scored)[0]
    assert two["row"]["reward/mean"] > 0 and "reward/mean" not in one["row"]
    for name, value in one["weights"].items():
        assert torch.equal(value, two["weights"][name]), name


# --- guidance and texts


def views(cfg: FlowRLConfig) -> dict[str, Any]:
    """The teacher's outputs for the student's transitions, and the expected ones, replayed by hand."""
    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    numbers = torch.arange(t.updater.plan.samples)[:, None]
    counted = torch.ones(len(numbers), dtype=torch.bool)
    batch = t.updater.batches(samples, torch.zeros(len(numbers)), counted, numbers, StepLog())
    seen = t.updater.reference_outputs(batch)["teacher"]
    model = replace(cfg.model, path=cfg.algorithm.teacher_path)
    alone = build_policy(model, cfg.parallel, cfg.data, t.world, seed=0, detach_uncond=False)
    guidance = cfg.algorithm.teacher_guidance
    rollout = PolicyRollout(alone, replace(cfg.rollout, guidance_scale=guidance), t.world, 4)
    first = samples.index[0] // cfg.rollout.n
    prompts = t.collector.prompts.batch(0)[first : first + int(samples.trace.prompt_index.max()) + 1]
    embeds = rollout.collate(prompts, negatives=guidance > 1)
    with torch.no_grad():
        wanted = alone.replay(replace(samples.trace, sampler=rollout.sampler, embeds=embeds)).mean
    return {
        "apart": (seen - wanted).abs().max().item(),
        "student": (seen - samples.trace.means).abs().max().item(),
        "encoders": t.updater.teachers["teacher"].policy.model.text_encoders is not t.policy.model.text_encoders,
    }


@pytest.mark.seldom("1-3")
@pytest.mark.quick("3-5")
@pytest.mark.parametrize(("student", "teacher"), [(1, 3), (3, 1), (3, 5)])
def test_guidance_of_the_teacher(student: int, teacher: int, sd3_folder: Path, tmp_path: Path) -> None:
    """With negative prompts, which a student without guidance has not embedded."""
    keys = (f"rollout.guidance_scale={student}", f"algorithm.teacher_guidance={teacher}")
    for seen in run_ranks(views, 2, configure(sd3_folder, tmp_path, *keys, "parallel.fsdp_size=2")):
        assert seen["apart"] < 1e-4 and seen["student"] > 1e-2 and not seen["encoders"]


def test_a_teacher_with_other_text_encoders(sd3_folder: Path, sd3_t5_folder: Path, tmp_path: Path) -> None:
    """It encodes the prompts with its own encoders."""
    cfg = configure(sd3_folder, tmp_path, "algorithm.teacher_guidance=3", teacher=sd3_t5_folder)
    (seen,) = run_ranks(views, 1, cfg)
    assert seen["encoders"] and seen["apart"] < 1e-4 and seen["student"] > 1e-4


# --- what is refused


def refusal(cfg: FlowRLConfig) -> str:
    try:
        build(cfg)
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_no_teacher(sd3_folder: Path, qwen_folder: Path, tmp_path: Path) -> None:
    other = configure(sd3_folder, tmp_path, teacher=qwen_folder)
    assert run_ranks(refusal, 1, other)[0] == (
        f"algorithm.teacher_path: '{qwen_folder}' is a QwenImagePipeline; it should be a StableDiffusion3Pipeline, "
        "as model.path is"
    )
    none = configure(sd3_folder, tmp_path, teacher=tmp_path / "none")
    assert run_ranks(refusal, 1, none)[0] == f"algorithm.teacher_path: '{tmp_path}/none': no such folder"
    foreign = tiny_sd3(tmp_path / "foreign", seed=3)
    assert run_ranks(refusal, 1, configure(sd3_folder, tmp_path, teacher=foreign))[0] == (
        f"algorithm.teacher_path: '{foreign}' has another VAE than model.path, so its latents differ"
    )


def test_it_wants_a_teacher_and_trajectories(sd3_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm.teacher_path is not set; give algorithm.teacher_path=..."):
        load_config(FlowRLConfig, None, [f"model.path={sd3_folder}", "algorithm.name=opd"])
    with pytest.raises(ConfigError, match=r"^rollout.noise_level: 0.0; expected more than 0"):
        check(configure(sd3_folder, tmp_path, "rollout.noise_level=0"))
