"""A run that was stopped and resumed equals one that was not, and a damaged checkpoint is never used."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from phalanx.config.flow import FlowRLConfig
from phalanx.run.checkpoint_folder import find
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from tests.helpers.jobs import fit, rows, tiny_config
from tests.helpers.ranks import RankError, run_ranks

LORA = ("model.lora_rank=4", "actor.ema.decay=0.9")
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", "optim.lr_scheduler=cosine")


def stop_after(folder: Path, step: int) -> None:
    """Make the run look as if it had been killed after `step`: remove later checkpoints, but keep later rows."""
    for checkpoint in (folder / "out" / "checkpoints").glob("step_*"):
        if checkpoint.name > f"step_{step:06d}":
            shutil.rmtree(checkpoint)


@pytest.mark.seldom("1-1-lora", "1-1-full", "2-2-full")
@pytest.mark.full
@pytest.mark.parametrize("kind", [LORA, ("actor.ema.decay=0.9",)], ids=["lora", "full"])
@pytest.mark.parametrize(("world", "fsdp"), [(1, 1), (2, 2)])
def test_resume_repeats_bit_for_bit(
    world: int, fsdp: int, kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path
) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *kind, *STEPS, f"parallel.fsdp_size={fsdp}")
    unkilled = run_ranks(fit, world, cfg)[0]
    wanted = rows(tmp_path / "out")
    assert [row["step"] for row in wanted] == [1, 2, 3, 4]
    stop_after(tmp_path, 2)
    resumed = run_ranks(fit, world, cfg)[0]
    assert rows(tmp_path / "out") == wanted
    assert unkilled.keys() == resumed.keys()
    for name, value in unkilled.items():
        assert torch.equal(value, resumed[name]), name


# each way to offload, on each way to shard that it is for
OFFLOADS = [
    (1, "optimizer_offload"),
    (2, "optimizer_offload"),
    (2, "param_offload"),
    (2, "optimizer_offload param_offload"),
]


@pytest.mark.full
@pytest.mark.seldom(
    "1-optimizer_offload-lora",
    "2-optimizer_offload-full",
    "2-param_offload-full",
    "2-param_offload-lora",
    "2-optimizer_offload param_offload-lora",
    "2-optimizer_offload param_offload-full",
)
@pytest.mark.parametrize("kind", [LORA, ("actor.ema.decay=0.9",)], ids=["lora", "full"])
@pytest.mark.parametrize(("fsdp", "offloads"), OFFLOADS)
def test_offloaded_states_are_saved_and_resumed(
    fsdp: int, offloads: str, kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path
) -> None:
    keys = [f"parallel.{name}=true" for name in offloads.split()]
    cfg = tiny_config(sd3_folder, tmp_path, *kind, *STEPS, f"parallel.fsdp_size={fsdp}", *keys)
    unkilled = run_ranks(fit, 2, cfg)[0]
    wanted = rows(tmp_path / "out")
    assert [row["step"] for row in wanted] == [1, 2, 3, 4]
    stop_after(tmp_path, 2)
    resumed = run_ranks(fit, 2, cfg)[0]
    assert rows(tmp_path / "out") == wanted
    for name, value in unkilled.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.seldom("4-2-1", "2-4-2")
@pytest.mark.full
@pytest.mark.parametrize(("before", "after", "fsdp"), [(1, 2, 2), (4, 2, 1), (2, 4, 2)])
def test_resume_on_other_ranks(before: int, after: int, fsdp: int, sd3_folder: Path, tmp_path: Path) -> None:
    fixed = ("rollout.micro_batch_size_per_gpu=4", "actor.ppo_micro_batch_size_per_gpu=2")
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, *fixed, f"parallel.fsdp_size={min(before, 2)}")
    run_ranks(fit, before, cfg)
    wanted = rows(tmp_path / "out")
    stop_after(tmp_path, 2)
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, *fixed, f"parallel.fsdp_size={fsdp}")
    run_ranks(fit, after, cfg)
    for row, expected in zip(rows(tmp_path / "out"), wanted, strict=True):
        assert row.keys() == expected.keys()
        for key in ("reward/mean", "actor/grad_norm", "actor/lr"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.full
def test_only_what_is_trained_is_saved(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, "trainer.max_checkpoints=1")
    weights = run_ranks(fit, 2, cfg)[0]
    assert all("lora_" in name for name in weights)
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()  # the newest one is kept, and no .tmp
    assert checkpoint.name == "step_000004"
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    expected = {f"{part}.{name}" for name in weights for part in ("model", "ema")}
    expected |= {f"optim.{name}.{key}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(saved) == expected


@pytest.mark.full
def test_damaged_checkpoints_are_passed_over(
    sd3_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, "trainer.save_freq=1", "trainer.max_checkpoints=4")
    run_ranks(fit, 1, cfg)
    root = tmp_path / "out" / "checkpoints"
    assert find(root) == root / "step_000004"
    data = next((root / "step_000004").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    (root / "step_000003" / "meta.json").write_text("{")
    (root / "step_000002").rename(root / "step_000002.tmp")
    with caplog.at_level(logging.WARNING):
        assert find(root) == root / "step_000001"
    size = len(data.read_bytes())
    assert f"step_000004 is skipped: {data.name} has {size} bytes of {size + 100}" in caplog.text
    assert "step_000003 is skipped: meta.json is damaged, or of another program" in caplog.text
    assert "step_000002.tmp is skipped: it was never finished" in caplog.text
    wanted = rows(tmp_path / "out")
    run_ranks(fit, 1, cfg)  # goes on from step 1
    assert rows(tmp_path / "out") == wanted


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def loud_fit(cfg: FlowRLConfig) -> None:
    """`fit`, with what it says printed as in a task."""
    logging.basicConfig(force=True)
    logging.getLogger("phalanx").setLevel(logging.INFO)
    fit(cfg)


@pytest.mark.full
def test_a_flipped_bit_is_noticed(sd3_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a file of rank 1: its size is right, and torch would load it without an error."""
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, "trainer.save_freq=1", "trainer.max_checkpoints=4")
    run_ranks(fit, 2, cfg)
    wanted = rows(tmp_path / "out")
    root = tmp_path / "out" / "checkpoints"
    flip_a_byte(root / "step_000004" / "__1_0.distcp")
    assert find(root) == root / "step_000004"
    refused = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, f"trainer.resume={root}/step_000004")
    with pytest.raises(RankError) as error:
        run_ranks(fit, 2, refused)
    problem = "the checksum of __1_0.distcp differs"
    assert f"trainer.resume: '{root}/step_000004' cannot be used: {problem}" in str(error.value)
    capfd.readouterr()
    run_ranks(loud_fit, 2, cfg)
    said = capfd.readouterr().err
    assert f"checkpoint {root}/step_000004 is skipped: {problem}" in said
    assert f"resuming from {root}/step_000003: step 3 of 4" in said
    assert rows(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    "meta", ['{"step": 9}', "[]", '{"progress": {"epoch": 1}, "signature": {}, "files": {}}', "\0"]
)
def test_a_foreign_checkpoint_is_passed_over(meta: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step_000009").mkdir()
    (tmp_path / "step_000009" / "meta.json").write_text(meta)
    with caplog.at_level(logging.WARNING):
        assert find(tmp_path) is None
    assert "step_000009 is skipped: meta.json is damaged, or of another program" in caplog.text


@pytest.mark.full
def test_other_settings_are_told(sd3_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also if the earlier configuration cannot be read. A LoRA on another base is refused."""
    keys = ("model.lora_rank=4", "model.lora_init=pissa", "trainer.save_freq=1")
    run_ranks(loud_fit, 1, tiny_config(sd3_folder, tmp_path, *keys, "trainer.total_training_steps=1"))
    shutil.copy(tmp_path / "prompts.txt", tmp_path / "other.txt")
    another = f"data.train_files=[{tmp_path}/other.txt]"
    run_ranks(loud_fit, 1, tiny_config(sd3_folder, tmp_path, *keys, another, "optim.lr=0.002"))
    before = tmp_path / "out" / "config.yaml"
    line = f"data.train_files ['{tmp_path}/prompts.txt'] -> ['{tmp_path}/other.txt'], optim.lr 0.001 -> 0.002"
    assert capfd.readouterr().err.count(f"other settings than in {before}: {line}\n") == 1
    before.write_text("a: [b")
    more = tiny_config(sd3_folder, tmp_path, *keys, another, "trainer.total_training_steps=3")
    run_ranks(loud_fit, 1, more)
    assert f"the settings of the earlier run cannot be read: {before}:1:6: not valid YAML" in capfd.readouterr().err
    for changed in ("trainer.seed=1", "model.lora_init=gaussian"):
        with pytest.raises(RankError, match=r"holds lora_init pissa of trainer\.seed=0, this run has"):
            run_ranks(loud_fit, 1, tiny_config(sd3_folder, tmp_path, *keys, another, changed))


@pytest.mark.full
def test_resume_refuses_another_run(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS)
    run_ranks(fit, 1, cfg)
    folder = tmp_path / "out" / "checkpoints" / "step_000004"
    other = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, "model.lora_rank=2")
    with pytest.raises(RankError) as error:
        run_ranks(fit, 2, other)
    assert f"trainer.resume: {folder} holds trained parameters" in str(error.value)
    assert "give another trainer.output_dir, or trainer.resume=never" in str(error.value)
    missing = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, f"trainer.resume={tmp_path}/nowhere")
    with pytest.raises(RankError, match="nowhere' cannot be used: no such folder"):
        run_ranks(fit, 1, missing)
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        lora = tmp_path / name.partition(".")[0]
        lora.mkdir()
        (lora / name).touch()
        given = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS, f"trainer.resume={lora}")
        with pytest.raises(RankError, match=f"it is a LoRA, not a checkpoint; model.lora_path={lora} starts a run"):
            run_ranks(fit, 1, given)


@pytest.mark.full
def test_a_finished_run_trains_no_more(sd3_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It logs that; another run can only start from its checkpoint if that run has more steps."""
    steps = (*LORA, "trainer.save_freq=1", "trainer.total_training_steps=1")
    run_ranks(loud_fit, 1, tiny_config(sd3_folder, tmp_path, *steps))
    line = "no step is left to train: all 1 are done already"
    assert line not in capfd.readouterr().err
    folder = tmp_path / "out" / "checkpoints" / "step_000001"
    for resume in ("auto", str(folder)):
        run_ranks(loud_fit, 1, tiny_config(sd3_folder, tmp_path, *steps, f"trainer.resume={resume}"))
        assert capfd.readouterr().err.count(line) == 1
    other = (*steps, f"trainer.resume={folder}", f"trainer.output_dir={tmp_path}/other")
    refused = f"trainer.resume: {folder} was saved after step 1, and this run ends after step 1; expected an earlier"
    with pytest.raises(RankError, match=refused):
        run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *other))
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *other, "trainer.total_training_steps=2"))
    assert [row["step"] for row in read_metrics(tmp_path / "other" / METRICS_FILE)] == [2]


@pytest.mark.full
def test_a_new_run_sets_old_checkpoints_aside(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, *STEPS)
    run_ranks(fit, 1, cfg)
    again = (*LORA, "trainer.save_freq=2", "trainer.resume=never", "trainer.max_checkpoints=1", "trainer.seed=1")
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *again))
    root = tmp_path / "out" / "checkpoints"
    assert sorted(f.name for f in root.iterdir()) == ["old_step_000002", "old_step_000004", "step_000002"]
    assert find(root) == root / "step_000002"


def parts(cfg: FlowRLConfig) -> None:
    from phalanx.distributed.fsdp import as_part_of, local
    from phalanx.run.rl import build

    for p in build(cfg).policy.trained.parameters.values():
        part = local(p).detach().clone()
        whole = as_part_of(part, p)
        assert whole.shape == p.shape
        assert local(whole).data_ptr() == part.data_ptr()  # so that a load fills the part itself


@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_load_fills_the_parts_themselves(fsdp: int, sd3_folder: Path, tmp_path: Path) -> None:
    run_ranks(parts, 2, tiny_config(sd3_folder, tmp_path, f"parallel.fsdp_size={fsdp}"))
