"""Stages of gpu_day.py that ask whether kernels, copies and processes of a GPU do what the CPU's do."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_fast
import step
import torch
from gpu_fast import QWEN, ROOT, SD3
from gpu_lines import CUDA_ONLY, Line, Lines, Stage, device, first_line, seconds, tried
from gpu_tiny import tiny
from measure import Bench
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from phalanx.distributed import mesh
from phalanx.distributed.fsdp import local
from phalanx.distributed.mesh import World
from phalanx.functional.tokens import TokenTrace

LIMIT = 1e-5  # of |ratio - 1|: a tenth of the clip range of the recipes
OFF = 0.03  # of attention in bfloat16, relative to the largest value
NATS = 0.02  # mean difference of log-probs in bfloat16


def cuda() -> bool:
    return device().type == "cuda"


def facts() -> Lines:
    """Rates of this card and host, by which the speeds can be judged."""
    where = torch.cuda.get_device_properties(0) if cuda() else None
    gb = where.total_memory / 1e9 if where else None
    yield Line(where.name if where else "CPU", None, gb, "GB", f"CUDA {torch.version.cuda}")
    n = 8192 if cuda() else 256
    x, y = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    x @ y
    yield Line("product in bfloat16", None, 2 * n**3 / seconds(lambda: x @ y, 5) / 1e12, "TFLOP/s")
    source = torch.zeros(2**31 if cuda() else 2**22, dtype=torch.uint8, device=device())
    target = torch.zeros_like(source)
    yield Line("copy, read and written", None, 2e-9 * len(source) / seconds(lambda: target.copy_(source), 5), "GB/s")
    one = torch.ones(1, device=device())
    yield Line("a launch by the host", None, 1e3 * seconds(lambda: [one.add_(1) for _ in range(1000)]), "us")


# -- attention -----------------------------------------------------------------------------------------------------

BACKENDS: dict[str, list[SDPBackend] | None] = {
    "torch's choice": None,
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


def attention() -> Lines:
    """Each backend forward and backward, with and without a mask, at a length of a recipe and at two odd ones; packed
    sequences one by one and by varlen_attn; FlexAttention at four lengths of a row.
    """
    attend(None, *inputs(1, 2, 16, 8, False))  # so that the first line does not include CUDA's initialization
    for name in BACKENDS:
        for masked in (False, True):
            title = f"{name}, {'mask' if masked else 'no mask'}"
            if not cuda() and name in ("cuDNN", "memory-efficient"):
                yield Line(title, None, note=CUDA_ONLY)
                continue
            yield from tried(title, partial(backend, title, BACKENDS[name], masked))
    yield from tried("varlen_attn", varlen)
    yield from tried("FlexAttention", flex)


def backend(title: str, chosen: list[SDPBackend] | None, masked: bool) -> Lines:
    rows, heads, size = (16, 24, 128) if cuda() else (2, 2, 16)
    lengths = (1088, 1061, 1083) if cuda() else (40, 37, 39)  # of an image of 512 x 512 pixels and texts
    made = {length: inputs(rows, heads, size, length, masked) for length in lengths}
    try:
        first = [seconds(partial(attend, chosen, *given)) for given in made.values()]
    except RuntimeError as error:
        if chosen is None:
            raise
        yield Line(title, None, note=f"refused: {first_line(error)}"[:90])
        return
    later = seconds(lambda: attend(chosen, *made[lengths[0]]), 3)
    worst = max(error_of(attend(chosen, *given), exact_attention(*given)) for given in made.values())
    note = f"off by {worst:.0e}, first calls {', '.join(f'{s:.2f}' for s in first)} s"
    yield Line(title, worst <= OFF and sum(first[1:]) < 5, 1e3 * later, "ms", note)


def inputs(rows: int, heads: int, size: int, length: int, masked: bool) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values, the same in each row, and a mask that hides an eighth of the keys, or None."""
    generator = torch.Generator(device()).manual_seed(length)
    one = torch.randn(3, 1, heads, length, size, generator=generator, device=device()).bfloat16()
    keep = torch.arange(length, device=device()) < length - length // 8
    mask = keep.view(1, 1, 1, -1).expand(rows, 1, 1, -1) if masked else None
    return [x.expand(rows, -1, -1, -1).clone().requires_grad_() for x in one], mask


def attend(chosen: list[SDPBackend] | None, qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    """The output, and the gradients of its sum of squares."""
    with nullcontext() if chosen is None else sdpa_kernel(chosen):
        return with_gradients(scaled_dot_product_attention(*qkv, attn_mask=mask), qkv)


def with_gradients(out: Tensor, qkv: list[Tensor]) -> tuple[Tensor, ...]:
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)


def exact_attention(qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    """As `attend`, in float32, for the first row."""
    first = [x[:1].detach().float().requires_grad_() for x in qkv]
    return attend([SDPBackend.MATH], first, None if mask is None else mask[:1])


def error_of(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest difference in the first row, relative to the largest value."""
    return max(float((a[:1] - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))


def varlen() -> Lines:
    """Causal attention of a packed row of 65,536 tokens, 200 each, with Qwen2.5-7B's heads, forward and backward."""
    if not cuda():
        yield Line("varlen_attn, packed", None, note=CUDA_ONLY)
        return
    from torch.nn.attention.varlen import varlen_attn

    length, total, heads, size = 200, 65_400, 28, 128
    qkv = [torch.randn(total, heads, size, device=device()).bfloat16().requires_grad_() for _ in range(3)]
    ends = torch.arange(0, total + 1, length, device=device(), dtype=torch.int32)

    def together() -> tuple[Tensor, ...]:
        return with_gradients(varlen_attn(*qkv, ends, ends, length, length, window_size=(-1, 0)), qkv)

    def one_by_one() -> tuple[Tensor, ...]:
        parts = zip(*(x.transpose(0, 1)[None].split(length, 2) for x in qkv), strict=True)
        out = torch.cat([scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
        return with_gradients(out[0].transpose(0, 1), qkv)

    worst = error_of(tuple(x[None] for x in together()), tuple(x[None] for x in one_by_one()))
    note = f"off by {worst:.0e} from sdpa one by one, which takes {1e3 * seconds(one_by_one, 3):.1f} ms"
    yield Line("varlen_attn, 65,400 packed tokens", worst <= OFF, 1e3 * seconds(together, 5), "ms", note)


def flex() -> Lines:
    """FlexAttention over blocks, as block diffusion uses it: compilations and seconds of four lengths of a row."""
    if not cuda():
        yield Line("FlexAttention at 4 lengths", None, note=CUDA_ONLY)
        return
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, firsts, later = torch.compile(flex_attention), [], 0.0

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q // 32 >= k // 32

    for length in (4096, 5120, 6144, 8192):
        qkv = [torch.randn(1, 16, length, 128, device=device()).bfloat16().requires_grad_() for _ in range(3)]
        masks = seconds(partial(create_block_mask, rule, 1, None, length, length, device=str(device())))
        mask = create_block_mask(rule, 1, None, length, length, device=str(device()))
        run = partial(lambda given, seen: with_gradients(compiled(*given, block_mask=seen), given), qkv, mask)
        firsts.append(seconds(run))
        later = seconds(run, 3)
    graphs = counters["stats"]["unique_graphs"]
    note = f"{graphs} graphs; first {', '.join(f'{s:.1f}' for s in firsts)} s; mask of {length} {1e3 * masks:.0f} ms"
    yield Line("FlexAttention, 8,192 tokens", firsts[-1] < 5, 1e3 * later, "ms", note)


# -- steps of flow models and language models ------------------------------------------------------------------------


def bench(words: list[str], steps: int = 1) -> Bench:
    """The Trainer of a recipe after `steps` steps."""
    made = ready(words, steps)
    made.fit()
    return made


def ready(words: list[str], steps: int = 1) -> Bench:
    args, cfg = step.parse([*words, "--warmup", "0", "--steps", str(steps)])
    return step.prepared(cfg, args)


def few_blocks(config: str, *keys: str) -> list[str]:
    """Words of a flow model's recipe with four blocks and two prompts."""
    shape = f"{'qwen_image' if config == QWEN else 'sd35_medium'}/4"
    return gpu_fast.flow_words(config, shape, "data.train_batch_size=2", "actor.ppo_mini_batch_size=1", *keys)


def two_layers(*keys: str) -> list[str]:
    """Words of GRPO with two layers of Qwen2.5-7B's widths."""
    sizes = ("actor.ppo_mini_batch_size=4", "actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=4")
    return gpu_fast.lm_words("Qwen/Qwen2.5-7B-Instruct/2", 4, *sizes, *keys)


def ratio(title: str, words: list[str]) -> Lines:
    """The largest deviation of the first update's ratios from 1."""
    try:
        row = bench(words).measures[0]
    except ValueError as error:
        if "attn_backend" not in str(error):
            raise
        yield Line(title, None, note=f"refused: {first_line(error)}"[:90])
        return
    finally:
        torch.use_deterministic_algorithms(False)
    yield ratio_line(title, row)


def ratio_line(title: str, row: dict[str, float]) -> Line:
    error, norm = row["actor/first_ratio_error"], row["actor/grad_norm"]
    return Line(title, error <= LIMIT and 0 < norm < math.inf, error, "", f"gradient norm {norm:.4g}")


FLOW_VARIANTS = {
    "as the recipe": [],
    "cuDNN": ["model.attn_backend=_native_cudnn"],
    "deterministic": ["trainer.deterministic=true"],
    "compiled": ["model.compile=true"],
}
LM_VARIANTS = {
    "padded": ["model.use_remove_padding=false"],
    "packed": ["model.use_remove_padding=true"],
    "packed, deterministic": ["model.use_remove_padding=true", "trainer.deterministic=true"],
}


def exact() -> Lines:
    """Whether log-probs of rollout and replay are equal, for prompts of different lengths."""
    for config, model in ((QWEN, "Qwen-Image"), (SD3, "SD3.5")):
        for name, keys in FLOW_VARIANTS.items():
            title = f"|ratio - 1|, {model}, {name}"
            if name in ("cuDNN", "compiled") and not cuda():
                yield Line(title, None, note=CUDA_ONLY if name == "cuDNN" else "on a CPU only in the stage `compile`")
            else:
                yield from tried(title, partial(ratio, title, few_blocks(config, *keys)))


def packed() -> Lines:
    """Ratios of a language model, and log-probs of packed samples with each attention, compared with padded ones."""
    for name, keys in LM_VARIANTS.items():
        title = f"|ratio - 1|, Qwen2.5's shape, {name}"
        yield from tried(title, partial(ratio, title, two_layers(*keys)))
    padded = log_probs("sdpa", False)
    for kind in ("sdpa", "flex_attention"):
        title = f"packed by {kind}, off from padded"
        if kind != "sdpa" and not cuda():
            yield Line(title, None, note=CUDA_ONLY)
        else:
            yield from tried(title, partial(off_from, title, kind, padded))


def off_from(title: str, kind: str, padded: Tensor) -> Lines:
    off = float((log_probs(kind, True) - padded).abs().mean())
    yield Line(title, off <= NATS, off, "nats")


def log_probs(kind: str, pack: bool) -> Tensor:
    """Log-probabilities of the tokens of four samples of different lengths."""
    job = ready(two_layers(f"model.attn_implementation={kind}", f"model.use_remove_padding={str(pack).lower()}"))
    ids = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0)).to(device())
    starts, lengths = torch.tensor([4, 9, 1, 2]).to(device()), torch.tensor([3, 11, 1, 7]).to(device())
    trace = TokenTrace(ids, starts, lengths, 11)
    with torch.no_grad():
        scored: Tensor = job.policy.scored(trace, 1.0).log_prob * trace.mask
    return scored.float().cpu()


LAYOUTS = {
    "gathered once a rollout": [],
    "param_offload": ["parallel.param_offload=true"],
    "optimizer_offload": ["parallel.optimizer_offload=true"],
}


def fsdp() -> Lines:
    """FSDP2 over one rank with the real backend, compared with the same step without it; and resuming a checkpoint."""
    norm = bench(few_blocks(QWEN)).measures[0]["actor/grad_norm"]
    # otherwise a single rank does not use FSDP, and offloading is rejected
    with patch.object(World, "shard_size", 2), patch.object(mesh, "check_launch", lambda *_: None):
        for name, keys in LAYOUTS.items():
            yield from tried(f"FSDP2, {name}", partial(layout, name, keys, norm))
        yield from tried("FSDP2, resumed", resumed)


def layout(name: str, keys: list[str], norm: float) -> Lines:
    row = bench(few_blocks(QWEN, *keys)).measures[0]
    yield ratio_line(f"FSDP2, {name}, |ratio - 1|", row)
    away = row["actor/grad_norm"] / norm
    yield Line("  its gradient norm, of that without", abs(away - 1) < 0.01, away)


def resumed() -> Lines:
    """With both offloads, run two steps, then the second one again from the checkpoint written in its background."""
    keys = ("trainer.deterministic=true", "parallel.param_offload=true", "parallel.optimizer_offload=true")
    _, cfg = step.parse(few_blocks(QWEN, *keys))
    cfg.trainer.save_freq, cfg.trainer.total_training_steps = 1, 2
    weights = []
    try:
        for _ in range(2):
            trainer: Any = step.flow_rl.build(cfg)
            trainer.fit()
            weights.append({n: local(p).detach().clone() for n, p in trainer.policy.trained.parameters.items()})
            # as if the run had been killed in its second step
            shutil.rmtree(Path(cfg.trainer.output_dir) / "checkpoints" / "step_000002")
            cfg.trainer.resume = "auto"
    finally:
        torch.use_deterministic_algorithms(False)
    one, other = weights
    differ = sum(not torch.equal(value, other[name]) for name, value in one.items())
    title = "FSDP2, both offloads, resumed: other tensors"
    yield Line(title, differ == 0, differ, "", f"of {len(one)}")


def compiled() -> Lines:
    """Five steps with prompts of other lengths must not recompile."""
    yield from tried("compiled", _compiled)


def _compiled() -> Lines:
    from torch._dynamo.utils import counters

    # on a CPU only graphs and no kernels, which would take a C++ compiler minutes
    eager: AbstractContextManager[Any] = patch.object(torch, "compile", partial(torch.compile, backend="eager"))
    with nullcontext() if cuda() else eager:
        job = ready(few_blocks(QWEN, "model.compile=true"), steps=5)
        graphs = [counters["stats"]["unique_graphs"]]
        job.after = lambda _: graphs.append(counters["stats"]["unique_graphs"])
        job.fit()
    s = [row["perf/step_s"] for row in job.measures]
    made, new = graphs[1] - graphs[0], graphs[-1] - graphs[1]
    yield Line("graphs of the first step", made > 0, made, "", f"{s[0]:.1f} s, later {s[-1]:.2f}")
    yield Line("  new ones in 4 steps of other lengths", new == 0, new)
    error = max(row["actor/first_ratio_error"] for row in job.measures)
    yield Line("  |ratio - 1| of all steps", error <= LIMIT, error)


# -- processes and copies ----------------------------------------------------------------------------------------------

KILL_S = 60.0  # until the ranks work, and until the job has ended


def kill() -> Lines:
    """kill -9 the last rank of a job after its first step: seconds until the job has ended, and no rank is left."""
    yield from tried("killed rank", _kill)


def _kill() -> Lines:
    ranks = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/bin", "/bin"])
    env = {**os.environ, "PATH": path, "NPROC_PER_NODE": str(ranks)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), env.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="phalanx-kill-") as name:
        words = ["tasks/train_grpo.py", "configs/grpo/quickstart.yaml", "data.val_files=[]", "trainer.test_freq=-1"]
        words += ["trainer.total_training_steps=100000", "trainer.save_freq=-1", f"trainer.output_dir={name}"]
        command = ["/bin/sh", "train.sh", *words]
        job = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
        try:
            files = [Path(name) / f"ranks/{rank}.json" for rank in range(ranks)]
            wait_for(lambda: all(file.is_file() for file in (*files, Path(name) / "metrics.jsonl")), job)
            pids = [json.loads(file.read_text())["pid"] for file in files]
            os.kill(pids[-1], signal.SIGKILL)
            start = time.perf_counter()
            status = job.wait(KILL_S)
            took = time.perf_counter() - start
        finally:
            with contextlib.suppress(ProcessLookupError):  # the job and its ranks have ended
                os.killpg(job.pid, signal.SIGKILL)
    left = sum(Path(f"/proc/{pid}").exists() for pid in pids)
    note = f"status {status}, {left} ranks left"
    yield Line(f"{ranks} rank(s), one killed: the job ends", status != 0 and not left, took, "s", note)


def wait_for(ready: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    """Wait until `ready()`; raises an error if the job ends before, or after KILL_S."""
    end = time.monotonic() + KILL_S
    while not ready():
        if job.poll() is not None or time.monotonic() > end:
            raise TimeoutError(f"no step within {KILL_S:.0f} s, status {job.returncode}")
        time.sleep(0.1)


STAGES = {
    "facts": Stage("right", facts, 8, 40),
    "tiny": Stage("right", tiny, 75, 150),
    "attention": Stage("right", attention, 15, 60),
    "packed": Stage("right", packed, 40, 80),
    "exact": Stage("right", exact, 75, 130),
    "fsdp": Stage("right", fsdp, 50, 100),
    "compile": Stage("right", compiled, 60, 120),
    "kill": Stage("right", kill, 20, 130),
}
