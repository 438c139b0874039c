"""train.sh reads the variables of each launcher. The stub srun starts its tasks like Slurm."""

from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.helpers.shells import (
    DSTACK,
    EIGHT_GPUS,
    INDEXED_JOB,
    MPIRUN,
    PYTORCH_JOB,
    SCONTROL,
    SKYPILOT,
    SLURM_BATCH,
    SLURM_PORT,
    SLURM_STEP,
    SRUN,
    TRAIN_JOB,
    environment,
    launch,
    torchrun_arguments,
    write_tool,
)

TASK = ("tasks/train.py", "cfg.yaml", "a.b=two words")
ONE_NODE_OF_SKYPILOT = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}


@pytest.fixture
def slurm(folder: Path) -> Path:
    """The folder, with stubs of Slurm's tools."""
    (folder / "bin" / "sh").symlink_to("/bin/sh")
    write_tool(folder, "scontrol", SCONTROL)
    write_tool(folder, "srun", SRUN)
    return folder


def node(options: list[str]) -> dict[str, str]:
    """Parse the options of a torchrun on one of several nodes."""
    assert options[-len(TASK) :] == list(TASK)
    names = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--nproc-per-node")
    return {name: options[options.index(name) + 1] for name in names}


def second_of_two(port: str = "29500", ranks: str = "8") -> dict[str, str]:
    where = {"--nnodes": "2", "--node-rank": "1", "--master-addr": "10.0.0.1"}
    return {**where, "--master-port": port, "--nproc-per-node": ranks}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(SKYPILOT, second_of_two(), id="skypilot"),
        pytest.param(DSTACK, second_of_two(), id="dstack"),
        pytest.param(TRAIN_JOB, second_of_two("29400"), id="trainjob"),
        pytest.param({**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"}, second_of_two("29400", "1"), id="trainjob-auto"),
        pytest.param(PYTORCH_JOB, second_of_two("23456", "1"), id="pytorchjob"),
        pytest.param({**PYTORCH_JOB, **TRAIN_JOB}, second_of_two("23456"), id="pytorchjob-with-pet"),
        pytest.param(INDEXED_JOB, second_of_two(ranks="1"), id="indexed-job"),
        pytest.param(MPIRUN, second_of_two(ranks="1"), id="mpirun"),
        pytest.param({**SLURM_STEP, **EIGHT_GPUS}, second_of_two(SLURM_PORT), id="slurm-step"),
        pytest.param({**SLURM_STEP, **SKYPILOT}, second_of_two(), id="skypilot-on-slurm"),
        pytest.param({**SLURM_BATCH, **MPIRUN}, second_of_two(ranks="1"), id="mpirun-on-slurm"),
        pytest.param(
            {**SLURM_STEP, **PYTORCH_JOB, "WORLD_SIZE": "9"}, second_of_two("23456", "1"), id="slurm-and-leaks"
        ),
    ],
)
def test_a_torchrun_on_each_node(
    shell: list[str], slurm: Path, env: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    done = launch(shell, slurm, *TASK, **env)
    assert node(torchrun_arguments(done)) == expected
    seen = environment(done)
    assert [name for name in seen if name.startswith("PET_") or name in ("RANK", "WORLD_SIZE")] == []
    assert (seen["NNODES"], seen["NPROC_PER_NODE"]) == ("2", expected["--nproc-per-node"])


@pytest.mark.parametrize(
    "env",
    [SKYPILOT, DSTACK, TRAIN_JOB, PYTORCH_JOB, INDEXED_JOB, MPIRUN, SLURM_STEP],
    ids=["skypilot", "dstack", "trainjob", "pytorchjob", "indexed-job", "mpirun", "slurm"],
)
def test_what_is_set_wins(shell: list[str], slurm: Path, env: Mapping[str, str]) -> None:
    plain = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7", "NPROC_PER_NODE": "5"}
    expected = dict(zip(second_of_two(), plain.values(), strict=True))
    assert node(torchrun_arguments(launch(shell, slurm, *TASK, **{**env, **plain}))) == expected


@pytest.mark.parametrize(
    ("plain", "option"),
    [
        ({"NODE_RANK": "0"}, "--node-rank"),
        ({"MASTER_ADDR": "10.9.9.9"}, "--master-addr"),
        ({"MASTER_PORT": "7"}, "--master-port"),
        ({"NPROC_PER_NODE": "5"}, "--nproc-per-node"),
    ],
)
def test_each_for_itself(shell: list[str], folder: Path, plain: Mapping[str, str], option: str) -> None:
    expected = {**second_of_two(), option: next(iter(plain.values()))}
    assert node(torchrun_arguments(launch(shell, folder, *TASK, **SKYPILOT, **plain))) == expected


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="plain"),
        pytest.param({"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1"}, id="slurm-without-srun"),
        pytest.param({**SLURM_BATCH, "NNODES": "1"}, id="one-node-of-a-slurm-allocation"),
        pytest.param(
            {**SLURM_STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}, id="srun-pty"
        ),
        pytest.param({"PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "9", "PET_RDZV_BACKEND": "x"}, id="pet-leaks"),
        pytest.param({"WORLD_SIZE": "9", "RANK": "3"}, id="world-size-leaks"),
        pytest.param({"NNODES": "1", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "9"}, id="started-by-a-rank"),
        pytest.param({"JOB_COMPLETION_INDEX": "3"}, id="one-node-a-index"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, id="slurm-in-part"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}, id="slurm-no-tasks"),
        pytest.param({**SKYPILOT, **ONE_NODE_OF_SKYPILOT}, id="skypilot-cpu"),
        pytest.param({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, id="mpirun-of-one"),
    ],
)
def test_one_node(shell: list[str], folder: Path, env: Mapping[str, str]) -> None:
    done = launch(shell, folder, *TASK, **env)
    assert torchrun_arguments(done)[:5] == ["--standalone", "--nnodes", "1", "--nproc-per-node", "1"]
    seen = environment(done)
    assert [name for name in seen if name.startswith("PET_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == []


def test_the_shell_of_a_step_is_no_rank(shell: list[str], folder: Path) -> None:
    """For `srun --ntasks=8 --pty bash`, Slurm runs only the shell, as task 0 of 8."""
    step = {**SLURM_STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "0"}
    done = launch(shell, folder, *TASK, **{**step, **EIGHT_GPUS, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40000"})
    assert torchrun_arguments(done)[:5] == ["--standalone", "--nnodes", "1", "--nproc-per-node", "8"]


def test_a_world_of_one_has_one_local_rank(shell: list[str], folder: Path) -> None:
    done = launch(shell, folder, *TASK, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert environment(done)["LOCAL_WORLD_SIZE"] == "1"


# -- Slurm ------------------------------------------------------------------------------------------------------------


def tasks_of_srun(done: CompletedProcess[str]) -> tuple[list[str], list[dict[str, str]]]:
    """The options passed to srun, and those of each node's torchrun."""
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = done.stdout.splitlines()
    given = [line[1:-1] for line in lines if line.startswith("<")]
    options: list[list[str]] = []
    for line in lines:
        if line == "[--nnodes]":
            options.append([])
        if line.startswith("["):
            options[-1].append(line[1:-1])
    return given[: given.index("sh")], [node(words) for words in options]


@pytest.mark.parametrize(
    "step", [{}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1"}], ids=["batch", "salloc"]
)
def test_a_batch_script_starts_a_task_on_each_node(shell: list[str], slurm: Path, step: Mapping[str, str]) -> None:
    given, nodes = tasks_of_srun(launch(shell, slurm, *TASK, **SLURM_BATCH, **step, **EIGHT_GPUS))
    assert given == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert nodes == [{**second_of_two(SLURM_PORT), "--node-rank": rank} for rank in ("0", "1")]


def test_node_0_is_looked_up_by_the_batch_script(shell: list[str], slurm: Path) -> None:
    """The nodes may not have scontrol."""
    write_tool(slurm, "scontrol", f'[ -z "${{SLURM_STEP_ID:-}}" ] && {SCONTROL}')
    _, nodes = tasks_of_srun(launch(shell, slurm, *TASK, **SLURM_BATCH))
    assert [n["--master-addr"] for n in nodes] == ["10.0.0.1"] * 2


def test_what_is_set_reaches_the_tasks(shell: list[str], slurm: Path) -> None:
    _, nodes = tasks_of_srun(launch(shell, slurm, *TASK, **SLURM_BATCH, MASTER_PORT="7", NPROC_PER_NODE="3"))
    assert [(n["--master-port"], n["--nproc-per-node"]) for n in nodes] == [("7", "3")] * 2


def test_a_batch_script_of_one_node(shell: list[str], slurm: Path) -> None:
    """The job still runs in a step, because that receives the signals requested by sbatch --signal."""
    done = launch(shell, slurm, *TASK, **{**SLURM_BATCH, "SLURM_JOB_NUM_NODES": "1"})
    assert done.stdout.startswith("<--nodes=1>\n<--ntasks=1>\n<--ntasks-per-node=1>\n<--kill-on-bad-exit=1>\n<sh>\n")
    assert "[--standalone]" in done.stdout


def test_a_range_outlives_the_nodes_of_its_step(shell: list[str], slurm: Path) -> None:
    done = launch(shell, slurm, *TASK, **SLURM_BATCH, NNODES="1:2")
    assert done.stdout.startswith(
        "<--nodes=2>\n<--ntasks=2>\n<--ntasks-per-node=1>\n<--kill-on-bad-exit=0>\n<--no-kill>\n"
    )
    assert done.stdout.count("[--rdzv-id]\n[1234567]\n") == 2
    assert done.stdout.count("[is_host=true,") == done.stdout.count("[is_host=false,") == 1


def test_a_container_without_scontrol(shell: list[str], folder: Path) -> None:
    """The step gets the address of node 0 from a variable that the batch script exported."""
    done = launch(shell, folder, *TASK, **SLURM_STEP, MASTER_ADDR="10.0.0.1")
    assert node(torchrun_arguments(done)) == second_of_two(SLURM_PORT, "1")


def test_nodes_that_are_started_by_hand(shell: list[str], slurm: Path) -> None:
    """Inside an allocation, NODE_RANK marks a node instead of a batch script."""
    done = launch(shell, slurm, *TASK, **SLURM_BATCH, NODE_RANK="1")
    assert node(torchrun_arguments(done)) == second_of_two(SLURM_PORT, "1")


def test_a_plan_in_a_batch_script(shell: list[str], slurm: Path) -> None:
    done = launch(shell, slurm, "tasks/train.py", "plan=true", **SLURM_BATCH, **EIGHT_GPUS)
    assert done.stdout.startswith("task ['plan=true']\n")
    seen = environment(done)
    assert (seen["NNODES"], seen["NPROC_PER_NODE"]) == ("2", "8")


# -- a task per GPU ---------------------------------------------------------------------------------------------------

SLURM_TASK = {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", **EIGHT_GPUS}
PLACE = {"SIZE": "16", "RANK": "11", "LOCAL_SIZE": "8", "LOCAL_RANK": "3"}
MPIRUN_TASK = {**{f"OMPI_COMM_WORLD_{name}": value for name, value in PLACE.items()}, "MASTER_ADDR": "10.0.0.1"}
TORCH_TASK = {"WORLD_SIZE": "16", "RANK": "11", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("env", "port"),
    [
        pytest.param(SLURM_TASK, SLURM_PORT, id="slurm"),
        pytest.param(MPIRUN_TASK, "29500", id="mpirun"),
        pytest.param(TORCH_TASK, "29500", id="torch"),
        pytest.param({**SLURM_TASK, **MPIRUN_TASK}, "29500", id="mpirun-on-slurm"),
    ],
)
@pytest.mark.parametrize("plan", [(), ("--plan",)], ids=["run", "plan"])
def test_tasks_are_ranks(
    shell: list[str], slurm: Path, env: Mapping[str, str], port: str, plan: tuple[str, ...]
) -> None:
    done = launch(shell, slurm, *TASK, *plan, **env)
    assert done.stdout.startswith(f"task {[*TASK[1:], *plan]}\n")
    seen = environment(done)
    assert [seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["11", "16", "3", "8"]
    assert (seen["NNODES"], seen["NPROC_PER_NODE"]) == ("2", "8")
    if not plan:
        assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("10.0.0.1", port)


def test_tasks_of_one_node(shell: list[str], folder: Path) -> None:
    one_node = {**MPIRUN_TASK, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3", "MASTER_ADDR": ""}
    seen = environment(launch(shell, folder, *TASK, **one_node))
    assert (seen["MASTER_ADDR"], seen["RANK"], seen["NNODES"]) == ("127.0.0.1", "3", "1")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**SLURM_STEP, "MASTER_ADDR": ""}, "NNODES=2 needs MASTER_ADDR, the name or address of node 0"),
        (SLURM_BATCH, "the job has 2 Slurm nodes, but srun is not on PATH; start this with srun"),
        ({**SLURM_STEP, "NNODES": "1"}, "NODE_RANK=1 is not below NNODES=1; nodes are numbered from 0"),
        (
            {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "15"},
            "WORLD_SIZE=15 is not a multiple of LOCAL_WORLD_SIZE=7, the tasks per node",
        ),
        (
            {**SLURM_TASK, "CUDA_VISIBLE_DEVICES": "0"},
            "LOCAL_RANK=3, but this task sees 1 of its node's GPUs; let every task see all of them",
        ),
        ({**MPIRUN_TASK, "MASTER_ADDR": ""}, "NNODES=2 needs MASTER_ADDR, the name or address of node 0"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "LOCAL_WORLD_SIZE=: expected an integer, such as LOCAL_WORLD_SIZE=8",
        ),
        (
            {**TRAIN_JOB, "PET_NNODES": "2-4"},
            "NNODES=2-4: expected a number or a range, such as NNODES=2 or NNODES=2:4",
        ),
    ],
)
def test_mistakes(shell: list[str], folder: Path, env: Mapping[str, str], message: str) -> None:
    done = launch(shell, folder, *TASK, **env)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"train.sh: {message}\n")
