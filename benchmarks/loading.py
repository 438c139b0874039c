"""Memory that a rank reads from weight files and allocates while a full fine-tuning shards a model over its ranks.

    python benchmarks/loading.py
    python benchmarks/loading.py --ranks 2 4 --runs 3 --hidden 2048 --layers 8

A random model in bfloat16 is written to a folder; trained weights are kept in float32. The two ways alternate: ranks on
this machine load the model whole, cast it and keep their shard (`whole`), or leave it in memory-mapped files, from
which each rank reads and casts only its shard (`parts`). "Read" are resident pages of mapped files (RssFile; the kernel
maps up to 2 MB at a time), "own" are the rank's anonymous pages (RssAnon). Both are peaks of the kernel's counts,
sampled every 2 ms, minus the counts before loading. "Disk" is what all ranks together fetch from the disk
(/proc/self/io), after the file was removed from the page cache; it needs a folder on a disk (TMPDIR). The last line is
JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from phalanx.config.parallel import ParallelConfig  # noqa: E402
from phalanx.config.trained_model import LMModelConfig  # noqa: E402
from phalanx.models.lm.load_folder import load_model  # noqa: E402
from phalanx.models.trained import TrainedModel  # noqa: E402
from phalanx.run.world import start_world  # noqa: E402
from tests.helpers.ranks import run_ranks  # noqa: E402

WAYS = ("whole", "parts")
READ, OWN = "RssFile", "RssAnon"


def main() -> None:
    """Measure, and print a table."""
    from measure import origin  # importable when this script is run, but not when a test imports it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, which form one shard group"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each, alternating (3)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the model (2048)")
    parser.add_argument("--layers", type=int, default=3, help="layers of the model (3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-loading-") as name:
        folder = Path(name)
        size = run_ranks(write, 1, folder, args.hidden, args.layers, timeout=600, init=False)[0]
        found: dict[tuple[int, str], list[tuple[float, ...]]] = {(n, way): [] for n in args.ranks for way in WAYS}
        for _ in range(args.runs):
            for ranks, way in found:
                evict(folder / "model.safetensors")
                peaks = run_ranks(lay_out, ranks, str(folder), ranks, way == "parts", timeout=600)
                read, own, disk = zip(*peaks, strict=True)
                found[ranks, way].append((max(read), max(own), sum(disk)))
    names = ("read_mb", "own_mb", "disk_mb")
    rows = [
        {"ranks": n, "way": way} | {name: middle(values, i) for i, name in enumerate(names)}
        for (n, way), values in found.items()
    ]
    print(f"A model of {size:.0f} MB in bfloat16: the most that a rank reads, and has of its own, and of the disk, MB")
    for row in rows:
        print(f"  {row['ranks']} ranks  {row['way']:5}", *(f"{name[:-3]} {row[name]:7.1f}" for name in names), sep="  ")
    print(json.dumps({"model_mb": round(size, 1), "runs": args.runs, "rows": rows} | origin(torch.device("cpu"))))


def write(folder: Path, hidden: int, layers: int) -> float:
    """Write a random model; returns its size in MB."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size / 1e6


def evict(file: Path) -> None:
    """Remove a file from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_disk() -> float:
    """MB that this process has fetched from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"]) / 1e6


def lay_out(folder: str, ranks: int, parts: bool) -> tuple[float, float, float]:
    """Load a model for a full fine-tuning; returns the MB that this rank read from files, those it allocated, and those
    that it fetched from the disk.
    """
    config, parallel = LMModelConfig(path=folder), ParallelConfig(fsdp_size=ranks)
    world = start_world(parallel)
    before = from_disk()
    with peaks() as most:
        model = load_model(config, torch.float32, chunk=1024, stored=parts)
        TrainedModel(model, model.blocks(), world, config, parallel, torch.bfloat16, seed=0, kept=torch.float32)
    return most[READ], most[OWN], from_disk() - before


@contextmanager
def peaks() -> Iterator[dict[str, float]]:
    """Peak MB of each kind during the block, minus those at its start; valid once the block has ended."""
    before, done = counted(), threading.Event()
    most = dict(before)

    def watch() -> None:
        while not done.wait(0.002):
            for kind, size in counted().items():
                most[kind] = max(most[kind], size)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
        most.update({kind: size - before[kind] for kind, size in most.items()})


def counted() -> dict[str, float]:
    """Resident MB of this process, by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: int(fields[kind].split()[0]) * 1024 / 1e6 for kind in (READ, OWN)}


def middle(found: list[tuple[float, ...]], column: int) -> float:
    """The median over the runs."""
    return round(statistics.median(row[column] for row in found), 1)


if __name__ == "__main__":
    main()
