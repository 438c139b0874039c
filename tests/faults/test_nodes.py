"""Two hosts: the same results as on one host, a host that leaves and returns, and a cut network link."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import ADDRESSES, NAMES, Hosts
from tests.faults.jobs import SHORT, kill, rows, steps
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import LIMIT_S, run_ranks

pytestmark = pytest.mark.full
FIXED = ("parallel.fsdp_size=2", "model.lora_rank=4")


def worlds(said: str) -> list[int]:
    """The number of ranks of each start of a job."""
    return [int(n) for n in re.findall(r"^(\d+) ranks on cpu: ", said, re.MULTILINE)]


def on_one_host(model: Path, folder: Path, *overrides: str) -> None:
    """The same job on four ranks of this host."""
    run_ranks(fit, 4, tiny_config(model, folder, *overrides, "rollout.micro_batch_size_per_gpu=4"))


def test_two_hosts_are_one_world(hosts: Hosts, sd3_folder: Path, tmp_path: Path) -> None:
    """2 x 2 ranks on two hosts train exactly the same weights as 4 ranks on one host.

    Node 0 is given by its name, which resolves to node 0 on the other host and to the loopback interface on itself.
    """
    settings = (*FIXED, "trainer.total_training_steps=3")
    on_one_host(sd3_folder, tmp_path / "one", *settings)
    folder = tmp_path / "two"
    env = {"MASTER_ADDR": NAMES[0]}
    with (
        hosts.job(0, sd3_folder, folder, *settings, **env) as a,
        hosts.job(1, sd3_folder, folder, *settings, **env) as b,
    ):
        assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    assert worlds(a.said) == [4] and worlds(b.said) == []  # only rank 0 prints
    assert rows(folder) == rows(tmp_path / "one")


@pytest.mark.long
def test_a_host_goes_and_comes_back(hosts: Hosts, sd3_folder: Path, tmp_path: Path) -> None:
    """The global batch, and therefore the run, does not change: only its division among the ranks does."""
    settings = (*FIXED, "trainer.save_freq=2", "trainer.total_training_steps=40")
    elastic = {"NNODES": "1:2", "RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"}
    with hosts.job(0, sd3_folder, tmp_path, *settings, **elastic, PHASE_S="0.15") as a:
        b = hosts.job(1, sd3_folder, tmp_path, *settings, **elastic, PHASE_S="0.15")
        a.until(lambda: len(steps(tmp_path)) >= 4)
        b.kill_all()
        begin = time.monotonic()
        a.until(lambda: worlds(a.said) == [4, 2])
        before = len(steps(tmp_path))
        a.until(lambda: len(steps(tmp_path)) > before)
        alone_after = time.monotonic() - begin
        with hosts.job(1, sd3_folder, tmp_path, *settings, **elastic, PHASE_S="0.02") as b:
            begin = time.monotonic()
            a.until(lambda: "4 ranks on cpu: " in a.said[-20000:] and worlds(a.said + b.said)[2:] == [4])
            again_after = time.monotonic() - begin
            assert (a.wait(), b.wait()) == (0, 0), a.said + b.said
    print(f"alone after {alone_after:.0f} s, two again after {again_after:.0f} s")
    whole = tmp_path / "whole"
    on_one_host(sd3_folder, whole, *settings)
    for row, wanted in zip(rows(tmp_path), rows(whole), strict=True):
        assert row["step"] == wanted["step"]
        for key in ("reward/mean", "actor/grad_norm"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-4), (row["step"], key)


@pytest.mark.long
def test_a_stop_of_node_0_is_one_line_on_the_other(hosts: Hosts, sd3_folder: Path, tmp_path: Path) -> None:
    """In an elastic job, whose second node joins later; node 0 reports that, too."""
    settings = (*FIXED, "trainer.total_training_steps=500")
    elastic = {"NNODES": "1:2", "PHASE_S": "0.1", "RDZV_CONF": "last_call_timeout=3"}
    with hosts.job(0, sd3_folder, tmp_path, *settings, **elastic) as a:
        a.until(lambda: steps(tmp_path))
        alone = a.phase(0)[0]
        with hosts.job(1, sd3_folder, tmp_path, *settings, **elastic) as b:
            # wait until both nodes train, because a node whose ranks have not started would end differently
            a.until(lambda: worlds(a.said)[-1:] == [4] and a.phase(0)[0] != alone and a.phase(0)[1] >= 2)
            assert "\nnodes come or go: starting again after step " in a.said and "stopped by" not in a.said
            kill(a.process.pid, signal.SIGTERM)
            assert (a.wait(), b.wait()) == (143, 143), a.said + b.said
    assert "stopped by SIGTERM after step " in a.said
    lines = [line for line in b.said.splitlines() if not line.startswith(("waiting for node 0", "[W"))]
    first, last = lines
    assert first == f"starting 2 ranks; node 0 ({ADDRESSES[0]}) shows the job's progress"
    line = f"error: node 0 (MASTER_ADDR={ADDRESSES[0]}, MASTER_PORT=29500) has left the job, and this node's ranks were stopped"
    assert last.startswith(line)


@pytest.mark.long
def test_an_error_on_one_host_is_told_on_the_other(hosts: Hosts, sd3_folder: Path, tmp_path: Path) -> None:
    """Rank 2 raises on host 1; host 0 ends within seconds, and with that error."""
    settings = (*FIXED, "trainer.total_training_steps=500")
    with (
        hosts.job(0, sd3_folder, tmp_path, *settings, PHASE_S="0.1", FAULT="raise:2:2") as a,
        hosts.job(1, sd3_folder, tmp_path, *settings, PHASE_S="0.1", FAULT="raise:2:2") as b,
    ):
        b.until(lambda: "KeyError" in b.said)
        assert (a.wait(), b.wait()) == (1, 1)
    assert re.search(r"^rank 2 on \S+: KeyError: 'no such thing'\n\Z", a.said, re.MULTILINE), a.said
    traceback = b.said.partition("Traceback (most recent call last):\n")
    assert re.search(r"^rank 2 on \S+:\n\Z", traceback[0], re.MULTILINE), b.said
    assert traceback[2].endswith("\nKeyError: 'no such thing'\n"), b.said


def test_a_cut_wire_ends_all_ranks(hosts: Hosts, sd3_folder: Path, tmp_path: Path) -> None:
    """Each side reports the ranks that it has lost."""
    settings = (*FIXED, "trainer.total_training_steps=500", SHORT)
    with (
        hosts.job(0, sd3_folder, tmp_path, *settings, PHASE_S="0.1") as a,
        hosts.job(1, sd3_folder, tmp_path, *settings, PHASE_S="0.1") as b,
    ):
        a.until(lambda: len(steps(tmp_path)) >= 2)
        hosts.link(up=False)
        deadline = time.monotonic() + LIMIT_S
        for job in (a, b):
            while job.ranks():
                assert time.monotonic() < deadline, a.said + b.said
                time.sleep(0.1)
        for job in (a, b):
            kill(job.process.pid, signal.SIGTERM)  # the launchers would take long to leave the rendezvous
            job.wait()
        assert re.search(r"lost ranks 2, 3 on \S+ \(node 1\): no sign of life for \d+ s", a.said), a.said
        assert re.search(r"lost rank 0 on \S+ \(node 0\), which keeps the store: no contact for \d+ s", b.said), b.said
