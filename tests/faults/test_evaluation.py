"""Faults of ranks that evaluate: found and told as in training."""

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.distributed.test_evaluation import lm_words
from tests.helpers.ranks import torchrun

FREEZE = f"""
import os

def evenness(completions, prompts, metadata):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), {int(signal.SIGSTOP)})
    return [0.0] * len(completions)
"""


@pytest.mark.long
def test_a_frozen_rank_of_an_evaluation_is_named(lm_folder: Path, tmp_path: Path) -> None:
    short = ("parallel.fsdp_size=1", "parallel.heartbeat_timeout_s=5")
    words = lm_words(lm_folder, tmp_path, "out", *short)
    (tmp_path / "reward.py").write_text(FREEZE)
    done = torchrun(["tasks/evaluate.py", *words], nproc=2, env={"GRACE_S": "2"})  # until SIGKILL
    said = done.stderr.splitlines()
    assert re.fullmatch(f"lost rank 1 on {re.escape(socket.gethostname())}: no sign of life for [5-9] s", said[-1])
    assert done.returncode == 1 and "Traceback" not in done.stderr
