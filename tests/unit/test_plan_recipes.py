"""--plan of every recipe for GPUs: it fits the hardware that its first lines name."""

import re
from pathlib import Path

import pytest

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from phalanx.tools.plan import plan_job
from tests.helpers.ranks import ROOT

CONFIGS = ROOT / "configs"
HARDWARE = re.compile(r"(?:GPUs?|H200) of (\d+) GB")
RECIPES = {
    str(path.relative_to(CONFIGS)): (int(ranks[1]), int(size[1]))
    for path in sorted(CONFIGS.glob("*/*.yaml"))
    if (ranks := re.search(r"^# ranks: (\d+)$", path.read_text(), re.MULTILINE))
    and (size := HARDWARE.search(path.read_text()))
}
IN_CI = "flowgrpo/flux2_klein_4b_pickscore_lora.yaml"
MODEL_GB = 4.0  # PickScore's, on each GPU
# recipes that recompute blocks which the plan would keep: it counts no critic, and as many tokens for each rank's experts
UNCERTAIN = (
    "ppo/gsm8k_qwen25_7b.yaml",
    "block_diffusion/llada2_mini_sft.yaml",
    "block_diffusion/llada2_flash_sft.yaml",
)


def schema_of(path: Path) -> type[FlowRLConfig | LMRLConfig | BlockDiffusionTaskConfig]:
    if path.stem.endswith("_sft"):
        return BlockDiffusionTaskConfig
    return FlowRLConfig if path.parent.name == "flowgrpo" else LMRLConfig


@pytest.mark.full
@pytest.mark.seldom(*(RECIPES.keys() - {IN_CI}))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_hardware(recipe: str) -> None:
    """With a tenth of the memory free and its peak as in its comments, where it recomputes a part of its blocks; those
    that need not be are worth at most a fiftieth of a step's arithmetic.
    """
    (ranks, size), path = RECIPES[recipe], CONFIGS / recipe
    nodes = max(ranks // 8, 1)
    words = {"nnodes": str(nodes), "nproc": str(ranks // nodes), "gpu_memory_gb": str(size)}
    text = plan_job(load_config(schema_of(path), str(path), []), words)
    assert "does not fit" not in text and "leaves little" not in text
    [(peak, beside)] = re.findall(r"  peak: ([\d.]+) and ([\d.]+) for CUDA", text)
    scorer = MODEL_GB if "pickscore" in recipe else 0.0
    assert float(peak) + float(beside) + scorer <= 0.9 * size
    said = re.search(r"`--plan nproc=8 gpu_memory_gb=80` shows (\d+) GB", path.read_text())
    assert said is None or round(float(peak)) == int(said[1])
    saved = re.search(r"backward passes then repeat (\d+) instead of (\d+) % of a step", text)
    assert saved is None or recipe in UNCERTAIN or int(saved[2]) - int(saved[1]) <= 2
