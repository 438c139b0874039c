"""What a rank reads of the weights and holds of its own while a full fine-tuning lays them out over its ranks.

    python benchmarks/loading.py
    python benchmarks/loading.py --ranks 2 4 --runs 3 --hidden 2048 --layers 8

A random model in bfloat16 is written to a folder, and trained weights are kept in float32. In turns, ranks on this
machine load it whole, cast it and keep their part (`whole`), or leave it in the mapped files, of which each reads and
casts its part (`parts`). Read are pages of the files that a rank has mapped (RssFile; the kernel maps up to 2 MB at a
time), its own are pages that no other has (RssAnon), both at their peak, by the kernel's count every 2 ms, beyond what
there was before. The last line is JSON.
"""

import argparse
import json
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

from phalanx.config.lm import LMModelConfig  # noqa: E402
from phalanx.config.run import ParallelConfig  # noqa: E402
from phalanx.distributed import mesh  # noqa: E402
from phalanx.models.lm.model import load_model  # noqa: E402
from phalanx.models.trained import TrainedModel  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

WAYS = ("whole", "parts")
READ, OWN = "RssFile", "RssAnon"


def main() -> None:
    """Measure, and print a table."""
    from measure import origin  # found where this is run, and not where a test imports it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="worlds, each one shard group")
    parser.add_argument("--runs", type=int, default=3, help="of each, in turns (3)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the model (2048)")
    parser.add_argument("--layers", type=int, default=3, help="layers of the model (3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-loading-") as name:
        folder = Path(name)
        size = run_ranks(write, 1, folder, args.hidden, args.layers, timeout=600, init=False)[0]
        found: dict[tuple[int, str], list[tuple[float, float]]] = {(n, way): [] for n in args.ranks for way in WAYS}
        for _ in range(args.runs):
            for ranks, way in found:
                peaks = run_ranks(lay_out, ranks, str(folder), ranks, way == "parts", timeout=600)
                found[ranks, way].append((max(read for read, _ in peaks), max(own for _, own in peaks)))
    rows = [{"ranks": n, "way": way, "read_mb": middle(f, 0), "own_mb": middle(f, 1)} for (n, way), f in found.items()]
    print(f"A model of {size:.0f} MB in bfloat16: the most that a rank reads, and has of its own, MB")
    for row in rows:
        print(f"  {row['ranks']} ranks  {row['way']:5}  read {row['read_mb']:7.1f}  own {row['own_mb']:7.1f}")
    print(json.dumps({"model_mb": round(size, 1), "runs": args.runs, "rows": rows} | origin(torch.device("cpu"))))


def write(folder: Path, hidden: int, layers: int) -> float:
    """Write a random model; its MB."""
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


def lay_out(folder: str, ranks: int, parts: bool) -> tuple[float, float]:
    """Load a model for a full fine-tuning; MB of its file that this rank read, and had of its own."""
    config, parallel = LMModelConfig(path=folder), ParallelConfig(fsdp_size=ranks)
    world = mesh.start(parallel)
    with peaks() as most:
        model = load_model(config, torch.float32, chunk=1024, stored=parts)
        TrainedModel(model, model.blocks(), world, config, parallel, torch.bfloat16, seed=0, kept=torch.float32)
    return most[READ], most[OWN]


@contextmanager
def peaks() -> Iterator[dict[str, float]]:
    """The most MB of each kind beyond what there is now, when the block has ended."""
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
    """MB of this process, by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: int(fields[kind].split()[0]) * 1024 / 1e6 for kind in (READ, OWN)}


def middle(found: list[tuple[float, float]], column: int) -> float:
    """The median of runs."""
    return round(statistics.median(row[column] for row in found), 1)


if __name__ == "__main__":
    main()
