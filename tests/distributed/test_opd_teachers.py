"""On-policy distillation from several teachers: each sees only the samples of its rows, on every layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.algorithms import opd
from phalanx.config.flow import FlowRLConfig
from phalanx.data.prompts import load_prompts
from phalanx.functional.flow import FlowReplay
from phalanx.functional.sde import gaussian_kl
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.run.start import routed
from phalanx.training.update import StepLog
from phalanx.types import Batch, Teacher
from tests.distributed.test_opd import moved, refusal
from tests.helpers.checks import reduced
from tests.helpers.jobs import PROMPTS, base_overrides, full_weights, update
from tests.helpers.ranks import run_ranks

ONE_OF_FOUR = ("sharp", "sharp", "sharp", "soft")  # so that only one of two ranks has rows of `soft`


def configure(model: Path, folder: Path, *keys: str, tasks: tuple[Any, ...] = ONE_OF_FOUR) -> FlowRLConfig:
    """A tiny opd job on four prompts with these teachers."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": text, "task": task} for text, task in zip(PROMPTS[:4], tasks, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [o for o in base_overrides(model, folder) if not o.startswith(("algorithm.", "reward.", "data.train_f"))]
    fixed = [f"data.train_files=[{folder / 'rows.jsonl'}]", "rollout.micro_batch_size_per_gpu=4", "algorithm.name=opd"]
    return load_config(FlowRLConfig, None, [*base, *fixed, *keys])


def several(**teachers: Path) -> tuple[str, str]:
    paths = ", ".join(f"{name}: {path}" for name, path in teachers.items())
    return f"algorithm.teachers={{{paths}}}", "algorithm.teacher_key=task"


@pytest.fixture(scope="module")
def other_folder(sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(sd3_folder, tmp_path_factory.mktemp("models") / "other")


def one_step(cfg: FlowRLConfig) -> dict[str, Any]:
    """A step's metrics and weights, the teachers' outputs for each sample, and each teacher's outputs for all samples."""
    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    numbers = torch.arange(t.updater.plan.samples)[:, None]
    counted = torch.ones(len(numbers), dtype=torch.bool)
    batch = t.updater.batches(samples, torch.zeros(len(numbers)), counted, numbers, StepLog())
    seen = t.updater.reference_outputs(batch)["teacher"]
    views = {}
    for name, teacher in t.updater.teachers.items():
        theirs = replace(batch, samples=teacher.samples(samples))
        means = []
        for part in torch.arange(len(samples.index)).split(2):  # as large as the job's own passes
            with torch.no_grad():
                means.append(teacher.policy.replay(theirs.select(part, torch.ones(2, 2)).trace).mean)
        views[name] = torch.cat(means)
    drawn, reward, scores = t.collector.reward(samples, 0)
    flops = t.updater.step_flops(samples, 4, recomputed=False)
    row = update(t, drawn, reward, 0) | scores
    tasks = [prompt.meta["task"] for prompt in samples.prompts]
    weights = full_weights(t.policy.trained.parameters)
    return {"seen": seen, "views": views, "tasks": tasks, "row": row, "weights": weights, "flops": flops}


@pytest.mark.full
def test_each_sample_is_judged_by_its_teacher(sd3_folder: Path, other_folder: Path, tmp_path: Path) -> None:
    """On one rank, and on two ranks that shard the weights, one of which has no row of the second teacher."""
    keys = several(sharp=sd3_folder, soft=other_folder)
    (one,) = run_ranks(one_step, 1, configure(sd3_folder, tmp_path / "one", *keys))
    two = run_ranks(one_step, 2, configure(sd3_folder, tmp_path / "two", *keys, "parallel.fsdp_size=2"))
    assert sorted("soft" in part["tasks"] for part in two) == [False, True]
    for part in (one, *two):
        views = part["views"]
        chosen = torch.stack([views[f"teacher {task}"][i] for i, task in enumerate(part["tasks"])])
        torch.testing.assert_close(part["seen"], chosen, rtol=0, atol=1e-6)
        assert (views["teacher sharp"] - views["teacher soft"]).abs().max() > 1e-3
    torch.testing.assert_close(torch.cat([part["seen"] for part in two]), one["seen"], rtol=0, atol=1e-5)
    for key in ("actor/grad_norm", "actor/teacher_kl"):
        assert one["row"][key] > 1e-5 and two[0]["row"][key] == pytest.approx(one["row"][key], rel=1e-5), key
    # the student begins as the first teacher; the shares are those of the rows
    for row in (one["row"], two[0]["row"]):
        shares = row["actor/teacher_share/sharp"], row["actor/teacher_share/soft"]
        kls = row["actor/teacher_kl/sharp"], row["actor/teacher_kl/soft"]
        assert shares == (0.75, 0.25) and kls[0] < kls[1]
        assert shares[0] * kls[0] + shares[1] * kls[1] == pytest.approx(row["actor/teacher_kl"], rel=1e-5)


@pytest.mark.full
def test_one_teacher_by_either_key(sd3_folder: Path, other_folder: Path, tmp_path: Path) -> None:
    """Bit for bit; operation counts include only a teacher's own rows."""
    path = f"algorithm.teacher_path={other_folder}"
    (plain,) = run_ranks(one_step, 1, configure(sd3_folder, tmp_path / "plain", path))
    keys = several(soft=other_folder)
    (named,) = run_ranks(one_step, 1, configure(sd3_folder, tmp_path / "named", *keys, tasks=("soft",) * 4))
    assert torch.equal(plain["seen"], named["seen"]) and plain["flops"] == named["flops"]
    assert plain["row"]["actor/teacher_kl"] == named["row"]["actor/teacher_kl"] > 0
    for name, value in plain["weights"].items():
        assert torch.equal(value, named["weights"][name]), name


# --- rows and teachers


def test_a_row_that_names_no_teacher(sd3_folder: Path, other_folder: Path, tmp_path: Path) -> None:
    keys = several(sharp=sd3_folder, soft=other_folder)
    cfg = configure(sd3_folder, tmp_path, *keys, tasks=("sharp", "soft", "blur", "soft"))
    place = f"data.train_files: {tmp_path / 'rows.jsonl'}:3"
    assert run_ranks(refusal, 1, cfg)[0] == (
        f"{place}: task is 'blur'; expected one of algorithm.teachers, sharp, soft (algorithm.teacher_key)"
    )
    cfg.algorithm.teacher_key = "kind"
    assert run_ranks(refusal, 1, cfg)[0].startswith(
        f"{place.removesuffix('3')}1: it has no column 'kind'; expected one"
    )


def test_a_teacher_that_no_row_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows.csv").write_text("prompt,task\na cat,1\na dog,1\n")
    rows = load_prompts([str(tmp_path / "rows.csv")], "data.train_files")
    teachers = [Teacher(f"teacher {n}", "x", f"algorithm.teachers.{n}", rows=("task", n)) for n in ("1", "2")]
    assert [row.teacher for row in routed(rows, teachers, first=True)] == ["teacher 1"] * 2
    assert caplog.messages == [
        "algorithm.teachers.2: no row of data.train_files names it in column task; it is not used"
    ]
    assert routed(rows, [replace(teachers[0], rows=None)], first=True) is rows


# --- the anchor


class _Student:
    """A policy whose replay is given."""

    def replay(self, trace: Any) -> Any:
        return trace


@pytest.mark.quick("kl")
@pytest.mark.parametrize("loss_type", ["kl", "velocity"])
def test_the_anchor(loss_type: str) -> None:
    """The same loss with the reference as teacher, times its weight, is added."""
    torch.manual_seed(0)
    mean, velocity, teacher, reference = torch.randn(4, 2, 3, 5)  # [B, W, ...]
    replay = FlowReplay(torch.zeros(2, 3), mean, torch.tensor([0.1, 0.2, 0.3]), velocity)
    algorithm = opd.Algorithm(opd.Config(teacher_path="x", loss_type=loss_type, kl_loss_coef=0.25))
    assert algorithm.references == ("reference", "teacher")
    outputs = {"teacher": teacher, "reference": reference}
    ones = torch.ones(2, 3)
    batch: Any = Batch(replay, ones, ones.bool(), torch.zeros(2), ones, outputs)
    loss, metrics = algorithm.loss(_Student(), batch)  # type: ignore[arg-type]
    stats = reduced(metrics, batch.weight)

    def distance(other: torch.Tensor) -> torch.Tensor:
        if loss_type == "velocity":
            return (velocity - other).square().mean(2)
        rows = [gaussian_kl(mean[i], other[i], replay.std) for i in range(2)]
        return torch.stack(rows)

    torch.testing.assert_close(loss, distance(teacher) + 0.25 * distance(reference))
    assert stats[f"teacher_{loss_type}"] == pytest.approx(distance(teacher).mean().item(), rel=1e-6)
    assert stats["kl_ref"] == pytest.approx(distance(reference).mean().item(), rel=1e-6)
