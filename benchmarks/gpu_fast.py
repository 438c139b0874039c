"""Stages of gpu_day.py that measure speed: steps by benchmarks/step.py beside --plan, TRL at the same work, copies."""

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import beside_trl
import lm_shapes
import step
import torch
from gpu_lines import CUDA_ONLY, Line, Lines, Part, Stage, clock, device, seconds, tried
from torch import nn

from phalanx.engines.transformers import Sleeping
from phalanx.telemetry.step_metrics import peak_memory_gb

ROOT = Path(__file__).resolve().parents[1]
QWEN, SD3 = "configs/flowgrpo/qwen_image_ocr_lora.yaml", "configs/flowgrpo/sd35_medium_ocr_lora.yaml"
LM = "configs/grpo/gsm8k_qwen25_0_5b.yaml"
SMALL, MIDDLE, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B-Instruct"
COMPILE = "model.compile=true"
ON_CPU = device().type == "cpu"  # the same runs at tiny sizes
# prompts, responses for each, tokens of a response, and rows of a padded micro-batch
PROMPTS, EACH, RESPONSE, ROWS = (4, 2, 12, 4) if ON_CPU else (64, 8, 256, 32)
TINY_FLOW = ["data.max_prompt_length=16", "rollout.height=32", "rollout.width=32", "rollout.num_inference_steps=3"]
TINY_FLOW += ["rollout.n=4", "actor.ppo_micro_batch_size_per_gpu=2", "rollout.sde_window_range=[0,2]"]
TINY_FLOW += ["model.lora_rank=4"]
PLAN_S = 60.0


def flow_words(config: str, blocks: int, *keys: str) -> list[str]:
    """Words of benchmarks/step.py for a recipe's flow model with this number of blocks, and 32 or 36 images a step."""
    qwen = config == QWEN
    sizes = ["data.max_prompt_length=64", *([] if qwen else ["rollout.n=18"])]  # of 9 steps each, in passes of 9 images
    shape = f"{'qwen_image' if qwen else 'sd35_medium'}/{blocks}"
    if ON_CPU:
        shape, sizes = f"{'tiny_qwen_image' if qwen else 'tiny_sd3'}/1", TINY_FLOW
    batch = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=1", "model.compile=false"]
    return [str(ROOT / config), "--shapes", shape, *batch, *sizes, *keys]


def lm_words(shape: str, prompts: int, *keys: str) -> list[str]:
    """Words of benchmarks/step.py for GRPO of a language model that decodes by itself; by default in two updates."""
    sizes = {
        "data.train_batch_size": min(prompts, PROMPTS),
        "actor.ppo_mini_batch_size": min(prompts, PROMPTS) // 2,
        "rollout.n": EACH,
        "data.max_prompt_length": 64,
        "data.max_response_length": RESPONSE,
        "algorithm.kl_loss_coef": 0,
        "model.gradient_checkpointing": "true",
    }
    given = [f"{key}={value}" for key, value in sizes.items()]
    return [str(ROOT / LM), "--shapes", lm_shapes.TINY if ON_CPU else shape, *given, *keys]


def timed(title: str, words: list[str]) -> Lines:
    """A line with the seconds of the second step, whose row goes into docs/measurements.md, and one with its memory."""
    if COMPILE in words and ON_CPU:
        yield Line(title, None, note="on a CPU, a C++ compiler would take minutes")
        return
    args, cfg = step.parse([*words, "--warmup", "1", "--steps", "1"])
    # the CPU counts the plan while the GPU works
    plan = Part(partial(step.expected, copy.deepcopy(cfg), args.shapes), Path("plan.log"))
    start = clock()
    bench = step.prepared(cfg, args)
    built = clock() - start
    bench.fit()
    r = step.summary(bench, args)
    for counted in plan.results(PLAN_S):
        r |= counted if isinstance(counted, dict) else {}
    row = row_of(title, r)
    note = f"rollout {r['rollout_s']:.2f}, update {r['update_s']:.2f}, built in {built:.1f}; {' | '.join(row[2:])}"
    yield Line(title, r["step_s"] > 0, r["step_s"], "s", note, {"step": r, "row": row})
    yield memory(f"  memory of {title}", r)


def memory(title: str, r: dict[str, Any]) -> Line:
    """Planned and measured peaks; on a GPU they should agree within 10 %, and the cache should never be freed."""
    gb, planned = r["peak_memory_gb"], r.get("planned_gb")
    if planned is None or ON_CPU:
        return Line(title, None if ON_CPU and planned else False, gb, "GB", f"planned {planned}; see plan.log")
    retries, reserved = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved() / 1e9
    phases = ", ".join(f"{name} {value:.1f}" for name, value in r["memory_gb"].items())
    note = f"planned {planned:.1f}; {phases}; reserved {reserved:.1f}, {retries} retries"
    return Line(title, abs(gb / planned - 1) < 0.1 and not retries, gb, "GB", note)


def trl() -> Lines:
    """The work of the stage `lm05` in TRL's GRPOTrainer: two steps of two updates, of which the second step counts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    samples, micro, title = PROMPTS * EACH, 2 * ROWS if PROMPTS > 4 else ROWS, "TRL, Qwen2.5-0.5B"
    settings = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": samples // 2 // micro,
        "steps_per_generation": samples // micro,
        "num_generations": EACH,
        "max_completion_length": RESPONSE,
        "learning_rate": 1e-6,
        "use_cpu": ON_CPU,
        "bf16": not ON_CPU,
        "gradient_checkpointing": True,
    }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return lm_shapes.random_reward([turns[-1]["content"] for turns in completions], [], [])

    with tempfile.TemporaryDirectory(prefix="phalanx-trl-") as name:
        folder = lm_shapes.folder_of(lm_shapes.TINY if ON_CPU else SMALL, Path(name) / "model")
        model = lm_shapes.made(AutoModelForCausalLM, str(folder), torch.float32, "sdpa")
        parts = {"model": model, "processing_class": AutoTokenizer.from_pretrained(folder), "reward_funcs": reward}
        r = beside_trl.job_of_trl(lm_shapes.WORDS, samples, 4, Path(name) / "out", settings, clock, **parts)
    took = r["ends"][3] - r["ends"][1]
    row = [title, f"{took:.2f}", f"{samples / took:.3f}", "", "", f"{peak_memory_gb(device()):.1f}"]
    note = f"{row[2]} responses/s; weights in float32, bfloat16 by autocast"
    yield Line(title, took > 0, took, "s", note, {"row": row})


def transfers() -> Lines:
    """The speed of copies between host and device, and the time of moving a text encoder there and back."""
    if ON_CPU:
        yield Line("host and device", None, note=CUDA_ONLY)
        return
    yield from tried("copies", copies)
    yield from tried("text encoder", encoder)


def copies() -> Lines:
    there = torch.empty(2**30, dtype=torch.uint8, device=device())
    for pinned in (True, False):
        here = torch.zeros(2**30, dtype=torch.uint8, pin_memory=pinned)
        for title, to, source in (("host to device", there, here), ("device to host", here, there)):
            to.copy_(source)
            rate = 2**30 / 1e9 / seconds(partial(to.copy_, source, non_blocking=pinned), 3)
            yield Line(f"{title}, {'pinned' if pinned else 'pageable'}", rate > 1, rate, "GB/s")


def encoder() -> Lines:
    """Move a text encoder with nn.Module.to, as the policy does, and with Sleeping."""
    linears = [nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(32)]
    model = nn.Sequential(*linears).requires_grad_(False)
    size = sum(p.nbytes for p in model.parameters()) / 1e9
    there, back = seconds(lambda: model.to(device())), seconds(lambda: model.to("cpu"))
    sleeping, start = Sleeping(model, device()), clock()
    with sleeping.awake():
        took = clock() - start
    note = f"{size:.1f} GB there, {back:.1f} s back; {took:.2f} s there from pinned memory"
    yield Line("text encoder", there < 60, there, "s", note)


COLUMNS = ["job", "s per step", "samples/s", "tokens/s decoded, trained", "MFU, HFU %", "GB, planned"]


def row_of(title: str, r: dict[str, Any]) -> list[str]:
    """The row of a step for docs/measurements.md."""
    unit, tokens = "images" if "images" in r else "responses", ""
    if unit == "responses":
        tokens = f"{r['decoded_per_rank_per_s']:.0f}, {r['trained_per_rank_per_s']:.0f}"
    used = "" if r["mfu"] is None else f"{100 * r['mfu']:.1f}, {100 * r['hfu']:.1f}"
    rate = f"{r[f'{unit}_per_rank_per_s_without_reward']:.3f}"
    planned = f"{r['peak_memory_gb']:.1f}, {r.get('planned_gb', 0):.1f}"
    return [title, f"{r['step_s']:.2f}", rate, tokens, used, planned]


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The table for docs/measurements.md of the lines that have a row."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for line in lines:
        if "row" in line["more"]:
            rows.append(line["more"]["row"])
    return [f"| {' | '.join(cells)} |" for cells in rows] if len(rows) > 2 else []


def stages() -> dict[str, Stage]:
    """What matters most comes first; what stands below `transfers` needs a larger budget."""

    def stage(title: str, words: list[str], expected: float, limit: float) -> Stage:
        return Stage("fast", partial(timed, title, words), expected, limit)

    qwen, sd3 = flow_words(QWEN, 60, "data.train_batch_size=1"), flow_words(SD3, 24)
    small, middle, large = lm_words(SMALL, 64), lm_words(MIDDLE, 32), lm_words(LARGE, 16, "model.lora_rank=64")
    fast = [COMPILE]
    if ON_CPU:  # without varlen_attn, blocks are not compiled for packed samples
        fast += ["model.use_remove_padding=false", "actor.use_dynamic_bsz=false"]
        fast += [f"actor.ppo_micro_batch_size_per_gpu={ROWS}"]
    return {
        "qwen60": stage("Qwen-Image LoRA", qwen, 75, 130),
        "lm05": stage("Qwen2.5-0.5B", small, 30, 70),
        "trl": Stage("fast", trl, 50, 100),
        "lm15": stage("Qwen2.5-1.5B", middle, 40, 80),
        "sd35": stage("SD3.5-medium LoRA", sd3, 40, 90),
        "lm7": stage("Qwen2.5-7B LoRA", large, 35, 80),
        "qwen60c": stage("Qwen-Image LoRA, compiled", [*qwen, COMPILE], 90, 170),
        "lm7c": stage("Qwen2.5-7B LoRA, compiled", [*large, *fast], 50, 110),
        "lm05e": stage("Qwen2.5-0.5B, without graphs", [*small, "rollout.enforce_eager=true"], 45, 90),
        "transfers": Stage("fast", transfers, 12, 50),
        "lm05c": stage("Qwen2.5-0.5B, compiled", [*small, *fast], 40, 90),
        "sd35c": stage("SD3.5-medium LoRA, compiled", [*sd3, COMPILE], 60, 110),
        "lm15c": stage("Qwen2.5-1.5B, compiled", [*middle, *fast], 50, 100),
    }
