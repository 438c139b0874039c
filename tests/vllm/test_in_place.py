"""Ranks with engines of vLLM go on in place when others are lost: each opens its engine again, and rows are as without."""

import signal
from pathlib import Path

from tests.faults.jobs import kill, steps
from tests.faults.test_in_place import GOING_ON, assert_same, two_nodes
from tests.vllm.test_jobs import shared_memory


def test_a_lost_rank_costs_no_step(lm_folder: Path, tmp_path: Path) -> None:
    before = shared_memory()
    settings = ("rollout.engine=vllm", "data.max_prompt_length=200", "parallel.fsdp_size=1", "trainer.undo_steps=true")
    settings += ("trainer.total_training_steps=6", "trainer.save_freq=100", "optim.lr=1e-2")
    with two_nodes(lm_folder, tmp_path / "whole", *settings, ranks=1, is_lm=True, PHASE_S="0") as nodes:
        assert [node.wait(250) for node in nodes] == [0, 0], nodes[0].said + nodes[1].said
    with two_nodes(lm_folder, tmp_path, *settings, ranks=1, is_lm=True, PHASE_S="0.2") as (a, b):
        a.until(lambda: len(steps(tmp_path)) >= 2, timeout=200)
        survivors = a.ranks()
        a.until(lambda: b.phase(1)[2] == "rollout")
        kill(b.phase(1)[0], signal.SIGKILL)
        assert (a.wait(250), b.wait(250)) == (0, 0), a.said + b.said
        assert a.ranks() == [] and a.phase(0)[0] in survivors
    assert GOING_ON.findall(a.said), a.said
    assert_same(tmp_path, tmp_path / "whole")
    assert shared_memory() == before
