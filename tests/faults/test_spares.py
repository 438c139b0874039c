"""A node that waits takes the place of a lost one: rows are bit for bit those of a run that lost nothing."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks import kills
from benchmarks.kills import Campaign, Net, differences, run_whole

from tests.faults.jobs import Job, kill, rows, steps
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import LIMIT_S, end_with_parent, free_port, launch_environment, run_ranks

pytestmark = pytest.mark.full
SETTINGS = ("model.lora_rank=4", "parallel.fsdp_size=1", "trainer.save_freq=-1", "trainer.total_training_steps=500")


def test_a_spare_node_takes_the_place_of_a_lost_one(
    sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost one comes back, and takes the next place that is free, with the state of the others."""
    net = Net(None)
    whole = Campaign("flow", 1, sd3_folder, tmp_path / "whole", 16, net, 0.0)
    run_whole(whole)
    job = Campaign("flow", 1, sd3_folder, tmp_path / "job", 16, net, 0.15, spares=1)

    def until(words: str) -> None:
        assert job.until(lambda: words in job.said, LIMIT_S), job.said

    def lose(number: int, back_s: float) -> None:
        monkeypatch.setattr(kills, "LATE_S", back_s)
        job.nodes[number].late = True
        kill(job.nodes[number].pids()[0], signal.SIGKILL)

    with job.running():
        until("node 2 waits for a place")
        survivor = job.nodes[0].pids()
        lose(1, 4.0)
        until("node 2 takes the place of node 1")
        until("node 1 waits for a place")
        lose(2, 1e9)
        until("node 1 takes the place of node 2")
        assert job.nodes[0].pids() == survivor
        assert job.until(lambda: [node.status for node in job.nodes[:2]] == [0, 0], LIMIT_S), job.said
    assert differences(job.folder, whole.folder, "") == (0.0, "")


def test_a_spare_ends_with_its_job(sd3_folder: Path, tmp_path: Path) -> None:
    """A signal to one launcher ends the nodes that train and the one that waits, with the same status."""
    env = {"NNODES": "2", "SPARES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"NPROC_PER_NODE": "1", "IN_PLACE": "1", "PHASE_S": "0.1"}
    with ExitStack() as stack:

        def start(number: int) -> Job:
            here = env | {"NODE_RANK": str(number)}
            return stack.enter_context(Job(sd3_folder, tmp_path, *SETTINGS, env=here, name=f"node_{number}"))

        a, b, spare = start(0), start(1), start(2)
        a.until(lambda: "node 2 waits for a place" in a.said)
        b.kill_all()
        a.until(lambda: "node 2 takes the place of node 1" in a.said)
        done = len(steps(tmp_path))
        a.until(lambda: len(steps(tmp_path)) > done)
        b = start(1)
        a.until(lambda: "node 1 waits for a place" in a.said)
        kill(spare.process.pid, signal.SIGTERM)
        assert (a.wait(), b.wait(), spare.wait()) == (143, 143, 143), a.said + b.said + spare.said
    assert a.said.count("going on in place") == 1 and "error" not in a.said + b.said + spare.said


def test_node_0_may_die_where_no_node_keeps_the_store(sd3_folder: Path, tmp_path: Path) -> None:
    """A spare node becomes the first one, and the store ends with the job."""
    settings = (*SETTINGS[:3], "trainer.total_training_steps=24", "rollout.micro_batch_size_per_gpu=4")
    run_ranks(fit, 2, tiny_config(sd3_folder, tmp_path / "whole", *settings))
    port = free_port()
    command = [sys.executable, "-m", "phalanx.run.keep_store", str(port)]
    env = {"NNODES": "2", "SPARES": "1", "STORE_ADDR": f"127.0.0.1:{port}", "IN_PLACE": "1"}
    env |= {"NPROC_PER_NODE": "1", "PHASE_S": "0.1"}
    with ExitStack() as stack:
        keeper = stack.enter_context(
            subprocess.Popen(command, env=launch_environment(), preexec_fn=end_with_parent, stderr=subprocess.PIPE)
        )
        stack.callback(keeper.kill)

        def start(number: int) -> Job:
            here = env | {"NODE_RANK": str(number)}
            return stack.enter_context(Job(sd3_folder, tmp_path, *settings, env=here, name=f"node_{number}"))

        a, b, spare = start(0), start(1), start(2)
        a.until(lambda: steps(tmp_path))
        with a.holding():
            a.until(lambda: "node 2 is ready" in spare.said)
        a.until(lambda: "node 2 waits for a place" in a.said)
        a.kill_all()
        statuses = b.wait(), spare.wait(), keeper.wait(LIMIT_S)
        assert statuses == (0, 0, 0), b.said + spare.said
    assert "node 2 takes the place of node 0" in b.said
    assert rows(tmp_path) == rows(tmp_path / "whole")
