"""Jobs whose ranks have roles end or resume like others when ranks are killed, stopped, fail, hang or are slow."""

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.rl import build
from phalanx.run.telemetry.curves import read_metrics
from tests.faults import jobs
from tests.faults.jobs import SHORT, Job, checkpoints, kill, killed, steps
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import free_port
from tests.helpers.roles import run_roles

HOST = socket.gethostname()
ENDLESS = "trainer.total_training_steps=500"
ACTOR_LAST, ACTOR_FIRST = "placement={rollout: 0, actor: 1}", "placement={actor: 0, rollout: 1}"
SCHEDULES = {
    "synchronous": (),
    "one step off": ("rollout.schedule=one_step_off", "rollout.in_flight=finish"),
    "one step off, dropped": ("rollout.schedule=one_step_off", "rollout.in_flight=drop"),
}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without metrics of time and memory."""
    return [{k: v for k, v in row.items() if not k.startswith("idle/")} for row in jobs.rows(folder)]


def untouched(model: Path, folder: Path, total: int, *overrides: str) -> list[dict[str, Any]]:
    """The rows of the same job without interruption."""
    run_roles(build, 2, tiny_lm_config(model, folder, *overrides, f"trainer.total_training_steps={total}"))
    return rows(folder)


def node(number: int, port: int, model: Path, folder: Path, *overrides: str, **env: str) -> Job:
    """Start node `number` of a job of two nodes with one rank each."""
    place = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"NPROC_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "lo", "PHASE_S": "0.1", **env}
    return Job(model, folder, *overrides, env=place, name=f"node_{number}", lm=True)


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_killed_roles_start_again(schedule: str, lm_folder: Path, tmp_path: Path) -> None:
    """After SIGKILL of rank 0, which samples and hosts the store, all ranks restart, and the run equals one without
    interruption except for a dropped batch. After SIGKILL of the actor, all ranks end and report that cause.
    """
    settings = (ACTOR_LAST, *SCHEDULES[schedule], "trainer.save_freq=2")
    console = "trainer.logger=[console]"
    env = {"MAX_RESTARTS": "1", "PHASE_S": "0.05"}
    with Job(lm_folder, tmp_path, *settings, console, ENDLESS, env=env, lm=True) as job:
        job.until(lambda: job.phase(1)[1] >= 4)
        old = set(job.ranks())
        kill(job.phase(0)[0], signal.SIGKILL)
        job.until(lambda: old.isdisjoint(job.ranks()))
        job.until(lambda: job.phase(1)[0] not in old and len(job.ranks()) == 2 and job.phase(1)[1] >= 7)
        kill(job.phase(1)[0], signal.SIGKILL)
        assert job.wait() == 137, job.said
        assert job.processes() == {}
        said = job.said
    assert len(re.findall(rf"^(?:lost )?rank 0 on {HOST} \(rollout\)", said, re.MULTILINE)) == 1
    assert re.fullmatch(killed(1, "actor"), said.splitlines()[-1])
    assert "Traceback" not in said
    for words in ("loading the model", "ranks on cpu"):  # once at each start, by the actor
        assert said.count(words) == 2
    assert len(re.findall("^step 1/500  reward", said, re.MULTILINE)) == 1
    (resumed,) = re.findall(r"^resuming from \S+/step_(\d+): step \d+ of 500$", said, re.MULTILINE)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    ages = [row["rollout/staleness_max"] for row in found]
    if schedule == "synchronous":
        assert set(ages) == {0}
    else:
        fresh = {1, int(resumed) + 1} if schedule.endswith("dropped") else {1}
        assert ages == [float(row["step"] not in fresh) for row in found]
    if not schedule.endswith("dropped"):
        assert found == untouched(lm_folder, tmp_path / "whole", len(found), *settings)


@pytest.mark.long
@pytest.mark.full
def test_a_signal_to_one_roles_launcher_stops_all(lm_folder: Path, tmp_path: Path) -> None:
    """Rollout and actor have separate launchers: whichever is stopped, the last complete step is saved, and the run
    resumes from it.
    """
    settings = (ACTOR_LAST, *SCHEDULES["one step off"], ENDLESS)
    said: list[str] = []
    for told in ((1,), (0,), (0, 1)):
        port, before = free_port(), steps(tmp_path)[-1:] or [0]
        keys = (*settings, "trainer.save_freq=100")
        with node(0, port, lm_folder, tmp_path, *keys) as a, node(1, port, lm_folder, tmp_path, *keys) as b:
            b.until(lambda: steps(tmp_path)[-1:] > [before[0] + 1])  # noqa: B023
            for number in told:
                (a, b)[number].process.send_signal(signal.SIGTERM)
            assert (a.wait(), b.wait()) == (143, 143), a.said + b.said
            assert a.processes() == b.processes() == {}
            done = steps(tmp_path)[-1]
            assert checkpoints(tmp_path)[-1] == f"step_{done:06d}"
            kept = f"the same command resumes from {tmp_path}/out/checkpoints/step_{done:06d}"
            assert b.said.splitlines()[-1] == f"stopped by SIGTERM after step {done} of 500; {kept}"
            said = [a.said, b.said]
    assert said[0].count("stopped by") == 1  # in the run in which only the other launcher was signalled
    assert "\nstopped by SIGTERM; what is kept is said where the actor runs\n" in said[0]
    assert said[1].count("stopped by") == 3
    assert [text.count("resuming from") for text in said] == [0, 2]
    assert [row["rollout/staleness_max"] for row in rows(tmp_path)] == [0.0] + [1.0] * (steps(tmp_path)[-1] - 1)
    assert rows(tmp_path) == untouched(lm_folder, tmp_path / "whole", steps(tmp_path)[-1], *settings[:-1])


@pytest.mark.long
@pytest.mark.parametrize("killed", ["rollout", "actor"])
def test_a_killed_role_on_another_node_is_named(killed: str, lm_folder: Path, tmp_path: Path) -> None:
    port, number = free_port(), ("rollout", "actor").index(killed)
    keys = (ACTOR_LAST, ENDLESS, SHORT)
    with node(0, port, lm_folder, tmp_path, *keys) as a, node(1, port, lm_folder, tmp_path, *keys) as b:
        b.until(lambda: steps(tmp_path)[1:])
        kill((a, b)[number].ranks()[0], signal.SIGKILL)
        codes = (a.wait(), b.wait())
        assert a.processes() == b.processes() == {}
        own, other = (a.said, b.said) if number == 0 else (b.said, a.said)
    assert codes[number] == 137 and codes[1 - number] == 1
    assert own.splitlines()[-1] == f"error: rank {number} on {HOST} was killed by SIGKILL, possibly out of memory"
    how = "no sign of life" if number else "which keeps the store: no contact"  # it went with the launcher
    lost = rf"lost rank {number} on {HOST} \(node {number}, {killed}\)(: |, ){how} for \d+ s"
    assert re.fullmatch(lost, other.splitlines()[-1]), other
    assert "Traceback" not in own + other


REFUSING = """
def refuses(completions, prompts, metadata):
    raise ValueError("no such judge")
"""
FLAT = """
def flat(completions, prompts, metadata):
    return [1.0] * len(completions)
"""
FAULTS = {"reward": "", "rollout": "raise:1:10", "actor": "raise:0:2"}
REPORTS = {
    "reward": r"error: rank 1: reward 'refuses' raised ValueError: no such judge on the prompt .*\n\Z",
    "rollout": rf"rank 1 on {HOST} \(rollout\):\nTraceback [\s\S]* in sample\n[\s\S]*\nKeyError: 'no such thing'\n\Z",
    "actor": rf"rank 0 on {HOST} \(actor\):\nTraceback [\s\S]* in advantage\n[\s\S]*\nKeyError: 'no such thing'\n\Z",
}


@pytest.mark.full
@pytest.mark.seldom("rollout", "actor")
@pytest.mark.parametrize("where", REPORTS)
def test_a_role_that_fails_says_so_once(where: str, lm_folder: Path, tmp_path: Path) -> None:
    """The same holds for a warning about the rewards, which rank 1 computes and rank 0 logs."""
    (tmp_path / "rewards.py").write_text(REFUSING + FLAT)
    name = "refuses" if where == "reward" else "flat"
    reward = f"reward.functions=[{{path: '{tmp_path}/rewards.py:{name}'}}]"
    with Job(lm_folder, tmp_path, ACTOR_FIRST, ENDLESS, reward, env={"FAULT": FAULTS[where]}, lm=True) as job:
        assert job.wait() == 1
        said = job.said
    assert re.search(rf"^{REPORTS[where]}", said, re.MULTILINE), said
    assert said.count("Traceback (most recent call last)") == (where != "reward")
    assert said.count(": no such judge") + said.count(": 'no such thing'") == 1
    flat = "WARNING: the reward is 1 for every sample of the last 5 steps"
    assert said.count(flat) == (where == "rollout")


SLOW = """
import time

def slow(completions, prompts, metadata):
    time.sleep(4.5)
    return [float(len(text)) for text in completions]
"""


@pytest.mark.long
def test_a_slow_role_is_no_hang_and_a_rank_that_hangs_is_one(lm_folder: Path, tmp_path: Path) -> None:
    """The actor's ranks wait for samples longer than parallel.timeout_s; then one of them hangs in an update."""
    (tmp_path / "rewards.py").write_text(SLOW)
    reward = f"reward.functions=[{{path: '{tmp_path}/rewards.py:slow'}}]"
    settings = ("placement={rollout: 0, actor: 1-2}", "parallel.timeout_s=8", "rollout.micro_batch_size_per_gpu=8")
    env = {"NPROC_PER_NODE": "3", "FAULT": "hang:2:1"}
    with Job(lm_folder, tmp_path, *settings, reward, ENDLESS, env=env, lm=True) as job:
        assert job.wait() == 1
        assert f"stacks of rank 2 on {HOST} (actor):" in job.said
        assert job.said.count("Timed out waiting") == 1
        assert job.processes() == {}
    (row,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert row["step"] == 1 and row["time/wait"] > 8


@pytest.mark.long
def test_roles_are_divided_anew_as_a_node_leaves(lm_folder: Path, tmp_path: Path) -> None:
    """A node dies with all ranks of a role (the rendezvous decides which one): half of the remaining ranks sample and
    half train, starting from the last checkpoint.
    """
    settings = ("placement={rollout: 1/2, actor: 1/2}", "trainer.save_freq=2", ENDLESS)
    elastic = {
        "NNODES": "1:2",
        "NPROC_PER_NODE": "2",
        "RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5",
    }
    port = free_port()
    with (
        node(0, port, lm_folder, tmp_path, *settings, **elastic) as a,
        node(1, port, lm_folder, tmp_path, *settings, **elastic) as b,
    ):
        a.until(lambda: "2 ranks on cpu: " in a.said + b.said and len(steps(tmp_path)) >= 3)
        alone = a.said.count("1 ranks on cpu: ")  # 1 if one node joined long before the other
        b.kill_all()
        a.until(lambda: a.said.count("1 ranks on cpu: ") > alone)
        before = len(steps(tmp_path))
        a.until(lambda: len(steps(tmp_path)) > before + 1)
        assert "resuming from" in a.said
        a.process.send_signal(signal.SIGTERM)
        assert a.wait() == 143
    assert steps(tmp_path) == list(range(1, len(steps(tmp_path)) + 1))


def test_an_elastic_job_refuses_ranges(lm_folder: Path, tmp_path: Path) -> None:
    """The mistake is reported once, before any rank starts."""
    with node(0, free_port(), lm_folder, tmp_path, ACTOR_LAST, NNODES="1:2", NPROC_PER_NODE="2") as job:
        assert job.wait() == 2
        said = (
            "error: placement.rollout: '0' names ranks, which change as nodes join and leave (NNODES=1:2); expected a"
        )
        assert job.said.startswith(said) and job.said.count("\n") == 1
