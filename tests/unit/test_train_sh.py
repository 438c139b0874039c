"""train.sh under each available shell, with a torchrun that prints its arguments, and with the real one."""

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.checks import wait_for
from tests.helpers.ranks import LIMIT_S, ROOT, launch_environment, torchrun, two_nodes
from tests.helpers.shells import SCRIPT, command, environment, launch, shellcheck, torchrun_arguments, write_tool

TASK = ("tasks/train.py", "cfg.yaml", "a.b=two words", "c=*")
ONCE = "--max-restarts 0 --signals-to-handle SIGTERM"
KEEP_ALIVE = "keep_alive_interval=3,keep_alive_max_attempt=5,last_call_timeout=15"
NODE_0 = f"--rdzv-conf is_host=true,{KEEP_ALIVE} --rdzv-id phalanx --local-addr localhost"
# environment variables, and the resulting arguments of torchrun
COMMANDS = {
    "NPROC_PER_NODE=2": f"--standalone --nnodes 1 --nproc-per-node 2 {ONCE}",
    "NNODES=4 NODE_RANK=3 MASTER_ADDR=node-0 MASTER_PORT=1234 NPROC_PER_NODE=8": (
        f"--nnodes 4 --node-rank 3 --master-addr node-0 --master-port 1234 --nproc-per-node 8 {ONCE}"
    ),
    "NNODES=2 MASTER_ADDR=10.0.0.1": (
        f"--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 1 {ONCE}"
    ),
    "TORCHRUN_ARGS='--max-restarts 2 --redirects 3'": (
        f"--standalone --nnodes 1 --nproc-per-node 1 {ONCE} --max-restarts 2 --redirects 3"
    ),
    "NNODES=2 NODE_RANK=1 MASTER_ADDR=a LOG_DIR='my logs' TORCHRUN_ARGS='--tee 1'": (
        f"--nnodes 2 --node-rank 1 --master-addr a --master-port 29500 --nproc-per-node 1 {ONCE} "
        "--log-dir 'my logs/node_1' --tee 3 --local-ranks-filter 0 --tee 1"
    ),
    "NNODES=2:4 MASTER_ADDR=localhost MASTER_PORT=1234": (
        f"--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint localhost:1234 {NODE_0} "
        "--nproc-per-node 1 --max-restarts 3 --signals-to-handle SIGTERM"
    ),
    # other nodes do not host the store, and pass the address from which they reach node 0
    "NNODES=2:4 NODE_RANK=3 MASTER_ADDR=127.0.0.1 MAX_RESTARTS=0 RDZV_CONF=a=b": (
        f"--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29500 --rdzv-conf is_host=false,{KEEP_ALIVE},a=b "
        f"--rdzv-id phalanx --local-addr 127.0.0.1 --nproc-per-node 1 {ONCE}"
    ),
    # the name of node 0 cannot be resolved
    "NNODES=2:4 NODE_RANK=1 MASTER_ADDR=no-host.invalid MAX_RESTARTS=0": (
        f"--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint no-host.invalid:29500 --rdzv-conf is_host=false,{KEEP_ALIVE} "
        f"--rdzv-id phalanx --nproc-per-node 1 {ONCE}"
    ),
    "NNODES=2 MASTER_ADDR=localhost MAX_RESTARTS=5": (
        f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:29500 {NODE_0} "
        "--nproc-per-node 1 --max-restarts 5 --signals-to-handle SIGTERM"
    ),
    "NNODES=2 NODE_RANK=1 MASTER_ADDR=a IN_PLACE=1": (
        "--standalone --nnodes 1 --nproc-per-node 1 --max-restarts 3 --signals-to-handle SIGTERM"
    ),
    "MAX_RESTARTS=5": "--standalone --nnodes 1 --nproc-per-node 1 --max-restarts 5 --signals-to-handle SIGTERM",
}


def test_as_many_open_files_as_the_system_allows(shell: list[str], folder: Path) -> None:
    write_tool(folder, "torchrun", "ulimit -n")
    done = subprocess.run(
        command(shell, *TASK),
        cwd=folder,
        env={"PATH": str(folder / "bin")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (500, 3000)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.stdout, done.stderr) == ("3000\n", "")


@pytest.mark.parametrize("variables", COMMANDS)
def test_command(shell: list[str], folder: Path, variables: str) -> None:
    env = dict(word.split("=", 1) for word in shlex.split(variables))
    done = launch(shell, folder, *TASK, **env)
    assert torchrun_arguments(done) == [*shlex.split(COMMANDS[variables]), *TASK]
    seen = environment(done)
    assert seen["NNODES"] == env.get("NNODES", "1")
    assert seen["IN_PLACE"] == env.get("IN_PLACE", "")
    restarts = "MAX_RESTARTS" in env or ":" in seen["NNODES"] or bool(seen["IN_PLACE"])
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in seen) == restarts


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({"NNODES": "2", "NODE_RANK": "2"}, ("2", "2", "1", "a:29500")),
        ({"NNODES": "2", "NODE_RANK": "2", "STORE_ADDR": "head:7"}, ("2", "2", "1", "head:7")),
        ({"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "2"}, ("2", "2", "1", "a:29500")),  # a scheduler counts all
    ],
)
def test_a_spare_node(shell: list[str], folder: Path, env: Mapping[str, str], place: tuple[str, ...]) -> None:
    seen = environment(launch(shell, folder, *TASK, IN_PLACE="1", SPARES="1", MASTER_ADDR="a", **env))
    assert tuple(seen[name] for name in ("NNODES", "NODE_RANK", "SPARES", "PHALANX_STORE")) == place


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


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF": "a:1"}),
        ({}, {}),
    ],
)
def test_memory_of_gpus_is_expandable(
    shell: list[str], folder: Path, env: Mapping[str, str], settings: Mapping[str, str]
) -> None:
    seen = environment(launch(shell, folder, "tasks/train.py", **env))
    assert {name: value for name, value in seen.items() if name.endswith("ALLOC_CONF")} == settings


def test_ranks_follow_nvidia_smi(shell: list[str], folder: Path) -> None:
    write_tool(folder, "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: x)"; echo "GPU 1: NVIDIA H200 (UUID: y)"')
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py"))[4] == "2"


def test_ranks_follow_rocm_smi_where_nvidia_smi_finds_no_driver(shell: list[str], folder: Path) -> None:
    write_tool(folder, "nvidia-smi", 'echo "NVIDIA-SMI has failed"; exit 9')
    write_tool(folder, "rocm-smi", 'echo "device,GUID"; for i in 0 1 2; do echo "card$i,$i"; done')
    assert torchrun_arguments(launch(shell, folder, "tasks/train.py"))[4] == "3"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR, the name or address of node 0"),
        ({"NNODES": "2:4"}, "NNODES=2:4 needs MASTER_ADDR, the name or address of node 0"),
        ({"NNODES": "two"}, "NNODES=two: expected a number or a range, such as NNODES=2 or NNODES=2:4"),
        ({"NNODES": "2:"}, "NNODES=2:: expected a number or a range, such as NNODES=2 or NNODES=2:4"),
        ({"NNODES": "1:2:3"}, "NNODES=1:2:3: expected a number or a range, such as NNODES=2 or NNODES=2:4"),
        ({"NNODES": "4:2"}, "NNODES=4:2: expected the smaller number first, such as NNODES=2:4"),
        ({"NNODES": "0:2"}, "NNODES=0:2: expected at least 1"),
        ({"NNODES": "0"}, "NNODES=0: expected at least 1"),
        (
            {"IN_PLACE": "yes", "NNODES": "2"},
            "IN_PLACE=yes: expected 1, with a fixed number of nodes, at least 2, each with one torchrun",
        ),
        ({"IN_PLACE": "1"}, "IN_PLACE=1: expected 1, with a fixed number of nodes, at least 2, each with one torchrun"),
        (
            {"IN_PLACE": "1", "NNODES": "2:4"},
            "IN_PLACE=1: expected 1, with a fixed number of nodes, at least 2, each with one torchrun",
        ),
        ({"MAX_RESTARTS": "no"}, "MAX_RESTARTS=no: expected an integer, such as MAX_RESTARTS=3"),
        ({"GRACE_S": "1m"}, "GRACE_S=1m: expected an integer, such as GRACE_S=30"),
        ({"NODE_RANK": "-1"}, "NODE_RANK=-1: expected an integer, such as NODE_RANK=0"),
        (
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            "NODE_RANK=2 is not below NNODES=2; nodes are numbered from 0",
        ),
        (
            {"NNODES": "2", "SPARES": "1", "IN_PLACE": "1", "NODE_RANK": "3", "MASTER_ADDR": "a"},
            "NODE_RANK=3 is not below NNODES=2 and SPARES=1 more; nodes are numbered from 0",
        ),
        ({"NNODES": "2", "SPARES": "1"}, "SPARES=1 needs IN_PLACE=1: spare nodes take the place of lost ones"),
        ({"NNODES": "2", "STORE_ADDR": "head:1"}, "STORE_ADDR=head:1 needs IN_PLACE=1"),
        ({"STORE_ADDR": "head"}, "STORE_ADDR=head: expected host:port, such as STORE_ADDR=head:29500"),
        ({"STORE_ADDR": "head:http"}, "STORE_ADDR=head:http: expected host:port, such as STORE_ADDR=head:29500"),
        ({"NNODES": "2", "SPARES": "yes"}, "SPARES=yes: expected an integer, such as SPARES=1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: expected an integer, such as MASTER_PORT=29500"),
        ({"NPROC_PER_NODE": "2.5"}, "NPROC_PER_NODE=2.5: expected an integer, such as NPROC_PER_NODE=8"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: expected at least 1"),
    ],
)
def test_mistakes(shell: list[str], folder: Path, env: Mapping[str, str], message: str) -> None:
    done = launch(shell, folder, "tasks/train.py", **env)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"train.sh: {message}\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no task given; expected: sh train.sh tasks/<task>.py config.yaml [key=value ...]"),
        (["tasks/tarin.py", "cfg.yaml"], "task file tasks/tarin.py does not exist; expected a file such as {example}"),
    ],
)
def test_no_task(shell: list[str], folder: Path, args: list[str], message: str) -> None:
    done = launch(shell, folder, *args)
    wanted = f"train.sh: {message.format(example='tasks/train_flowgrpo.py')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def test_torchrun_is_missing(shell: list[str], folder: Path) -> None:
    (folder / "bin" / "torchrun").unlink()
    done = launch(shell, folder, "tasks/train.py")
    message = "train.sh: torchrun is not on PATH; activate the environment that phalanx is installed in\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("args", [("--help",), ("cfg.yaml", "a=b", "-h")])
def test_help_runs_the_task_without_torchrun(shell: list[str], folder: Path, args: tuple[str, ...]) -> None:
    done = launch(shell, folder, "tasks/train.py", *args, NNODES="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"task {list(args)}\n")


@pytest.mark.parametrize("ask", ["--plan", "plan=true"])
@pytest.mark.parametrize("nodes", ["4", "2:4"])
def test_a_plan_runs_the_task_without_torchrun(shell: list[str], folder: Path, ask: str, nodes: str) -> None:
    """It does not need the address of node 0, and sees only its own variables."""
    done = launch(shell, folder, "tasks/train.py", ask, NNODES=nodes, HIP_VISIBLE_DEVICES="0,1", WORLD_SIZE="9")
    assert done.stdout.startswith(f"task ['{ask}']\n")
    seen = environment(done)
    assert (seen["NNODES"], seen["NPROC_PER_NODE"], seen.get("WORLD_SIZE")) == (nodes, "2", None)


def test_usage(shell: list[str], folder: Path) -> None:
    done = launch(shell, folder, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    read = set(re.findall(r"^  ([A-Z_]+) ", done.stdout, re.MULTILINE))
    documented = re.search(r"## Variables\n(.*?)\n## ", (ROOT / "docs" / "launching.md").read_text(), re.DOTALL)
    assert documented is not None
    assert read == set(re.findall(r"^\| `([A-Z_]+)` \|", documented[1], re.MULTILINE))
    assert {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "TORCHRUN_ARGS"} < read
    assert "143" in done.stdout.splitlines()[-1]


def test_the_exit_status_is_torchruns(shell: list[str], folder: Path) -> None:
    assert launch(shell, folder, "tasks/train.py", STUB_STATUS="7").returncode == 7


def test_a_torchrun_that_is_killed(shell: list[str], folder: Path) -> None:
    write_tool(folder, "torchrun", "kill -KILL $$")
    assert launch(shell, folder, "tasks/train.py").returncode == 137


def test_environment_of_the_ranks(shell: list[str], folder: Path) -> None:
    seen = environment(launch(shell, folder, "tasks/train.py"))
    assert (seen["OMP_NUM_THREADS"], seen["TOKENIZERS_PARALLELISM"]) == ("1", "false")
    assert (seen["NNODES"], seen["NPROC_PER_NODE"]) == ("1", "1")
    assert (seen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], seen.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")) == ("30", None)
    seen = environment(launch(shell, folder, "tasks/train.py", OMP_NUM_THREADS="3", GRACE_S="5"))
    assert (seen["OMP_NUM_THREADS"], seen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("3", "5")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in seen


@pytest.mark.parametrize(
    ("env", "threads", "compiling"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "12", "12"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "48", "32"),  # as many as torch starts by default
        ({"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "3", "TORCHINDUCTOR_COMPILE_THREADS": "5"}, "3", "5"),
        ({"CUDA_VISIBLE_DEVICES": "0", "NPROC_PER_NODE": "64"}, "1", "1"),
        # ranks that are tasks of a launcher, which may have bound this one to some cores already
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "32",
            "32",
        ),
    ],
)
def test_cores_are_shared_on_gpus(
    shell: list[str], folder: Path, env: Mapping[str, str], threads: str, compiling: str
) -> None:
    write_tool(folder, "nproc", 'if [ "${1:-}" = --all ]; then echo 64; else echo 48; fi')
    seen = environment(launch(shell, folder, "tasks/train.py", **env))
    assert (seen["OMP_NUM_THREADS"], seen["TORCHINDUCTOR_COMPILE_THREADS"]) == (threads, compiling)


def test_cores_that_cannot_be_counted(shell: list[str], folder: Path) -> None:
    """There is no nproc on PATH here, nor on macOS."""
    seen = environment(launch(shell, folder, "tasks/train.py", CUDA_VISIBLE_DEVICES="0,1"))
    assert (seen["OMP_NUM_THREADS"], seen["TORCHINDUCTOR_COMPILE_THREADS"]) == ("1", "1")


# -- signals --------------------------------------------------------------------------------------------------------

# Records that it runs and the signals it receives; it takes a moment for its checkpoint, as torchrun does.
SLOW = """trap 'echo heard TERM >>heard; sleep 0.3; echo saved >>heard; exit 1' TERM
echo ready >ready
while :; do sleep 0.1; done"""


def default_signals() -> None:
    """Called in the child, because a shell cannot trap signals that its parent ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def started(shell: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """train.sh as the leader of a separate process group, with a running torchrun."""
    (folder / "bin" / "sleep").symlink_to(str(shutil.which("sleep")))
    write_tool(folder, "torchrun", SLOW)
    process = subprocess.Popen(
        command(shell, "tasks/train.py"),
        cwd=folder,
        env={"PATH": str(folder / "bin")},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_told_to_stop(started: subprocess.Popen[str], folder: Path, number: signal.Signals, status: int) -> None:
    started.send_signal(number)
    started.send_signal(number)
    assert started.wait(60) == status
    assert (folder / "heard").read_text() == "heard TERM\nsaved\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_of_the_terminal(
    started: subprocess.Popen[str], folder: Path, number: signal.Signals, status: int
) -> None:
    """A terminal signals all of its processes at each Ctrl-C; nevertheless torchrun receives a single SIGTERM."""
    for _ in range(3):
        os.killpg(started.pid, number)
        time.sleep(0.05)
    assert started.wait(60) == status
    assert (folder / "heard").read_text() == "heard TERM\nsaved\n"


def test_nohup(shell: list[str], folder: Path) -> None:
    """Closing the terminal does not end a job started with nohup, although torchrun would handle SIGHUP."""
    write_tool(folder, "torchrun", "kill -HUP 0; echo goes on")
    done = subprocess.run(
        ["nohup", *command(shell, "tasks/train.py")],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}{os.pathsep}{os.defpath}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_signals_for_the_ranks(started: subprocess.Popen[str], folder: Path) -> None:
    """Slurm sends them to every process of a step."""
    os.killpg(started.pid, signal.SIGUSR1)
    os.killpg(started.pid, signal.SIGUSR2)
    time.sleep(0.3)
    assert started.poll() is None and not (folder / "heard").exists()


def test_the_ranks_read_the_terminal(shell: list[str], folder: Path) -> None:
    write_tool(folder, "torchrun", 'read -r line; echo "read $line"')
    done = subprocess.run(
        command(shell, "tasks/train.py"),
        cwd=folder,
        env={"PATH": str(folder / "bin")},
        input="continue\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("read continue\n", "", 0)


# -- itself ---------------------------------------------------------------------------------------------------------


def test_a_closed_stdin(shell: list[str], folder: Path) -> None:
    """Daemons and supervisors start programs without stdin."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command(shell, *TASK)],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}"},
        executable="/bin/sh",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert torchrun_arguments(done)[-len(TASK) :] == list(TASK)


def test_it_is_short() -> None:
    assert len(Path(SCRIPT).read_text().splitlines()) <= 128


def test_shellcheck() -> None:
    assert shellcheck(ROOT / "train.sh", ROOT / "launch" / "cluster.sh") == ""


# -- the real torchrun ----------------------------------------------------------------------------------------------

PLACES = """
import os, pathlib, sys
names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[n] for n in names))
sys.exit(int(os.environ["RANK"] == os.environ.get("FAILING_RANK")))
"""


def test_real_torchrun_and_its_failure(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(PLACES)
    done = torchrun([task, tmp_path], nproc=2)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 2 2 0 1", "1 2 2 0 1"]
    assert torchrun([task, tmp_path], nproc=2, env={"FAILING_RANK": "1"}).returncode == 1


def test_two_nodes_number_their_ranks_in_order(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(PLACES)
    for done in two_nodes([task, tmp_path], nproc=2):
        assert done.returncode == 0, done.stderr
    places = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert places == ["0 4 2 0 1", "1 4 2 0 1", "0 4 2 1 1", "1 4 2 1 1"]


# Rank 3 fails once the others have started, which would wait for it in a collective.
FAILS_ONCE = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if (folder / "failed").exists():
    (folder / rank).write_text(os.environ["WORLD_SIZE"])
    sys.exit(0)
(folder / f"begun-{rank}").touch()
while rank != "3" or len(list(folder.glob("begun-*"))) < 4:
    time.sleep(0.1)
(folder / "failed").touch()
sys.exit(1)
"""


@pytest.mark.full
def test_failed_ranks_start_again_on_two_nodes(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(FAILS_ONCE)
    for done in two_nodes([task, tmp_path], nproc=2, env={"MAX_RESTARTS": "1"}):
        assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["4"] * 4


def test_a_launch_that_hangs_is_ended(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        f"import os, time; print(os.getpid(), flush=True); open('{tmp_path}/began', 'w'); time.sleep(1000)\n"
    )

    def limit(*_: object) -> None:
        raise subprocess.TimeoutExpired("torchrun", 0)

    def watch() -> None:
        wait_for((tmp_path / "began").exists, LIMIT_S)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, limit)
    threading.Thread(target=watch).start()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        torchrun([task])
    signal.signal(signal.SIGUSR2, before)
    said = caught.value.output
    pid = int(next(line for line in said.splitlines() if line.isdigit()))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_variables_of_a_launch_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "9")
    assert "NNODES" not in launch_environment()
