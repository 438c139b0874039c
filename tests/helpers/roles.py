"""Jobs whose ranks have different roles, on forked ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from tests.helpers.jobs import full_weights
from tests.helpers.ranks import free_port, run_ranks


def run_roles(build: Callable[[Any], Any], ranks: int, cfg: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Train to the end on `ranks` ranks; returns the weights of the actor's first rank."""
    found: list[dict[str, torch.Tensor] | None] = run_ranks(part, ranks, build, cfg, free_port(), init=False, **options)
    return next(weights for weights in found if weights is not None)


def part(build: Callable[[Any], Any], cfg: Any, port: int) -> dict[str, torch.Tensor] | None:
    """Run this rank's part of the job; returns the weights on ranks of the actor."""
    from phalanx.run.rl import Trainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job = build(cfg)
    if not isinstance(job, Trainer):
        job.run()
        return None
    if job.world.link is not None:
        job.world.link.meet()
    job.fit()
    weights = full_weights(job.policy.trained.parameters)
    job.job.sampling.end()
    job.world.watch.close()
    return weights


def learned(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run about rewards, samples, gradients and validations, without those about time and roles."""
    heads = ("step", "reward/", "actor/", "val/", "response/")
    return [
        {key: value for key, value in row.items() if key.startswith(heads)}
        for row in read_metrics(folder / "out" / METRICS_FILE)
    ]
