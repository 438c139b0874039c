"""A reference for the plan's update: the same training step with real FSDP2, as one rank of many on the meta device.

Process groups are torch's fake ones. FSDP2 itself gathers, frees and reduces the tensors of its units, and the ledger
only counts them; every pass is run, even if it equals another one. Gradients are those that autograd and FSDP2 leave.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.config.parallel import ParallelConfig
from phalanx.config.run import RunConfig
from phalanx.distributed import mesh
from phalanx.distributed.launch_env import Launch
from phalanx.run.watchdog import Watch
from phalanx.tools.plan import blueprint, flow_jobs, jobs, lm_blueprint, lm_jobs, rehearsal
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import META, Ledger
from phalanx.tools.plan.rehearsal import AnyPlannedPolicy
from phalanx.training.optim import TrainState


class RealState(TrainState):
    """The gradients of FSDP2, which an update frees."""

    def __init__(self, policy: AnyPlannedPolicy, cfg: RunConfig, ema: Any, averages: Any = ()) -> None:
        super().__init__(policy.trained, cfg.optim, 1, ema=ema, averages=averages)
        self.updates_made = self.micro_batches = 0
        self.sharding = SimpleNamespace()  # FSDP2 shards

    def step(self, loss: Tensor) -> dict[str, float | Tensor]:
        self.updates_made += 1
        for p in self.model.parameters.values():
            p.grad = None
        return {"grad_norm": 0.0, "lr": 0.0, "skipped": False}


def world_of(ranks: int) -> Callable[..., mesh.World]:
    def world(config: ParallelConfig, size: int, rank: int, device: torch.device) -> mesh.World:
        width = mesh.shard_size(config, Launch(0, ranks, 0, ranks))
        both = init_device_mesh("cpu", (ranks // width, width), mesh_dim_names=("replicate", "shard"))
        watch, launch = Watch(0, ["no host"], range(1), silence_s=60), Launch(rank, ranks, 0, 1)
        return mesh.World(rank, ranks, device, both, both.get_group("shard"), watch, launch)

    return world


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resizing(ledgers: list[Ledger]) -> Callable[..., Any]:
    """Count FSDP2's way of freeing a tensor: it resizes the storage to 0 bytes, which is not an operator that a ledger
    would see.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        for ledger in ledgers:
            if storage._cdata in ledger._sizes:
                ledger._add_bytes(size - ledger._sizes[storage._cdata])
                ledger._sizes[storage._cdata] = size
        return out

    return resized


class OnMeta(TorchDispatchMode):
    """Keep tensors that FSDP2's offload copies to the host on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = kwargs | {"device": META}
        return func(*args, **kwargs)


def referee(cfg: RunConfig, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> int:
    """Peak bytes of the update, without those that the rank holds throughout."""
    ledgers: list[Ledger] = []

    class RealLedger(Ledger):
        def __init__(self) -> None:
            super().__init__()
            ledgers.append(self)

        def once(self, key: Hashable, run: Callable[[], Tensor]) -> Tensor:
            return run()

    handle = _fsdp_param_group._get_device_handle
    with monkeypatch.context() as patch, fake_ranks(cluster.ranks), OnMeta():
        for module in (_fsdp_param_group, _fsdp_collectives, _fsdp_state):
            patch.setattr(module, "_get_device_handle", lambda *_: handle("cpu"))
        patch.setattr(_fsdp_init, "_get_device_from_mesh", lambda _: META)
        import torch.distributed.fsdp._fully_shard._fully_shard as fully_shard

        patch.setattr(fully_shard, "_get_device_from_mesh", lambda _: META)
        patch.setattr(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None)
        patch.setattr(torch.cpu.Stream, "record_event", lambda *_: torch.cpu.Event(), raising=False)
        patch.setattr(torch.UntypedStorage, "resize_", resizing(ledgers))
        patch.setattr(_fsdp_param_group.FSDPParamGroup, "_validate_cpu_offload_params", lambda _: None)
        for module in (blueprint, lm_blueprint):
            patch.setattr(module, "lone_world", world_of(cluster.ranks))
        for module in (flow_jobs, lm_jobs):
            patch.setattr(module, "Ledger", RealLedger)
        patch.setattr(rehearsal, "PlannedState", RealState)
        job = jobs.planned(cfg, cluster)
    return job.ledger.phases["update"].peak
