"""--plan of block diffusion: states of a pass, the operations of decoding, and what is printed."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.ranges import ESTIMATES
from phalanx.functional.tokens import Truncation
from phalanx.rollout.lm.denoise_blocks import Denoising, drawn_tokens
from phalanx.run.rules import load_config
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import META, Ledger
from phalanx.tools.plan.lm_blueprint import PlannedBlockPolicy
from phalanx.tools.plan.memory import count
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import ROOT

FOLDER = ROOT / "configs" / "block_diffusion"


def test_the_words_of_a_plan() -> None:
    cfg = load_config(LMRLConfig, str(FOLDER / "quickstart.yaml"), [])
    for line in (
        "  rollout         64 responses together, at least 1 of a block's tokens per denoising step",
        "  micro-batch     32 responses of 260 positions",
        "  states          40 of 4 tokens behind 100 of a sample at most",
        "  forward passes  2 to train, per rank and step",
    ):
        assert line in plan_job(cfg, {"nproc": "2"}).split("\n")
    supervised = plan_job(load_config(BlockDiffusionTaskConfig, str(FOLDER / "words_sft.yaml"), []), {"nproc": "2"})
    for line in ("  a step          48 samples, 24 per rank, one optimizer step",):
        assert line in supervised.split("\n")
    assert "images" not in supervised


def test_fixed_steps() -> None:
    keys = ["rollout.threshold=1", "rollout.denoising_steps_per_block=2"]
    text = plan_job(load_config(LMRLConfig, str(FOLDER / "quickstart.yaml"), keys), {"nproc": "2"})
    assert "64 responses together, at least 2 of a block's tokens per denoising step\n" in text
    assert "  states          20 of 4 tokens behind 100 of a sample" in text


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_operations_are_those_of_the_job(estimate: str, lm_folder: Path, tmp_path: Path) -> None:
    """Two updates, which take old log-probs; the states that decoding goes through are those of its looks."""
    cfg = tiny_lm_config(lm_folder, tmp_path, "model.block_size=4", f"actor.log_prob_estimate={estimate}")
    job = planned(cfg, Cluster(1, 2))
    assert isinstance(job.policy, PlannedBlockPolicy)
    looks = 12
    states = {"trace": looks, "coupled": 9}.get(estimate, 3)
    scored, decoded = job.policy.states_flops(76, states, 12), job.policy.states_flops(76, looks, 4 * looks)
    read = job.policy.forward_flops(64, 0)
    assert job.model_flops == pytest.approx(16 * decoded - (16 - 4) * read + 16 * scored * (1 + 3), rel=1e-6)


def test_flex_attention_holds_no_dense_mask(lm_folder: Path, tmp_path: Path) -> None:
    keys = ("model.block_size=4", "data.max_prompt_length=256", "data.max_response_length=128")
    cfg = tiny_lm_config(lm_folder, tmp_path, *keys)
    peaks = {}
    for name in ("sdpa", "flex_attention"):
        cfg.model = replace(cfg.model, attn_implementation=name)
        phases = {phase.name: phase for phase in count(planned(cfg, Cluster(1, 1))).phases}
        peaks[name] = phases["update"].activations
    row = 256 + 128 - 4 + 128 * 4
    masks = 2 * row**2 * 4  # of two samples, in float32
    assert math.isclose(peaks["sdpa"] - peaks["flex_attention"], 2 * masks, rel_tol=0.3), "of two layers"


def test_a_draw_from_many_words_is_bounded() -> None:
    """64 blocks of LLaDA2, whose logits alone are 1.3 GB in float32."""
    ledger, how = Ledger(), Denoising(256, 0.7, (1,), 0, Truncation(top_p=0.9), size=32, steps=32, mask_id=5)
    with ledger, torch.no_grad():
        logits = torch.empty(64, 32, 157184, dtype=torch.bfloat16, device=META)
        masked, uniform = torch.ones(64, 32, dtype=torch.bool, device=META), torch.empty(64, 32, device=META)
        with ledger.during("draw"):
            drawn_tokens(logits, masked, uniform, how)
    draw = ledger.phases["draw"]
    assert 0.3e9 < draw.peak - draw.before < 1e9


def test_models_that_cannot_look_at_blocks(lm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sliding"
    folder.mkdir()
    text = (lm_folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("full_attention", "sliding_attention"))
    with pytest.raises(ValueError, match="has layers of other kinds \\(sliding_attention\\)"):
        plan_job(tiny_lm_config(folder, tmp_path, "model.block_size=4"), {})
