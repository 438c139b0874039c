"""Roles on separate ranks learn the same as colocated ranks, in each schedule, and resume where they stopped."""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.data.streams import IndexStream
from phalanx.run import link
from tests.distributed.test_opd import configure, moved
from tests.helpers.jobs import assert_same_weights, tiny_config
from tests.helpers.lm import REWARD, tiny_lm_config
from tests.helpers.ranks import RankError
from tests.helpers.roles import learned, run_roles

VAL = ("trainer.test_freq=1", "trainer.log_val_generations=2", "actor.ema.decay=0.9")
TWO_AND_TWO = "placement={rollout: 0-1, actor: 2-3}"
ONCE = ("actor.ppo_mini_batch_size=4",)
Job = Callable[..., Any]


def language(cfg: Any) -> Any:
    from phalanx.run.rl import build

    return build(cfg)


def pictures(cfg: Any) -> Any:
    from phalanx.run.rl import build

    return build(cfg)


@pytest.fixture(params=["lm", "lm-lora", "blocks", "flow-lora"])
def kind(request: pytest.FixtureRequest, lm_folder: Path, blocks_folder: Path, sd3_folder: Path, tmp_path: Path) -> Any:
    """(build, config) of a kind of policy: config(name, *overrides) is a job with separate files."""
    lora, val = ("model.lora_rank=4",), f"data.val_files=[{tmp_path}/held_out.jsonl]"
    (tmp_path / "held_out.jsonl").write_text("".join(f'{{"prompt": "Bob has {i} cats"}}\n' for i in range(3)))

    def config(name: str, *overrides: str) -> Any:
        if request.param == "flow-lora":
            (tmp_path / "held_out.txt").write_text("alpha\nbeta\ngamma\n")
            keys = (*lora, *VAL, f"data.val_files=[{tmp_path}/held_out.txt]", "rollout.micro_batch_size_per_gpu=4")
            return tiny_config(sd3_folder, tmp_path / name, *keys, *overrides)
        keys = {"lm": (), "lm-lora": lora, "blocks": ("model.block_size=4", "rollout.threshold=0.02")}[request.param]
        folder = blocks_folder if request.param == "blocks" else lm_folder
        return tiny_lm_config(folder, tmp_path / name, *VAL, val, *keys, *overrides)

    return (pictures if request.param == "flow-lora" else language), config


@pytest.mark.full
@pytest.mark.seldom("lm-lora")
def test_roles_learn_what_all_ranks_learn(kind: tuple[Job, Job], tmp_path: Path) -> None:
    """Synchronous: bit-identical samples, gradients and validations, sharded or not."""
    build, config = kind
    together = run_roles(build, 2, config("together", "parallel.fsdp_size=1"))
    assert any(row["actor/grad_norm"] > 1e-4 for row in learned(tmp_path / "together")[1:])
    apart = run_roles(build, 4, config("apart", TWO_AND_TWO, "parallel.fsdp_size=1"))
    assert learned(tmp_path / "apart") == learned(tmp_path / "together")
    assert all(torch.equal(value, apart[name]) for name, value in together.items())
    for row in read(tmp_path / "apart"):
        assert 0 < row["idle/actor"] < 1 and 0 < row["idle/rollout"] < 1
        assert row["idle/actor"] * row["perf/step_s"] <= row["time/wait"]


@pytest.mark.full
def test_a_teacher_stands_beside_the_actor(sd3_folder: Path, lm_folder: Path, tmp_path: Path) -> None:
    """Distillation, without rewards."""
    student = moved(sd3_folder, tmp_path / "student")
    keys = ("algorithm.name=distillation", f"algorithm.teacher_path={lm_folder}")
    for name, build, config in (
        ("pictures", pictures, partial(configure, student, teacher=sd3_folder)),
        ("texts", language, lambda folder, *overrides: tiny_lm_config(lm_folder, folder, *keys, *overrides)),
    ):
        folder = tmp_path / name
        together = run_roles(build, 2, config(folder / "together", "parallel.fsdp_size=1"))
        apart = run_roles(build, 4, config(folder / "apart", TWO_AND_TWO, "parallel.fsdp_size=1"))
        assert learned(folder / "apart") == learned(folder / "together")
        assert all(torch.equal(value, apart[name]) for name, value in together.items())


@pytest.mark.long
def test_shards_of_other_widths(kind: tuple[Job, Job], tmp_path: Path) -> None:
    """One rank samples for three that shard the weights, and two for one: whole tensors are sent between roles."""
    build, config = kind
    keys = ("data.train_batch_size=6", "actor.ppo_mini_batch_size=6", "rollout.micro_batch_size_per_gpu=4")
    together = run_roles(build, 1, config("together", *keys))
    for name, ranks, placement in (
        ("wide", 4, "{rollout: 0, actor: 1-3}"),
        ("narrow", 3, "{actor: 1, rollout: '0,2'}"),
    ):
        apart = run_roles(build, ranks, config(name, *keys, f"placement={placement}"))
        for row, wanted in zip(learned(tmp_path / name), learned(tmp_path / "together"), strict=True):
            assert row.keys() == wanted.keys()
            for key in (key for key in row if not key.startswith("val/")):
                assert row[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6), key
        assert_same_weights(together, apart, 1e-3)


@pytest.mark.seldom("lm-lora", "blocks")
@pytest.mark.full
def test_parts_are_the_step(kind: tuple[Job, Job], tmp_path: Path) -> None:
    """Pipelined: a part's samples are trained while the next ones are drawn, with the gradient of the whole step."""
    build, config = kind
    keys = (*ONCE, "trainer.test_freq=-1", "data.val_files=[]")
    together = run_roles(build, 2, config("together", *keys, "parallel.fsdp_size=1"))
    keys = (*keys, "rollout.schedule=pipelined", "rollout.parts=2")
    apart = run_roles(build, 4, config("parts", *keys, TWO_AND_TWO))
    wanted = learned(tmp_path / "together")
    for row, expected in zip(learned(tmp_path / "parts"), wanted, strict=True):
        numbers = [key for key in expected if key.startswith(("reward/", "actor/", "response/", "prompt/", "rollout/"))]
        assert {"reward/std", "actor/grad_norm", "actor/first_ratio_error"} < set(numbers)
        for key in numbers:
            assert row[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key
    assert_same_weights(together, apart, 1e-3)


@pytest.mark.seldom("seq-mean-token-mean")
@pytest.mark.full
@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_parts_with_each_mean(mode: str, lm_folder: Path, tmp_path: Path) -> None:
    keys = (*ONCE, f"actor.loss_agg_mode={mode}")
    run_roles(language, 1, tiny_lm_config(lm_folder, tmp_path / "a", *keys))
    keys = (*keys, "rollout.schedule=pipelined", "placement={rollout: 0, actor: 1}")
    run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path / "b", *keys))
    for row, expected in zip(learned(tmp_path / "b"), learned(tmp_path / "a"), strict=True):
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)


@pytest.mark.full
def test_each_update_has_parts_of_its_own(lm_folder: Path, tmp_path: Path) -> None:
    """Two updates on two parts each: the first is on-policy, the second is not."""
    keys = ("rollout.schedule=pipelined", "rollout.parts=4", "placement={rollout: 0, actor: 1}", "optim.lr=1e-2")
    run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path, *keys))
    for row in read(tmp_path):
        assert row["actor/first_ratio_error"] == 0 and abs(row["actor/ratio_mean"] - 1) > 1e-6
        assert row["actor/updates_skipped"] == 0 and row["actor/grad_norm"] > 1e-4


@pytest.mark.full
def test_a_part_without_a_sample_to_train_ends_its_update(lm_folder: Path, tmp_path: Path) -> None:
    """All rewards of the last part are equal: the update is taken on the part before it."""
    last = IndexStream(8, 4, 0).batch(0)[2:]  # the rows of the last two of a step's four prompts
    even = "    return [float(any(f'has {i} ' in prompt for i in %s)) or score for prompt, score in zip(prompts, scores)]\n"
    reward = REWARD.replace("return", "scores =") + even % last
    keys = (*ONCE, "trainer.total_training_steps=1")
    weights = []
    for name, ranks, schedule in (
        ("together", 1, ()),
        ("parts", 2, ("rollout.schedule=pipelined", "rollout.parts=2", "placement={rollout: 0, actor: 1}")),
    ):
        cfg = tiny_lm_config(lm_folder, tmp_path / name, *keys, *schedule)
        (tmp_path / name / "reward.py").write_text(reward)
        weights.append(run_roles(language, ranks, cfg))
    (expected,), (row,) = learned(tmp_path / "together"), learned(tmp_path / "parts")
    assert expected["reward/zero_std_ratio"] == 0.5
    assert row["actor/updates_skipped"] == 0
    assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert_same_weights(*weights, 1e-3)


def at_most_8_samples(cfg: Any) -> Any:
    """A job of updates of 8 samples each, whose gradients are divided by at most this number."""
    from phalanx.run.rl import Trainer

    job = language(cfg)
    if isinstance(job, Trainer):
        optimizer = job.job.state.optimizer
        scale = optimizer.scale_gradients

        def scaled(factor: float) -> None:
            assert factor >= 1 / 8
            scale(factor)

        optimizer.scale_gradients = scaled  # type: ignore[method-assign]
    return job


@pytest.mark.full
def test_samples_of_a_dropped_update_do_not_count_in_the_next_step(lm_folder: Path, tmp_path: Path) -> None:
    keys = ("rollout.schedule=pipelined", "rollout.parts=4", "placement={rollout: 0, actor: 1}", "optim.lr=1e-2")
    stop = ("algorithm.early_stop_imp_ratio=1.00001", "actor.loss_agg_mode=seq-mean-token-sum")
    run_roles(at_most_8_samples, 2, tiny_lm_config(lm_folder, tmp_path, *keys, *stop))
    assert read(tmp_path)[0]["actor/updates_skipped"] > 0


STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", "rollout.schedule=one_step_off")


@pytest.mark.full
@pytest.mark.seldom("lm", "lm-lora", "blocks")
def test_one_step_off_goes_on_with_what_was_in_flight(kind: tuple[Job, Job], tmp_path: Path) -> None:
    """A resumed run is bit-identical: the checkpoint has the samples that were already drawn."""
    build, config = kind
    keys = (*STEPS, TWO_AND_TWO, "trainer.test_freq=3")
    whole = run_roles(build, 4, config("whole", *keys))
    rows = learned(tmp_path / "whole")
    ages = [row["rollout/staleness_max"] for row in read(tmp_path / "whole") if "rollout/staleness_max" in row]
    assert ages == [0, 1, 1, 1]
    shutil.rmtree(tmp_path / "whole" / "out" / "checkpoints" / "step_000004")
    assert len(list((tmp_path / "whole" / "out" / "checkpoints" / "step_000002").glob("*in_flight*"))) == 2
    again = run_roles(build, 4, config("whole", *keys))
    assert learned(tmp_path / "whole") == rows
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


@pytest.mark.full
def test_samples_in_flight_fit_other_ranks(lm_folder: Path, tmp_path: Path) -> None:
    """Two actor ranks have saved them, and one rank loads them."""
    keys = (*STEPS, "parallel.fsdp_size=1")
    run_roles(language, 4, tiny_lm_config(lm_folder, tmp_path / "a", *keys, TWO_AND_TWO))
    rows = learned(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "out" / "checkpoints" / "step_000004")
    run_roles(language, 3, tiny_lm_config(lm_folder, tmp_path / "a", *keys, "placement={rollout: 0-1, actor: 2}"))
    for row, expected in zip(learned(tmp_path / "a"), rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.full
@pytest.mark.seldom("pictures")
@pytest.mark.parametrize("of", ["texts", "pictures"])
def test_ranks_of_the_actor_share_samples(of: str, lm_folder: Path, qwen_folder: Path, tmp_path: Path) -> None:
    """Those that sample do not. A checkpoint has samples in flight once, for ranks that share them or not."""
    config = partial(tiny_lm_config, lm_folder) if of == "texts" else partial(tiny_config, qwen_folder)
    run_roles(language, 2, config(tmp_path / "one", *STEPS, "placement={rollout: 0, actor: 1}", "optim.eps=1e-3"))
    shared = (*STEPS, TWO_AND_TWO, "optim.eps=1e-3", "parallel.ulysses_sequence_parallel_size=2")
    run_roles(language, 4, config(tmp_path / "two", *shared))
    shutil.rmtree(tmp_path / "two" / "out" / "checkpoints" / "step_000004")
    assert len(list((tmp_path / "two" / "out" / "checkpoints" / "step_000002").glob("*in_flight*"))) == 1
    run_roles(language, 4, config(tmp_path / "two", *shared))
    for row, wanted in zip(learned(tmp_path / "two"), learned(tmp_path / "one"), strict=True):
        for key in row:
            assert row[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key


@pytest.mark.full
def test_samples_in_flight_may_be_dropped(lm_folder: Path, tmp_path: Path) -> None:
    keys = (*STEPS, "rollout.in_flight=drop", "placement={rollout: 0, actor: 1}")
    run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path / "a", *keys))
    checkpoints = tmp_path / "a" / "out" / "checkpoints"
    assert list(checkpoints.glob("*/*in_flight*")) == []
    shutil.rmtree(checkpoints / "step_000004")
    run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path / "a", *keys))
    assert [row["rollout/staleness_max"] for row in read(tmp_path / "a")] == [0, 1, 0, 1]


def test_corrections_of_older_weights(lm_folder: Path, tmp_path: Path) -> None:
    """The ratio between the weights that train and those that sampled is 1 in the first step, and differs later."""
    keys = (*STEPS, "rollout.correction=token_tis", "placement={rollout: 0, actor: 1}")
    run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path / "a", *keys))
    first, *later = read(tmp_path / "a")
    assert "rollout/correction_weight_mean" not in first
    assert all(abs(row["rollout/correction_weight_mean"] - 1) > 1e-6 for row in later)
    assert all(row["actor/first_ratio_error"] == 0 for row in (first, *later))


@pytest.mark.full
def test_new_prompts_are_drawn_where_samples_are(lm_folder: Path, tmp_path: Path) -> None:
    """The rollout ranks do the dynamic sampling; the actor trains on the result."""
    keys = ("rollout.n=2", "rollout.max_num_gen_batches=3")
    run_roles(language, 1, tiny_lm_config(lm_folder, tmp_path / "a", *keys))
    run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path / "b", *keys, "placement={rollout: 0, actor: 1}"))
    assert learned(tmp_path / "a") == learned(tmp_path / "b")


def test_weights_that_are_not_what_was_sent(lm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that change on the way end the job; the rank that notices reports it."""

    def broadcast(group: Any, tensor: torch.Tensor, root: int) -> Any:
        work = send(group, tensor, root)
        if os.environ["RANK"] == "0" and tensor.dtype == torch.uint8 and len(tensor) > 1000:
            work.wait()
            tensor[500] += 1
        return work

    send = link._broadcast_tensor
    monkeypatch.setattr(link, "_broadcast_tensor", broadcast)
    cfg = tiny_lm_config(lm_folder, tmp_path, "placement={rollout: 0, actor: 1}")
    with pytest.raises(
        RankError, match=r"the weights that this rank \(rollout\) received are not those that were sent"
    ):
        run_roles(language, 2, cfg)


def read(folder: Path) -> list[dict[str, Any]]:
    from phalanx.run.telemetry.curves import read_metrics
    from phalanx.run.telemetry.run_folder import METRICS_FILE

    return [row for row in read_metrics(folder / "out" / METRICS_FILE) if row["step"] > 0]


REFUSED = [
    (("rollout.schedule=one_step_off",), "rollout.schedule: one_step_off needs ranks that only sample; see placement"),
    (
        (TWO_AND_TWO, "rollout.schedule=pipelined", "actor.ppo_epochs=2"),
        "rollout.schedule: pipelined trains on each sample once, when it arrives",
    ),
    ((TWO_AND_TWO, "rollout.schedule=pipelined", "rollout.parts=1"), "expected a multiple of 2"),
    (
        (TWO_AND_TWO, "rollout.schedule=pipelined", *ONCE, "rollout.parts=3"),
        "rollout.parts: 3 does not divide the 4 prompts",
    ),
    ((TWO_AND_TWO, "rollout.schedule=pipelined", *ONCE, "algorithm.global_std=true"), "needs all samples of a step"),
    ((TWO_AND_TWO, "rollout.schedule=one_step_off", "rollout.max_staleness=0"), "set rollout.max_staleness to 1"),
    (("placement={rollout: 0-2, actor: 3}",), "placement.rollout: 3 ranks do not divide 4 prompts x rollout.n 4 = 16"),
    (("placement={rollout: 0, inference: 1, actor: 2-3}",), "placement.inference: there are no log-probs to recompute"),
    (("placement={rollout: 0-1, actor: 3}",), "placement: ranks 2 of 4 have no role (rollout 0-1, actor 3)"),
]


@pytest.mark.parametrize(("keys", "expected"), REFUSED, ids=[expected[:40] for _, expected in REFUSED])
def test_what_roles_do_not_allow(
    keys: tuple[str, ...], expected: str, lm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.kinds import check

    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check(tiny_lm_config(lm_folder, tmp_path, *keys))


def test_passes_of_pictures_that_do_not_divide(
    sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.kinds import check

    for name, value in {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    cfg = tiny_config(sd3_folder, tmp_path, "placement={rollout: 0-3, actor: 4}", "rollout.n=3")
    with pytest.raises(
        ConfigError, match="the rollout's passes of 4 samples do not divide the 3 of each of its 4 ranks"
    ):
        check(cfg)
