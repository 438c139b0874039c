"""The recipe from a base to a policy, as `make recipe` runs it, and the plans of its stages for Qwen3-4B."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from phalanx.config.lm import LMRLConfig
from phalanx.config.lm_supervised import SFTConfig
from phalanx.run.rules import load_config
from phalanx.tools.plan import plan_job
from tests.helpers.ranks import ROOT, launch_environment

STAGES = {"sft": SFTConfig, "grpo": LMRLConfig, "sdpo": LMRLConfig}


@pytest.mark.long
def test_each_stage_improves_or_holds(tmp_path: Path) -> None:
    """By the rewards of problems on which nothing was trained, and by the difference from the stage before."""
    for name in ("assets", "configs", "examples", "launch", "tasks", "train.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = launch_environment({"NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    subprocess.run(["sh", "examples/recipe.sh"], cwd=tmp_path, env=env, check=True, timeout=1500)
    differences = {}
    for stage in ("sft", "grpo", "sdft"):
        found = json.loads((tmp_path / "outputs" / "recipe" / "test" / stage / "evaluation.json").read_text())
        differences[stage] = found["sets"]["test"]["baseline"]["differences"]["gsm8k"]["mean"]
    assert differences["sft"]["low"] > 0.1 and differences["grpo"]["low"] > 0.2
    assert differences["sdft"]["high"] > 0 and differences["sdft"]["value"] > -0.03


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_the_plan_for_qwen3_4b(stage: str) -> None:
    cfg = load_config(STAGES[stage], str(ROOT / "configs" / "recipe" / f"qwen3_4b_{stage}.yaml"), [])
    text = plan_job(cfg, {"nproc": "8", "gpu_memory_gb": "80"})
    assert "(4.02 B weights, 4.02 B of them trained)" in text and "of 80.00 GB" in text


def test_the_plan_counts_the_context() -> None:
    """A teacher that reads a longer context computes more."""
    found = []
    for limit in (8, 256):
        keys = ["algorithm.name=sdft", f"algorithm.max_context_length={limit}"]
        text = plan_job(
            load_config(LMRLConfig, str(ROOT / "configs" / "grpo" / "quickstart.yaml"), keys), {"nproc": "2"}
        )
        assert " of the reference" in text
        found.append(float(re.findall(r"a step +([\d.]+) TFLOP", text)[0]))
    assert found[1] > 1.1 * found[0]
