"""Losses in place on pretended GPUs: a collective that waits for a lost rank ends only as its group is aborted, without an
error on the host and with arbitrary results.
"""

import random
from pathlib import Path

import pytest
from benchmarks.kills import KINDS, Campaign, Net, differences, run_whole

from tests.helpers.ranks import LIMIT_S

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("kind", "phase"), [pytest.param("flow", "update", marks=pytest.mark.long), ("text", "rollout")]
)
def test_a_lost_gpu_costs_no_step(kind: str, phase: str, tmp_path: Path) -> None:
    """Language models share one copy of the weights here, which is gathered in each pass."""
    model, net, sharded = KINDS[kind].make(tmp_path / "model"), Net(None), kind == "text"
    whole = Campaign(kind, 1, model, tmp_path / "whole", 6, net, 0.0, sharded, pretended=True)
    run_whole(whole)
    job = Campaign(kind, 1, model, tmp_path / "job", 6, net, 0.1, sharded, pretended=True)
    with job.running():
        assert job.until(lambda: job.done >= 2, LIMIT_S), job.said
        assert job.lose(random.Random(0), phase, "kill", 0)["goes_on"], job.said
        assert job.until(lambda: job.ended, LIMIT_S), job.said
    assert sorted(node.restarts for node in job.nodes) == [1, 2]
    assert "going on in place" in job.said and "last checkpoint" not in job.said
    if sharded:
        assert "no sign of life" in job.said  # nothing else ends a collective on a device
    assert differences(job.folder, whole.folder, "") == (0.0, "")
