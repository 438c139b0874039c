"""The costs of a step that benchmarks/largest_costs.py tells apart."""

import sys
from pathlib import Path

import pytest

from phalanx.tools.plan.blueprint import family_name
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.rehearsal import RLRehearsal
from tests.helpers.jobs import tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from largest_costs import (
    AGAIN,
    BACKWARD,
    DECODING,
    FORWARD,
    MOVED,
    OLD,
    REFERENCE,
    costs,
    decoded_bytes,
    of_reinforcement,
)

KL = "algorithm.kl_loss_coef=0.1"


def test_the_parts_of_a_flow_step(sd3_folder: Path, tmp_path: Path) -> None:
    """They are all of the plan's arithmetic; checkpointing repeats the forward passes."""
    keys = ("model.gradient_checkpointing=true", "parallel.optimizer_offload=true", KL)
    cfg = tiny_config(sd3_folder, tmp_path, *keys)
    cfg.model.family = family_name(cfg.model)
    job = planned(cfg, Cluster(1, 2))
    assert isinstance(job, RLRehearsal)
    parts = of_reinforcement(job)
    assert sum(parts.values()) == pytest.approx(job.flops)
    assert parts[BACKWARD] == pytest.approx(2 * parts[FORWARD])
    assert parts[AGAIN] == pytest.approx(parts[FORWARD])
    assert parts[REFERENCE] > 0 == parts[OLD]
    taken = costs(job)
    assert taken[MOVED] > 0 and "weights, gathered to train" in taken


def test_the_parts_of_a_step_of_a_language_model(lm_folder: Path, tmp_path: Path) -> None:
    """Reading weights and cache takes longer than the arithmetic of so few responses."""
    job = planned(tiny_lm_config(lm_folder, tmp_path, KL), Cluster(1, 2))
    assert isinstance(job, RLRehearsal)
    assert sum(of_reinforcement(job).values()) == pytest.approx(job.flops)
    assert costs(job)[DECODING] == pytest.approx(decoded_bytes(job) / 3.35e12 / 0.85)
    half = planned(tiny_lm_config(lm_folder, tmp_path, KL, "data.max_response_length=6"), Cluster(1, 2))
    assert isinstance(half, RLRehearsal)
    assert 0.4 < decoded_bytes(half) / decoded_bytes(job) < 0.5
