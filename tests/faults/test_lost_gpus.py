"""Losses in place on pretended GPUs: a collective that waits for a lost rank ends only as its group is aborted, without an
error on the host and with arbitrary results.
"""

import random
from pathlib import Path

import pytest
from benchmarks.kills import KINDS, Campaign, Net, differences, run_whole

from tests.helpers.ranks import LIMIT_S

pytestmark = pytest.mark.full


@pytest.mark.parametrize("kind", ["text", "flow"])
def test_a_lost_gpu_costs_no_step(kind: str, tmp_path: Path) -> None:
    model, net = KINDS[kind].make(tmp_path / "model"), Net(None)
    whole = Campaign(kind, 1, model, tmp_path / "whole", 8, net, 0.0, pretended=True)
    run_whole(whole)
    job, chance = Campaign(kind, 1, model, tmp_path / "job", 8, net, 0.1, pretended=True), random.Random(0)
    with job.running():
        assert job.until(lambda: job.done >= 2, LIMIT_S), job.said
        loss = job.lose(chance, "update", "kill", 0)
        assert loss["goes_on"], job.said
        assert job.until(lambda: job.ended, LIMIT_S), job.said
    assert sorted(node.restarts for node in job.nodes) == [1, 2]
    assert "going on in place" in job.said and "last checkpoint" not in job.said
    assert differences(job.folder, whole.folder, "") == (True, 0.0)
