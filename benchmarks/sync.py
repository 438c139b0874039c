"""Cost of sending the actor's weights to ranks with other roles, against the size of the trained weights.

    python benchmarks/sync.py
    python benchmarks/sync.py --receivers 1 2 --rounds 9

Ranks are forked processes over gloo. A sync runs the job's own code: whole tensors in buckets, a checksum of each, and
a copy into the receiver's tensors. Syncs alternate with plain broadcasts of the same bytes in buckets of the same size
("the wire"). Tensors have the shapes of the named models. For models that are too large to be measured here, and for
GPUs, the table has the planned time: bytes over the network bandwidth of a node (NETWORK of phalanx.tools.plan.text).
The table goes to docs/performance.md.
"""

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import QwenImageTransformer2DModel
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from learning import insert  # noqa: E402

from phalanx.config.parallel import ParallelConfig  # noqa: E402
from phalanx.run import link as links  # noqa: E402
from phalanx.run.world import start_world  # noqa: E402
from phalanx.tools.plan.text import NETWORK  # noqa: E402
from tests.helpers.ranks import free_port, run_ranks  # noqa: E402

Shapes = dict[str, tuple[torch.Size, torch.dtype]]
LARGEST = 4e9  # bytes; larger models are not measured
LORA_RANK = 64
# from their config.json: hidden size, layers, heads, key-value heads, width of the MLP, tied embeddings
QWEN2 = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2], help="numbers of ranks that sample (1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="syncs of each size, alternating with broadcasts (5)")
    parser.add_argument("--no-docs", action="store_true", help="print the table, write nothing below docs/")
    args = parser.parse_args()
    head = [f"{n} receiver{'s' * (n > 1)}, s (GB/s; of the wire)" for n in args.receivers]
    lines = [
        f"| trained | tensors | GB | {' | '.join(head)} | planned at {NETWORK / 1e9:.0f} GB/s, s |",
        "|---" * (4 + len(head)) + "|",
    ]
    for name, shapes in sizes():
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in shapes.values())
        cells = [measured(shapes, size, n, args.rounds) if size <= LARGEST else "-" for n in args.receivers]
        lines.append(f"| {name} | {len(shapes)} | {size / 1e9:.3g} | {' | '.join(cells)} | {size / NETWORK:.2g} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if not args.no_docs:
        insert(ROOT / "docs" / "performance.md", "sync", lines)


def sizes() -> Iterator[tuple[str, Shapes]]:
    """Trained weights by name: whole models in float32, and LoRAs in float32 on all linear layers of the blocks."""
    models = {name: qwen2(*sizes) for name, sizes in QWEN2.items()}
    with init_empty_weights():
        image = QwenImageTransformer2DModel()
    for name in ("Qwen2.5-0.5B", "Qwen2.5-7B"):
        yield f"LoRA r{LORA_RANK} of {name}", lora(models[name])
    yield f"LoRA r{LORA_RANK} of Qwen-Image", lora(image)
    for name, model in models.items():
        yield f"{name}, whole", {n: (p.shape, torch.float32) for n, p in model.named_parameters()}


def qwen2(hidden: int, layers: int, heads: int, kv_heads: int, width: int, tied: bool) -> nn.Module:
    config = Qwen2Config(
        vocab_size=151936 if hidden < 3584 else 152064,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        tie_word_embeddings=tied,
    )
    with init_empty_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def lora(model: nn.Module) -> Shapes:
    shapes: Shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.search("layers|blocks", name):
            shapes[f"{name}.A"] = torch.Size([LORA_RANK, module.in_features]), torch.float32
            shapes[f"{name}.B"] = torch.Size([module.out_features, LORA_RANK]), torch.float32
    return shapes


def measured(shapes: Shapes, size: int, receivers: int, rounds: int) -> str:
    """Seconds of a sync, its bandwidth, and its fraction of the plain broadcast's bandwidth."""
    times_of_actor = run_ranks(rank, receivers + 1, shapes, rounds, free_port(), init=False, timeout=1200)[receivers]
    sync, wire = (statistics.median(times) for times in times_of_actor)
    return f"{sync:.3g} ({size / sync / 1e9:.2f}; {wire / sync:.2f})"


def rank(shapes: Shapes, rounds: int, port: int) -> tuple[list[float], list[float]]:
    """Seconds of each sync and of each broadcast of the same bytes, on this rank; the last rank is the actor."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    last = int(os.environ["WORLD_SIZE"]) - 1
    world = start_world(ParallelConfig(), {"rollout": f"0-{last - 1}", "actor": str(last)})
    link = world.link
    assert link is not None
    link.meet()
    link.compare(shapes)
    weights = {name: torch.rand(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    sizes = [size // 4 for _, size in links._buckets(shapes)]
    kept = torch.rand(2, max(sizes))

    def sync() -> None:
        if world.lead:
            link.send_weights(iter(weights.items()), shapes)
        else:
            for name, value in link.receive_weights(shapes):
                weights[name].copy_(value)

    def wire() -> None:
        for number, size in enumerate(sizes):
            links._broadcast(link._weights, kept[number % 2, :size], 0).wait()

    times = [[timed(link, work) for work in (sync, wire)] for _ in range(rounds)]
    link.meet()
    world.watch.close()
    return [both[0] for both in times], [both[1] for both in times]


def timed(link: links.Link, work: Callable[[], None]) -> float:
    """Seconds until all ranks have finished `work`."""
    link.meet()
    start = time.perf_counter()
    work()
    link.meet()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
