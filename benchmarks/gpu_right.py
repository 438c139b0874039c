"""Stages of gpu_day.py that ask whether kernels, compilers and processes of a GPU do what the CPU's do."""

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
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_shapes
import sampling
import step
import torch
from gpu_fast import COMPILE, LARGE, ON_CPU, QWEN, ROOT, SD3, flow_words, lm_words
from gpu_lines import CUDA_ONLY, Line, Lines, Stage, clock, device, first_line, seconds, tried
from gpu_tiny import tiny
from measure import Bench
from torch import Tensor
from torch._inductor import cpp_builder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from phalanx.distributed.fsdp import local
from phalanx.distributed.mesh import World
from phalanx.functional.block_states import States
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.flex import block_mask, one_graph
from phalanx.run import rl, world
from phalanx.tools.numerics import EXACT, measure

LIMIT = 1e-5  # of |ratio - 1|: a tenth of the clip range of the recipes
OFF = 0.03  # of attention in bfloat16, relative to the largest value
NATS = 0.02  # mean difference of log-probs in bfloat16
SAME = 0.95  # of responses in float32 that other shapes may draw otherwise, by rounding
START_S, END_S = 90.0, 60.0  # until the ranks of a job work, and until it has ended


def facts() -> Lines:
    """Rates of this card and host, by which the speeds can be judged."""
    card = None if ON_CPU else torch.cuda.get_device_properties(0)
    gb, n, size = (0.0, 256, 2**22) if card is None else (card.total_memory / 1e9, 8192, 2**31)
    yield Line("CPU" if card is None else card.name, None, gb, "GB", f"CUDA {torch.version.cuda}")
    x, y = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device())
    target, one = torch.zeros_like(source), torch.ones(1, device=device())
    x @ y
    yield Line("product in bfloat16", None, 2e-12 * n**3 / seconds(lambda: x @ y, 5), "TFLOP/s")
    yield Line("copy, read and written", None, 2e-9 * size / seconds(lambda: target.copy_(source), 5), "GB/s")
    yield Line("a launch by the host", None, 1e6 * seconds(lambda: one.add_(1), 1000), "us")


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
    for name, masked in product(BACKENDS, (False, True)):
        title = f"{name}, {'mask' if masked else 'no mask'}"
        if ON_CPU and name in ("cuDNN", "memory-efficient"):
            yield Line(title, None, note=CUDA_ONLY)
        else:
            yield from tried(title, partial(backend, title, BACKENDS[name], masked))
    for title, look in (("varlen_attn, 65,400 packed tokens", varlen), ("FlexAttention, 2 x 8,192 tokens", flex)):
        if ON_CPU:
            yield Line(title, None, note=CUDA_ONLY)
        else:
            yield from tried(title, partial(look, title))


def backend(title: str, chosen: list[SDPBackend] | None, masked: bool) -> Lines:
    sizes, lengths = ((2, 2, 16), (40, 37, 39)) if ON_CPU else ((16, 24, 128), (1088, 1061, 1083))
    made = [inputs(*sizes, length, masked) for length in lengths]
    try:
        first = [seconds(partial(attend, chosen, *given)) for given in made]
    except RuntimeError as error:
        if chosen is None:
            raise
        yield Line(title, None, note=f"refused: {first_line(error)}"[:90])
        return
    worst = 0.0
    for qkv, mask in made:  # all rows are equal
        exact = [x[:1].detach().float().requires_grad_() for x in qkv]
        expected = attend([SDPBackend.MATH], exact, None if mask is None else mask[:1])
        worst = max(worst, error_of(attend(chosen, qkv, mask), expected))
    note = f"off by {worst:.0e}, first calls {', '.join(f'{s:.2f}' for s in first)} s"
    ms = 1e3 * seconds(partial(attend, chosen, *made[0]), 3)
    yield Line(title, worst <= OFF and sum(first[1:]) < 5, ms, "ms", note)


def inputs(rows: int, heads: int, size: int, length: int, masked: bool) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values, the same in each row, and a mask that hides an eighth of the keys, or None."""
    generator = torch.Generator(device()).manual_seed(length)
    one = torch.randn(3, 1, heads, length, size, generator=generator, device=device()).bfloat16()
    keep = torch.arange(length, device=device()) < length - length // 8
    mask = keep.view(1, 1, 1, -1).expand(rows, 1, 1, -1) if masked else None
    return [x.expand(rows, -1, -1, -1).clone().requires_grad_() for x in one], mask


def attend(chosen: list[SDPBackend] | None, qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    with nullcontext() if chosen is None else sdpa_kernel(chosen):
        return with_gradients(sdpa(*qkv, attn_mask=mask), qkv)


def with_gradients(out: Tensor, qkv: list[Tensor]) -> tuple[Tensor, ...]:
    """The output, and the gradients of its sum of squares."""
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)


def error_of(computed: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest difference in the first row, relative to the largest value."""
    return max(float((a[:1] - b[:1]).abs().max() / b[:1].abs().max()) for a, b in zip(computed, exact, strict=True))


def varlen(title: str) -> Lines:
    """Causal attention of a packed row of sequences of 200 tokens with Qwen2.5-7B's heads, forward and backward."""
    from torch.nn.attention.varlen import varlen_attn

    length, total = 200, 65_400
    qkv = [torch.randn(total, 28, 128, device=device()).bfloat16().requires_grad_() for _ in range(3)]
    ends = torch.arange(0, total + 1, length, device=device(), dtype=torch.int32)

    def together() -> tuple[Tensor, ...]:
        return with_gradients(varlen_attn(*qkv, ends, ends, length, length, window_size=(-1, 0))[None], qkv)

    def one_by_one() -> tuple[Tensor, ...]:
        parts = zip(*(x.transpose(0, 1)[None].split(length, 2) for x in qkv), strict=True)
        out = torch.cat([sdpa(*part, is_causal=True) for part in parts], 2)
        return with_gradients(out.transpose(1, 2), qkv)

    worst = error_of(together(), one_by_one())
    note = f"off by {worst:.0e} from sdpa one by one, which takes {1e3 * seconds(one_by_one, 3):.1f} ms"
    yield Line(title, worst <= OFF, 1e3 * seconds(together, 5), "ms", note)


def flex(title: str) -> Lines:
    """FlexAttention as block diffusion uses it: graphs and first calls of four lengths of two rows, and its mask."""
    from torch._dynamo.utils import counters
    from transformers.integrations.flex_attention import WrappedFlexAttention

    one_graph()
    compiled, first, ms, made = WrappedFlexAttention(False)(), [], 0.0, 0.0
    for length in (4096, 5120, 6144, 8192):
        qkv = [torch.randn(2, 16, length, 128, device=device()).bfloat16().requires_grad_() for _ in range(3)]
        zeros = torch.zeros(2, length, dtype=torch.long, device=device())
        block, empty = zeros + torch.arange(length, device=device()) // 32, zeros[:, None, :0]
        states = States(zeros, zeros, block, zeros, zeros, empty, empty, empty, empty)
        mask: list[Any] = []
        made = seconds(lambda kept=mask, of=states: kept.append(block_mask(of)))  # type: ignore[misc]
        run = partial(lambda x, m: with_gradients(compiled(*x, block_mask=m), x), qkv, mask[0])
        first.append(seconds(run))
        ms = 1e3 * seconds(run, 3)
    graphs = counters["stats"]["unique_graphs"]
    note = (
        f"{graphs} graphs of 4 lengths, first calls {', '.join(f'{s:.1f}' for s in first)} s, mask {1e3 * made:.0f} ms"
    )
    yield Line(title, graphs == 1 and first[-1] < 5, ms, "ms", note)


# -- steps of flow models and language models ------------------------------------------------------------------------


def two_layers(*keys: str) -> list[str]:
    """Words of GRPO with two layers of Qwen2.5-7B's widths."""
    sizes = ("actor.ppo_mini_batch_size=4", "actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=4")
    return lm_words(f"{LARGE}/2", 4, *sizes, *keys)


def ready(words: list[str], steps: int = 1) -> Bench:
    args, cfg = step.parse([*words, "--warmup", "0", "--steps", str(steps)])
    return step.prepared(cfg, args)


def first_row(words: list[str]) -> dict[str, float]:
    """The metrics of a training step."""
    try:
        bench = ready(words)
        bench.fit()
    finally:
        torch.use_deterministic_algorithms(False)
    return bench.measures[0]


def ratio(title: str, row: Callable[[], dict[str, float]]) -> Lines:
    """The largest deviation of the first update's ratios from 1."""
    try:
        values = row()
    except ValueError as error:
        if "attn_backend" not in str(error):
            raise
        yield Line(title, None, note=f"refused: {first_line(error)}"[:90])
        return
    error, norm = values["actor/first_ratio_error"], values["actor/grad_norm"]
    yield Line(title, error <= LIMIT and 0 < norm < math.inf, error, "", f"gradient norm {norm:.4g}")


VARIANTS = {
    "as the recipe": "trainer.deterministic=false",
    "cuDNN": "model.attn_backend=_native_cudnn",
    "deterministic": "trainer.deterministic=true",
    "compiled": COMPILE,
}


def exact() -> Lines:
    """Whether log-probs of rollout and replay are equal, for prompts of different lengths."""
    for (config, model), (name, key) in product(((QWEN, "Qwen-Image"), (SD3, "SD3.5")), VARIANTS.items()):
        title = f"|ratio - 1|, {model}, {name}"
        if ON_CPU and name in ("cuDNN", "compiled"):
            yield Line(title, None, note=CUDA_ONLY if name == "cuDNN" else "on a CPU in the stage `compile`")
        else:
            yield from tried(title, partial(ratio, title, partial(first_row, flow_words(config, 4, key))))


def packed() -> Lines:
    """Ratios of a language model, and log-probs of packed samples with each attention, compared with padded ones."""
    for pack, deterministic in (("false", "false"), ("true", "false"), ("true", "true")):
        title = f"|ratio - 1|, Qwen2.5-7B's widths, {'packed' if pack == 'true' else 'padded'}"
        title += ", deterministic" if deterministic == "true" else ""
        words = two_layers(f"model.use_remove_padding={pack}", f"trainer.deterministic={deterministic}")
        yield from tried(title, partial(ratio, title, partial(first_row, words)))
    padded = log_probs("sdpa", False)
    for kind in ("sdpa", "flex_attention"):
        title = f"packed by {kind}, off from padded"
        if ON_CPU and kind != "sdpa":
            yield Line(title, None, note=CUDA_ONLY)
        else:
            yield from tried(title, partial(off_from, title, kind, padded))


def graphs() -> Lines:
    """Responses of a long tail of lengths, drawn in float32 by CUDA graphs of the decoding steps, and without."""
    title = "responses drawn alike by graphs"
    if ON_CPU:
        yield Line(title, None, note=CUDA_ONLY)
        return
    drawn, took = {}, {}
    for eager in (False, True):
        start = clock()
        drawn[eager] = sampling.session(12, "cuda", eager=eager)
        took[eager] = clock() - start
    same = sum(one == other for one, other in zip(drawn[False], drawn[True], strict=True)) / len(drawn[True])
    yield Line(title, same >= SAME, same, "", f"{took[False]:.1f} s, {took[True]:.1f} s without graphs")


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


def numerics() -> Lines:
    """The check of `phalanx numerics`: the kernels that draw samples beside those that train on them."""
    jobs = {"Qwen-Image": flow_words(QWEN, 4), "Qwen2.5-7B's widths": two_layers()}
    jobs["Qwen2.5-7B's widths in float32"] = two_layers("model.dtype=float32")
    for name, words in jobs.items():
        title = f"sampler off from trainer, {name}"
        yield from tried(title, partial(apart, title, words))


def apart(title: str, words: list[str]) -> Lines:
    """The sampler's largest deviation. Fails if the log-probs that the loss takes, which rescoring mends, are off."""
    _, cfg = step.parse(words)
    with lm_shapes.random_weights():
        row = measure(cfg, None)[0]
    sampler, old, clip = row["sampler"], row["old"], row["clip_range"]
    note = f"median {sampler['median']:.0e}, {100 * sampler['actions_clipped']:.2g} % beyond {clip:g}, "
    note += f"KL {sampler['k3']:.0e}; the loss's {old['largest']:.0e}"
    yield Line(title, old["largest"] <= EXACT * clip, sampler["largest"], "", note, {"numerics": row})


def fsdp() -> Lines:
    """FSDP2 over one rank with the real backend, compared with the same step without it; and resuming a checkpoint."""
    norm = first_row(flow_words(QWEN, 4))["actor/grad_norm"]
    layouts = {"gathered once a rollout": "parallel.rollout_unsharded=true"}
    layouts |= {name: f"parallel.{name}=true" for name in ("param_offload", "optimizer_offload")}
    # otherwise a single rank does not use FSDP, and offloading is rejected
    with patch.object(World, "shard_size", 2), patch.object(world, "check_launch", lambda *_: None):
        for name, key in layouts.items():
            yield from tried(f"FSDP2, {name}", partial(layout, name, key, norm))
        yield from tried("FSDP2, resumed", resumed)


def layout(name: str, key: str, norm: float) -> Lines:
    row = first_row(flow_words(QWEN, 4, key))
    yield from ratio(f"FSDP2, {name}, |ratio - 1|", lambda: row)
    away = row["actor/grad_norm"] / norm
    yield Line("  its gradient norm, of that without", abs(away - 1) < 0.01, away)


def resumed() -> Lines:
    """With both offloads, run two steps, then the second one again from the checkpoint written in its background."""
    keys = ("trainer.deterministic=true", "parallel.param_offload=true", "parallel.optimizer_offload=true")
    _, cfg = step.parse(flow_words(QWEN, 4, *keys))
    cfg.trainer.save_freq, cfg.trainer.total_training_steps = 1, 2
    weights = []
    try:
        for _ in range(2):
            trainer: Any = rl.build(cfg)
            trainer.fit()
            weights.append({n: local(p).detach().clone() for n, p in trainer.policy.trained.parameters.items()})
            # as if the run had been killed in its second step
            shutil.rmtree(Path(cfg.trainer.output_dir) / "checkpoints" / "step_000002")
            cfg.trainer.resume = "auto"
    finally:
        torch.use_deterministic_algorithms(False)
    differ = sum(not torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    yield Line("FSDP2, both offloads, resumed: other tensors", differ == 0, differ, "", f"of {len(weights[0])}")


def compiled() -> Lines:
    """Five steps with prompts of other lengths must not recompile."""
    from torch._dynamo.utils import counters

    with contextlib.ExitStack() as stack:
        if ON_CPU:  # only graphs and no kernels, which would take a C++ compiler minutes; there may be none
            stack.enter_context(patch.object(torch, "compile", partial(torch.compile, backend="eager")))
            stack.enter_context(patch.object(cpp_builder, "get_cpp_compiler", str))
        job = ready(flow_words(QWEN, 4, COMPILE), steps=5)
        graphs = [counters["stats"]["unique_graphs"]]
        job.after = lambda _: graphs.append(counters["stats"]["unique_graphs"])
        job.fit()
    s = [row["perf/step_s"] for row in job.measures]
    made, new = graphs[1] - graphs[0], graphs[-1] - graphs[1]
    yield Line("graphs of the first step", made > 0, made, "", f"{s[0]:.1f} s, later {s[-1]:.2f}")
    yield Line("  new ones in 4 steps of other lengths", new == 0, new)
    error = max(row["actor/first_ratio_error"] for row in job.measures)
    yield Line("  |ratio - 1| of all steps", error <= LIMIT, error)


def kill() -> Lines:
    """kill -9 the last rank of a job after its first step: seconds until the job has ended, and no rank is left."""
    ranks = 2 if ON_CPU else min(2, torch.cuda.device_count())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/bin", "/bin"])
    env = {**os.environ, "PATH": path, "NPROC_PER_NODE": str(ranks)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), env.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="phalanx-kill-") as name:
        words = ["tasks/train_grpo.py", "configs/grpo/quickstart.yaml", "data.val_files=[]", "trainer.test_freq=-1"]
        words += ["trainer.total_training_steps=100000", "trainer.save_freq=-1", f"trainer.output_dir={name}"]
        job = subprocess.Popen(["/bin/sh", "train.sh", *words], cwd=ROOT, env=env, start_new_session=True)
        try:
            files = [Path(name) / f"ranks/{rank}.json" for rank in range(ranks)]
            wait_for(job, *files, Path(name) / "metrics.jsonl")
            pids = [json.loads(file.read_text())["pid"] for file in files]
            os.kill(pids[-1], signal.SIGKILL)
            start = time.perf_counter()
            status = job.wait(END_S)
            took = time.perf_counter() - start
        finally:
            with contextlib.suppress(ProcessLookupError):  # the job and its ranks have ended
                os.killpg(job.pid, signal.SIGKILL)
    left = sum(Path(f"/proc/{pid}").exists() for pid in pids)
    note = f"status {status}, {left} ranks left"
    yield Line(f"{ranks} rank(s), one killed: the job ends", status != 0 and not left, took, "s", note)


def wait_for(job: subprocess.Popen[bytes], *files: Path) -> None:
    """Wait for the files of a job; raises TimeoutError if it ends before, or after START_S."""
    end = time.monotonic() + START_S
    while not all(file.is_file() for file in files):
        if job.poll() is not None or time.monotonic() > end:
            raise TimeoutError(f"no step within {START_S:.0f} s, status {job.returncode}")
        time.sleep(0.1)


STAGES = {
    "facts": Stage("right", facts, 8, 40),
    "tiny": Stage("right", tiny, 75, 150),
    "attention": Stage("right", attention, 15, 60),
    "packed": Stage("right", packed, 40, 80),
    "exact": Stage("right", exact, 75, 130),
    "numerics": Stage("right", numerics, 25, 60),
    "fsdp": Stage("right", fsdp, 50, 100),
    "compile": Stage("right", compiled, 60, 120),
    "graphs": Stage("right", graphs, 25, 60),
    "kill": Stage("right", kill, 20, 160),
}
