"""kill -9 of random ranks at random moments: the launcher starts the ranks again, and the run is as if nothing had been.

PHALANX_KILLS says how many in one run (2; `make faults` takes 20), PHALANX_KILLS_SEED which.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, kill, rows
from tests.faults.task import PHASES
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import run_ranks

KILLS = int(os.environ.get("PHALANX_KILLS", "2"))
SEED = int(os.environ.get("PHALANX_KILLS_SEED", "0"))
STEPS = 10 + 2 * KILLS
SETTINGS = (
    *("model.lora_rank=4", "actor.ema.decay=0.9", "trainer.save_freq=2", "trainer.test_freq=4"),
    f"trainer.total_training_steps={STEPS}",
    "rollout.micro_batch_size_per_gpu=4",
)


def writing(job: Job) -> bool:
    """True while a checkpoint is being written."""
    return any((job.folder / "out" / "checkpoints").glob("step_*.tmp"))


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(600 + 90 * KILLS)
def test_random_kills(sd3_folder: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    (tmp_path / "held_out.txt").write_text('the word "eta"\n"theta" in red\n')
    settings = (*SETTINGS, f"data.val_files=[{tmp_path}/held_out.txt]")
    run_ranks(fit, 2, tiny_config(sd3_folder, tmp_path / "whole", *settings))
    env = {"MAX_RESTARTS": str(KILLS), "PHASE_S": "0.05"}
    killed = []
    with Job(sd3_folder, tmp_path, *settings, env=env) as job:
        for number in range(KILLS):
            rank, phase = chance.randrange(2), (*PHASES, "checkpoint write")[number % (len(PHASES) + 1)]
            old = {pid for pid, _, _ in killed}
            # ranks of this start that have done a step or two since, so that the run comes to its end
            job.until(lambda: len(set(job.ranks()) - old) == 2 and job.phase(0)[0] in job.ranks())  # noqa: B023
            start = job.phase(rank)[1]
            later = start + chance.randrange(3)
            if phase == "checkpoint write":
                job.until(lambda: writing(job))
            else:
                job.until(lambda: job.phase(rank)[1] >= later and job.phase(rank)[2] == phase)  # noqa: B023
            time.sleep(chance.uniform(0, 0.05))
            pid, step, _ = job.phase(rank)
            kill(pid, signal.SIGKILL)
            killed.append((pid, step, phase))
            job.until(lambda: pid not in job.ranks())  # noqa: B023
        assert job.wait() == 0, job.said
        starts = job.said.count(" ranks on cpu: ")
    assert starts <= KILLS + 1 and len(killed) == KILLS
    assert rows(tmp_path) == rows(tmp_path / "whole")
    print(f"{KILLS} kills survived: " + ", ".join(f"{phase} of step {step + 1}" for _, step, phase in killed))
