"""Copies of the state on another node, from pretended GPUs into pinned memory."""

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.launch_env import Launch
from phalanx.run import peer_copy
from phalanx.run.peer_copy import PeerCopy, packed, unpack
from tests.helpers.ranks import free_port, run_ranks
from tests.pretended.jobs import pretend
from tests.pretended.record import Record


def parts_after(step: int, rank: int, device: str) -> list[Tensor]:
    """Parts on a device, and moments that are offloaded; the second rank has less."""
    base = 100.0 * step + rank
    rows = 5 - 2 * rank
    weights = [torch.full((rows, 7), base).to(device), torch.full((3,), base, dtype=torch.bfloat16).to(device)]
    return [*weights, torch.full((rows, 7), base), torch.tensor(float(step)).to(device)]


def exchange(port: int) -> tuple[bool, bool, Record]:
    """Whether the copies of two steps are right, and what fills parts on the device again."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    record, launch = pretend(), Launch.from_env()
    peer_copy.MESSAGE = 48
    dist.init_process_group("cpu:gloo,cuda:nccl")
    cuda = torch.device("cuda", launch.local_rank)
    world: Any = SimpleNamespace(rank=launch.rank, size=2, device=cuda, shard_size=2, launch=launch)
    peer, other = PeerCopy(), 1 - launch.rank
    for step in (1, 2, 3):
        peer.update(parts_after(step, launch.rank, "cuda"), step, world)
    wanted = {(step, other): packed(parts_after(step, other, "cpu")) for step in (2, 3)}
    same = peer.copies.keys() == wanted.keys() and all(peer.copies[of].equal(wanted[of]) for of in wanted)
    pinned = all(memory.is_pinned() for memory in peer.copies.values())
    filled = parts_after(0, other, "cuda")
    unpack(peer.copies[3, other], filled)
    same = same and packed(filled).equal(wanted[3, other])
    return same, pinned, record


def test_an_exchange_between_gpus() -> None:
    for same, pinned, record in run_ranks(exchange, 2, free_port(), local_world=1, init=False):
        assert not record.faults, record.faults
        assert same and pinned
