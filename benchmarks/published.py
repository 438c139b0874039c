"""Published throughput of other trainers, beside the operations of the same recipes.

    python benchmarks/published.py

Phalanx is not measured: the plan counts the floating-point operations of a step. The last column is the fraction of the
dense peak of the GPU at which Phalanx would reach the published rate. The script prints the table of
docs/performance.md, in a minute and without a GPU.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from phalanx.telemetry.flops import named_peak_flops
from phalanx.tools.plan.blueprint import family_name, fetch
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.rehearsal import Rehearsal, RLRehearsal

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "configs"


@dataclass(frozen=True)
class Published:
    """A published figure: `rate` of `unit` per second and GPU, on `gpus` GPUs of a node; `recipe` is our equivalent."""

    who: str
    rate: float
    unit: str
    gpu: str
    gpus: int
    recipe: str


FIGURES = [
    Published("VeRL-Omni, FlowGRPO of Qwen-Image, LoRA", 0.305, "images", "H800", 4, "flowgrpo/qwen_image_ocr_lora"),
    Published("VeRL-Omni, all weights, no guidance", 0.510, "images", "H200", 4, "flowgrpo/qwen_image_ocr_full"),
    Published("SGLang, sampling alone, guidance", 19.2, "image-steps", "H200", 1, "flowgrpo/qwen_image_ocr_lora"),
    Published("RLinf, GRPO of 1.5 B", 3361, "tokens", "H100", 8, "grpo/math_deepseek_r1_distill_1_5b"),
]


def plan(figure: Published) -> Rehearsal:
    """Our recipe on their GPUs."""
    file, cluster = str(CONFIGS / f"{figure.recipe}.yaml"), Cluster(1, figure.gpus)
    if figure.unit == "tokens":
        text = load_config(LMRLConfig, file, [])
        text.model.path = fetch(text.model.path, text.model.revision)
        return planned(text, cluster)
    cfg = load_config(FlowRLConfig, file, [])
    cfg.model.path = fetch(cfg.model.path, cfg.model.revision)
    cfg.model.family = family_name(cfg.model)
    return planned(cfg, cluster)


def cost(figure: Published, p: Rehearsal) -> float:
    """Floating-point operations of one of the figure's units."""
    assert isinstance(p, RLRehearsal)
    if figure.unit == "image-steps":
        trace = p.samples.trace
        return p.policy.forward_flops(trace) * (2 if trace.sampler.guided else 1)
    each = p.flops / p.plan.samples
    return each / p.cfg.data.max_response_length if isinstance(p.cfg, LMRLConfig) else each


def main() -> None:
    print("| | published | as fast at |\n|---|---|---|")
    for figure in FIGURES:
        peak = named_peak_flops(figure.gpu, torch.bfloat16)
        assert peak is not None
        whole = peak / cost(figure, plan(figure))
        where = f"{figure.gpus} x {figure.gpu}" if figure.gpus > 1 else figure.gpu
        print(
            f"| {figure.who}: {figure.unit} a second and GPU, {where} | {figure.rate:,} "
            f"| {100 * figure.rate / whole:.0f} % of the peak |",
            flush=True,
        )


if __name__ == "__main__":
    main()
