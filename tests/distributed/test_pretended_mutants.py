"""Each line that moves a tensor, makes a stream wait or chooses a back end is needed: without it, a job on a pretended
GPU is stopped.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.training import offload as offload_module
from phalanx.training.offload import OffloadedState
from tests.distributed.test_pretended_gpus import JOBS, build, configure
from tests.helpers.ranks import free_port, run_ranks
from tests.pretended.jobs import pretend
from tests.pretended.mutants import MUTANTS, Mutant
from tests.pretended.vllm import steps


def offload(cfg: Any) -> None:
    """Moments that travel in many parts, and are read on the host at once."""
    offload_module.PART = 3000
    states = []
    for _ in range(9):
        moment = torch.zeros(50, 7, device="cuda")
        states.append((torch.ones(50, 7, device="cuda"), {"moment": moment}))
    del moment
    offloaded = OffloadedState(states)
    by_parameter = {id(parameter): state for parameter, state in states}
    for step in range(1, 3):
        for part in offloaded.visits():
            for parameter in part:
                by_parameter[id(parameter)]["moment"] += parameter
        torch.ones(1, device="cuda")  # takes memory of the slots
        for _, state in states:
            assert state["moment"].eq(step).all()


def faults(mutant: Mutant | None, job: Callable[[Any], None], cfg: Any, port: int) -> list[str]:
    """What stopped the job; nothing where it came to its end."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if mutant is not None:
        mutant.apply()
    record = pretend()
    try:
        job(cfg)
    except Exception as error:  # whatever a job makes of a fault
        return [*record.faults, f"{type(error).__name__}: {error}"]
    return record.faults


def fit(cfg: Any) -> None:
    build(cfg).run()


def sleeping_rollout(cfg: Any) -> None:
    steps(True, False)


def sleeping_judge(cfg: Any) -> None:
    steps(False, True)


PARTS = {"offload": offload, "sleeping_rollout": sleeping_rollout, "sleeping_judge": sleeping_judge}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_alone(name: str) -> None:
    assert run_ranks(faults, 1, None, PARTS[name], None, free_port(), init=False) == [[]]


def test_mutants_are_of_the_source() -> None:
    for mutant in MUTANTS:
        mutant.sources()


# CI takes the mutants of parts alone and one of each whole job
OFTEN = {mutant.job: mutant for mutant in reversed(MUTANTS)}
CASES = [
    pytest.param(mutant, marks=() if mutant.job in PARTS or OFTEN[mutant.job] is mutant else pytest.mark.long)
    for mutant in MUTANTS
]


@pytest.mark.full
@pytest.mark.parametrize("mutant", CASES, ids=str)
def test_a_mutant_is_stopped(mutant: Mutant, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if mutant.job in PARTS:
        (stops,) = run_ranks(faults, 1, mutant, PARTS[mutant.job], None, free_port(), init=False)
    else:
        folder, _, world = JOBS[mutant.job]
        model: Path = request.getfixturevalue(f"{folder}_folder")
        cfg = configure(mutant.job, model, tmp_path)
        cfg = replace(cfg, trainer=replace(cfg.trainer, save_freq=1, total_training_steps=1))
        stops = run_ranks(faults, world, mutant, fit, cfg, free_port(), init=False)[0]
    assert stops, "nothing stopped it"
