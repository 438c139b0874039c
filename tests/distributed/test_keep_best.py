"""The best checkpoint by a metric stays beside the newest ones, over resumes, on every layout and in every kind of job."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.messages import ConfigError
from phalanx.config.parallel import ParallelConfig
from phalanx.config.run import TrainerConfig
from phalanx.config.tasks import ExportConfig
from phalanx.run.checkpoint import Checkpointer, Progress
from phalanx.run.checkpoint_folder import best_checkpoint, named_folder
from phalanx.run.keep_best import judgement
from phalanx.run.rules import load_config
from phalanx.run.world import start_world
from phalanx.tools.export import Export
from tests.distributed.test_checkpoints import contents
from tests.distributed.test_joint import fit as fit_joint
from tests.distributed.test_joint import joint_config
from tests.distributed.test_roles import TWO_AND_TWO, language
from tests.distributed.test_stops import flow
from tests.distributed.test_sweep import train as sweep
from tests.helpers.jobs import fit, rows, tiny_config
from tests.helpers.lm import tiny_lm_config, tiny_sft_config
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.roles import run_roles

METRIC = "val/held_out/reward/mean"
SAVES = ("trainer.save_freq=1", "trainer.max_checkpoints=1", "trainer.test_freq=1", "model.lora_rank=4")
KEEP = f"trainer.keep_best={METRIC}"


def names(root: Path) -> list[str]:
    return sorted(folder.name for folder in root.iterdir())


def saved(folder: Path, trainer: TrainerConfig, values: list[float], first: int) -> list[list[str]]:
    """Save a checkpoint for each value of the metric x, from step `first`; returns the folders after each save."""
    world, states = start_world(ParallelConfig()), []
    writer = Checkpointer(folder, world, {}, trainer.max_checkpoints)
    for step, value in enumerate(values, first):
        writer.save(contents(world, value), Progress(step=step), None, judgement(trainer, {"x": value}))
        writer.wait()
        torch.distributed.barrier()
        states.append(names(writer.root))
        torch.distributed.barrier()
    return states


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_better_one_replaces_the_best_and_an_equal_one_does_not(ranks: int, mode: str, tmp_path: Path) -> None:
    sign = 1 if mode == "max" else -1
    trainer = TrainerConfig(keep_best="x", keep_best_mode=mode, max_checkpoints=1)
    values = [sign * value for value in (0.2, 0.9, 0.9, 0.5, math.nan)]
    for states in run_ranks(saved, ranks, tmp_path, trainer, values, 1):
        assert [{int(name[-1]) for name in state} for state in states] == [{1}, {2}, {2, 3}, {2, 4}, {2, 5}]
    # the next start remembers the best so far
    for states in run_ranks(saved, ranks, tmp_path, trainer, [sign * 0.8, sign * 1.0, sign * 0.1], 6):
        assert [{int(name[-1]) for name in state} for state in states] == [{2, 6}, {7}, {7, 8}]
    root = tmp_path / "checkpoints"
    assert named_folder(str(tmp_path / "best")) == named_folder(str(root / "best")) == root / "step_000007"
    # another metric begins anew, and without one only the newest are kept
    other = TrainerConfig(keep_best="y", max_checkpoints=1)
    assert run_ranks(saved, ranks, tmp_path, other, [0.0], 9)[0] == [["step_000009"]]
    assert best_checkpoint(root) is None and named_folder(str(tmp_path / "best")) == tmp_path / "best"


def best_step(folder: Path, key: str, mode: str = "max") -> int:
    """The step with the best value in metrics.jsonl, the first of several."""
    choose = max if mode == "max" else min
    return int(choose((row for row in rows(folder) if row["step"]), key=lambda row: row[key])["step"])


def kept_steps(folder: Path) -> set[int]:
    return {int(name.removeprefix("step_")) for name in names(folder / "checkpoints")}


@pytest.mark.quick("2-1")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_keeps_its_best_over_a_resume_on_other_ranks(
    before: int, after: int, sd3_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "held_out.txt").write_text("alpha\nbeta\n")
    fixed = ("rollout.micro_batch_size_per_gpu=2", f"data.val_files=[{tmp_path}/held_out.txt]")
    keys = (*SAVES, KEEP, "trainer.keep_best_mode=min", "actor.ema.decay=0.5", *fixed)
    for ranks, steps in ((before, 2), (after, 5)):
        sizes = (f"parallel.fsdp_size={ranks}", f"trainer.total_training_steps={steps}")
        run_ranks(fit, ranks, tiny_config(sd3_folder, tmp_path, *keys, *sizes))
        best = best_step(tmp_path / "out", METRIC, "min")
        assert kept_steps(tmp_path / "out") == {best, steps}
    place = tmp_path / "lora"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path}/out/best", f"output_dir={place}"])).run()
    assert (place / "pytorch_lora_weights.safetensors").is_file()
    # a run may also start from the best of another
    again = (*keys, f"trainer.resume={tmp_path}/out/best", f"trainer.output_dir={tmp_path}/again")
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *again, "trainer.total_training_steps=6"))
    assert next(iter(rows(tmp_path / "again")))["step"] == best + 1


@pytest.mark.full
def test_a_checkpoint_that_a_signal_caused_has_no_value(sd3_folder: Path, tmp_path: Path) -> None:
    """Learning rates of a cosine fall, so that the first checkpoint is the best; the signal comes in step 4."""
    keys = ("trainer.save_freq=2", "trainer.max_checkpoints=1", "trainer.total_training_steps=5", "model.lora_rank=4")
    cfg = tiny_config(sd3_folder, tmp_path, *keys, "trainer.keep_best=actor/lr", "optim.lr_scheduler=cosine")
    for end, *_ in run_ranks(flow, 2, cfg, 13):
        assert end.startswith("stopped by SIGTERM after step 3 of 5; the same command resumes from ")
    assert kept_steps(tmp_path / "out") == {2, 3}
    assert named_folder(str(tmp_path / "out" / "best")).name == "step_000002"
    run_ranks(flow, 2, cfg, 0)
    assert kept_steps(tmp_path / "out") == {2, 5}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_run_of_a_sweep_keeps_and_exports_its_best(ranks: int, sd3_folder: Path, tmp_path: Path) -> None:
    keys = (*SAVES[:2], *SAVES[3:], "trainer.total_training_steps=3", "trainer.export_each_save=true")
    best = ("trainer.keep_best=reward/mean", "sweep.optim.lr=[1e-3,4e-3]", "parallel.fsdp_size=1")
    cfg = tiny_config(sd3_folder, tmp_path, *keys, *best)
    run_ranks(sweep, ranks, cfg)
    for name in cfg.runs:
        folder = tmp_path / "out" / name
        assert kept_steps(folder) == {best_step(folder, "reward/mean"), 3}
        assert names(folder / "export") == ["step_000001", "step_000002", "step_000003"]
        for export in (folder / "export").iterdir():
            assert (export / "pytorch_lora_weights.safetensors").is_file()


def supervise(cfg: Any) -> None:
    from phalanx.run.block_diffusion_sft import build

    build(cfg).run()


def run(cfg: Any) -> None:
    from phalanx.run.rl import build

    build(cfg).run()


@pytest.mark.full
def test_joint_and_supervised_jobs_and_ranks_with_roles(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    of_joint = ("trainer.keep_best=val/prompts_original/reward/mean", "painter.model.lora_rank=4")
    keys = ("trainer.save_freq=1", "trainer.test_freq=1", "trainer.max_checkpoints=1", "trainer.total_training_steps=3")
    run_ranks(fit_joint, 1, joint_config(lm_folder, sd3_folder, tmp_path / "joint", *keys, *of_joint))
    best = best_step(tmp_path / "joint" / "out", "val/prompts_original/reward/mean")
    assert kept_steps(tmp_path / "joint" / "out") == {best, 3}
    of_roles = ("trainer.keep_best=reward/mean", "trainer.keep_best_mode=min", TWO_AND_TWO, "parallel.fsdp_size=1")
    run_roles(language, 4, tiny_lm_config(lm_folder, tmp_path / "roles", *keys[::2], keys[3], *of_roles))
    best = best_step(tmp_path / "roles" / "out", "reward/mean", "min")
    assert kept_steps(tmp_path / "roles" / "out") == {best, 3}


@pytest.mark.full
def test_a_supervised_job(blocks_folder: Path, tmp_path: Path) -> None:
    keys = ("trainer.save_freq=1", "trainer.max_checkpoints=1", "trainer.total_training_steps=3")
    loss = ("trainer.keep_best=train/loss", "trainer.keep_best_mode=max")
    run_ranks(supervise, 2, tiny_sft_config(blocks_folder, tmp_path, *keys, *loss))
    assert kept_steps(tmp_path / "out") == {best_step(tmp_path / "out", "train/loss"), 3}


def test_a_metric_that_never_comes_is_one_line(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("alpha\n")
    keys = (*SAVES, f"data.val_files=[{tmp_path}/held_out.txt]")

    def error(metric: str) -> str:
        with pytest.raises(RankError) as caught:
            run_ranks(run, 2, tiny_config(sd3_folder, tmp_path, *keys, f"trainer.keep_best={metric}"))
        return str(caught.value)

    # the name of a set is known before any model is loaded, that of a term at the first validation
    assert "trainer.keep_best: val/test/reward/mean is of none of the validation sets, held_out" in error(
        "val/test/reward/mean"
    )
    assert not (tmp_path / "out").exists()
    text = error("val/held_out/reward/maen")
    assert "JobError: trainer.keep_best: step 0 has no metric val/held_out/reward/maen; did you mean" in text
    assert METRIC in text and rows(tmp_path / "out") == []
    # a metric of training is missing at the first save, which is written
    text = error("reward/maen")
    assert "JobError: trainer.keep_best: step 1 has no metric reward/maen; did you mean reward/mean" in text
    assert kept_steps(tmp_path / "out") == {1}
    with pytest.raises(ValueError, match=r"checkpoint: .*no checkpoint of .*/out has a value of the metric"):
        Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path}/out/best"]))
    with pytest.raises(ConfigError, match=r"is measured every 2 steps .* expected trainer.save_freq, 1, to be a mult"):
        tiny_config(sd3_folder, tmp_path, *keys, KEEP, "trainer.test_freq=2")
