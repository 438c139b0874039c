"""The harness that distributed tests stand on: results, failures and hangs of forked ranks."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, run_ranks, torchrun


def _sum_and_place(offset: int) -> tuple[torch.Tensor, tuple[str, ...]]:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return value, tuple(os.environ[name] for name in names)


def test_results_come_back_by_rank() -> None:
    results = run_ranks(_sum_and_place, 4, 10, local_world=2)
    assert [value.item() for value, _ in results] == [46] * 4
    assert [place for _, place in results] == [
        ("0", "0", "4", "2", "0"),
        ("1", "1", "4", "2", "0"),
        ("2", "0", "4", "2", "1"),
        ("3", "1", "4", "2", "1"),
    ]
    assert "RANK" not in os.environ and not dist.is_initialized()


def test_what_ranks_have_imported_is_there_in_later_ones() -> None:
    def known(name: str) -> bool:
        before = name in sys.modules
        importlib.import_module(name)
        return before

    name = "torch.utils.collect_env"
    sys.modules.pop(name, None)
    assert run_ranks(known, 2, name) == [False, False]
    assert run_ranks(known, 2, name) == [True, True]


def test_ranks_can_differentiate_after_the_parent_did() -> None:
    def gradient() -> float:
        x = torch.tensor(3.0, requires_grad=True)
        (x * x).backward()
        assert x.grad is not None
        return x.grad.item()

    assert gradient() == 6.0
    assert run_ranks(gradient, 2) == [6.0, 6.0]


def test_an_exception_surfaces_with_its_traceback_before_those_it_caused() -> None:
    def fails_on_rank_1() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("the vase is broken")
        dist.barrier()

    with pytest.raises(RankError) as caught:
        run_ranks(fails_on_rank_1, 2)
    message = str(caught.value)
    assert message.startswith(f"{fails_on_rank_1.__qualname__} on 2 ranks: rank 1 raised")
    assert 'raise RuntimeError("the vase is broken")' in message


def test_a_hung_rank_is_named_with_its_stack() -> None:
    def hangs_on_rank_1() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(600)

    with pytest.raises(RankError) as caught:
        run_ranks(hangs_on_rank_1, 2, timeout=3, init=False)
    assert str(caught.value).startswith(f"{hangs_on_rank_1.__qualname__} on 2 ranks: ranks [1] hung")
    assert "in hangs_on_rank_1" in str(caught.value)


def test_a_rank_that_dies_is_named_with_its_status() -> None:
    def dies_on_rank_0() -> None:
        if dist.get_rank() == 0:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RankError, match="rank 0: exit status 7"):
        run_ranks(dies_on_rank_0, 2)


def test_a_test_that_is_killed_leaves_no_torchrun(tmp_path: Path) -> None:
    task, said = tmp_path / "task.py", tmp_path / "pid"
    task.write_text(f"import os, time\nopen({str(said)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(300)\n")
    test = os.fork()
    if test == 0:
        torchrun([task], timeout=300)
        os._exit(1)
    deadline = time.monotonic() + 240
    while not said.exists() or not said.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(test, signal.SIGKILL)
    os.waitpid(test, 0)
    rank = Path("/proc", said.read_text().strip())
    while rank.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
