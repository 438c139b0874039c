"""Jobs of block diffusion that lose a rank: they end at once, and the same command goes on as if nothing had been."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import Job, checksums, kill, killed, rows, steps
from tests.helpers.lm import fit, fit_sft, tiny_lm_config, tiny_sft_config
from tests.helpers.ranks import run_ranks

SETTINGS = ("parallel.fsdp_size=2", "trainer.save_freq=3", "trainer.total_training_steps=6")
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
        assert job.wait() == 137, job.said
        print(f"all ended after {time.monotonic() - begin:.1f} s")
        assert job.processes() == {} and "Traceback" not in job.said
        assert len(re.findall(killed(1), job.said, re.MULTILINE)) == 1
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
