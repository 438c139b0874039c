"""An endless job for benchmarks/smoke_kill.py: ranks that multiply matrices and sum them.

Each rank writes its process id to $PIDS/<rank> once it works.
"""

import os
from collections.abc import Callable
from pathlib import Path

from phalanx.cli import parse, run
from phalanx.config.run import ParallelConfig


def build(cfg: ParallelConfig) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    from phalanx.distributed import mesh

    world = mesh.start(cfg)
    cuda = world.device.type == "cuda"
    x = torch.randn(2, 8192 if cuda else 128, 8192 if cuda else 128, device=world.device)

    def job() -> None:
        file = Path(os.environ["PIDS"]) / str(world.rank)
        file.with_suffix(".part").write_text(str(os.getpid()))
        while True:
            for _ in range(50):
                x[1] = x[0] @ x[0]
            dist.all_reduce(x[1])
            if not file.is_file():
                file.with_suffix(".part").rename(file)

    return job


if __name__ == "__main__":
    run(build, parse(ParallelConfig, __doc__ or ""))
