"""The pretended accelerator of the tests: what it refuses, and what it allows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # before anything of torch is replaced
import torch.distributed as dist

from tests.helpers.ranks import RankError, run_ranks
from tests.pretended import install
from tests.pretended.streams import Stream


def two_devices() -> None:
    torch.ones(2, device="cuda") + torch.ones(2)


def backward_of_two_devices() -> None:
    class Crossing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * torch.ones(2)

    Crossing.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()


def indices_on_the_device() -> None:
    torch.ones(4)[torch.arange(2, device="cuda")]


def generator_of_the_cpu() -> None:
    torch.randn(2, generator=torch.Generator(), device="cuda")


def numpy_of_the_device() -> None:
    torch.ones(2, device="cuda").numpy()


def gloo_with_the_device() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2, device="cuda"))


def nccl_with_the_cpu() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))


def read_without_a_wait() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        there = torch.ones(2, device="cuda")
    there + 1


def write_without_a_wait() -> None:
    side, there = torch.cuda.Stream(), torch.ones(2, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there + 1
    there.zero_()


def early_look_at_a_late_copy() -> None:
    there = torch.ones(2, device="cuda").to("cpu", non_blocking=True)
    there.sum()


def early_reuse_of_a_buffer() -> None:
    buffer = torch.zeros(2, pin_memory=True)
    buffer.to("cuda", non_blocking=True)
    buffer.fill_(1)


def free_in_use() -> None:
    side, there = torch.cuda.Stream(), torch.ones(2, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there + 1
    del there
    torch.ones(2, device="cuda")


REFUSED = [
    (two_devices, "add: operands on ['cpu', 'cuda:0']"),
    (backward_of_two_devices, "mul: operands on ['cpu', 'cuda:0']"),
    (indices_on_the_device, "index: indices on the device, and a tensor on the CPU"),
    (generator_of_the_cpu, "randn: a generator of cpu for a tensor on cuda:0"),
    (numpy_of_the_device, "a tensor on cuda:0 cannot become a NumPy array"),
    (gloo_with_the_device, "allreduce_: a tensor on cuda:0 for a group of gloo"),
    (nccl_with_the_cpu, "allreduce_: a tensor on cpu for a group of nccl"),
    (read_without_a_wait, "the default stream reads memory that a side stream may not have written yet"),
    (write_without_a_wait, "the default stream writes to memory that a side stream may not have read yet"),
    (early_look_at_a_late_copy, "the host reads memory that the default stream may not have written yet"),
    (early_reuse_of_a_buffer, "the host writes to memory that the default stream may not have read yet"),
    (free_in_use, "the default stream may reuse memory that was freed, and that a side stream may still use"),
]


def under_rules(job: Callable[[], None]) -> list[str]:
    record = install()
    job()
    return record.faults


@pytest.mark.parametrize(("job", "message"), REFUSED, ids=lambda value: value.__name__ if callable(value) else "")
def test_what_is_refused(job: Callable[[], None], message: str) -> None:
    try:
        (faults,) = run_ranks(under_rules, 1, job, init=False)
    except RankError as error:
        faults = [str(error)]
    assert message in "\n".join(faults)


def allowed() -> list[Any]:
    """Each of the above as it should be, and numbers of it."""
    record = install()
    x = torch.arange(4.0, device="cuda", requires_grad=True)
    (x * torch.tensor(2.0) + x[torch.tensor([3, 2, 1, 0])]).sum().backward()
    assert x.grad is not None and x.grad.device == torch.device("cuda", 0)
    numbers = [x.grad.tolist(), str(x.to("cpu").device), x.detach().cpu().numpy().tolist()]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2, device="cuda"))
    dist.all_reduce(torch.ones(2))
    side: Stream = torch.cuda.Stream()
    with torch.cuda.stream(side):
        there = torch.ones(2, device="cuda")
    there.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    late = (there + 1).to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    record.phase = "end"
    return [*numbers, late.tolist(), bool(x.sum() > 3), record.waits()["end"], record.faults]


def test_what_is_allowed() -> None:
    (numbers,) = run_ranks(allowed, 1, init=False)
    assert numbers == [[3.0, 3.0, 3.0, 3.0], "cpu", [0.0, 1.0, 2.0, 3.0], [2.0, 2.0], True, 1, []]
