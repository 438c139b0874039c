"""CPU seconds of rank 0 for a checkpoint of many ranks, with plans of all ranks made from those of one replica.

Called by `benchmarks/scale.py --checkpoints 32 1024`. Nothing is sent: each object is pickled as its sender does, and
unpickled as its receiver does. The tensors have the number and the names of a LoRA of Qwen-Image with AdamW's moments;
they are small, since a plan's size does not depend on theirs.
"""

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.run.checkpoint_writer import Layout, ShareWriter
from phalanx.training.checkpoint_contents import share, trained_state

BLOCKS, LINEAR = 60, 14  # of Qwen-Image's transformer, and the linear modules of a block with a LoRA
ROWS, LENGTH = 8, 1024  # of each shard; bytes that it takes in a file
SHARDS = 8


class Axis:
    """An axis of a mesh, for `share`."""

    def __init__(self, size: int, place: int) -> None:
        self._size, self._place = size, place

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._place


def contents() -> dict[str, Any]:
    """A checkpoint's contents as the first rank of a replica has them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SHARDS)
    mesh = init_device_mesh("cpu", (1, SHARDS), mesh_dim_names=("replicate", "shard"))
    parameters, moments = {}, {}
    for number in range(BLOCKS * LINEAR):
        for half in "AB":
            name = f"transformer_blocks.{number // LINEAR}.attn.linear_{number % LINEAR}.lora_{half}.default.weight"
            local = torch.zeros(ROWS, 4)
            parameters[name] = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
            moments[name] = {"exp_avg": local.clone(), "exp_avg_sq": local.clone()}
    state = trained_state(parameters, moments, {})
    dist.destroy_process_group()
    return state


def layouts(state: dict[str, Any], ranks: int) -> list[Layout]:
    """The plan of each of `ranks` ranks, and where it has written what."""
    replicas, made = ranks // SHARDS, list[Layout]()
    for replica in range(replicas):
        mesh = {"replicate": Axis(replicas, replica), "shard": Axis(SHARDS, 0)}
        planner = DefaultSavePlanner()
        planner.set_up_planner(share(state, SimpleNamespace(mesh=mesh)))  # type: ignore[arg-type]
        plan = planner.create_local_plan()
        for shard in range(SHARDS):
            rank, items, results = replica * SHARDS + shard, [], []
            for number, item in enumerate(plan.items):
                data = item.tensor_data
                assert data is not None
                chunk = ChunkStorageMetadata(torch.Size([ROWS * shard, 0]), data.chunk.sizes)
                index = MetadataIndex(item.index.fqn, chunk.offsets)
                items.append(replace(item, index=index, tensor_data=replace(data, chunk=chunk)))
                place = _StorageInfo(f"__{rank}_0.distcp", number * LENGTH, LENGTH)
                results.append(WriteResult(index, LENGTH, place))
            made.append((replace(plan, items=items), results))
    return made


def planned_by_torch(folder: Path, plans: list[bytes], results: list[bytes]) -> None:
    """What rank 0 does in `dcp.save` with what the ranks send it, and with what it sends them."""
    returned, metadata = DefaultSavePlanner().create_global_plan(list(map(pickle.loads, plans)))
    for plan in returned:
        pickle.dumps(plan)
    FileSystemWriter(folder).finish(metadata, list(map(pickle.loads, results)))
    pickle.dumps(metadata)  # for all ranks


def planned_here(folder: Path, writer: ShareWriter, layouts: list[bytes]) -> None:
    """What rank 0 does instead."""
    writer.write_metadata(folder, list(map(pickle.loads, layouts)))


def cpu_s(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def checkpoint_costs(sizes: list[int], runs: int) -> list[str]:
    """Rows of a table: CPU seconds of rank 0 for a checkpoint, of interleaved runs."""
    rows = ["| ranks | dcp.save, each | planned once, the first | later ones |", "|---|---|---|---|"]
    state, cells = contents(), list[list[float]]()
    for ranks in sizes:
        made, unchanged = layouts(state, ranks), [pickle.dumps(None)] * ranks
        sent, plans, results = (list(map(pickle.dumps, values)) for values in (made, *zip(*made, strict=True)))
        cells.clear()
        for _ in range(runs):
            folder, writer = Path(tempfile.mkdtemp()), ShareWriter()
            acts = [partial(planned_by_torch, folder, plans, results), partial(planned_here, folder, writer, sent)]
            cells.append(list(map(cpu_s, [*acts, partial(planned_here, folder, writer, unchanged)])))
            shutil.rmtree(folder)
        columns = [", ".join(f"{value:.2g}" for value in column) for column in zip(*cells, strict=True)]
        rows.append(f"| {ranks:,} | {' | '.join(columns)} |")
    return rows
