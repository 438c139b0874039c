"""Scores of tokens and their gradient: bytes and seconds, beside plain formulas that autograd differentiates.

    python benchmarks/token_scores.py [--vocabulary 151936] [--tokens 64] [--chunk 32] [--runs 5] [--fused]

`plain` computes log-probability, entropy and self-certainty by torch's operators in float32, in chunks that the
backward pass recomputes. Bytes are those that aten operators read and write, without products and as if there were no
cache. CPU seconds are medians of runs in turns, with the product by the head, at a width of 64. `--fused` adds the
kernels of torch.compile, whose bytes are Inductor's count for each buffer that a kernel reads or writes.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from count_kernels import Kernels
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.utils.checkpoint import checkpoint

from phalanx.functional.tokens import token_scores

WIDTH = 64


def plain(hidden: Tensor, head: Callable[[Tensor], Tensor], tokens: Tensor, chunk: int) -> Tensor:
    """Log-probabilities [N]; the other scores are computed too."""

    def scores(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = head(states).float() / 1.0
        total = z.logsumexp(-1)
        log_prob = z.gather(1, targets[:, None]).squeeze(1) - total
        return log_prob, total - (torch.softmax(z, -1) * z).sum(-1), total - z.mean(-1)

    parts = []
    for states, targets in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
        parts.append(checkpoint(scores, states, targets, use_reentrant=False)[0])
    return torch.cat(parts)


@contextmanager
def counted(sizes: list[int]) -> Iterator[None]:
    """Collect Inductor's count of bytes for each graph that is compiled."""
    compile_graph = GraphLowering.codegen

    def codegen(graph: GraphLowering) -> object:
        code = compile_graph(graph)
        sizes.append(int(graph.count_bytes()[0]))
        return code

    with mock.patch.object(GraphLowering, "codegen", codegen), torch._inductor.config.patch(force_disable_caches=True):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randn(args.vocabulary, WIDTH).bfloat16()
    hidden = torch.randn(args.tokens, WIDTH).bfloat16().requires_grad_()
    tokens = torch.randint(args.vocabulary, (args.tokens,))

    def head(states: Tensor) -> Tensor:
        return states @ weight.t()

    def ours(fused: bool) -> Tensor:
        return token_scores(hidden, head, tokens, temperature=1.0, chunk=args.chunk, fused=fused)[0]

    ways: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: plain(hidden, head, tokens, args.chunk),
        "token_scores": lambda: ours(False),
    }
    for name, way in ways.items():
        with Kernels() as kernels:
            way().sum().backward()
        print(f"{name:12} {kernels.elementwise_bytes / args.tokens / 1e6:5.1f} MB per trained token")
    if args.fused:
        sizes: list[int] = []
        with counted(sizes):
            ours(True).sum().backward()
        print(f"{'fused':12} {sum(sizes) / min(args.chunk, args.tokens) / 1e6:5.1f} MB per trained token")
        ways["fused"] = lambda: ours(True)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.runs):
        for name, way in ways.items():
            start = time.process_time()
            way().sum().backward()
            seconds[name].append(time.process_time() - start)
    for name, values in seconds.items():
        print(f"{name:12} {1e6 * statistics.median(values) / args.tokens:7.0f} CPU microseconds per trained token")


if __name__ == "__main__":
    main()
