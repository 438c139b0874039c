"""Gradient checkpointing of some blocks: log-probs and gradients equal those with all or none, bit for bit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_sd3 import JointTransformerBlock
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from tests.helpers import jobs, lm
from tests.helpers.jobs import tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import RankError, run_ranks

ON = "model.gradient_checkpointing=true"
KINDS = ((), (ON, "model.gradient_checkpointing_blocks=1"), (ON,))


def passes(step: Any, cfg: Any, kind: type[nn.Module]) -> tuple[dict[str, Any], int]:
    """A step, and the number of its passes through modules of this kind with gradients."""
    count = 0
    forward = kind.forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += torch.is_grad_enabled()
        return forward(self, *args, **kwargs)

    with patch.object(kind, "forward", counted):
        return step(cfg), count


def assert_only_repeated(found: list[tuple[dict[str, Any], int]], blocks: int) -> None:
    """First one block, then all blocks were computed twice; the step is the same."""
    plain, count = found[0]
    assert [other for _, other in found] == [count, count + count // blocks, 2 * count]
    for other, _ in found[1:]:
        assert torch.equal(plain["log_prob"], other["log_prob"])
        assert other["row"]["actor/first_ratio_error"] == 0
        assert other["row"]["actor/grad_norm"] == plain["row"]["actor/grad_norm"]
        for name, value in plain["weights"].items():
            assert torch.equal(value, other["weights"][name]), name


@pytest.mark.quick("1")
@pytest.mark.parametrize("shards", [1, 2])
def test_some_layers(shards: int, lm_folder: Path, tmp_path: Path) -> None:
    cfgs = [tiny_lm_config(lm_folder, tmp_path, f"parallel.fsdp_size={shards}", *keys) for keys in KINDS]
    assert_only_repeated([run_ranks(passes, shards, lm.one_step, cfg, Qwen3MLP)[0] for cfg in cfgs], 2)


@pytest.mark.quick("1-qwen-QwenImageTransformerBlock")
@pytest.mark.seldom("2-qwen-QwenImageTransformerBlock")
@pytest.mark.parametrize(("family", "kind"), [("sd3", JointTransformerBlock), ("qwen", QwenImageTransformerBlock)])
@pytest.mark.parametrize("shards", [1, 2])
def test_some_blocks(
    shards: int, family: str, kind: type[nn.Module], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    cfgs = [tiny_config(folder, tmp_path, f"parallel.fsdp_size={shards}", *keys) for keys in KINDS]
    assert_only_repeated([run_ranks(passes, shards, jobs.one_step, cfg, kind)[0] for cfg in cfgs], 2)


@pytest.mark.parametrize("family", ["lm", "sd3"])
def test_more_blocks_than_there_are(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder, keys = request.getfixturevalue(f"{family}_folder"), (ON, "model.gradient_checkpointing_blocks=3")
    make, step = (tiny_lm_config, lm.one_step) if family == "lm" else (tiny_config, jobs.one_step)
    with pytest.raises(RankError, match=r"model.gradient_checkpointing_blocks: 3; expected 1 to 2, the model's blocks"):
        run_ranks(step, 1, make(folder, tmp_path, *keys))  # type: ignore[operator]
