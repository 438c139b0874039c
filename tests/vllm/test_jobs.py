"""Real torchruns with a judge: what they write, and that nothing of vLLM is left when they end, well or badly."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, checksums, kill, rows
from tests.helpers.jobs import base_overrides, tiny_config
from tests.helpers.judged import settings
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks, two_nodes

TERMS = ("{name: vlm_ocr}", "{name: ocr, weight: 0.5, kwargs: {detect: false}}", "{name: unified_reward, weight: 0.25}")
TASK = "tasks/train_flowgrpo.py"


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def judged(judge: Path, tp: int = 2) -> list[str]:
    # the first answer of an engine may take its time on two busy cores
    return [*settings(judge, *TERMS), f"reward.model.tensor_parallel_size={tp}", "parallel.timeout_s=60"]


@pytest.mark.long
def test_two_replicas_on_four_ranks(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """A judge at TP 2 in two groups beside OCR; the run is the same at TP 1 on two nodes of two ranks."""
    before = shared_memory()
    env = {"NPROC_PER_NODE": "4"}
    held_out = tmp_path / "held_out.txt"
    held_out.write_text('"red" in neon\na "green" door\n"blue"\n')
    validation = (f"data.val_files=[{held_out}]", "trainer.test_freq=2")
    with Job(sd3_folder, tmp_path / "one", *judged(judge_model), *validation, env=env) as job:
        assert job.wait(250) == 0, job.said
    one = rows(tmp_path / "one")
    assert [row["step"] for row in one] == [0, 1, 2]
    for row in one[1:]:
        parts = row["reward/vlm_ocr"] + 0.5 * row["reward/ocr"] + 0.25 * row["reward/unified_reward"]
        assert abs(row["reward/mean"] - parts) < 1e-5
        assert 0 < row["reward/vlm_ocr"] <= 1 and 0 <= row["reward/vlm_ocr_unparseable"] <= 1
    assert 0 <= one[0]["val/held_out/reward/vlm_ocr"] <= 1
    assert '"time/judge": ' in (tmp_path / "one" / "out" / "metrics.jsonl").read_text()
    assert shared_memory() == before and job.processes() == {}

    tiny_config(sd3_folder, tmp_path / "two")  # writes the prompts
    args = [TASK, *base_overrides(sd3_folder, tmp_path / "two"), *judged(judge_model, tp=1), *validation]
    done = two_nodes([*args, "parallel.fsdp_size=4", "rollout.micro_batch_size_per_gpu=4"], nproc=2, timeout=250)
    assert [node.returncode for node in done] == [0, 0], done[0].stderr + done[1].stderr
    assert rows(tmp_path / "two") == one
    assert shared_memory() == before


@pytest.mark.long
@pytest.mark.parametrize("placement", ["colocate", "ranks 2-3"])
def test_a_rank_killed_while_it_scores_ends_the_job(
    sd3_folder: Path, judge_model: Path, tmp_path: Path, placement: str
) -> None:
    before = shared_memory()
    env = {"NPROC_PER_NODE": "4", "PHASE_S": "0.2"}
    many = (f"reward.model.placement={placement}", "trainer.total_training_steps=50")
    with Job(sd3_folder, tmp_path, *judged(judge_model), *many, env=env) as job:
        pid = job.until(lambda: job.phase(3)[0] if job.phase(3)[1:] == (2, "judge") else 0, timeout=200)
        kill(pid, signal.SIGKILL)
        assert job.wait() != 0
        # by another rank in a collective, or by its watch
        assert job.said.count("no word from rank 3 on ") + job.said.count("lost rank 3 on ") == 1
        assert job.processes() == {}
    assert shared_memory() == before


def test_a_killed_language_model_goes_on(lm_folder: Path, tmp_path: Path) -> None:
    """An engine in each rank, and a LoRA over shards: after SIGKILL of a rank that samples, the launcher starts all again,
    and the run is as if nothing had been, to the last bit.
    """
    before = shared_memory()
    steps = ("trainer.total_training_steps=4", "trainer.save_freq=2", "optim.lr=1e-2")
    keys = (
        "rollout.engine=vllm",
        "model.lora_rank=4",
        "rollout.lora_sync=adapter",
        "parallel.fsdp_size=2",
        "data.max_prompt_length=200",
        *steps,
    )
    env = {"MAX_RESTARTS": "1", "PHASE_S": "0.2"}
    with Job(lm_folder, tmp_path, *keys, "parallel.timeout_s=60", env=env, lm=True) as job:
        job.until(lambda: job.phase(1)[1:] == (3, "rollout"), timeout=200)
        old = set(job.ranks())
        kill(job.phase(1)[0], signal.SIGKILL)
        begin = time.monotonic()
        job.until(lambda: old.isdisjoint(job.ranks()))
        gone_after = time.monotonic() - begin
        assert job.wait(200) == 0, job.said
        # by the other rank in a collective, or by its watch
        assert job.said.count("no word from rank 1 on ") + job.said.count("lost rank 1 on ") == 1
        assert "/step_000002: step 2 of 4" in job.said
        assert job.processes() == {}
    assert shared_memory() == before
    print(f"all ranks gone after {gone_after:.1f} s")
    run_ranks(fit, 2, tiny_lm_config(lm_folder, tmp_path / "whole", *keys), timeout=200)
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert checksums(tmp_path, 4) == checksums(tmp_path / "whole", 4)


def test_what_cannot_be_used_is_told_in_one_line(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    with Job(sd3_folder, tmp_path, *judged(judge_model, tp=3), env={"NPROC_PER_NODE": "4"}) as job:
        assert job.wait() != 0
    assert (  # before any process group
        "error: reward.model.tensor_parallel_size: 3 does not divide the 4 ranks of a node; "
        "nearest that does: 2 or 4\n" in job.said
    )
