"""Stages of gpu_day.py that measure speed: steps by benchmarks/step.py beside --plan, and TRL at the same work."""

import copy
import json
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lm_shapes
import step
import torch
from gpu_lines import CUDA_ONLY, Line, Lines, Part, Stage, clock, device, seconds, tried
from measure import Bench
from shapes import blueprint
from torch import nn

from phalanx.config.flow import FlowRLConfig
from phalanx.engines.sleeping import Sleeping
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster
from phalanx.plan.memory import count
from phalanx.plan.pace import USED
from phalanx.telemetry.step_metrics import peak_memory_gb

ROOT = Path(__file__).resolve().parents[1]
QWEN, SD3 = "configs/flowgrpo/qwen_image_ocr_lora.yaml", "configs/flowgrpo/sd35_medium_ocr_lora.yaml"
LM = "configs/grpo/gsm8k_qwen25_0_5b.yaml"
SMALL, MIDDLE, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B-Instruct"
# sizes at which the same runs on a CPU
TINY_FLOW = ["data.max_prompt_length=16", "rollout.height=32", "rollout.width=32", "rollout.num_inference_steps=3"]
TINY_FLOW += ["rollout.n=4", "actor.ppo_micro_batch_size_per_gpu=2", "rollout.sde_window_range=[0,2]"]
TINY_FLOW += ["model.lora_rank=4"]
RESPONSE = 256
PLAN_S = 60.0


def flow_words(config: str, shape: str, *keys: str) -> list[str]:
    """Words of benchmarks/step.py for a flow model's recipe; on a CPU with tiny sizes."""
    sizes = ["data.max_prompt_length=64"]
    if device().type == "cpu":
        shape, sizes = "tiny_qwen_image/1" if "qwen" in shape else "tiny_sd3/1", TINY_FLOW
    return [str(ROOT / config), "--shapes", shape, *sizes, *keys]


def lm_words(shape: str, prompts: int, *keys: str) -> list[str]:
    """Words of benchmarks/step.py for GRPO with `prompts` x 8 responses of 256 tokens, in two updates by default."""
    n, response = 8, RESPONSE
    if device().type == "cpu":
        shape, prompts, n, response = lm_shapes.TINY, 4, 2, 12
    sizes = [f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts // 2}", f"rollout.n={n}"]
    sizes += ["data.max_prompt_length=64", f"data.max_response_length={response}", "algorithm.kl_loss_coef=0"]
    sizes += ["model.gradient_checkpointing=true"]
    return [str(ROOT / LM), "--shapes", shape, *sizes, *keys]


COMPILE = "model.compile=true"


def one_micro_batch(rows: int) -> list[str]:
    """Keys of padded micro-batches of `rows` samples, which a compiled language model takes."""
    rows = rows if device().type == "cuda" else 4
    return [
        "model.use_remove_padding=false",
        "actor.use_dynamic_bsz=false",
        f"actor.ppo_micro_batch_size_per_gpu={rows}",
    ]


def timed(title: str, words: list[str]) -> Lines:
    """A line with the seconds of a second step, whose row goes into docs/performance.md, and one with its memory."""
    if COMPILE in words and device().type == "cpu":
        yield Line(title, None, note="on a CPU, a C++ compiler would take minutes")
        return
    args, cfg = step.parse([*words, "--warmup", "1", "--steps", "1"])
    asked = copy.deepcopy(cfg)  # the plan is counted by the CPU while the GPU works
    plan = Part(partial(plan_of, asked, args.shapes, Path(cfg.trainer.output_dir)), Path("plan.log"))
    start = clock()
    bench = step.prepared(cfg, args)
    built = clock() - start
    bench.fit()
    r = step.summary(bench, args)
    [expected] = [result for result in plan.results(PLAN_S) if isinstance(result, dict)] or [{}]
    if expected:
        most = expected["pflop"] * 1e3 / (r["peak_tflops"] or 1.0)
        expected["step_s"] = most / USED[1], most / USED[0]
    more = {"step": r, "plan": expected, "row": row_of(title, r, expected)}
    yield Line(title, r["step_s"] > 0, r["step_s"], "s", in_words(r, built), more)
    yield memory(title, bench, r, expected)


def in_words(r: dict[str, Any], built: float) -> str:
    """The figures of a step in one line."""
    parts = [f"rollout {r['rollout_s']:.2f}", f"update {r['update_s']:.2f}", f"MFU {100 * (r['mfu'] or 0):.1f} %"]
    if "images" in r:
        parts += [f"{r['images_per_rank_per_s_without_reward']:.3f} images/s", f"VAE {r['decode_s']:.2f}"]
    else:
        parts += [f"{r['ms_per_pass']:.1f} ms a token", f"{r['decoded_per_rank_per_s']:.0f} decoded/s"]
        parts += [f"{r['trained_per_rank_per_s']:.0f} trained/s"]
    return ", ".join([*parts, f"built in {built:.1f}"])


def memory(title: str, bench: Bench, r: dict[str, Any], expected: dict[str, Any]) -> Line:
    """Planned and measured peaks; on a GPU they should agree within 10 %, and the cache should never be freed."""
    gb, note = r["peak_memory_gb"], ", ".join(f"{name} {value:.1f}" for name, value in r["memory_gb"].items())
    if not expected:
        return Line(f"{title}, memory", False, gb, "GB", "no plan: see plan.log")
    note = f"planned {expected['gb']:.2f}; {note}"
    if device().type == "cpu":
        return Line(f"{title}, memory", None, gb, "GB", note)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    note += f"; reserved {torch.cuda.memory_reserved() / 1e9:.1f}, {retries} retries"
    return Line(f"{title}, memory", abs(gb / expected["gb"] - 1) < 0.1 and not retries, gb, "GB", note)


def plan_of(cfg: Any, shape: str, folder: Path) -> Iterator[dict[str, float]]:
    """The peak in GB and the arithmetic in PFLOP that --plan has of a step on one GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if isinstance(cfg, FlowRLConfig):
        cfg.model.path, cfg.model.family = (
            str(blueprint(folder / "blueprint", shape)),
            ("qwen_image" if "qwen" in shape else "sd3"),
        )
    job = planned(cfg, Cluster(1, 1))
    yield {"gb": count(job).peak / 1e9, "pflop": job.flops / 1e15, "model_pflop": job.model_flops / 1e15}


def trl() -> Lines:
    """The 0.5B shape in TRL's GRPOTrainer, at the work of the stage `lm05`: two steps, of which the second counts."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda = device().type == "cuda"
    shape, prompts, n, response, micro = (SMALL, 64, 8, RESPONSE, 64) if cuda else (lm_shapes.TINY, 4, 2, 12, 4)
    samples = prompts * n
    with tempfile.TemporaryDirectory(prefix="phalanx-trl-") as name:
        folder = lm_shapes.folder_of(shape, Path(name) / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = [json.loads(text) for text in (lm_shapes.WORDS / "train.jsonl").read_text().splitlines()]
        chats = [{"prompt": [{"role": "user", "content": row["question"]}]} for row in rows[: 8 * prompts]]
        ends: list[float] = []

        class Timed(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                ends.append(clock())

        def reward(completions: list[Any], **_: Any) -> list[float]:
            return lm_shapes.random_reward([turns[-1]["content"] for turns in completions], [], [])

        config = GRPOConfig(
            output_dir=name,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=samples // 2 // micro or 1,
            steps_per_generation=samples // micro,
            num_generations=n,
            max_completion_length=response,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            max_steps=4,
            save_strategy="no",
            report_to=[],
            use_cpu=not cuda,
            bf16=cuda,
            gradient_checkpointing=True,
            disable_tqdm=True,
            logging_steps=1,
        )
        model = lm_shapes.made(AutoModelForCausalLM, str(folder), torch.float32, "sdpa")
        options: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [Timed()], "reward_funcs": reward}
        trainer = GRPOTrainer(model=model, args=config, train_dataset=Dataset.from_list(chats), **options)
        trainer.train()
    took = ends[3] - ends[1]  # two optimizer steps, and the sampling before the first of them
    key = "completions/mean_length"
    lengths = [entry[key] for entry in trainer.state.log_history if key in entry]
    note = f"{samples / took:.3f} responses/s of {lengths[-1]:.0f} tokens, weights in float32 under autocast"
    row = ["TRL, Qwen2.5-0.5B", f"{took:.2f}", f"{samples / took:.3f}", "", "", "", f"{peak_memory_gb(device()):.1f}"]
    yield Line("TRL, Qwen2.5-0.5B", took > 0, took, "s", note, {"row": row})


def transfers() -> Lines:
    """The speed of copies between host and device, and the time of moving a text encoder there and back."""
    if device().type == "cpu":
        for title in ("host to device", "device to host", "text encoder"):
            yield Line(title, None, note=CUDA_ONLY)
        return
    yield from tried("copies", copies)
    yield from tried("text encoder", encoder)


def copies() -> Lines:
    size = 2**30
    there = torch.empty(size, dtype=torch.uint8, device=device())
    for pinned in (True, False):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        for title, to, source in (("host to device", there, here), ("device to host", here, there)):
            to.copy_(source)
            rate = size / 1e9 / seconds(partial(to.copy_, source, non_blocking=pinned), 3)
            yield Line(f"{title}, {kind}", rate > 1, rate, "GB/s")


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


COLUMNS = ["job", "s per step", "samples/s", "tokens/s decoded, trained", "MFU, HFU %", "s planned", "GB, planned"]


def row_of(title: str, r: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """The row of a step for docs/performance.md."""
    unit = "images" if "images" in r else "responses"
    rate = f"{r[f'{unit}_per_rank_per_s_without_reward']:.3f}"
    tokens = "" if unit == "images" else f"{r['decoded_per_rank_per_s']:.0f}, {r['trained_per_rank_per_s']:.0f}"
    used = "" if r["mfu"] is None else f"{100 * r['mfu']:.1f}, {100 * r['hfu']:.1f}"
    step_s = "{:.3g} to {:.3g}".format(*plan["step_s"]) if plan else ""
    gb = f"{r['peak_memory_gb']:.1f}, {plan['gb']:.1f}" if plan else f"{r['peak_memory_gb']:.1f}"
    return [title, f"{r['step_s']:.2f}", rate, tokens, used, step_s, gb]


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The table for docs/performance.md of the lines that have a row."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for line in lines:
        if "row" in line["more"]:
            rows.append(line["more"]["row"])
    return [f"| {' | '.join(cells)} |" for cells in rows] if len(rows) > 2 else []


def stages() -> dict[str, Stage]:
    """What matters most comes first; what comes after the copies fits only into a larger budget."""

    def fast(title: str, words: list[str], expected: float, limit: float) -> Stage:
        return Stage("fast", partial(timed, title, words), expected, limit)

    qwen = flow_words(QWEN, "qwen_image/60", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1")
    sd3 = flow_words(SD3, "sd35_medium/24", "data.train_batch_size=2", "actor.ppo_mini_batch_size=1")
    small, middle = lm_words(SMALL, 64), lm_words(MIDDLE, 32)
    large, padded = lm_words(LARGE, 16, "model.lora_rank=64"), [COMPILE, *one_micro_batch(32)]
    return {
        "qwen60": fast("Qwen-Image LoRA", qwen, 75, 130),
        "lm05": fast("Qwen2.5-0.5B", small, 30, 70),
        "trl": Stage("fast", trl, 50, 100),
        "lm15": fast("Qwen2.5-1.5B", middle, 40, 80),
        "sd35": fast("SD3.5-medium LoRA", sd3, 30, 80),
        "lm7": fast("Qwen2.5-7B LoRA", large, 35, 80),
        "qwen60c": fast("Qwen-Image LoRA, compiled", [*qwen, COMPILE], 90, 170),
        "lm7c": fast("Qwen2.5-7B LoRA, compiled", [*large, *padded], 50, 110),
        "transfers": Stage("fast", transfers, 12, 50),
        "lm05c": fast("Qwen2.5-0.5B, compiled", [*small, *padded], 40, 90),
        "sd35c": fast("SD3.5-medium LoRA, compiled", [*sd3, COMPILE], 60, 110),
        "lm15c": fast("Qwen2.5-1.5B, compiled", [*middle, *padded], 50, 100),
    }


STAGES = stages()
