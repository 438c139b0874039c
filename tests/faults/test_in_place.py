"""Ranks and nodes that are lost while the others go on in their processes: every row is as if nothing had been lost.

PHALANX_KILLS says how many in one run (2; `make faults` takes 20), PHALANX_KILLS_SEED which.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Hosts
from tests.faults.jobs import Job, kill, rows, steps
from tests.faults.task import PHASES
from tests.helpers import lm
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import free_port, run_ranks

pytestmark = pytest.mark.full
KILLS = int(os.environ.get("PHALANX_KILLS", "2"))
SEED = int(os.environ.get("PHALANX_KILLS_SEED", "0"))
SETTINGS = ("model.lora_rank=4", "actor.ema.decay=0.9", "trainer.save_freq=4", "rollout.micro_batch_size_per_gpu=4")
QUICK = "parallel.heartbeat_timeout_s=6"  # frozen ranks are found after this time
GOING_ON = re.compile(
    r"^going on in place after (\S+) s, with nodes ([\d, ]+)(?:; the last step is ([\d, ]+))?$", re.MULTILINE
)


@contextlib.contextmanager
def two_nodes(
    model: Path, folder: Path, *settings: str, ranks: int = 2, is_lm: bool = False, **env: str
) -> Iterator[list[Job]]:
    """A job of two nodes on this host, which may lose either one's ranks."""
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": str(ranks)}
    every = place | {"IN_PLACE": "1", "PHASE_S": "0.05", **env}
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(2):
            node = Job(
                model, folder, *settings, env=every | {"NODE_RANK": str(number)}, name=f"node_{number}", lm=is_lm
            )
            nodes.append(stack.enter_context(node))
        yield nodes


def assert_same(folder: Path, whole: Path, run: str = "") -> None:
    """All metrics but those of time and memory agree to 1e-6."""
    for row, wanted in zip(rows(folder, run), rows(whole, run), strict=True):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            if key.startswith("idle/"):
                continue
            # the spread of ratios is a difference of two nearly equal numbers
            loose = 1e-4 if key in ("actor/ratio_std", "actor/approx_kl") else 1e-6
            assert row[key] == pytest.approx(value, rel=loose, abs=1e-6), (row["step"], key)


def test_a_killed_rank_is_survived_and_its_node_comes_back(sd3_folder: Path, tmp_path: Path) -> None:
    """The other node goes on with its own ranks, in the same processes, and takes the first one in when it is back."""
    settings = (*SETTINGS, "parallel.fsdp_size=2", "trainer.total_training_steps=12")
    run_ranks(fit, 4, tiny_config(sd3_folder, tmp_path / "whole", *settings))
    with two_nodes(sd3_folder, tmp_path, *settings) as (a, b):
        a.until(lambda: len(steps(tmp_path)) >= 3)
        survivors = a.ranks()
        kill(b.phase(3)[0], signal.SIGKILL)
        a.until(lambda: GOING_ON.findall(a.said))
        with a.holding():  # or the job would be over before node 1 is back
            a.until(lambda: " is ready, and waits" in b.said or GOING_ON.findall(a.said)[0][1] == "0, 1")
        assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
        said = a.said
        assert a.phase(0)[0] in survivors, said
    assert [nodes for _, nodes, _ in GOING_ON.findall(said)] in (["0", "0, 1"], ["0, 1"]), said
    assert_same(tmp_path, tmp_path / "whole")


def test_a_node_that_is_gone_for_good_costs_no_step(sd3_folder: Path, tmp_path: Path) -> None:
    """Node 0 ends the run by itself, with one replica of the weights less."""
    settings = (*SETTINGS, "parallel.fsdp_size=1", "trainer.total_training_steps=8")
    run_ranks(fit, 2, tiny_config(sd3_folder, tmp_path / "whole", *settings))
    with two_nodes(sd3_folder, tmp_path, *settings, ranks=1) as (a, b):
        a.until(lambda: len(steps(tmp_path)) >= 3)
        b.kill_all()
        assert a.wait() == 0, a.said
        ((_, nodes, step),) = GOING_ON.findall(a.said)
    assert nodes == "0" and int(step) >= 3
    assert_same(tmp_path, tmp_path / "whole")


@pytest.mark.parametrize(
    ("kind", "ranks", "lost", "phase"),
    [
        ("lm", 1, 1, "update"),
        pytest.param("lm", 1, 0, "peer_copy", marks=pytest.mark.long),
        pytest.param("flow", 2, 1, "reward", marks=pytest.mark.long),
    ],
)
def test_a_lost_node_gets_its_shards_from_another(
    kind: str, ranks: int, lost: int, phase: str, sd3_folder: Path, lm_folder: Path, tmp_path: Path
) -> None:
    """All ranks share one copy of the weights; nodes have copies of each other's part, and every bit is as before."""
    is_lm, size = kind == "lm", 2 * ranks
    settings = ["trainer.save_freq=-1", f"parallel.fsdp_size={size}", "trainer.total_training_steps=8"]
    settings += [] if is_lm else SETTINGS[:2]
    if is_lm:
        run_ranks(lm.fit, size, lm.tiny_lm_config(lm_folder, tmp_path / "whole", *settings), local_world=ranks)
    else:
        run_ranks(fit, size, tiny_config(sd3_folder, tmp_path / "whole", *settings, *SETTINGS[-1:]), local_world=ranks)
    settings += ["trainer.peer_copy=true"]
    model = lm_folder if is_lm else sd3_folder
    with two_nodes(model, tmp_path, *settings, ranks=ranks, is_lm=is_lm) as nodes:
        nodes[0].until(lambda: len(steps(tmp_path)) >= 3)
        nodes[0].until(lambda: nodes[0].phase(lost * ranks)[2] == phase)
        for pid in nodes[lost].ranks():
            kill(pid, signal.SIGKILL)
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].said + nodes[1].said
        begins = re.findall(r"; steps (\d+) to 8 of ", nodes[0].said)
    assert len(begins) == 2 and int(begins[1]) >= 3  # there is no checkpoint
    assert rows(tmp_path) == rows(tmp_path / "whole")


SIDE_BY_SIDE = ("model.lora_rank=4", "sweep={optim.lr: [1e-3, 5e-4]}")
ROLES = ("trainer.undo_steps=true", "placement={rollout: 0 of each node, actor: 1 of each node}")
PARTIAL = ("rollout.partial_rollout.tokens=4", "rollout.max_staleness=2", "rollout.correction=token_tis")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sweep", "roles", "one step off"])
def test_sweeps_and_roles_lose_no_step(kind: str, lm_folder: Path, tmp_path: Path) -> None:
    """Each run of a sweep goes on from its own last step. Ranks that sample keep no state: that of the one that trains on
    the other node is taken, with the responses that are not finished. What was drawn ahead is drawn again by the weights
    that drew it.
    """
    settings = ("trainer.total_training_steps=8", "trainer.save_freq=100", "parallel.fsdp_size=1")
    settings += SIDE_BY_SIDE if kind == "sweep" else (*ROLES, "data.max_response_length=24")
    settings += () if kind == "sweep" else PARTIAL if kind == "roles" else ("rollout.schedule=one_step_off",)
    ranks, last = (1, 1) if kind == "sweep" else (2, 3)
    with two_nodes(lm_folder, tmp_path / "whole", *settings, ranks=ranks, is_lm=True, PHASE_S="0") as nodes:
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.said for node in nodes)
    with two_nodes(lm_folder, tmp_path, *settings, ranks=ranks, is_lm=True) as (a, b):
        runs = ["optim.lr=0.001", "optim.lr=0.0005"] if kind == "sweep" else [""]
        a.until(lambda: min(len(steps(tmp_path, run)) for run in runs) >= 3)
        survivors = a.ranks()
        kill(b.phase(last)[0], signal.SIGKILL)
        assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
        assert a.phase(0)[0] in survivors and "the job starts from its last checkpoint" not in a.said + b.said
    assert GOING_ON.findall(a.said), a.said
    for run in runs:
        assert_same(tmp_path, tmp_path / "whole", run)


@pytest.mark.long
@pytest.mark.parametrize("what", [signal.SIGTERM, "raise"], ids=["told-to-stop", "an-error"])
def test_what_ends_a_job_still_ends_it(sd3_folder: Path, tmp_path: Path, what: Any) -> None:
    """A signal to one launcher, and an exception of a rank, which would come again."""
    settings = (*SETTINGS, "parallel.fsdp_size=1", "trainer.total_training_steps=500")
    env = {"FAULT": "raise:1:3", "MAX_RESTARTS": "0"} if what == "raise" else {}
    with two_nodes(sd3_folder, tmp_path, *settings, ranks=1, **env) as (a, b):
        if what == "raise":
            assert (a.wait(), b.wait()) == (1, 1), a.said + b.said
            assert a.said.count("KeyError: 'no such thing'") == 1 and "Traceback" in b.said
        else:
            a.until(lambda: len(steps(tmp_path)) >= 2)
            kill(b.process.pid, what)
            assert (a.wait(), b.wait()) == (143, 143), a.said + b.said
            assert re.search(r"^stopped by SIGTERM after step \d+ of 500; the same command resumes from ", a.said, re.M)
        assert not GOING_ON.findall(a.said)


def test_a_job_that_loses_node_0_says_so(sd3_folder: Path, tmp_path: Path) -> None:
    """It keeps the store in which the others would meet."""
    settings = (*SETTINGS, "parallel.fsdp_size=1", "trainer.total_training_steps=500")
    with two_nodes(sd3_folder, tmp_path, *settings, ranks=1) as (a, b):
        a.until(lambda: len(steps(tmp_path)) >= 2)
        a.kill_all()
        assert b.wait(60) == 1, b.said
    assert "error on rank 1: node 0 has left the job, with the store in which ranks meet; start it again" in b.said
    assert "Traceback" not in b.said


@pytest.mark.long
@pytest.mark.timeout(600 + 90 * KILLS)
@pytest.mark.parametrize("kind", ["flow", "lm"])
def test_random_losses(kind: str, sd3_folder: Path, lm_folder: Path, tmp_path: Path) -> None:
    """Ranks of any node are killed or frozen in every phase, also while the others are forming the world anew."""
    chance, is_lm = random.Random(SEED), kind == "lm"
    (tmp_path / "held_out.txt").write_text('the word "eta"\n"theta" in red\n')
    settings = ["trainer.save_freq=4", "parallel.fsdp_size=2", QUICK, f"trainer.total_training_steps={20 + 6 * KILLS}"]
    model, job_of, whole = sd3_folder, tiny_config, fit
    if is_lm:
        model, job_of, whole = lm_folder, lm.tiny_lm_config, lm.fit  # type: ignore[assignment]
        settings += ["trainer.undo_steps=true"]
    else:
        settings += ["model.lora_rank=4", "actor.ema.decay=0.9", "trainer.test_freq=3"]
        settings += [f"data.val_files=[{tmp_path}/held_out.txt]"]
    run_ranks(whole, 4, job_of(model, tmp_path / "whole", *settings, *SETTINGS[-1:]))
    lost, times = [], []
    with two_nodes(
        model,
        tmp_path,
        *settings,
        is_lm=is_lm,
        MAX_RESTARTS=str(KILLS),
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2",
        GRACE_S="2",
    ) as nodes:
        first = nodes[0]
        for number in range(KILLS):
            node, phase = chance.randrange(2), PHASES[number % len(PHASES)]
            freezes = number % 5 == 4
            first.until(lambda: all(len(each.ranks()) == 2 for each in nodes))
            rank = 2 * node + chance.randrange(2)
            first.until(lambda: nodes[node].phase(rank)[0] in nodes[node].ranks())  # noqa: B023
            with contextlib.suppress(AssertionError):  # a phase that no later step has
                first.until(lambda: first.phase(rank)[2] == phase, timeout=10)  # noqa: B023
            time.sleep(chance.uniform(0, 0.1))
            pid = first.phase(rank)[0]
            done = len(steps(tmp_path))
            kill(pid, signal.SIGSTOP if freezes else signal.SIGKILL)
            begin = time.monotonic()
            first.until(lambda: len(steps(tmp_path)) > done)  # noqa: B023
            times.append(time.monotonic() - begin)
            lost.append(f"{'froze' if freezes else 'killed'} rank {rank} in {phase}")
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.said for node in nodes)
    print(f"{lost}\nseconds from a loss to the next step: {sorted(round(s, 1) for s in times)}")
    assert_same(tmp_path, tmp_path / "whole")


@pytest.mark.long
def test_a_cut_wire_costs_no_step(hosts: Hosts, sd3_folder: Path, tmp_path: Path) -> None:
    """The host that keeps the store goes on alone, and takes the other one in once the wire is mended."""
    settings = (*SETTINGS, "parallel.fsdp_size=2", "trainer.total_training_steps=60", "parallel.heartbeat_timeout_s=6")
    run_ranks(fit, 4, tiny_config(sd3_folder, tmp_path / "whole", *settings))
    env = {"IN_PLACE": "1", "PHASE_S": "0.1", "MAX_RESTARTS": "20"}
    with (
        hosts.job(0, sd3_folder, tmp_path, *settings, **env) as a,
        hosts.job(1, sd3_folder, tmp_path, *settings, **env) as b,
    ):
        a.until(lambda: len(steps(tmp_path)) >= 3)
        hosts.link(up=False)
        a.until(lambda: GOING_ON.findall(a.said))
        done = len(steps(tmp_path))
        a.until(lambda: len(steps(tmp_path)) > done + 2)
        hosts.link(up=True)
        with a.holding():
            a.until(lambda: " is ready, and waits" in b.said)
        a.until(lambda: len(GOING_ON.findall(a.said)) == 2)
        assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
        assert [nodes for _, nodes, _ in GOING_ON.findall(a.said)] == ["0", "0, 1"], a.said
    assert_same(tmp_path, tmp_path / "whole")


def footprint(pid: int) -> tuple[int, int, float]:
    """A process's threads, open files, and resident memory in MB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) / 1e3


@pytest.mark.long
@pytest.mark.timeout(300 + 60 * KILLS)
def test_recoveries_leave_nothing_behind(sd3_folder: Path, tmp_path: Path) -> None:
    """A process that has gone on many times has no more threads, files and memory than after the second time."""
    settings = (*SETTINGS, "parallel.fsdp_size=1", "trainer.total_training_steps=100000", "trainer.save_freq=-1")
    found = []
    with two_nodes(sd3_folder, tmp_path, *settings, ranks=1, MAX_RESTARTS=str(KILLS + 1)) as nodes:
        first, second = nodes
        first.until(lambda: steps(tmp_path))
        (survivor,) = first.ranks()
        for _ in range(max(KILLS, 3)):
            # a training step of both nodes, in which there is a rank to kill
            first.until(lambda: " 2 ranks on cpu: 2 replicas" in f" {first.said.rstrip().splitlines()[-2]}")
            done = len(steps(tmp_path))
            first.until(lambda: len(steps(tmp_path)) > done + 1)  # noqa: B023
            assert first.ranks() == [survivor], first.said
            found.append(footprint(survivor))
            told = len(GOING_ON.findall(first.said))
            kill(second.ranks()[0], signal.SIGKILL)
            first.until(lambda: len(GOING_ON.findall(first.said)) > told)  # noqa: B023
            first.until(lambda: GOING_ON.findall(first.said)[-1][1] == "0, 1")
    print(found)
    threads, files, memory = found[2]
    for more_threads, more_files, _ in found[2:]:
        assert more_threads <= threads + 1 and more_files <= files + 2, found
    assert (found[-1][2] - memory) / max(len(found) - 3, 1) < 2, found
