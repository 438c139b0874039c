"""Runs train.sh under several shells, with only stubs and a few tools on PATH, and the variables that launchers set."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from tests.helpers.ranks import LIMIT_S, ROOT

SCRIPT = str(ROOT / "train.sh")
SHELLS = {"dash": ["dash"], "bash": ["bash"], "bash-posix": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
TOOLS = ("env", "grep", "sed", "tr")  # all that train.sh and the stubs call
TASK = """
import os, sys
print("task", sys.argv[1:])
for name in sorted(os.environ):
    print(f"{name}={os.environ[name]}")
"""
# Prints its arguments in brackets, one per line, then its environment.
TORCHRUN = 'for a in "$@"; do echo "[$a]"; done; env; exit "${STUB_STATUS:-0}"'

# The variables that launchers set on node 1 of 2; in a batch script of Slurm, on its first node.
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_GPUS_PER_NODE": "8",
}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "10.0.0.1",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "8",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCH_JOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
INDEXED_JOB = {"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
SLURM_STEP = {
    **SLURM_BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SLURM_PORT = str(20000 + 1234567 % 20000)
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}

SCONTROL = 'test "$*" = "show hostnames n[1-2]" && echo 10.0.0.1 && echo 10.0.0.2'
# Runs its command on one node after the other, as a task of step 0.
SRUN = """
for a in "$@"; do echo "<$a>"; done
while :; do case $1 in --*) shift ;; *) break ;; esac; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=$SLURM_JOB_NUM_NODES SLURM_STEP_NUM_TASKS=$SLURM_JOB_NUM_NODES
export SLURM_STEP_NODELIST="$SLURM_JOB_NODELIST" SLURM_LOCALID=0
i=0
while [ "$i" -lt "$SLURM_JOB_NUM_NODES" ]; do SLURM_NODEID=$i SLURM_PROCID=$i "$@" || exit; i=$((i + 1)); done
"""


def stub_folder(folder: Path) -> Path:
    """A working directory with a task, and in bin/ everything that train.sh calls: a stub torchrun, no GPU tools."""
    (folder / "tasks").mkdir()
    (folder / "tasks" / "train.py").write_text(TASK)
    (folder / "bin").mkdir()
    for tool in TOOLS:
        (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
    # `python3 -m phalanx.run.launch` runs the stub torchrun
    write_tool(
        folder,
        "python3",
        f'if [ "$1 $2" = "-m phalanx.run.launch" ]; then shift 2; exec torchrun "$@"; fi; exec {sys.executable} "$@"',
    )
    write_tool(folder, "torchrun", TORCHRUN)
    return folder


def write_tool(folder: Path, name: str, body: str) -> None:
    """Write a shell script to the folder's bin/."""
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def command(shell: list[str], *args: str) -> list[str]:
    """The command that runs train.sh under a shell of SHELLS."""
    return [str(shutil.which(shell[0])), *shell[1:], SCRIPT, *args]


def launch(shell: list[str], folder: Path, *args: str, **env: str) -> CompletedProcess[str]:
    """Run train.sh with only this environment."""
    path = {"PATH": str(folder / "bin")}
    return subprocess.run(
        command(shell, *args), cwd=folder, env={**path, **env}, capture_output=True, text=True, timeout=LIMIT_S
    )


def torchrun_arguments(done: CompletedProcess[str]) -> list[str]:
    """The arguments of the stub torchrun."""
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("["), done.stdout
    return [line[1:-1] for line in done.stdout.splitlines() if line.startswith("[")]


def environment(done: CompletedProcess[str]) -> Mapping[str, str]:
    """The environment variables that the stub torchrun or the task printed."""
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line and line[0] not in "[ ")


def shellcheck(*files: Path) -> str:
    """The findings of shellcheck (from the extra `test`) in these files; empty if there are none."""
    tool = Path(sys.executable).parent / "shellcheck"
    return subprocess.run([tool, "--external-sources", *files], cwd=ROOT, capture_output=True, text=True).stdout
