"""`make gpu-smoke` on a CPU: all of its checks with tiny shapes, so that no time on a GPU is lost to its mistakes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ROOT, launch_environment

# what an image with torch, transformers, peft, accelerate and safetensors lacks, and `make gpu-wheels` does not bring
MISSING = ("datasets", "pyarrow", "pandas", "rich", "rapidfuzz", "onnxruntime", "rapidocr", "fastapi")
START = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.path.insert(0, "benchmarks")
sys.argv = ["benchmarks/gpu_smoke.py", "--json", "{file}", *{args}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def smoke(file: Path, *args: str) -> subprocess.CompletedProcess[str]:
    code = START.format(missing=MISSING, file=file, args=args)
    env = launch_environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


PASSES = [
    "attention by torch's choice, mask",
    "attention by flash, no mask",
    "attention by math, no mask",
    *(f"|ratio - 1|, qwen_image, {name}" for name in ("as the recipe", "native", "math", "deterministic")),
    *(f"|ratio - 1|, sd35_medium, {name}" for name in ("as the recipe", "native", "flash", "math", "deterministic")),
    *(f"|ratio - 1|, Qwen2.5's shape, {name}" for name in ("padded", "packed", "packed, deterministic")),
    "peak of a step of 1 blocks, planned",
    *(f"FSDP2, {name}, |ratio - 1|" for name in ("gathered once a rollout", "gathered at each block")),
    *(f"FSDP2, {name}, |ratio - 1|" for name in ("without checkpointing", "param_offload", "optimizer_offload")),
    "FSDP2, sharded LoRA, |ratio - 1|",
    *(f"FSDP2{name}, tensors that a resumed run has otherwise" for name in ("", ", param_offload", ", both offloads")),
    "FSDP2, optimizer_offload, tensors that a resumed run has otherwise",
    "packed by sdpa, off from padded",
    "judge that slept answers as before",
]
OF_STEPS = [
    "a step of 60 blocks, without reward",
    "kernels: GEMM",
    "kernels: attention",
    "kernels: elementwise",
    "2 ranks, one killed: the job ends",
]
NOTHING = ["attention by cuDNN, mask", "peak of a step of 1 blocks, allocated", "host to device", "vLLM, asleep"]
NOTHING += ["packed by flash_attention_2, off from padded", "vLLM asleep beside a judge, gradient norm"]


def passed(folder: Path, checks: tuple[str, ...], names: list[str]) -> dict[str, dict[str, Any]]:
    """Run these checks; the lines `names` must have passed. Returns all lines by name."""
    done = smoke(folder / "smoke.json", "--only", *checks)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "smoke.json").read_text())
    assert tuple(found["checks"]) == checks
    lines = {line["name"]: line for check in found["checks"].values() for line in check["lines"]}
    for name in names:
        assert lines[name]["state"] == "PASS" and lines[name]["value"] is not None, name
        assert f"  PASS  {name}" in done.stdout
    return lines


@pytest.mark.full
@pytest.mark.long
def test_steps_are_timed_on_a_cpu(tmp_path: Path) -> None:
    passed(tmp_path, ("step", "kill"), OF_STEPS)


@pytest.mark.full
def test_checks_run_on_a_cpu(tmp_path: Path) -> None:
    checks = ("attention", "exact", "exact_lm", "plan", "fsdp", "transfers", "judge", "vllm")
    checks += ("vllm_judge", "packed")
    lines = passed(tmp_path, checks, PASSES)
    for name in NOTHING:
        assert lines[name]["state"] == "-" and lines[name]["note"], name
    assert lines["|ratio - 1|, qwen_image, as the recipe"]["value"] == 0
    assert lines["  its gradient norm, of that without FSDP"]["value"] == pytest.approx(1, abs=1e-6)


@pytest.mark.full
@pytest.mark.long
def test_compiling_runs_on_a_cpu(tmp_path: Path) -> None:
    done = smoke(tmp_path / "smoke.json", "--only", "compile")
    assert done.returncode == 0, done.stdout + done.stderr
    (first, later, error) = json.loads((tmp_path / "smoke.json").read_text())["checks"]["compile"]["lines"]
    assert (first["value"], later["value"], error["value"]) == (1, 0, 0)


def test_a_check_that_fails_or_dies_does_not_end_the_others(tmp_path: Path) -> None:
    """With a measurement that raises, a process that dies, and the check of the judge."""
    code = f"""
import os, sys
sys.path.insert(0, "benchmarks")
import gpu_smoke, smoke_lines
def refuse():
    def look():
        yield smoke_lines.judged("small", False, 0.5, "s")
        raise ValueError("no such thing\\nat all")
    yield from smoke_lines.tried("large", look)
    yield smoke_lines.judged("after it", True)
def crash():
    yield smoke_lines.judged("before it", True)
    os.abort()
gpu_smoke.CHECKS |= {{"attention": refuse, "fsdp": crash}}
sys.argv = ["gpu_smoke.py", "--json", "{tmp_path}/smoke.json", "--only", "attention", "fsdp", "judge"]
gpu_smoke.main()
"""
    env = launch_environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    checks = json.loads((tmp_path / "smoke.json").read_text())["checks"]
    lines = [(line["name"], line["state"]) for check in checks.values() for line in check["lines"]]
    assert lines == [
        *(("small", "FAIL"), ("large", "FAIL"), ("after it", "PASS"), ("before it", "PASS"), ("fsdp", "FAIL")),
        *(("judge that slept answers as before", "PASS"), ("its memory on the device", "-")),
    ]
    report = done.stdout.partition("for an issue:\n")[2].splitlines()
    heads = ["device", "torch", "packages", "passed", "peak memory"]
    assert [line.partition(":")[0] for line in report] == heads
    assert report[3].endswith("failed: small, large, fsdp") and f"torch: {torch.__version__}" in report[1]
    assert "ValueError: no such thing\n" in done.stdout and "attention| ValueError: no such thing" in done.stderr
