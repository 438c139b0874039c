"""Rendezvous of ranks: messages about missing and duplicate ranks, and about inconsistent world sizes."""

import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from phalanx.config import ConfigError
from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.launch_env import Launch
from phalanx.run import rendezvous
from phalanx.run.world import start_world, stop_world
from phalanx.tools.cluster.notes import open_store
from tests.helpers.ranks import free_port, rank_environment, run_ranks

HOST = socket.gethostname()


def come(folder: Path, port: int, ranks: list[int], sizes: list[int], limit_s: float, late_s: float) -> str:
    """The error of this process if it registers as `ranks[i]` of `sizes[i]` ranks; empty if there is none. Without an
    error, rank 0, which has the store, leaves last; the others sleep for at least `late_s` between looks at it.
    """
    i = int(os.environ["RANK"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rendezvous.SAY_S = 1
    if ranks[i] != 0:
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(max(seconds, late_s)))
        rendezvous.time = clock  # type: ignore[assignment]
    (folder / f"{i}.begun").touch()
    while len(list(folder.glob("*.begun"))) < len(ranks):
        time.sleep(0.01)  # the time limits begin once all processes run
    try:
        store = rendezvous.meet(Launch(ranks[i], sizes[i], 0, 1), timedelta(seconds=limit_s))
        assert store.check(["meet/end"])
        answer = ""
    except ConfigError as error:
        answer = str(error)
    (folder / f"{i}.ended").touch()
    while ranks[i] == 0 and not answer and len(list(folder.glob("*.ended"))) < len(ranks):
        time.sleep(0.05)
    return answer


def told(
    ranks: list[int], sizes: list[int], limit_s: float = 60, port: int | None = None, late_s: float = 0
) -> list[str]:
    with TemporaryDirectory() as folder:
        given = Path(folder), port or free_port(), ranks, sizes, limit_s, late_s
        answers: list[str] = run_ranks(come, len(ranks), *given, init=False)
    return answers


def test_ranks_that_have_all_come() -> None:
    assert told([2, 0, 1], [3, 3, 3]) == ["", "", ""]


def test_ranks_that_are_missing(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 reports them while it waits; in the end, all ranks that came do."""
    line = r"2 of 4 ranks came within (\d+) s; ranks that are missing: 1, 3"
    first, second = told([0, 2], [4, 4], limit_s=4)
    last = re.fullmatch(line, first)
    assert first == second and last is not None and int(last[1]) >= 4
    said = [re.fullmatch(line, text) for text in capfd.readouterr().err.splitlines()]
    seconds = [int(text[1]) for text in said if text is not None]
    assert 1 <= len(said) == len(seconds) <= 2 and seconds[0] < int(last[1])  # each after twice the previous time


def test_a_rank_that_comes_twice() -> None:
    """All ranks that have come read the error, however long after rank 0."""
    answers = told([0, 1, 1], [3, 3, 3], late_s=1)
    where = rf"{HOST}, process \d+"
    line = rf"rank 1 came twice, from {where} and from {where}; expected one RANK each"
    assert all(re.fullmatch(line, answer) for answer in answers)


def test_worlds_of_two_sizes() -> None:
    where = rf"{HOST}, process \d+"
    line = rf"WORLD_SIZE is (2 on rank 0|3 on rank 1) \({where}\) and [23] on {where}; expected one number"
    first, second = told([0, 1], [2, 3])
    assert first == second and re.fullmatch(line, first)


def test_a_first_rank_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    where = f"rank 0 (MASTER_ADDR=127.0.0.1, MASTER_PORT={port})"
    (answer,) = told([1], [2], limit_s=2, port=port)
    assert re.fullmatch(rf"{re.escape(where)} was not reached within \d+ s: Connection refused", answer)
    said = capfd.readouterr().err
    assert re.search(
        rf"^rank 1 on {HOST} waits for {re.escape(where)}, for \d+ s so far: Connection refused$", said, re.M
    )


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (answer,) = told([0], [2], port=port)
    where = f"rank 0 on {HOST} cannot open the store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
    assert answer == f"{where}: port {port} of {HOST} is in use, by another job or a second first node"


def join_alone(port: int) -> list[int]:
    """Join a world of one rank, and open the store of a check of the cluster."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    size = start_world(ParallelConfig()).size
    stop_world()
    return [size, open_store(Launch.from_env(), 1).add("notes", 1)]


def test_one_rank_needs_no_port() -> None:
    """Many may start at once on a machine, each with a port that another has taken meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert run_ranks(join_alone, 1, other.getsockname()[1], init=False) == [[1, 1]]


def join_apart(port: int) -> list[int]:
    """Join a world of one rank, whichever of many processes this is."""
    os.environ |= rank_environment(0, 1, 1)
    return join_alone(port)


@pytest.mark.long
def test_two_hundred_start_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert run_ranks(join_apart, 200, other.getsockname()[1], init=False, timeout=300) == [[1, 1]] * 200


def test_what_torch_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError) as error, rendezvous.joining():
        raise RuntimeError("[enforce fail]\nrefused\n  by peer")
    assert str(error.value) == f"rank 3 on {HOST} cannot join the other ranks: [enforce fail] refused by peer"
