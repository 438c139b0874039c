"""Checks of `make gpu-smoke` on training steps: the Trainer, on random weights of real widths in a few blocks."""

import copy
import json
import math
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import init_empty_weights
from measure import HERE, Bench, configure
from shapes import SHAPES
from smoke_kernels import has_vllm
from smoke_lines import CUDA_ONLY, Line, device, judged, nothing, said, tried
from torch.autograd import DeviceType
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from phalanx.config import load
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.distributed import mesh
from phalanx.distributed.fsdp import local
from phalanx.distributed.mesh import World
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster
from phalanx.plan.memory import count
from phalanx.training import flow_rl, lm_rl
from phalanx.training.rl import Trainer

ROOT = HERE.parent
QWEN, SD3 = "qwen_image", "sd35_medium"
CONFIGS = {QWEN: "configs/flowgrpo/qwen_image_ocr_lora.yaml", SD3: "configs/flowgrpo/sd35_medium_ocr_lora.yaml"}
TINY = {QWEN: "tiny_qwen_image", SD3: "tiny_sd3"}
WHOLE = 60  # number of blocks of Qwen-Image
LIMIT = 1e-5  # of |ratio - 1|: a tenth of the clip range of the recipes


def bench(model: str, blocks: int, *overrides: str, **options: Any) -> Bench:
    """Run the Trainer of a recipe with `blocks` blocks, by default for one step."""
    made = Bench.of(configured(model, blocks, *overrides), **{"warmup": 0, "steps": 1, **options})
    made.fit()
    return made


def configured(model: str, blocks: int, *overrides: str) -> FlowRLConfig:
    """The recipe's configuration with two prompts per step; on a CPU with tiny sizes."""
    cuda = device().type == "cuda"
    sizes = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=1", "data.max_prompt_length=64"]
    if not cuda:
        sizes += ["data.max_prompt_length=16", "rollout.height=32", "rollout.width=32", "rollout.num_inference_steps=3"]
        sizes += ["rollout.n=4", "actor.ppo_micro_batch_size_per_gpu=2", "rollout.sde_window_range=[0,2]"]
        sizes += ["model.lora_rank=4"]
    shape = f"{model if cuda else TINY[model]}/{blocks}"
    reward = f"reward.functions=[{{path: '{HERE / 'smoke_rewards.py'}:of_images'}}]"
    args = Namespace(config=str(ROOT / CONFIGS[model]), shapes=shape, overrides=[*sizes, reward, *overrides])
    return configure(args)


def small() -> int:
    """The number of blocks of a transformer that is not timed."""
    return 4 if device().type == "cuda" else 1


def compiling() -> AbstractContextManager[Any]:
    """On a CPU, compile only graphs and no kernels, which would take a C++ compiler minutes."""
    if device().type == "cuda":
        return nullcontext()
    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


def left_out(name: str) -> str | None:
    """The reason if the variant of this name does not run on a CPU."""
    if device().type == "cuda":
        return None
    if name == "compiled":
        return "on a CPU in the check `compile` alone, where it takes longest"
    return CUDA_ONLY if name in CUDA_VARIANTS else None


# -- (2) rollout and replay ---------------------------------------------------------------------------------------

VARIANTS = {
    "as the recipe": [],
    "native": ["model.attn_backend=native"],
    "cuDNN": ["model.attn_backend=_native_cudnn"],
    "memory-efficient": ["model.attn_backend=_native_efficient"],
    "flash": ["model.attn_backend=_native_flash"],
    "math": ["model.attn_backend=_native_math"],
    "deterministic": ["trainer.deterministic=true"],
    "compiled": ["model.compile=true"],
}
CUDA_VARIANTS = ("cuDNN", "memory-efficient")


def exact() -> Iterator[Line]:
    """Whether log-probs of rollout and replay are equal, for prompts of different lengths."""
    for model in CONFIGS:
        for name, overrides in VARIANTS.items():
            title = f"|ratio - 1|, {model}, {name}"
            yield from tried(title, partial(_exact, title, model, name, overrides))


def _exact(title: str, model: str, name: str, overrides: list[str]) -> Iterator[Line]:
    reason = left_out(name)
    if reason is not None:
        yield nothing(title, reason)
        return
    try:
        row = bench(model, small(), *overrides).measures[0]
    except ValueError as error:
        if "attn_backend" not in str(error):
            raise
        yield nothing(title, f"refused: {said(error)}")
        return
    finally:
        torch.use_deterministic_algorithms(False)
    yield ratio(title, row)


def ratio(title: str, row: Mapping[str, float]) -> Line:
    """The largest deviation of the first update's ratios from 1."""
    error, norm = row["actor/first_ratio_error"], row["actor/grad_norm"]
    return judged(title, error <= LIMIT and 0 < norm < math.inf, error, "", f"gradient norm {norm:.3g}")


def measured(cfg: Any) -> tuple[Any, list[dict[str, float]]]:
    """A job of a language model, and the list to which it appends its row of metrics after each step."""
    trainer, rows = lm_rl.build(cfg), list[dict[str, float]]()
    assert isinstance(trainer, Trainer), "each rank does everything"

    def end_step(step: int, row: dict[str, float]) -> None:
        trainer.job.progress.step = step
        rows.append(row)

    trainer.job.end_step = end_step  # type: ignore[method-assign]
    return trainer, rows


def exact_lm() -> Iterator[Line]:
    """As `exact`, for a language model with Qwen2.5's widths, with padded and packed samples."""
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-lm-") as name:
        folder = language_model(Path(name))
        for title, overrides in LM_VARIANTS.items():
            title = f"|ratio - 1|, Qwen2.5's shape, {title}"
            yield from tried(title, partial(_exact_lm, title, folder, overrides))


LM_VARIANTS = {
    "padded": ["model.use_remove_padding=false"],
    "packed": ["model.use_remove_padding=true"],
    "packed, deterministic": ["model.use_remove_padding=true", "trainer.deterministic=true"],
}


def _exact_lm(title: str, folder: Path, overrides: list[str]) -> Iterator[Line]:
    trainer, rows = measured(lm_config(folder, *overrides))
    try:
        trainer.fit()
    finally:
        torch.use_deterministic_algorithms(False)
    yield ratio(title, rows[0])


def language_model(folder: Path) -> Path:
    """Write random weights of two layers with Qwen2.5-7B's widths, and the quickstart's tokenizer, to a folder."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 600}
    if device().type == "cuda":
        sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "vocab_size": 152064}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/words/base")
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        **sizes,
        num_key_value_heads=4,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device()):
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return folder


def lm_config(folder: Path, *overrides: str) -> LMRLConfig:
    """The configuration of a job with one step on the quickstart's word problems."""
    tokens = 256 if device().type == "cuda" else 12
    keys = [
        f"model.path={folder}",
        "model.dtype=bfloat16",
        "model.gradient_checkpointing=true",
        f"data.train_files=[{ROOT / 'assets/words/train.jsonl'}]",
        "data.prompt_key=question",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        f"data.max_response_length={tokens}",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_micro_batch_size_per_gpu=4",
        f"reward.functions=[{{path: '{HERE / 'smoke_rewards.py'}:of_texts'}}]",
        *("trainer.total_training_steps=1", "trainer.logger=[]", "trainer.save_freq=-1", "trainer.resume=never"),
        f"trainer.output_dir={folder / 'out'}",
    ]
    return load(LMRLConfig, None, [*keys, *overrides])


# -- (3) the time of a step ---------------------------------------------------------------------------------------

# patterns of the names of kernels, and of torch's operations on a CPU; the first match counts
CLASSES = {
    "communication": r"nccl|gloo|c10d",
    "attention": r"flash|fmha|attention|sdpa",
    "convolutions": r"conv|fprop|dgrad|wgrad|im2col",
    "GEMM": r"gemm|gemv|splitk|nvjet|cutlass|xmma|cublas|::(add|b|badd)?mm$|linear|matmul",
    "copies": r"memcpy|memset|copy|cat|nchw|nhwc",
    "elementwise": r"elementwise|triton|norm|reduce|softmax|aten::|vectorized|upsample|multi_tensor|index|fill|rand",
}
UNKNOWN = "unknown"


def step() -> Iterator[Line]:
    """The time of a step at two depths, extrapolated to all blocks, and the device's time by class of kernels."""
    yield from tried("time of a step", _step)


def _step() -> Iterator[Line]:
    few, more = (4, 12) if device().type == "cuda" else (1, 4)
    clock = "time" if device().type == "cuda" else "cpu"  # CPU time of the process, which other work disturbs less
    found = {}
    for blocks in (few, more):
        b = bench(QWEN, blocks, warmup=1, steps=2, trace=Path() if blocks == more else None)
        found[blocks] = b.medians()
    images = b.plan.samples
    whole = 0.0
    for phase in ("rollout", "update"):
        one, other = (m[f"{clock}/{phase}"] for m in found.values())
        a_block = (other - one) / (more - few)
        total = one + (WHOLE - few) * a_block
        whole += total
        note = f"{one:.3f} s with {few} blocks, {other:.3f} with {more}, so {total:.2f} with {WHOLE}"
        yield judged(f"{phase}, a block", a_block > 0, 1e3 * a_block, "ms", note)
    yield judged(f"a step of {WHOLE} blocks, without reward", whole > 0, whole, "s", f"{images / whole:.3g} images/s")
    decoded = 1e3 * found[more][f"{clock}/decode"] / images
    yield judged("VAE, an image", decoded > 0, decoded, "ms")
    ms = kernel_classes(b.profile)
    total = sum(ms.values())
    for name, value in ms.items():
        note = f"{100 * value / total:.0f} % of {total:.0f} ms in the kernels of a step of {more} blocks"
        if name == UNKNOWN:
            yield judged("kernels of no known class", value < 0.1 * total, value, "ms", note)
        else:
            yield Line(f"kernels: {name}", "PASS" if value else "-", value, "ms", note)


def kernel_classes(profile: Any) -> dict[str, float]:
    """Milliseconds of a profile's kernels by class; on a CPU, the operations' own time without the ones they call."""
    cuda = device().type == "cuda"
    ms = dict.fromkeys([*CLASSES, UNKNOWN], 0.0)
    for event in profile.key_averages():
        if cuda and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        if not cuda and not event.key.startswith(("aten::", "c10d::")):
            continue
        fits = (name for name, words in CLASSES.items() if re.search(words, event.key, re.IGNORECASE))
        took = event.self_device_time_total if cuda else event.self_cpu_time_total
        ms[next(fits, UNKNOWN)] += took / 1e3
    return ms


# -- (4) memory ---------------------------------------------------------------------------------------------------


def plan() -> Iterator[Line]:
    """A step's memory as planned by --plan, and as measured."""
    yield from tried("plan of memory", _plan)


def _plan() -> Iterator[Line]:
    cuda = device().type == "cuda"
    blocks = 1
    if cuda:
        blocks = WHOLE if torch.cuda.get_device_properties(0).total_memory > 75e9 else 12
    cfg = configured(QWEN, blocks)
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-plan-") as name:
        asked = copy.deepcopy(cfg)
        asked.model.path, asked.model.family = str(blueprint(Path(name), QWEN if cuda else TINY[QWEN], blocks)), QWEN
        expected = count(planned(asked, Cluster(1, 1))).peak / 1e9
    title = f"peak of a step of {blocks} blocks"
    yield judged(f"{title}, planned", expected > 0, expected, "GB")
    b = Bench.of(cfg, warmup=0, steps=1)
    b.fit()
    if not cuda:
        for what in ("allocated", "reserved", "num_alloc_retries"):
            yield nothing(f"{title}, {what}", CUDA_ONLY)
        return
    found = b.peak_memory_gb()
    note = f"{found / expected:.3f} of the plan"
    yield judged(f"{title}, allocated", abs(found / expected - 1) < 0.1, found, "GB", note)
    reserved, retries = torch.cuda.memory_reserved() / 1e9, torch.cuda.memory_stats()["num_alloc_retries"]
    yield judged(f"{title}, reserved", reserved < 1.25 * found, reserved, "GB", f"{reserved / found:.3f} of allocated")
    yield judged(f"{title}, num_alloc_retries", retries == 0, retries)
    for phase, gb in b.meter.memory_gb.items():
        yield Line(f"  {phase}", "PASS", gb, "GB")


def blueprint(folder: Path, name: str, blocks: int) -> Path:
    """Write the configuration files of a shape, from which the plan is made, to a folder."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    shape = SHAPES[name]
    with init_empty_weights():
        parts = {
            "transformer": QwenImageTransformer2DModel(**shape.transformer | {"num_layers": blocks}),
            "vae": AutoencoderKLQwenImage(**shape.vae),
            "scheduler": FlowMatchEulerDiscreteScheduler(**shape.scheduler),
        }
    index: dict[str, Any] = {
        "_class_name": "QwenImagePipeline",
        "text_encoder": [None, None],
        "tokenizer": [None, None],
    }
    for part, module in parts.items():
        module.save_config(folder / part)
        index[part] = ["diffusers", type(module).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


# -- (5) FSDP2 ----------------------------------------------------------------------------------------------------


def fsdp() -> Iterator[Line]:
    """FSDP2 over one rank with the real backend, compared with the same step without it; and resuming a checkpoint."""
    norm = bench(QWEN, small()).measures[0]["actor/grad_norm"]
    # otherwise a single rank does not use FSDP, and offloading is rejected
    with patch.object(World, "shard_size", 2), patch.object(mesh, "check_launch", lambda *_: None):
        for name, overrides in LAYOUTS.items():
            yield from tried(f"FSDP2, {name}", partial(_fsdp, name, overrides, norm))
        for name in SAVES:
            yield from tried(f"FSDP2{name}, resumed", partial(_resumed, name))


LAYOUTS = {
    "gathered once a rollout": [],
    "gathered at each block": ["parallel.rollout_unsharded=false"],
    "without checkpointing": ["model.gradient_checkpointing=false"],
    "param_offload": ["parallel.param_offload=true"],
    "optimizer_offload": ["parallel.optimizer_offload=true"],
    "sharded LoRA": ["parallel.lora_sharding=shard"],
    "compiled": ["model.compile=true"],
}


def _fsdp(name: str, overrides: list[str], norm: float) -> Iterator[Line]:
    reason = left_out(name)
    if reason is not None:
        yield nothing(f"FSDP2, {name}", reason)
        return
    row = bench(QWEN, small(), *overrides).measures[0]
    yield ratio(f"FSDP2, {name}, |ratio - 1|", row)
    away = row["actor/grad_norm"] / norm
    yield judged("  its gradient norm, of that without FSDP", abs(away - 1) < 0.01, away)


SAVES = {
    "": [],
    ", param_offload": ["parallel.param_offload=true"],
    ", optimizer_offload": ["parallel.optimizer_offload=true"],
    ", both offloads": ["parallel.param_offload=true", "parallel.optimizer_offload=true"],
}


def _resumed(name: str) -> Iterator[Line]:
    """Run two steps, then the second one again from the checkpoint that was written in the background of it."""
    cfg = configured(QWEN, small(), "trainer.deterministic=true", *SAVES[name])
    cfg.trainer.save_freq, cfg.trainer.total_training_steps = 1, 2
    folder = Path(cfg.trainer.output_dir)
    weights = []
    try:
        for _ in range(2):
            trainer = flow_rl.build(cfg)
            assert isinstance(trainer, Trainer)
            trainer.fit()
            weights.append({n: local(p).detach().clone() for n, p in trainer.policy.trained.parameters.items()})
            # as if the run had been killed in its second step
            shutil.rmtree(folder / "checkpoints" / "step_000002")
            cfg.trainer.resume = "auto"
    finally:
        torch.use_deterministic_algorithms(False)
    one, other = weights
    differ = sum(not torch.equal(value, other[name]) for name, value in one.items())
    yield judged(f"FSDP2{name}, tensors that a resumed run has otherwise", differ == 0, differ, "", f"of {len(one)}")


# -- (6) compiling, (8) vLLM --------------------------------------------------------------------------------------


def recompiles() -> Iterator[Line]:
    """Steps with prompts of other lengths must not recompile."""
    for model in CONFIGS if device().type == "cuda" else [QWEN]:
        yield from tried(f"compiled, {model}", partial(_recompiles, model))


def _recompiles(model: str) -> Iterator[Line]:
    from torch._dynamo.utils import counters

    steps = 5
    with compiling():
        b = Bench.of(configured(model, small(), "model.compile=true"), warmup=0, steps=steps)
        graphs: list[int] = []
        b.after = lambda _: graphs.append(counters["stats"]["unique_graphs"])
        start = counters["stats"]["unique_graphs"]
        b.fit()
    seconds = [row["perf/step_s"] for row in b.measures]
    made = graphs[0] - start
    title = f"compiled, {model}"
    yield judged(
        f"{title}, graphs of the first step", made > 0, made, "", f"{seconds[0]:.1f} s, later {seconds[-1]:.2f}"
    )
    new = graphs[-1] - graphs[0]
    yield judged(f"  new ones in {steps - 1} steps of other lengths", new == 0, new)
    error = max(row["actor/first_ratio_error"] for row in b.measures)
    yield judged("  |ratio - 1| of all steps", error <= LIMIT, error)


def sleeping_vllm() -> Iterator[Line]:
    """Memory of the sleeping vLLM on the device while the policy trains."""
    title = "vLLM, asleep"
    if not has_vllm() or device().type == "cpu":
        yield nothing(title, CUDA_ONLY if has_vllm() else "vllm is not installed")
        return
    yield from tried(title, _sleeping_vllm)


def _sleeping_vllm() -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-vllm-") as name:
        folder = language_model(Path(name))
        keys = ("rollout.engine=vllm", "rollout.gpu_memory_utilization=0.3")
        trainer, rows = measured(lm_config(folder, *keys))
        before = used()
        with trainer.collector.rollout.awake():
            within = used()
        after = used()
        trainer.fit()
    weights = sum(p.nbytes for p in trainer.policy.trained.parameters.values()) / 1e9
    note = f"{before:.1f} GB used before, {within:.1f} awake, {after:.1f} after"
    yield judged(
        "vLLM, asleep", within - before > weights and after - before < 0.1 * (within - before), after, "GB", note
    )
    norm = rows[0]["actor/grad_norm"]
    yield judged("a step with it, gradient norm", 0 < norm < math.inf, norm)


def used() -> float:
    """GB of device memory that are in use, by all processes."""
    torch.cuda.empty_cache()
    left, total = torch.cuda.mem_get_info()
    return (total - left) / 1e9
