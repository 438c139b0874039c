"""Checks of `make gpu-smoke` on kernels, copies and memory, without a Trainer."""

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from smoke_lines import CUDA_ONLY, Line, clock, device, free, judged, nothing, said, seconds, tried
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from phalanx.engines.sleeping import Sleeping

BACKENDS: dict[str, list[SDPBackend] | None] = {
    "torch's choice": None,
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}
CPU_HAS = ("torch's choice", "flash", "math")
WITHIN = 0.03  # accepted error relative to the largest value, in bfloat16


def attention() -> Iterator[Line]:
    """Each backend forward and backward, with and without a mask, at a length of the recipe and at three odd ones."""
    _exact(*_inputs(1, 2, 16, 8, False))  # warm up, so that the first line does not include CUDA's initialization
    for name in BACKENDS:
        for masked in (False, True):
            yield from tried(name, partial(_backend, name, masked))


def _backend(name: str, masked: bool) -> Iterator[Line]:
    title = f"attention by {name}, {'mask' if masked else 'no mask'}"
    cuda = device().type == "cuda"
    if not cuda and name not in CPU_HAS:
        yield nothing(title, CUDA_ONLY)
        return
    rows, heads, size = (16, 24, 128) if cuda else (2, 2, 16)
    # 1024 tokens of an image of 512 x 512 pixels, and texts of several lengths
    even, odd = (1088, (1061, 1067, 1083)) if cuda else (40, (37, 39, 41))
    made = {length: _inputs(rows, heads, size, length, masked) for length in (even, *odd)}

    def run(length: int) -> tuple[Tensor, ...]:
        return _attend(BACKENDS[name], *made[length])

    try:
        first = seconds(lambda: run(even))
    except RuntimeError as error:
        if BACKENDS[name] is None:
            raise
        yield nothing(title, f"refused: {said(error)}")
        return
    later = seconds(lambda: run(even), 3)
    firsts = [seconds(partial(run, length)) for length in odd]
    again = [seconds(partial(run, length)) for length in odd]
    worst = max(_error(run(length), _exact(*made[length])) for length in odd)
    yield judged(title, worst <= WITHIN, 1e3 * later, "ms", f"first call {first:.2f} s, off by {worst:.0e}")
    # the extra cost of a batch with a length that was not seen before
    extra = max(sum(firsts) - sum(again), 0.0)
    yield judged(
        f"  {len(odd)} new odd lengths", extra < 5, extra, "s", f"then {1e3 * sum(again) / len(odd):.2f} ms each"
    )


def _inputs(rows: int, heads: int, size: int, length: int, masked: bool) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys and values, the same in each row, and a mask that hides an eighth of the keys, or None."""
    generator = torch.Generator(device()).manual_seed(length)
    one = torch.randn(3, 1, heads, length, size, generator=generator, device=device()).bfloat16()
    keep = torch.arange(length, device=device()) < length - length // 8
    mask = keep.view(1, 1, 1, -1).expand(rows, 1, 1, -1) if masked else None
    return [x.expand(rows, -1, -1, -1).clone().requires_grad_() for x in one], mask


def _attend(backends: list[SDPBackend] | None, qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    """The output, and the gradients of its sum of squares."""
    with nullcontext() if backends is None else sdpa_kernel(backends):
        out = scaled_dot_product_attention(*qkv, attn_mask=mask)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)


def _exact(qkv: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
    """As `_attend`, in float32, for the first row."""
    first = [x[:1].detach().float().requires_grad_() for x in qkv]
    return _attend([SDPBackend.MATH], first, None if mask is None else mask[:1])


def _error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest difference in the first row, relative to the largest value."""
    return max(float((a[:1] - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))


def transfers() -> Iterator[Line]:
    """The speed of copies between host and device, and the time of moving a text encoder there and back."""
    if device().type == "cpu":
        for title in ("host to device", "device to host", "text encoder there and back"):
            yield nothing(title, CUDA_ONLY)
        return
    yield from tried("copies", _copies)
    yield from tried("text encoder there and back", _encoder)


def _copies() -> Iterator[Line]:
    size = 2**30
    there = torch.empty(size, dtype=torch.uint8, device=device())
    for pinned in (True, False):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        for title, to, source in (("host to device", there, here), ("device to host", here, there)):
            to.copy_(source)
            rate = size / 1e9 / seconds(partial(to.copy_, source, non_blocking=pinned), 3)
            yield judged(f"{title}, {kind}", rate > 1, rate, "GB/s")


def _encoder() -> Iterator[Line]:
    """Move a text encoder with nn.Module.to, as the policy does, and with Sleeping."""
    linears = [nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(32)]
    model = nn.Sequential(*linears).requires_grad_(False)
    size = sum(p.nbytes for p in model.parameters()) / 1e9
    there = seconds(lambda: model.to(device()))
    back = seconds(lambda: model.to("cpu"))
    yield judged("text encoder there", there < 60, there, "s", f"{size:.1f} GB, pageable; Qwen2.5-VL's has 16.6 GB")
    yield judged("text encoder back", back < 60, back, "s", f"{size / back:.1f} GB/s")
    sleeping = Sleeping(model, device())

    def visit() -> None:
        with sleeping.awake():
            pass

    took = seconds(visit)
    yield judged("the same from pinned memory, never back", took < 60, took, "s", f"{size / took:.1f} GB/s")


def sleeping_judge() -> Iterator[Line]:
    """Check a reward model that is on the device only while it answers."""
    cuda = device().type == "cuda"
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    if cuda:
        sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "vocab_size": 4096}
    config = Qwen2Config(**sizes, num_key_value_heads=2, num_hidden_layers=2)
    model = Qwen2ForCausalLM(config).bfloat16().requires_grad_(False).eval()
    size = sum(p.nbytes for p in model.parameters())
    judge, ids = Sleeping(model, device()), torch.arange(12, device=device())[None]
    before = torch.cuda.memory_allocated() if cuda else 0
    answers, took, within = [], [], 0
    for _ in range(2):
        start = clock()
        with judge.awake(), torch.no_grad():
            answers.append(model(ids).logits.clone())
            within = torch.cuda.memory_allocated() if cuda else 0
        took.append(clock() - start)
    same = torch.equal(*answers)
    yield judged("judge that slept answers as before", same, took[-1], "s", f"{size / 1e9:.2f} GB woken and asked")
    if not cuda:
        yield nothing("its memory on the device", CUDA_ONLY)
        return
    del answers
    free()
    after = torch.cuda.memory_allocated()
    note = f"{before / 1e9:.2f} GB before, {within / 1e9:.2f} awake, {after / 1e9:.2f} asleep"
    yield judged("its memory on the device", within - before >= size and after - before < size / 100, note=note)


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None
