"""Compiled blocks where a machine of the job cannot compile."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._inductor import config, cpp_builder

from phalanx.config.lm import LMRLConfig
from phalanx.models.lm.lm_policy import LMPolicy
from tests.helpers.checks import heard
from tests.helpers.jobs import assert_same_weights
from tests.helpers.lm import one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks


def step_without_a_compiler(cfg: LMRLConfig) -> dict[str, Any]:
    """A step in which rank 1 has no C++ compiler."""
    if dist.get_rank() == 1:
        config.cpp.cxx = (None, "/nowhere/c++")
        cpp_builder.cpp_compiler_search.cache_clear()
    lines, graphs = heard("phalanx.models.compiling", logging.NOTSET), []
    build = LMPolicy.__init__

    def built(policy: LMPolicy, *args: Any, **kwargs: Any) -> None:
        build(policy, *args, **kwargs)
        graphs.append(policy.trained._one_graph)

    LMPolicy.__init__ = built  # type: ignore[method-assign]
    return one_step(cfg) | {"lines": lines, "compiled": [graph is not None for graph in graphs]}


@pytest.mark.full
def test_all_ranks_go_without_if_one_cannot_compile(lm_folder: Path, tmp_path: Path) -> None:
    """The step is that of a job without model.compile, and one line says why."""
    plain = run_ranks(one_step, 2, tiny_lm_config(lm_folder, tmp_path / "plain"))
    parts = run_ranks(step_without_a_compiler, 2, tiny_lm_config(lm_folder, tmp_path / "fast", "model.compile=true"))
    assert [part["compiled"] for part in parts] == [[False], [False]]
    [line], none = (part["lines"] for part in parts)
    assert none == [] and "\n" not in line
    assert line.startswith("model.compile: all ranks go on without, because torch.compile fails on rank 1: ")
    assert parts[0]["texts"] == plain[0]["texts"]
    assert parts[0]["row"]["actor/grad_norm"] == plain[0]["row"]["actor/grad_norm"]
    assert_same_weights(plain[0]["weights"], parts[0]["weights"], 0)
