"""Jobs side by side: their order, what they are answered together, and how they end."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.models.meeting import Disbanded, Meeting, Seat, pause, shared


def meet(*jobs: Callable[[Seat], Any]) -> list[Any]:
    """What the jobs return, or the exceptions that they raise."""
    meeting, results = Meeting(len(jobs), {}), [None] * len(jobs)

    def run(number: int) -> None:
        with meeting.seat(number, str(number)) as seat:
            try:
                results[number] = jobs[number](seat)
            except ValueError as error:
                results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def test_jobs_take_turns_in_their_order_until_the_last_has_ended() -> None:
    said: list[str] = []

    def job(turns: int) -> Callable[[Seat], None]:
        def run(seat: Seat) -> None:
            for turn in range(turns):
                said.append(f"{seat.name}.{turn}")
                pause()

        return run

    meet(job(2), job(1), job(3))
    assert said == ["0.0", "1.0", "2.0", "0.1", "2.1", "2.2"]


@pytest.mark.parametrize("agrees", [True, False])
def test_requests_are_joined_only_if_all_ranks_join_them(agrees: bool) -> None:
    groups: list[list[int]] = []

    def together(values: list[int]) -> list[int]:
        groups.append(values)
        return values

    def run(seat: Seat) -> int:
        seat.meeting.agree = lambda numbers: agrees
        answer: int = seat.ask("other" if seat.number == 1 else "one", seat.number, together)
        pause()
        return answer

    assert meet(run, run, run) == [0, 1, 2]
    assert groups == ([[0, 2], [1]] if agrees else [[0], [1], [2]])


def test_equal_requests_are_answered_at_once_in_their_mode_of_gradients() -> None:
    groups: list[tuple[list[int], bool]] = []

    def together(values: list[int]) -> list[int]:
        groups.append((values, torch.is_grad_enabled()))
        return [10 * value for value in values]

    def job(key: str, *, grad: bool = True) -> Callable[[Seat], int]:
        def run(seat: Seat) -> int:
            with torch.set_grad_enabled(grad):
                answer: int = seat.ask(key, seat.number, together)
            return answer

        return run

    assert meet(job("a"), job("b"), job("a"), job("a", grad=False)) == [0, 10, 20, 30]
    assert groups == [([0, 2], True), ([1], True), ([3], False)]


def test_an_error_of_a_common_pass_is_that_of_each_job() -> None:
    def together(values: list[int]) -> list[int]:
        raise ValueError("no memory")

    def alone(seat: Seat) -> str:
        pause()
        pause()
        return "done"

    first, second, third = meet(*[lambda seat: seat.ask("a", 0, together)] * 2, alone)
    assert str(first) == str(second) == "no memory" and third == "done"


def test_a_common_graph_has_one_backward_pass_although_one_job_asks_for_it_later() -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]

    def together(seats: list[Seat]) -> list[Tensor]:
        return list(torch.cat([weights[seat.number] * (seat.number + 2) for seat in seats]).square().split(1))

    def early(seat: Seat) -> float:
        seat.backward(seat.ask("pass", seat, together).sum())
        return float(weights[seat.number].grad)  # type: ignore[arg-type]

    def late(seat: Seat) -> float:
        out = seat.ask("pass", seat, together)
        pause()
        pause()
        seat.backward(out.sum())
        return float(weights[seat.number].grad)  # type: ignore[arg-type]

    def leaves(seat: Seat) -> None:
        seat.ask("pass", seat, together)

    # d/dw (w n)^2 = 2 n^2
    assert meet(early, late, leaves) == [8.0, 18.0, None]


def test_things_are_made_once_for_all_jobs() -> None:
    made: list[int] = []

    def job(seat: Seat) -> list[int]:
        return shared("thing", lambda: made.append(seat.number) or made)

    assert meet(job, job) == [[0], [0]]
    assert shared("thing", lambda: "own") == "own"


def test_after_a_bug_nobody_gets_a_turn() -> None:
    meeting, said = Meeting(2, {}), list[str]()

    def wait() -> None:
        with meeting.seat(1, "second"):
            said.append("second")

    threading.Thread(target=wait, daemon=True).start()
    with pytest.raises(RuntimeError, match="a bug"), meeting.seat(0, "first"):
        raise RuntimeError("a bug")
    assert not said


def test_a_meeting_that_is_disbanded_ends_the_threads_that_wait() -> None:
    """One waits for an answer, and one for its first turn."""
    meeting, ended, threads = Meeting(3, {}), dict[int, bool](), list[threading.Thread]()

    def run(number: int) -> None:
        try:
            with meeting.seat(number, str(number)):
                if number == 1:
                    raise KeyError
                pause()
        except Disbanded:
            ended[number] = True
        except KeyError:
            ended[number] = False

    for number in range(3):
        threads.append(threading.Thread(target=run, args=(number,), daemon=True))
        threads[-1].start()
    threads[1].join(20)
    assert ended == {1: False}
    meeting.disband()
    for thread in threads:
        thread.join(20)
    assert ended == {0: True, 1: False, 2: True}
