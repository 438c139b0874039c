"""Algorithms on tokens in whole jobs: teachers on every layout, and options that select what a step trains on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from phalanx.distributed.fsdp import local
from phalanx.training.loop import train_step
from tests.helpers.jobs import assert_same_weights, first_step, full_weights, rows
from tests.helpers.lm import fit, one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks


def teacher_of(model: Path, folder: Path) -> Path:
    """A larger model with the same tokenizer."""
    from assets.make.tiny_lm import make_model

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    make_model(tokenizer, hidden=128, layers=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher_folder(lm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_of(lm_folder, tmp_path_factory.mktemp("teachers") / "large")


def distilled(teacher: Path, *overrides: str) -> tuple[str, ...]:
    return "algorithm.name=distillation", f"algorithm.teacher_path={teacher}", *overrides


def step_beside_a_teacher(cfg: Any) -> dict[str, Any]:
    """A job's first step, and the part of the teacher on this rank."""
    from phalanx.run.rl import build

    made: list[Any] = []
    _, found = first_step(lambda c: made.append(build(c)) or made[0], cfg)
    module = made[0].updater.teachers["teacher"].policy.trained.module
    held = sum(local(p).numel() for p in module.parameters())
    return found | {"held": held, "trained": any(p.requires_grad for p in module.parameters())}


NO_REWARD = ("reward.functions=[]",)


@pytest.mark.full
def test_layouts_agree_beside_a_teacher(lm_folder: Path, teacher_folder: Path, tmp_path: Path) -> None:
    """Also with a reward: one rank, replicas, shards, and both take the same step; the teacher is sharded."""
    keys = distilled(teacher_folder)
    (alone,) = run_ranks(step_beside_a_teacher, 1, tiny_lm_config(lm_folder, tmp_path / "alone", *keys))
    row = alone["row"]
    assert row["actor/teacher_kl"] > 0.01 and row["actor/grad_norm"] > 1e-3 and not alone["trained"]
    assert row["actor/first_ratio_error"] == 0
    for ranks, shards in ((2, 1), (2, 2), (4, 2)):
        cfg = tiny_lm_config(lm_folder, tmp_path / f"{ranks}_{shards}", *keys, f"parallel.fsdp_size={shards}")
        parts = run_ranks(step_beside_a_teacher, ranks, cfg)
        for part in parts:
            assert part["row"]["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-5)
            assert part["row"]["actor/teacher_kl"] == pytest.approx(row["actor/teacher_kl"], rel=1e-5)
            assert part["held"] < (1.01 if shards == 1 else 0.6) * alone["held"]
        assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)


@pytest.mark.full
def test_several_teachers(lm_folder: Path, teacher_folder: Path, tmp_path: Path) -> None:
    """Each prompt has its teacher, also if ranks exchange samples; one of two ranks has few rows of either."""
    files = tmp_path / "rows.jsonl"
    base = ("algorithm.name=distillation", f"data.train_files=[{files}]", *NO_REWARD, "actor.use_dynamic_bsz=true")
    base = (*base, "actor.ppo_max_token_len_per_gpu=80")
    two = (f"algorithm.teachers={{large: {teacher_folder}, own: {lm_folder}}}", "algorithm.teacher_key=task")

    def step(name: str, ranks: int, tasks: tuple[str, ...], *keys: str) -> dict[str, Any]:
        data = [{"prompt": f"Ann has {i} books" + " and more" * (4 * i), "task": tasks[i]} for i in range(4)]
        cfg = tiny_lm_config(lm_folder, tmp_path / name, *base, *keys)
        files.write_text("".join(json.dumps(row) + "\n" for row in data))
        return run_ranks(distilled_step, ranks, cfg)[0]

    mixed = ("large", "large", "own", "large")
    one = step("one", 1, mixed, *two)
    for ranks, shards in ((2, 1), (2, 2)):
        other = step(f"{ranks}_{shards}", ranks, mixed, *two, f"parallel.fsdp_size={shards}")
        assert other["row"]["actor/grad_norm"] == pytest.approx(one["row"]["actor/grad_norm"], rel=1e-5)
        assert_same_weights(one["weights"], other["weights"], 1e-3)
        for key in ("actor/teacher_kl/large", "actor/teacher_kl/own"):
            assert other["row"][key] == pytest.approx(one["row"][key], rel=1e-5, abs=1e-6), key
        for name, share in (("large", 0.75), ("own", 0.25)):
            assert one["row"][f"actor/teacher_share/{name}"] == other["row"][f"actor/teacher_share/{name}"] == share
    assert abs(one["row"]["actor/teacher_kl/own"]) < 0.1 * one["row"]["actor/teacher_kl/large"]
    alone = step("alone", 1, ("large",) * 4, f"algorithm.teacher_path={teacher_folder}")
    named = step("named", 1, ("large",) * 4, two[0].replace(f", own: {lm_folder}", ""), two[1])
    assert alone["row"]["actor/grad_norm"] == named["row"]["actor/grad_norm"] > 1.01 * one["row"]["actor/grad_norm"]


def distilled_step(cfg: Any) -> dict[str, Any]:
    """The metrics of a job's step, and the weights after it."""
    from phalanx.run.rl import build

    trainer = build(cfg)
    row = train_step(trainer.job, trainer.collector, trainer.updater, 0)
    return {"row": row, "weights": full_weights(trainer.policy.trained.parameters)}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_nothing_to_learn_from_oneself(kind: str, lm_folder: Path, tmp_path: Path) -> None:
    keys = (*distilled(lm_folder), f"algorithm.loss_type={kind}", *NO_REWARD, "optim.weight_decay=0")
    (step,) = run_ranks(scoreless, 1, tiny_lm_config(lm_folder, tmp_path, *keys))
    assert step["actor/teacher_kl"] == 0.0 and step["actor/grad_norm"] == 0.0
    assert not any(key.startswith("reward/") for key in step)


def scoreless(cfg: Any) -> dict[str, float]:
    """A step of a job without a reward; its metrics."""
    cfg.trainer.total_training_steps = 1
    fit(cfg)
    return rows(Path(cfg.trainer.output_dir))[-1]


@pytest.mark.long
@pytest.mark.full
def test_the_student_comes_nearer(lm_folder: Path, teacher_folder: Path, tmp_path: Path) -> None:
    keys = (*distilled(teacher_folder), *NO_REWARD, "trainer.total_training_steps=20", "optim.lr=3e-3", "rollout.n=8")
    run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path, *keys, "actor.ppo_mini_batch_size=4"))
    found = [row["actor/teacher_kl"] for row in rows(tmp_path / "out")]
    assert sum(found[-5:]) < 0.7 * sum(found[:5]), found


@pytest.mark.full
def test_what_is_no_teacher(lm_folder: Path, teacher_folder: Path, tmp_path: Path) -> None:
    """Other tokens, too few logits, no folder: one line each."""
    from phalanx.run.rl import build

    other = Path(shutil.copytree(teacher_folder, tmp_path / "other"))
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)

    def refusals() -> list[str]:
        said = []
        for teacher in (other, tmp_path / "none"):
            with pytest.raises(ValueError) as error:
                build(tiny_lm_config(lm_folder, tmp_path / "job", *distilled(teacher)))
            said.append(str(error.value))
        return said

    tokens, none = run_ranks(refusals, 1)[0]
    assert tokens.startswith(f"algorithm.teacher_path: '{other}' has another tokenizer than model.path, ")
    assert none.startswith("algorithm.teacher_path: ") and "\n" not in tokens + none


# --- what a step trains on


@pytest.mark.quick("cispo", "rloo")
@pytest.mark.parametrize("name", ["cispo", "sapo", "rloo", "raft"])
def test_each_algorithm_takes_a_step(name: str, lm_folder: Path, tmp_path: Path) -> None:
    (step,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path, f"algorithm.name={name}"))
    assert step["row"]["actor/grad_norm"] > 1e-4


def test_updates_that_are_too_far_off_are_left_out(lm_folder: Path, tmp_path: Path) -> None:
    """On all ranks at the same update, and never the first update of a step."""
    far = ("optim.lr=0.1", "actor.ppo_epochs=2", "parallel.fsdp_size=2")
    stop = "algorithm.early_stop_imp_ratio=1.0001"
    for part in run_ranks(one_step, 2, tiny_lm_config(lm_folder, tmp_path / "a", *far, stop)):
        assert part["row"]["actor/updates_skipped"] == 3 and part["row"]["actor/ratio_mean"] > 1.0001
    (plain, _) = run_ranks(one_step, 2, tiny_lm_config(lm_folder, tmp_path / "b", *far))
    assert plain["row"]["actor/updates_skipped"] == 0


@pytest.mark.full
def test_dynamic_sampling_takes_new_prompts(lm_folder: Path, tmp_path: Path) -> None:
    """Groups of equal rewards are replaced by other prompts; their number may differ between ranks."""
    cfg = tiny_lm_config(
        lm_folder, tmp_path, "rollout.max_num_gen_batches=20", "trainer.total_training_steps=2", "rollout.n=2"
    )
    # only prompts of odd numbers can differ
    (tmp_path / "reward.py").write_text(
        "def odd(completions, prompts, metadata):\n"
        "    return [len(c) if int(p.split()[2]) % 2 else 0.0 for c, p in zip(completions, prompts)]\n"
    )
    cfg.reward.functions[0].path = f"{tmp_path}/reward.py:odd"
    run_ranks(fit, 2, cfg)
    for row in rows(tmp_path / "out"):
        assert row["rollout/resampled_ratio"] > 0.2
        assert row["reward/zero_std_ratio"] == 0


@pytest.mark.full
def test_rewards_know_the_length_of_a_response(lm_folder: Path, tmp_path: Path) -> None:
    """Overlong shaping beside another reward: -1 for truncated responses."""
    cfg = tiny_lm_config(lm_folder, tmp_path, "trainer.total_training_steps=1")
    cfg.reward.functions.append(type(cfg.reward.functions[0])(name="overlong", kwargs={"overlong_buffer_len": 1}))
    run_ranks(fit, 2, cfg)
    (row,) = rows(tmp_path / "out")
    # with a buffer of one token only those at the limit are punished, cut ones and those that end just there
    assert row["response/truncated_ratio"] > 0
    assert -row["reward/overlong"] >= row["response/truncated_ratio"] - 1e-6
