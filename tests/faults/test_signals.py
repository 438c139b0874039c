"""A job that is told to stop saves its last step and says so; the same command resumes as if nothing had happened."""

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.tools.board.runs import main, states
from tests.faults.jobs import Job, checkpoints, kill, rows, steps
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import run_ranks

SETTINGS = ("trainer.save_freq=50", "model.lora_rank=4", "actor.ema.decay=0.9")
VALIDATION = ("trainer.test_freq=2", "trainer.val_before_train=false")
MAY_TAKE_S = 120  # from the signal to the end; torchrun allows its ranks 30 s


def unstopped(model: Path, folder: Path, total: int, *overrides: str) -> list[dict[str, float]]:
    """The rows of the same job without interruption."""
    fixed = ("rollout.micro_batch_size_per_gpu=4", f"trainer.total_training_steps={total}")
    run_ranks(fit, 2, tiny_config(model, folder, *SETTINGS, *overrides, *fixed))
    return rows(folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "status", "phase"),
    [
        pytest.param(signal.SIGTERM, 143, "rollout", id="SIGTERM in a rollout"),
        pytest.param(signal.SIGINT, 130, "update", id="SIGINT in an update", marks=pytest.mark.long),
    ],
)
def test_a_stopped_job_goes_on(
    number: signal.Signals, status: int, phase: str, sd3_folder: Path, tmp_path: Path
) -> None:
    env = {"PHASE_S": "0.1"}
    with Job(sd3_folder, tmp_path, *SETTINGS, "trainer.total_training_steps=500", env=env) as job:
        job.until(lambda: job.phase(0)[1] >= 2 and job.phase(0)[2] == phase)
        job.process.send_signal(number)
        assert job.wait(MAY_TAKE_S) == status
        done = steps(tmp_path)[-1]
        kept = tmp_path / "out" / "checkpoints" / f"step_{done:06d}"
        # train.sh hands SIGINT on as SIGTERM: torchrun would not wait for a checkpoint at a second Ctrl-C
        line = f"stopped by SIGTERM after step {done} of 500; the same command resumes from {kept}"
        assert job.said.splitlines().count(line) == 1
    assert checkpoints(tmp_path) == [kept.name]
    total = done + 2
    written = kept.stat().st_mtime_ns
    unstopped(sd3_folder, tmp_path, total)  # it resumes from the last checkpoint
    assert checkpoints(tmp_path) == [kept.name, f"step_{total:06d}"] and kept.stat().st_mtime_ns == written
    assert rows(tmp_path) == unstopped(sd3_folder, tmp_path / "whole", total)


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all(sd3_folder: Path, tmp_path: Path) -> None:
    """Not to the launcher, and during a step that is longer than a rank would wait for a word from a dead one: the step
    is dropped, and the one before it is saved.
    """
    settings = (*SETTINGS, "trainer.total_training_steps=500", "parallel.heartbeat_timeout_s=10")
    with Job(sd3_folder, tmp_path, *settings, env={"PHASE_S": "6"}) as job:
        job.until(lambda: job.phase(0)[1:] == job.phase(1)[1:] == (1, "update"))
        kill(job.phase(0)[0], signal.SIGTERM)
        assert job.wait(MAY_TAKE_S) == 143, job.said
        assert "Traceback" not in job.said and "no word" not in job.said and "lost" not in job.said
        kept = tmp_path / "out" / "checkpoints" / "step_000001"
        line = f"stopped by SIGTERM after step 1 of 500; the same command resumes from {kept}"
        assert job.said.splitlines()[-1] == line
    assert (steps(tmp_path), checkpoints(tmp_path)) == ([1], [kept.name])


@pytest.mark.long
def test_phalanx_stop_ends_a_job_that_would_be_started_again(sd3_folder: Path, tmp_path: Path) -> None:
    """The launcher may restart failed ranks, but not those that were asked to stop. The request that remains in the
    folder does not stop the next start.
    """
    out = tmp_path / "out"
    env = {"PHASE_S": "0.1", "MAX_RESTARTS": "2"}
    with Job(sd3_folder, tmp_path, *SETTINGS, "trainer.total_training_steps=500", env=env) as job:
        job.until(lambda: job.phase(0)[1] >= 2)
        assert main("stop", [str(out), "--no-wait"]) == 0
        request = (out / "stop.json").read_text()
        assert job.wait(MAY_TAKE_S) == 143
        done = steps(tmp_path)[-1]
        kept = out / "checkpoints" / f"step_{done:06d}"
        line = f"stopped by phalanx stop after step {done} of 500; the same command resumes from {kept}"
        assert job.said.splitlines().count(line) == 1 and job.said.count("joining 2 ranks") == 1
    assert states([out]) == {out: "stopped"} and not (out / "stop.json").exists()
    (out / "stop.json").write_text(request)
    total = f"trainer.total_training_steps={done + 2}"
    with Job(sd3_folder, tmp_path, *SETTINGS, total, env={"PHASE_S": "1.5"}) as job:
        assert job.wait() == 0, job.said
    assert steps(tmp_path)[-1] == done + 2 and states([out]) == {out: "finished"}
    assert "stopped by phalanx stop" in (out / "ranks" / "1.jsonl").read_text()


@pytest.mark.long
@pytest.mark.full
def test_a_job_stopped_in_validation_still_has_the_steps_row(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text('the word "eta"\n"theta" in red\n')
    validation = (*VALIDATION, f"data.val_files=[{tmp_path}/held_out.txt]")
    with Job(
        sd3_folder, tmp_path, *SETTINGS, *validation, "trainer.total_training_steps=500", env={"PHASE_S": "0.3"}
    ) as job:
        job.until(lambda: job.phase(0)[1:] == (4, "validation"))
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(MAY_TAKE_S) == 143
    assert (steps(tmp_path), checkpoints(tmp_path)) == ([1, 2, 3], ["step_000004"])
    with Job(sd3_folder, tmp_path, *SETTINGS, *validation, "trainer.total_training_steps=5") as job:
        assert job.wait() == 0, job.said
    wanted = unstopped(sd3_folder, tmp_path / "whole", 5, *validation)
    assert rows(tmp_path) == wanted
    assert [row["step"] for row in wanted if "val/held_out/reward/mean" in row] == [2, 4, 5]


@pytest.mark.full
def test_a_job_whose_output_nobody_reads_still_stops_in_order(sd3_folder: Path, tmp_path: Path) -> None:
    """After `sh train.sh ... | head -n 1`, all output fails; the job is then stopped by SIGTERM."""
    settings = (*SETTINGS, "trainer.total_training_steps=500", "trainer.logger=[console]")
    pipe = ["sh", "-c", '"$@" 2>&1 | head -n 1', "sh"]
    with Job(sd3_folder, tmp_path, *settings, env={"PHASE_S": "0.1"}, prefix=pipe) as job:
        job.until(lambda: steps(tmp_path)[2:])
        (launcher,) = (pid for pid, line in job.processes().items() if line.startswith("sh train.sh"))
        kill(launcher, signal.SIGTERM)
        begin = time.monotonic()
        while job.processes():
            assert time.monotonic() - begin < MAY_TAKE_S
            time.sleep(0.1)
    assert checkpoints(tmp_path) == [f"step_{steps(tmp_path)[-1]:06d}"]


@pytest.mark.full
def test_sigusr1_prints_stacks_and_ends_nothing(sd3_folder: Path, tmp_path: Path) -> None:
    """Sent to one rank, it prints the stacks of all ranks; sent to all processes, as by `scancel --signal=USR1`,
    train.sh and torchrun receive it, too.
    """
    settings = (*SETTINGS, "trainer.total_training_steps=500")
    with Job(sd3_folder, tmp_path, *settings, env={"PHASE_S": "0.1"}) as job:
        job.until(lambda: steps(tmp_path))
        kill(job.phase(0)[0], signal.SIGUSR1)
        job.until(lambda: f"stacks of rank 1 on {socket.gethostname()}:" in job.said)
        job.until(lambda: job.said.count("Thread 0x") >= 4)
        before: Callable[[], int] = lambda: steps(tmp_path)[-1]  # noqa: E731
        done, stacks = before(), job.said.count("Current thread 0x")
        for pid in job.processes():
            kill(pid, signal.SIGUSR1)
        job.until(lambda: job.said.count("Current thread 0x") > stacks and before() > done + 2)
