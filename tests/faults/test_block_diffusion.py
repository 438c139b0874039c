"""Jobs of block diffusion that lose a rank: they end at once, and the same command goes on as if nothing had been."""

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.faults.jobs import TIMEOUT_S, Job, checksums, kill, rows, steps
from tests.lm import fit, fit_sft, tiny_lm_config, tiny_sft_config
from tests.ranks import run_ranks

# A busy machine takes longer than a third of the usual limit to see that a process has ended.
SETTINGS = ("parallel.fsdp_size=2", "trainer.save_freq=3", "trainer.total_training_steps=6", "parallel.timeout_s=30")
RL = (*SETTINGS, "model.block_size=4", "rollout.threshold=0.02", "actor.log_prob_estimate=coupled")
SFT = (*SETTINGS, "block_diffusion.noise_per_block=true", "block_diffusion.ema={decay: 0.7, warmup: false}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_killed_job_goes_on(kind: str, blocks_folder: Path, lm_folder: Path, tmp_path: Path) -> None:
    """SIGKILL of one rank while blocks are denoised, or while their loss is taken."""
    rl = kind == "rl"
    model, settings, phase = (blocks_folder, RL, "rollout") if rl else (lm_folder, SFT, "update")
    saved = tmp_path / "out" / "checkpoints" / "step_000003"  # it is written beside the next steps

    with Job(model, tmp_path, *settings, env={"PHASE_S": "0.1"}, lm=rl, sft=not rl) as job:
        job.until(lambda: job.phase(1)[1] >= 4 and job.phase(1)[2] == phase and saved.is_dir())
        begin = time.monotonic()
        kill(job.phase(1)[0], signal.SIGKILL)
        assert job.wait(TIMEOUT_S) == 137, job.said
        print(f"all ended after {time.monotonic() - begin:.1f} s")
        assert job.processes() == {} and "Traceback" not in job.said
        assert job.said.count(f"rank 1 on {socket.gethostname()} ended without a word") == 1
    assert 4 <= steps(tmp_path)[-1] < 6
    written = saved.stat().st_mtime_ns
    for folder in (tmp_path, tmp_path / "whole"):
        if rl:
            run_ranks(fit, 2, tiny_lm_config(model, folder, *settings))
        else:
            run_ranks(fit_sft, 2, tiny_sft_config(model, folder, *settings))
    assert saved.stat().st_mtime_ns == written
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert checksums(tmp_path, 6) == checksums(tmp_path / "whole", 6)
