"""The output of failed launches, and the processes left after killed ones, with real torchruns through train.sh."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.checks import STARTING, mistakes
from tests.helpers.jobs import PROMPTS, base_overrides
from tests.helpers.ranks import LIMIT_S, ROOT, end_with_parent, free_port, launch_environment, torchrun, two_nodes
from tests.helpers.tasks import run_task

TASK = "tasks/train_flowgrpo.py"
CONFIG = "configs/flowgrpo/quickstart.yaml"
UNEVEN = "actor.ppo_micro_batch_size_per_gpu=7"  # which works with no number of ranks
SCRIPT = """
import os, signal, sys, time
import phalanx.run.cli
from dataclasses import dataclass

@dataclass
class Empty:
    pass

phalanx.run.cli.parse(Empty, "", [])
def job():
    {each}
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        {what}
    open(os.path.join({folder!r}, os.environ["RANK"]), "w").write(str(os.getpid()))
    time.sleep(1000)
phalanx.run.cli.run(lambda _: job, Empty())
"""

SLOW_REWARD = """
class Slow:
    def __call__(self, images, prompts, metadata):
        return [float(i) for i in range(len(prompts))]
"""


def script(folder: Path, what: str, each: str = "pass") -> Path:
    """A task whose ranks run `each`, and the last one `what`; ranks that continue write their process id to a file."""
    path = folder / "task.py"
    path.write_text(SCRIPT.format(what=what, each=each, folder=str(folder)))
    return path


@pytest.mark.quick("1")
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_mistake_is_one_line_on_each_node(nodes: int) -> None:
    arguments = [TASK, CONFIG, "rollout.nn=3"]
    runs = [torchrun(arguments, nproc=2)] if nodes == 1 else two_nodes(arguments)
    for done in runs:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: unknown key rollout.nn; did you mean rollout.n?\n"


@pytest.mark.quick("model.path=/none-model.path: '/none': no such folder")
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("model.path=/none", "model.path: '/none': no such folder"),
        ("data.val_files=[/none/a.txt]", "data.val_files: /none/a.txt does not exist; expected a .txt, "),
    ],
)
def test_files_are_looked_at_before_a_rank_starts(mistake: str, message: str) -> None:
    """Without starting torchrun, which is missing here."""
    env = launch_environment({"NPROC_PER_NODE": "2", "PHALANX_CHECK": "1"})
    done = subprocess.run(
        [sys.executable, TASK, CONFIG, mistake], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


@pytest.mark.full
def test_an_error_of_the_ranks_is_one_line(tmp_path: Path) -> None:
    """For a mistake that only a running rank detects; its exit status is that of the job."""
    done = torchrun([TASK, CONFIG, UNEVEN, f"trainer.output_dir={tmp_path / 'out'}"], nproc=2)
    said = mistakes(done.stderr)
    assert done.returncode == 2 and said.startswith("error: actor.ppo_micro_batch_size_per_gpu: 7 does not")
    assert len(said.splitlines()) == 1


@pytest.mark.quick(
    "os._exit(7)-7-ended with status 7, without a word-1",
    "os.kill(os.getpid(), signal.SIGKILL)-137-was killed by SIGKILL, possibly out of memory-1",
)
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL, possibly out of memory"),
        ("os._exit(7)", 7, "ended with status 7, without a word"),
    ],
)
def test_a_rank_that_ends_without_a_word(what: str, status: int, message: str, nproc: int, tmp_path: Path) -> None:
    done = torchrun([script(tmp_path, what)], nproc=nproc)
    assert done.returncode == status
    assert mistakes(done.stderr).startswith(f"error: rank {nproc - 1} on ") and done.stderr.endswith(f" {message}\n")
    assert len(mistakes(done.stderr).splitlines()) == 1


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.full)])
def test_ranks_that_end_before_their_job_is_done_fail_it(nproc: int, tmp_path: Path) -> None:
    """Even if all of them end with a status that launchers take for success."""
    done = torchrun([script(tmp_path, "pass", each="os._exit(0)")], nproc=nproc)
    ranks, their = ("rank 0", "its") if nproc == 1 else ("ranks 0, 1", "their")
    line = f"ended with status 0 before {their} job was done, for example by os._exit in a reward"
    assert mistakes(done.stderr) == f"error: {ranks} on {socket.gethostname()} {line}\n"
    assert done.returncode == 1


@pytest.mark.full
@pytest.mark.parametrize("status", [0, 7])
def test_a_rank_that_ends_below_a_plain_torchrun(status: int, tmp_path: Path) -> None:
    """Without train.sh, torchrun's report follows the line. Processes that the rank has forked may end by os._exit."""
    forked = "os.fork() == 0 and os._exit(0)"
    task = script(tmp_path, f"os._exit({status})", each=forked)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(task)]
    done = subprocess.run(
        command, cwd=ROOT, env=launch_environment({}), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode != 0
    line = task.read_text().splitlines().index(f"        os._exit({status})") + 1
    where = f"by os._exit({status}) at {task}:{line}"
    told = f"error: rank 1 on {socket.gethostname()} ended before its job was done, {where}"
    assert done.stderr.count(f"{told}\n") == 2  # from the rank, and in torchrun's report


def test_called_code_that_exits_is_one_line_with_its_place(tmp_path: Path) -> None:
    done = torchrun([script(tmp_path, "sys.exit(0)")])
    assert mistakes(done.stderr) == f"error: SystemExit: 0 at {tmp_path}/task.py:14\n"
    assert done.returncode == 1


@pytest.mark.long
def test_everything_is_shown_where_that_is_asked_for() -> None:
    done = torchrun([TASK, CONFIG, UNEVEN], nproc=2, env={"PHALANX_TRACEBACK": "1"})
    assert "Traceback (most recent call last)" in done.stderr and "ChildFailedError" in done.stderr


def first_line(command: list[str], env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The first line of a process on stderr, on which it is terminated, and its output after that."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
        return line, process.communicate(timeout=LIMIT_S)[1]


@pytest.mark.full
def test_a_master_that_cannot_be_found_is_told_within_seconds() -> None:
    env = launch_environment({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "no.such.host"})
    command = ["sh", "train.sh", TASK, CONFIG]
    line, _ = first_line(command, env)
    where = "MASTER_ADDR=no.such.host, MASTER_PORT=29500"
    assert line.startswith(f"waiting for node 0 ({where}), at most 600 s: the name cannot be resolved")


def test_a_launcher_without_ranks_says_that_it_waits() -> None:
    """After its rank, here a sleep, has ended and no other rank is started."""
    code = """
import subprocess, threading, time
from phalanx.run import launch
launch.QUIET_S = 1
threading.Thread(target=launch._tell_of_waiting, args=("2",), daemon=True).start()
time.sleep(2)  # nothing is printed before the first rank
subprocess.run(["sleep", "3"])
time.sleep(1000)
"""
    line = "this node's ranks have ended; waiting for other nodes (NNODES=2), at most 600 s\n"
    assert first_line([sys.executable, "-c", code]) == (line, "")


# -- the start ---------------------------------------------------------------------------------------------------------


def test_rank_0_alone_says_how_far_the_start_has_come(sd3_folder: Path, tmp_path: Path) -> None:
    """In the order of events, without those that take no time."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    done = run_task(
        [
            TASK,
            *base_overrides(sd3_folder, tmp_path),
            f"reward.functions=[{{path: {tmp_path / 'reward.py'}:Slow, name: mine}}, {{name: jpeg_compressibility}}]",
            f"data.val_files=[{tmp_path / 'prompts.txt'}]",
            "trainer.total_training_steps=1",
        ],
        nproc=2,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(STARTING)] == [
        "loading the libraries",
        "joining 2 ranks",
        "loading the reward mine",
        f"loading the model {sd3_folder}",
        "laying out SD3Transformer2DModel, 0.32 M weights",
        "validating on 6 prompts",
        "encoding 4 prompts",
    ]
    (world,) = [line for line in done.stdout.splitlines() if line.startswith("2 ranks on cpu")]
    assert "; steps 0 to 1 of 4 prompts in 2 updates; files in " in world


def test_a_report_that_cannot_be_made_is_a_line(sd3_folder: Path, tmp_path: Path) -> None:
    """The training is complete, and ends successfully."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    reward = tmp_path / "reward.py"  # whose only purpose is to put a folder in the place of the page
    reward.write_text(
        "from pathlib import Path\n\n"
        "def number(images, prompts, metadata):\n"
        "    (Path(__file__).parent / 'out' / 'report.html').mkdir(exist_ok=True)\n"
        "    return list(range(len(prompts)))\n"
    )
    own = f"reward.functions=[{{path: '{reward}:number'}}]"
    done = run_task([TASK, *base_overrides(sd3_folder, tmp_path), own, "trainer.total_training_steps=1"])
    assert (done.returncode, mistakes(done.stderr)) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("the report was not written: ")


def test_a_plan_does_not_speak_of_a_start(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    done = run_task([TASK, "--plan", *base_overrides(sd3_folder, tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    assert not [line for line in done.stdout.splitlines() if line.startswith(STARTING)]


# -- orphans ----------------------------------------------------------------------------------------------------------


def started(
    folder: Path, nodes: int = 1, nproc: int = 2, what: str = "pass", **variables: str
) -> list[subprocess.Popen[bytes]]:
    """Start a train.sh per node with `nproc` ranks each, and wait until all ranks run."""
    task = script(folder, what)
    port = free_port()
    processes = []
    for node in range(nodes):
        env = launch_environment({"NPROC_PER_NODE": str(nproc), **variables})
        if nodes > 1:
            env |= {"NNODES": str(nodes), "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = ["sh", "train.sh", str(task)]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, preexec_fn=end_with_parent)
        )
    deadline = time.monotonic() + LIMIT_S
    while not all((folder / str(rank)).exists() and (folder / str(rank)).read_text() for rank in range(nproc * nodes)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return processes


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.glob("[0-9]"):
        if alive(int(file.read_text())):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.quick("launcher-1-1", "train.sh-1-1", "train.sh-1-2")
@pytest.mark.parametrize(
    ("whom", "nodes", "nproc"), [("train.sh", 1, 1), ("train.sh", 1, 2), ("launcher", 1, 1), ("launcher", 2, 2)]
)
def test_ranks_do_not_outlive_their_launcher(whom: str, nodes: int, nproc: int, folder: Path) -> None:
    """If it is killed with -9 on the first node, its ranks end at once."""
    processes = started(folder, nodes, nproc)
    ranks = [int((folder / str(rank)).read_text()) for rank in range(nproc)]
    victim = processes[0].pid if whom == "train.sh" else parent(ranks[0])
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(alive(rank) for rank in ranks):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)
    for process in processes:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.mark.quick("1")
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_rank_that_does_not_stop_is_ended_after_the_grace(nproc: int, folder: Path) -> None:
    [process] = started(folder, nproc=nproc, what="signal.signal(signal.SIGTERM, signal.SIG_IGN)", GRACE_S="2")
    deaf = int((folder / str(nproc - 1)).read_text())
    process.terminate()
    begin = time.monotonic()
    assert process.wait(LIMIT_S) == 143
    assert time.monotonic() - begin > 1.5 and not alive(deaf)
