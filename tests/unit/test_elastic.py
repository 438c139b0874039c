"""Worlds that an elastic job refuses or warns of, and the words of a rank for others that it lost."""

import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import threading
import time
from typing import NoReturn

import pytest
import torch.distributed as dist

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.distributed.collectives import all_gather_object
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import shard_size
from phalanx.run.roles import roles_of
from phalanx.run.rules import check_launch, load_config
from phalanx.run.watchdog import Watch
from phalanx.run.world import ranks_of, warn_of_sizes
from tests.helpers.checks import wait_for
from tests.helpers.ranks import free_port, run_ranks

ENV = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}


def job(*overrides: str) -> FlowRLConfig:
    return load_config(FlowRLConfig, None, ["model.path=any", *overrides])


def works(launch: Launch) -> None:
    if launch.world_size % 8:
        raise ConfigError(f"data.train_batch_size: 32 does not divide over {launch.world_size} ranks")


def test_worlds_of_a_range_of_nodes() -> None:
    assert Launch.from_env(ENV).worlds() == [8]
    assert Launch.from_env({**ENV, "NNODES": "2"}).worlds() == [8]
    assert Launch.from_env({**ENV, "NNODES": "1:4"}).worlds() == [4, 8, 12, 16]


def test_worlds_that_would_not_do_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_sizes(Launch.from_env({**ENV, "NNODES": "2:4"}), works)
    assert [record.message for record in caplog.records] == [
        "NNODES=2:4: with 12 ranks the job would end: data.train_batch_size: 32 does not divide over 12 ranks"
    ]


@pytest.mark.parametrize("elastic", [{"TORCHELASTIC_MAX_RESTARTS": "3"}, {"NNODES": "2:4"}])
def test_a_restart_must_resume(elastic: dict[str, str]) -> None:
    launch = Launch.from_env({**ENV, **elastic})
    with pytest.raises(ConfigError) as error:
        check_resume(launch)
    assert str(error.value) == (
        "trainer.resume: never would begin from there again whenever the ranks are restarted (MAX_RESTARTS, or a range "
        "of NNODES); expected auto, with another trainer.output_dir"
    )
    check_resume(Launch.from_env(ENV))


def check_resume(launch: Launch) -> None:
    cfg = job("trainer.resume=never")
    check_launch(cfg, ranks_of(cfg, roles_of({}, launch), launch))


def test_a_sharding_that_a_world_forbids_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cfg = job("parallel.fsdp_size=8")
        launch = Launch.from_env({**ENV, "NNODES": "1:2"})
        warn_of_sizes(launch, lambda other: shard_size(cfg.parallel, other))
    assert [record.message for record in caplog.records] == [
        "NNODES=1:2: with 4 ranks the job would end: parallel.fsdp_size: 8 does not divide the world's 4 ranks; nearest "
        "that does: 4"
    ]


def pool_beside_a_watch() -> int | None:
    watch = Watch(0, ["a"], range(1), 10.0)
    watch.listen()
    with multiprocessing.get_context("fork").Pool(1) as pool:  # its end sends SIGTERM to the worker
        pool.map(abs, [-1])
    time.sleep(0.3)
    return watch.stop


def test_a_signal_to_a_forked_worker_is_not_the_ranks() -> None:
    assert run_ranks(pool_beside_a_watch, 1) == [None]


def stopped_beside_many_files() -> int | None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept = [os.dup(0) for _ in range(1100)]  # as connections to many ranks
    watch = Watch(0, ["a"], range(1), 10.0)
    assert watch._wakeup.fileno() > max(kept) >= 1024
    watch.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: watch.stop is not None)
    return watch.stop


def test_a_signal_is_heard_beside_more_open_files_than_select_knows() -> None:
    assert run_ranks(stopped_beside_many_files, 1) == [signal.SIGTERM]


def watches(count: int) -> list[Watch]:
    store = dist.HashStore()
    hosts = ["a"] * 2 + ["b"] * (count - 2)
    made = [Watch(rank, hosts, range(2), 10.0, store, store) for rank in range(count)]
    for watch in made:
        watch._seen = [(b"0", time.monotonic())] * count
    return made


def test_the_first_error_wins() -> None:
    first, second, third = watches(3)
    assert second.tell("rank 1: KeyError") == ("rank 1: KeyError", True)
    assert first.tell("rank 0: connection closed by peer") == ("rank 1: KeyError", False)
    assert third.explain() == "rank 1: KeyError"


def test_an_error_follows_from_a_loss_while_the_job_goes_on_without_others() -> None:
    """Not before it can, nor once this rank knows of the loss or its job is over."""
    first, _, _ = watches(3)
    first._seen[2] = b"0", time.monotonic() - 7  # silent
    assert not first.goes_on(wait=False)
    first.sever = lambda: None
    assert first.goes_on(wait=False)
    first.sever = None
    assert not first.goes_on(wait=False)
    first.sever = lambda: None
    first.close()
    assert not first.goes_on(wait=False)


def test_a_signal_to_one_rank_stops_all() -> None:
    """Two launchers of a rank each."""
    store = dist.HashStore()
    told, other = (Watch(rank, "ab", range(rank, rank + 1), 10.0, store, store) for rank in (0, 1))
    told._seen = other._seen = [(b"0", time.monotonic())] * 2
    told._handle_signal(signal.SIGTERM)
    other._exchange_beats(store)
    assert (told.stop, other.stop) == (signal.SIGTERM, signal.SIGTERM)


class Failing(Watch):
    """A watch that raises in place of ending its process."""

    def fail(self, error: str, gone: int = 0) -> NoReturn:
        raise RuntimeError(error)


@pytest.mark.parametrize("alive", [True, False])
def test_a_rank_of_the_same_launcher_is_dead_only_without_a_heartbeat(alive: bool) -> None:
    store = dist.HashStore()
    told, other = (Failing(rank, "aa", range(2), 1.0, store, store) for rank in (0, 1))
    told._seen = other._seen = [(b"0", time.monotonic())] * 2
    beating = threading.Thread(target=other._send_beats, args=(store,), daemon=True)
    if alive:
        beating.start()
        told._handle_signal(signal.SIGTERM)
        other._closed.set()
        beating.join()
        assert (told.stop, other.stop) == (signal.SIGTERM, signal.SIGTERM)
    else:
        with pytest.raises(
            RuntimeError, match=r"^no word from rank 1 on a: killed, out of memory, crashed, or frozen$"
        ):
            told._handle_signal(signal.SIGTERM)


class Silent(Watch):
    """A watch that keeps the errors for which it would end its process."""

    def fail(self, error: str, gone: int = 0) -> NoReturn:
        self._leave_silently(self.tell(error)[0])

    def _leave_silently(self, error: str, gone: int = 0) -> NoReturn:
        errors.append(error)
        self._closed.set()
        raise SystemExit  # ends the thread


errors: list[str] = []


def frozen(port: int, ranks: list[int]) -> list[str]:
    """Two ranks, of which these are frozen for longer than the limit; returns the errors of this one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stores = [dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0 and i == 0) for i in range(2)]
    watch = Silent(rank, "aa", range(2), 1.0, *stores)
    pids = all_gather_object(os.getpid())
    watch.start()
    if rank == 0:
        chosen = " ".join(str(pids[i]) for i in ranks)
        subprocess.Popen(["sh", "-c", f"kill -STOP {chosen}; sleep 2; kill -CONT {chosen}"])
    time.sleep(4)
    dist.barrier()  # the store's rank leaves last
    return errors


@pytest.mark.full
def test_ranks_that_were_frozen_together_go_on() -> None:
    assert run_ranks(frozen, 2, free_port(), [0, 1]) == [[], []]


def test_a_frozen_rank_that_runs_again_ends_by_the_error_of_the_others() -> None:
    (line,), (read,) = run_ranks(frozen, 2, free_port(), [1])
    assert line == read and re.fullmatch("lost rank 1 on a: no sign of life for [12] s", line)


def test_who_is_silent_is_lost() -> None:
    first, second, third, fourth = watches(4)
    begin = time.monotonic()
    while time.monotonic() - begin < 4:  # ranks 0 and 1 live, 2 and 3 were never heard of again
        for watch in (first, second):
            assert watch._store is not None
            watch._exchange_beats(watch._store)
        time.sleep(0.2)
    assert first._lost_ranks(60.0) is None
    lost = first._lost_ranks(3.0)
    assert lost is not None and lost.startswith("lost ranks 2, 3 on b: no sign of life for ")
    assert (first.explain() or "").startswith("lost ranks 2, 3 on b: no sign of life for ")
    assert third._rank_names([0, 1, 3]) == "ranks 0, 1 on a, rank 3 on b"
    assert (fourth._lost_ranks(3.0) or "").startswith("lost rank 0 on a, which keeps the store: no contact for ")
