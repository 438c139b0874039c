"""Real jobs under real torchruns, and faults that can happen to them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.run.checkpoint_folder import read_meta
from tests.helpers.jobs import PROMPTS, base_overrides
from tests.helpers.lm import lm_overrides, sft_overrides
from tests.helpers.ranks import LIMIT_S, ROOT, end_with_parent, launch_environment

TASK = "tests/faults/task.py"
TIMEOUT_S = 60  # parallel.timeout_s of jobs in which no rank hangs or is silent
SHORT = "parallel.timeout_s=15"  # for jobs in which one does, because the limit must expire


class Job:
    """One node's `sh train.sh`, started immediately; a context manager that leaves no process behind.

    `folder` contains prompts, the output_dir `out`, and the terminal's output `<name>.log`. `prefix` precedes the
    command, such as `ip netns exec ...`. With `lm` the model is a language model, with `sft` one that learns to denoise
    blocks by supervised training.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        name: str = "node",
        lm: bool = False,
        sft: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        recipe, overrides_of = ("lm", lm_overrides) if lm else ("sft", sft_overrides) if sft else ("", base_overrides)
        base = overrides_of(model, folder)
        self.folder, self.log = folder, folder / f"{name}.log"
        settings = [f"parallel.timeout_s={TIMEOUT_S}", "rollout.micro_batch_size_per_gpu=4", *overrides]
        mark = f"{folder}/{name}"  # in the environment of all processes of the job
        variables = {"NPROC_PER_NODE": "2", "RECIPE": recipe, "NODE_MARK": mark, **(env or {})}
        self._mark = f"NODE_MARK={mark}\0"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*prefix, "sh", "train.sh", TASK, *base, *settings],
                cwd=ROOT,
                env=launch_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_like_a_terminals_job,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    @property
    def said(self) -> str:
        """The whole output on the terminal."""
        return self.log.read_text()

    def wait(self, timeout: float = LIMIT_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {timeout} s:\n{self.said}") from None

    def until(self, happened: Callable[[], Any], timeout: float = LIMIT_S) -> Any:
        """Wait until `happened()` is true and return its value; the job must not end before."""
        deadline = time.monotonic() + timeout
        while not (found := happened()):
            assert self.process.poll() is None, f"the job ended too early:\n{self.said}"
            assert time.monotonic() < deadline, f"nothing after {timeout} s:\n{self.said}"
            time.sleep(0.01)
        return found

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """A block in which no rank gets beyond the beginning of a phase."""
        hold = self.folder / "hold"
        hold.touch()
        yield
        hold.unlink()

    def phase(self, rank: int) -> tuple[int, int, str]:
        """(pid, steps done, phase) of a rank; pid 0 before the first one."""
        try:
            pid, step, name = (self.folder / f"phase_{rank}").read_text().split()
        except FileNotFoundError:
            return 0, 0, ""
        return int(pid), int(step), name

    def processes(self) -> dict[int, str]:
        """pid -> command line of this node's running processes: train.sh, torchrun, ranks, and their children."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    where = (entry / "environ").read_bytes().decode(errors="replace")
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
                if self._mark in where:
                    found[int(entry.name)] = line
        return found

    def ranks(self) -> list[int]:
        """pids of the ranks."""
        return sorted(pid for pid, line in self.processes().items() if f" -u {TASK}" in line)

    def kill_all(self) -> None:
        """Send SIGKILL to all processes of the node, like a power cut."""
        while processes := self.processes():
            for pid in processes:
                kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()


def _like_a_terminals_job() -> None:
    """Called in the child: handle SIGINT, which background jobs of a shell, such as the tests, may ignore; and die with
    the test.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def killed(rank: int, role: str = "") -> str:
    """A pattern of the line that reports a killed rank: due to its launcher, which ends the others, or, if that takes
    long on a busy machine, due to the other ranks' watch.
    """
    name = rf"rank {rank} on {socket.gethostname()}" + (rf" \({role}\)" if role else "")
    return (
        rf"^(?:no word from {name}: killed, out of memory, crashed, or frozen|lost {name}: no sign of life for \d+ s)$"
    )


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    assert pid > 0  # 0 would be this process's whole group
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def rows(folder: Path, run: str = "") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, of a run of a sweep or of the job, without metrics of time and memory."""
    lines = (folder / "out" / run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("perf/", "time/"))} for line in lines]


def steps(folder: Path, run: str = "") -> list[int]:
    """The steps of metrics.jsonl; empty if it does not exist yet."""
    return [row["step"] for row in rows(folder, run)] if (folder / "out" / run / "metrics.jsonl").exists() else []


def checkpoints(folder: Path) -> list[str]:
    """The names of the folders in checkpoints/."""
    return sorted(entry.name for entry in (folder / "out" / "checkpoints").iterdir())


def checksums(folder: Path, step: int) -> dict[str, list[int]]:
    """[size, checksum] of the files with a checkpoint's weights and optimizer states."""
    files: dict[str, list[int]] = read_meta(folder / "out" / "checkpoints" / f"step_{step:06d}")["files"]
    return {name: found for name, found in files.items() if name.endswith(".distcp")}
