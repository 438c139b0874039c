"""Write the tensors of a checkpoint in the format of torch.distributed.checkpoint (DCP), planned once.

`dcp.save` plans each checkpoint anew: rank 0 unpickles the plans of all ranks, returns each plan to its rank, unpickles
where each rank has written what, and sends all of that to all ranks. But a rank that writes only its share needs no
plan of the others, and its file has the same layout each time. So here each rank writes at once, and rank 0 gathers
the layouts only if one has changed.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

METADATA = ".metadata"

Layout = tuple[SavePlan, list[WriteResult]]  # the parts of tensors in a rank's file, and their places in it


class ShareWriter:
    """Writes one rank's shares of the checkpoints of a run and, on rank 0, the `.metadata` of all shares."""

    def __init__(self) -> None:
        self._layout: Layout | None = None  # of the last file; None if it was not written
        self._planned: Layout | None = None  # of the last checkpoint that is complete
        self._metadata = b""  # on rank 0: the content of its `.metadata`

    def write(self, folder: Path, rank: int, share: dict[str, Any]) -> None:
        """Write CPU tensors that only this rank writes, by nested names. Raises OSError or RuntimeError."""
        self._layout = None
        writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
        planner.set_up_planner(share)
        plan = replace(planner.create_local_plan(), storage_data=_StoragePrefix(f"__{rank}_"))
        plan = writer.prepare_local_plan(plan)  # makes the folder, which this node may not see yet
        self._layout = plan, writer.write_data(plan, planner).value()

    def new_layout(self, group: dist.ProcessGroup) -> Layout | None:
        """The layout of this rank's file, for `write_metadata`; None on all ranks if it is on each as in the last
        checkpoint. All ranks call this together. group: all of them, on the CPU.
        """
        changed = torch.tensor([int(self._layout is None or self._layout != self._planned)])
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        return self._layout if changed.item() else None

    def write_metadata(self, folder: Path, layouts: Sequence[Layout | None]) -> None:
        """On rank 0: write `.metadata` for the new layouts of all ranks. Raises OSError, or ValueError for tensors with
        missing parts.
        """
        plans, places = [], []
        for plan, written in filter(None, layouts):
            plans.append(plan)
            places.append(written)
        if plans:
            _, metadata = DefaultSavePlanner().create_global_plan(plans)
            FileSystemWriter(folder).finish(metadata, places)
            self._metadata = (folder / METADATA).read_bytes()
            return
        with (folder / METADATA).open("wb") as file:
            file.write(self._metadata)
            os.fsync(file.fileno())

    def end(self, is_complete: bool) -> None:
        """On all ranks: note whether the checkpoint is complete; otherwise the next one is planned again."""
        self._planned = self._layout if is_complete else None
