"""Check of `make gpu-smoke` that a job ends, and with an error, when a rank is killed while its device is busy."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import HERE
from smoke_lines import Line, judged, tried

START_S, LIMIT_S = 60.0, 60.0


def kill() -> Iterator[Line]:
    """kill -9 the last rank, a second after all ranks have started to work."""
    yield from tried("killed rank", _kill)


def _kill() -> Iterator[Line]:
    ranks = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    bin = str(Path(sys.executable).parent)
    paths = {"PATH": os.pathsep.join([bin, os.environ["PATH"]])}
    paths["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-kill-") as name:
        folder = Path(name)
        env = {**os.environ, **paths, "NPROC_PER_NODE": str(ranks), "PIDS": name}
        job = subprocess.Popen(
            ["sh", "train.sh", "benchmarks/smoke_rank.py"], cwd=HERE.parent, env=env, start_new_session=True
        )
        try:
            pids = _wait_for(folder, ranks)
            time.sleep(1)
            os.kill(pids[-1], signal.SIGKILL)
            start = time.perf_counter()
            status = job.wait(LIMIT_S)
            took = time.perf_counter() - start
        finally:
            with contextlib.suppress(ProcessLookupError):  # the job and its ranks have ended
                os.killpg(job.pid, signal.SIGKILL)
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    title = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, one killed: the job ends"
    yield judged(title, status != 0 and not left, took, "s", f"status {status}, {len(left)} ranks left")


def _wait_for(folder: Path, ranks: int) -> list[int]:
    """Wait until all ranks work, and return their process ids; raises TimeoutError."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        files = [folder / str(rank) for rank in range(ranks)]
        if all(file.is_file() for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(0.1)
    raise TimeoutError(f"the ranks did not begin within {START_S:.0f} s")
