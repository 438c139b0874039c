"""train.sh under each shell at hand, with a torchrun that prints its arguments; then with the real one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.ranks import ROOT, launch_environment, torchrun, two_nodes

SHELLS = {"dash": ["dash"], "bash": ["bash"], "bash-posix": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
SCRIPT = str(ROOT / "train.sh")


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    command = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a task, and in bin/ all that train.sh calls: a stub torchrun, no GPU tools."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "train.py").write_text("import sys; print('task', sys.argv[1:])\n")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in ("grep", "tr", "sed"):
        (bin_folder / tool).symlink_to(str(shutil.which(tool)))
    (bin_folder / "python3").symlink_to(sys.executable)
    write_tool(bin_folder / "torchrun", 'for a in "$@"; do echo "[$a]"; done; exit "${STUB_STATUS:-0}"')
    return tmp_path


def write_tool(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def launch(shell: list[str], folder: Path, *args: str, **env: str) -> CompletedProcess[str]:
    command = [str(shutil.which(shell[0])), *shell[1:], SCRIPT, *args]
    path = {"PATH": str(folder / "bin")}
    return subprocess.run(command, cwd=folder, env={**path, **env}, capture_output=True, text=True, timeout=30)


def torchrun_arguments(done: CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [line[1:-1] for line in done.stdout.splitlines()]


def test_one_node(shell: list[str], folder: Path) -> None:
    done = launch(shell, folder, "tasks/train.py", "cfg.yaml", "a.b=two words", "c=*", NPROC_PER_NODE="2")
    assert torchrun_arguments(done) == [
        *["--standalone", "--nnodes", "1", "--nproc-per-node", "2"],
        *["tasks/train.py", "cfg.yaml", "a.b=two words", "c=*"],
    ]


def test_several_nodes(shell: list[str], folder: Path) -> None:
    env = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "node-0", "MASTER_PORT": "1234", "NPROC_PER_NODE": "8"}
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py", "cfg.yaml", **env)) == [
        *["--nnodes", "4", "--node-rank", "3", "--nproc-per-node", "8"],
        *["--master-addr", "node-0", "--master-port", "1234", "tasks/train.py", "cfg.yaml"],
    ]


def test_defaults_of_several_nodes(shell: list[str], folder: Path) -> None:
    done = launch(shell, folder, "tasks/train.py", NNODES="2", MASTER_ADDR="10.0.0.1")
    assert torchrun_arguments(done) == [
        *["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "1"],
        *["--master-addr", "10.0.0.1", "--master-port", "29500", "tasks/train.py"],
    ]


def test_further_options_of_torchrun(shell: list[str], folder: Path) -> None:
    done = launch(shell, folder, "tasks/train.py", TORCHRUN_ARGS="--log-dir logs --redirects 3")
    assert torchrun_arguments(done)[5:] == ["--log-dir", "logs", "--redirects", "3", "tasks/train.py"]


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": "5"}, "5"),
    ],
)
def test_ranks_follow_the_visible_devices(shell: list[str], folder: Path, env: Mapping[str, str], count: str) -> None:
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py", **env))[4] == count


def test_ranks_follow_nvidia_smi(shell: list[str], folder: Path) -> None:
    write_tool(
        folder / "bin" / "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: x)"; echo "GPU 1: NVIDIA H200 (UUID: y)"'
    )
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py"))[4] == "2"


def test_ranks_follow_rocm_smi_where_nvidia_smi_finds_no_driver(shell: list[str], folder: Path) -> None:
    write_tool(folder / "bin" / "nvidia-smi", 'echo "NVIDIA-SMI has failed"; exit 9')
    write_tool(folder / "bin" / "rocm-smi", 'echo "device,GUID"; for i in 0 1 2; do echo "card$i,$i"; done')
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py"))[4] == "3"


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        ([], {}, "no task given; expected: sh train.sh tasks/<task>.py config.yaml [key=value ...]"),
        (
            ["tasks/tarin.py", "cfg.yaml"],
            {},
            "task file tasks/tarin.py does not exist; expected a file such as tasks/train_flowgrpo.py",
        ),
        (["tasks/train.py"], {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR, the name or address of node 0"),
        (["tasks/train.py"], {"NNODES": "two"}, "NNODES=two: expected a whole number, such as NNODES=2"),
        (["tasks/train.py"], {"NNODES": "0"}, "NNODES=0: expected at least 1"),
        (["tasks/train.py"], {"NODE_RANK": "-1"}, "NODE_RANK=-1: expected a whole number, such as NODE_RANK=0"),
        (
            ["tasks/train.py"],
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            "NODE_RANK=2 is not below NNODES=2; nodes are numbered from 0",
        ),
        (
            ["tasks/train.py"],
            {"MASTER_PORT": "http"},
            "MASTER_PORT=http: expected a whole number, such as MASTER_PORT=29500",
        ),
        (
            ["tasks/train.py"],
            {"NPROC_PER_NODE": "2.5"},
            "NPROC_PER_NODE=2.5: expected a whole number, such as NPROC_PER_NODE=8",
        ),
        (["tasks/train.py"], {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: expected at least 1"),
    ],
)
def test_mistakes(shell: list[str], folder: Path, args: list[str], env: Mapping[str, str], message: str) -> None:
    done = launch(shell, folder, *args, **env)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"train.sh: {message}\n")


def test_torchrun_is_missing(shell: list[str], folder: Path) -> None:
    (folder / "bin" / "torchrun").unlink()
    done = launch(shell, folder, "tasks/train.py")
    message = "train.sh: torchrun is not on PATH; activate the environment that phalanx is installed in\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("args", [("--help",), ("cfg.yaml", "a=b", "-h")])
def test_help_runs_the_task_without_torchrun(shell: list[str], folder: Path, args: tuple[str, ...]) -> None:
    done = launch(shell, folder, "tasks/train.py", *args, NNODES="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"task {list(args)}\n", "")


def test_usage(shell: list[str], folder: Path) -> None:
    done = launch(shell, folder, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    names = ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "TORCHRUN_ARGS"]
    assert [name for name in names if f"\n  {name} " not in done.stdout] == []


def test_the_exit_status_is_torchruns(shell: list[str], folder: Path) -> None:
    assert launch(shell, folder, "tasks/train.py", STUB_STATUS="7").returncode == 7


def test_environment_of_the_ranks(shell: list[str], folder: Path) -> None:
    write_tool(folder / "bin" / "torchrun", 'echo "[${OMP_NUM_THREADS:-unset}]"; echo "[$TOKENIZERS_PARALLELISM]"')
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py")) == ["1", "false"]
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py", OMP_NUM_THREADS="3")) == ["3", "false"]
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py", CUDA_VISIBLE_DEVICES="0"))[0] == "unset"


def test_it_is_short() -> None:
    assert len(Path(SCRIPT).read_text().splitlines()) <= 60


TASK = """
import os, pathlib, sys
names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[n] for n in names))
sys.exit(int(os.environ["RANK"] == os.environ.get("FAILING_RANK")))
"""


def test_real_torchrun_and_its_failure(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK)
    done = torchrun([task, tmp_path], nproc=2)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 2 2 0 1", "1 2 2 0 1"]
    assert torchrun([task, tmp_path], nproc=2, env={"FAILING_RANK": "1"}).returncode == 1


def test_two_nodes_number_their_ranks_in_order(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK)
    for done in two_nodes([task, tmp_path], nproc=2):
        assert done.returncode == 0, done.stderr
    places = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert places == ["0 4 2 0 1", "1 4 2 0 1", "0 4 2 1 1", "1 4 2 1 1"]


def test_a_launch_that_hangs_is_ended(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(100)\n")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        torchrun([task], timeout=8)
    said = caught.value.output
    pid = int(next(line for line in said.splitlines() if line.isdigit()))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_variables_of_a_launch_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "9")
    assert "NNODES" not in launch_environment()
