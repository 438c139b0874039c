"""Costs of more ranks: the plan compared with one simulated rank of 1,024, and the start of real ranks, extrapolated.

    python benchmarks/scale.py
    python benchmarks/scale.py --real 4 8 16 --figure scale.svg
    python benchmarks/scale.py --simulated --real --checkpoints 32 1024

**Simulated**: one process acts as a rank of many, with torch's fake process groups. The job's own code creates the
mesh, shards the model and runs a training step. The bytes of its collectives, its memory and its process groups are
compared with the results of `--plan`. Data from other ranks is replaced by this rank's own.

**Real**: forked processes join a world over gloo and a TCPStore in a separate process, as under torchrun, alternating
between connections that are all made at the start and connections made at their first use. Counted are sockets, calls
of the store and CPU seconds, which many processes on few cores disturb less than wall-clock time. Numbers beyond the
largest world are fits, and are marked as such.

**Checkpoints**: what rank 0 does with the plans of all ranks, see benchmarks/scale_files.py.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks.scale_files import checkpoint_costs  # noqa: E402

from phalanx.config.flow import FlowRLConfig  # noqa: E402
from phalanx.config.parallel import ParallelConfig  # noqa: E402
from phalanx.distributed.collectives import agree, all_gather, all_gather_object  # noqa: E402
from phalanx.distributed.fsdp import local  # noqa: E402
from phalanx.run import world as world_module  # noqa: E402
from phalanx.run.rules import load_config  # noqa: E402
from phalanx.run.watchdog import Watch  # noqa: E402
from phalanx.run.world import start_world  # noqa: E402
from phalanx.tools.plan.batch import messages  # noqa: E402
from phalanx.tools.plan.blueprint import family_name  # noqa: E402
from phalanx.tools.plan.jobs import planned  # noqa: E402
from phalanx.tools.plan.layout import Cluster  # noqa: E402
from phalanx.tools.plan.memory import count  # noqa: E402
from tests.helpers.ranks import free_port, run_ranks  # noqa: E402

NODE = 8  # ranks per node
REPEATS, BEATS = 20, 200  # number of timed collectives and heartbeats
BEYOND = (64, 256, 1024)
LAZY = "TORCH_GLOO_LAZY_INIT"
TIMED = {"mesh_s": "make the mesh", "start_s": "build the job"}
KINDS = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce", "allreduce_": "sum"}

Messages = dict[tuple[str, int], float]


# -- a simulated rank ---------------------------------------------------------------------------------------------


class Mail(TorchDispatchMode):
    """Bytes that a rank of a ring receives, by collective and size of its group; small messages are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Messages = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in KINDS:
            leaves = tree_leaves((args, kwargs))
            size = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            (ranks,) = [dist.ProcessGroup.unbox(leaf).size() for leaf in leaves if is_group(leaf)]
            if size >= 1000 and ranks > 1:
                share = (2 if name == "allreduce_" else 1) * (ranks - 1) / ranks
                key = KINDS[name], ranks
                self.received[key] = self.received.get(key, 0) + share * size
        return func(*args, **(kwargs or {}))


def is_group(leaf: Any) -> bool:
    return isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in leaf._type().qualified_name()


def simulate(cfg: FlowRLConfig, cluster: Cluster, rank: int) -> dict[str, Any]:
    """Groups, memory and received bytes of rank `rank` of the cluster in a training step. Must run in a new process."""
    from phalanx.run.rl import build

    place = {"RANK": rank, "WORLD_SIZE": cluster.ranks, "LOCAL_RANK": rank % cluster.per_node}
    os.environ.update({name: str(value) for name, value in place.items()}, LOCAL_WORLD_SIZE=str(cluster.per_node))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cluster.ranks)
    make, real, calls = dist.distributed_c10d._new_process_group_helper, dist.new_group, []
    cut, cutting = world_module.init_device_mesh, 0.0

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return make(*args, **kwargs)

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal cutting
        start = time.process_time()
        found = cut(*args, **kwargs)
        cutting = time.process_time() - start
        return found

    def fake(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "fake"})

    with (
        patch.object(dist.distributed_c10d, "_new_process_group_helper", counted),
        patch.object(dist, "new_group", fake),
        patch.object(world_module, "init_device_mesh", timed),
        patch.object(dist, "broadcast_object_list", lambda *args, **kwargs: None),  # rank 0 says nothing
    ):
        start = time.process_time()
        job = build(cfg)
        built = time.process_time() - start
        with Mail() as mail:
            collector = job.collector
            with collector.rollout.awake():
                prompts = collector.prompts.batch(0)
                samples = collector.rollout.sample(prompts, seed=0, step=0, each=collector.rewards.submit)
            reward = all_gather(collector.rewards.score()[0])
            collector.sample, collector.reward = lambda *_: (samples, {}), lambda *_: (samples, reward, {})
            job.job.end_step = lambda *_: None
            job.fit()
    groups = {name: dist.get_process_group_ranks(job.world.mesh.get_group(name)) for name in ("replicate", "shard")}
    weights = [*job.policy.model.transformer.parameters(), *job.policy.trained.parameters.values()]
    moments = [value for state in job.job.state.optimizer.state().values() for value in state.values()]
    return {
        "shard": groups["shard"],
        "replicate": groups["replicate"],
        "groups": len(calls),
        "samples": len(samples.prompts),
        "messages": mail.received,
        "weights": nbytes(weights),
        "optimizer": nbytes(moments),
        "start_s": built,
        "mesh_s": cutting,
    }


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of tensors on this rank."""
    found = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def expect(cfg: FlowRLConfig, cluster: Cluster, rank: int) -> dict[str, Any]:
    """The same values from the plan, which creates no process group."""
    cfg.model.family = family_name(cfg.model)
    plan = planned(cfg, cluster)
    memory, width = count(plan), plan.policy.layout.width
    copies = cluster.ranks // width
    kinds = {
        "gradients, reduced to their parts": ("reduce", width),
        "gradients, summed over copies": ("sum", copies),
        "gradients of replicated weights": ("sum", cluster.ranks),
    }
    sizes: Messages = {}
    for item in messages(plan):
        key = kinds.get(item.what, ("gather", width))
        sizes[key] = sizes.get(key, 0) + item.size
    assert plan.plan is not None
    return {
        "shard": list(next(group for group in cluster.shard_groups(width) if rank in group)),
        "replicate": list(range(rank % width, cluster.ranks, width)),
        # those of both axes, where they are not the world itself, and that of the checkpoints
        "groups": (copies if copies > 1 else 0) + (width if width > 1 else 0) + 1,
        "samples": plan.plan.per_rank,
        "messages": sizes,
        "weights": memory.held.get("frozen weights", 0) + memory.held["trained weights"],
        "optimizer": memory.held["optimizer's state"],
    }


def job(folder: Path, ranks: int) -> FlowRLConfig:
    """Full fine-tuning of the quickstart's model over 8 ranks, with four images per rank and step."""
    (folder / "prompts.txt").write_text("1\n2\n")
    keys = ["model.gradient_checkpointing=true", f"parallel.fsdp_size={NODE}", "data.train_batch_size=2"]
    keys += [f"data.train_files=[{folder / 'prompts.txt'}]", "data.val_files=[]", f"rollout.n={2 * ranks}"]
    keys += ["actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2", "trainer.test_freq=-1"]
    keys += [f"model.path={ROOT / 'assets/digits/base'}", "reward.functions=[{name: jpeg_incompressibility}]"]
    keys += ["trainer.total_training_steps=1", "trainer.logger=[]", "trainer.save_freq=-1", "trainer.resume=never"]
    return load_config(
        FlowRLConfig, str(ROOT / "configs/flowgrpo/quickstart.yaml"), [*keys, f"trainer.output_dir={folder / 'out'}"]
    )


def compare(ranks: int) -> list[str]:
    """Rows of a table: the plan's values, and those of a rank in the middle of the world."""
    rank, cluster = ranks // 2 + 3, Cluster(ranks // NODE, NODE)
    with tempfile.TemporaryDirectory() as name:
        cfg = job(Path(name), ranks)
        (found,) = run_ranks(simulate, 1, cfg, cluster, rank, init=False)
        said = expect(cfg, cluster, rank)
    sizes = {"weights": "MB of weights", "optimizer": "MB of the optimizer's state"}
    rows = [("ranks", f"{ranks:,}", f"{ranks:,}")]
    rows += [(f"ranks of its {name} group", span(said[name]), span(found[name])) for name in ("shard", "replicate")]
    rows += [("groups that it hears of", str(said["groups"]), str(found["groups"]))]
    rows += [(what, f"{said[name] / 1e6:.3f}", f"{found[name] / 1e6:.3f}") for name, what in sizes.items()]
    for key in sorted(said["messages"].keys() | found["messages"].keys()):
        mine, theirs = (messages.get(key, 0) / 1e6 for messages in (said["messages"], found["messages"]))
        rows.append((f"MB a step by {key[0]} in groups of {key[1]}", f"{mine:.3f}", f"{theirs:.3f}"))
    rows += [(f"CPU seconds to {what}", "", f"{found[name]:.3f}") for name, what in TIMED.items()]
    return [f"| {' | '.join(row)} |" for row in rows]


def span(ranks: list[int]) -> str:
    return f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"


# -- a real world -------------------------------------------------------------------------------------------------


class Counted(dist.Store):
    """A store that counts its calls and the bytes that they transfer."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.calls, self.bytes = store, 0, 0

    def set(self, key: str, value: Any) -> None:
        self._add(len(value))
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self._add(len(value))
        return value

    def add(self, key: str, value: int) -> int:
        self._add(8)
        return self.store.add(key, value)

    def wait(self, *args: Any) -> None:
        self._add(0)
        self.store.wait(*args)

    def check(self, keys: list[str]) -> bool:
        self._add(0)
        return self.store.check(keys)

    def set_timeout(self, timeout: Any) -> None:
        self.store.set_timeout(timeout)

    def _add(self, size: int) -> None:
        self.calls += 1
        self.bytes += size


def sockets() -> int:
    """The number of open sockets of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def member(port: int, ranks: int, lazy: bool) -> dict[str, float]:
    """A process of a world of `ranks`; the last one runs the store."""
    if int(os.environ["RANK"]) == ranks:
        return serve(port, ranks)
    node = min(NODE, ranks // 2)
    os.environ.update({LAZY: str(int(lazy)), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(node)})
    rank, before, start = int(os.environ["RANK"]), sockets(), time.process_time()
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = Counted(client)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = start_world(ParallelConfig(fsdp_size=node))
    dist.barrier()
    found: dict[str, float] = {"start_cpu_s": time.process_time() - start}
    for group in (dist.group.WORLD, *world.mesh.get_all_groups(), world.checkpoint_group):
        dist.all_reduce(torch.ones(1000), group=group)
    found |= {"sockets": sockets() - before, "store_calls": store.calls, "store_bytes": store.bytes}
    dist.gather_object(None, [None] * ranks if rank == 0 else None, dst=0)
    found["sockets_of_validation"] = sockets() - before
    found["agree_cpu_ms"] = cpu_ms(lambda: agree(None, 0))
    found["gather_objects_cpu_ms"] = cpu_ms(lambda: all_gather_object((None, 0)))
    client.add("done", 1)
    dist.destroy_process_group()
    return found


def serve(port: int, ranks: int) -> dict[str, float]:
    """Run the store until all ranks are done."""
    before, start = sockets(), time.process_time()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    most = 0
    while store.add("done", 0) < ranks:
        most = max(most, sockets() - before)
        time.sleep(0.1)
    return {"server_cpu_s": time.process_time() - start, "server_sockets": most}


def cpu_ms(act: Callable[[], object]) -> float:
    """The mean CPU time of a collective call on this rank, in ms, over all of its threads."""
    start = time.process_time()
    for _ in range(REPEATS):
        act()
    return 1000 * (time.process_time() - start) / REPEATS


def beat(port: int, ranks: int) -> dict[str, float]:
    """The heartbeats of one rank of `ranks`, without the others; on rank 1, the store that it talks to."""
    if os.environ["RANK"] == "1":
        return serve(port, 1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    keys = [f"beat/{rank}" for rank in range(ranks)]
    for key in keys:
        store.set(key, "0")
    for _ in range(BEATS):
        store.set("beat/0", "1")
        store.multi_get(keys)
        store.check(["error"])
        store.add("stacks", 0)
    store.add("done", 1)
    return {}


def watched(ranks: int) -> float:
    """The share of a core that the store needs for the heartbeats of `ranks` ranks."""
    served = run_ranks(beat, 2, free_port(), ranks, init=False)[1]["server_cpu_s"]
    return served / BEATS * ranks / Watch(0, ["host"] * ranks, range(1), ParallelConfig().heartbeat_timeout_s).interval


def world_of(ranks: int, lazy: bool, runs: int) -> dict[str, float]:
    """Medians over ranks and runs, and the values of rank 0 and of the store's process."""
    found = [run_ranks(member, ranks + 1, free_port(), ranks, lazy, init=False, timeout=150) for _ in range(runs)]
    out = {name: statistics.median(r[name] for run in found for r in run[1:-1]) for name in found[0][1]}
    out["sockets_of_rank_0"] = statistics.median(run[0]["sockets_of_validation"] for run in found)
    return out | {name: statistics.median(run[-1][name] for run in found) for name in found[0][-1]}


# the terms of each number's growth, with connections at the start and at first use
FITS: dict[str, tuple[str, str]] = {
    "sockets": ("n", "log n"),
    "sockets_of_rank_0": ("n", "n, log n"),
    "store_calls": ("n", "log n"),
    "store_bytes": ("n, n^2", "log n"),
    "start_cpu_s": ("n", "n"),
    "server_sockets": ("n", "n"),
    "server_cpu_s": ("n, n^2", "n, n log n"),
    "agree_cpu_ms": ("log n", "log n"),
    "gather_objects_cpu_ms": ("n", "n"),
}
TERMS: dict[str, Callable[[Any], Any]] = {
    "n": lambda n: n,
    "n^2": lambda n: n**2,
    "log n": np.log2,
    "n log n": lambda n: n * np.log2(n),
}


def fit(sizes: Sequence[int], values: Sequence[float], terms: str) -> Callable[[int], float]:
    """The least-squares fit of the terms and a constant."""

    def design(n: Any) -> Any:
        return np.stack([np.ones_like(n), *(TERMS[term](n) for term in terms.split(", "))], axis=-1)

    weights, *_ = np.linalg.lstsq(design(np.array(sizes, float)), np.array(values), rcond=None)
    return lambda n: float(design(np.array(float(n))) @ weights)


# -- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=[64, 1024], help="sizes of simulated worlds (64 1024)"
    )
    parser.add_argument("--real", type=int, nargs="*", default=[4, 8, 16, 32], help="sizes of real worlds (4 8 16 32)")
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[], help="ranks of simulated checkpoints (none)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each real world; figures are medians (3)")
    parser.add_argument("--figure", type=Path, help="draw the real worlds and their fits (needs matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for ranks in args.simulated:
        print("| | planned | simulated |\n|---|---|---|", *compare(ranks), sep="\n", end="\n\n", flush=True)
    if args.checkpoints:
        print("CPU seconds of rank 0 for a checkpoint", *checkpoint_costs(args.checkpoints, args.runs), sep="\n")
    if not args.real:
        return
    print(f"imports of a rank: {imports():.1f} CPU seconds")
    print(f"open files of a process: {resource.getrlimit(resource.RLIMIT_NOFILE)}\n")
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for ranks in args.real:
        for lazy in found:
            found[lazy].append(world_of(ranks, lazy, args.runs))
            print(json.dumps({"ranks": ranks, "lazy": lazy, **found[lazy][-1]}), flush=True)
    curves = {
        (name, lazy): fit(args.real, [row[name] for row in found[lazy]], terms[lazy])
        for name, terms in FITS.items()
        for lazy in found
    }
    beyond = [n for n in BEYOND if n > max(args.real)]
    columns = [*(f"{n:,}" for n in args.real), *(f"{n:,} (fit)" for n in beyond)]
    print(f"\n| connections | | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for name in FITS:
        for lazy, rows in found.items():
            cells = [*(row[name] for row in rows), *(curves[name, lazy](n) for n in beyond)]
            print(f"| {'at first use' if lazy else 'at once'} | {name} | {' | '.join(map(figure, cells))} |")
    shares = ", ".join(f"{100 * watched(n):.1f} % of a core for {n:,} ranks" for n in BEYOND)
    print(f"\nsigns of life in the store: {shares}")
    if args.figure is not None:
        draw(args.figure, args.real, found, curves)


def imports() -> float:
    """CPU seconds of a rank's imports, the median of three processes."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import phalanx.run.rl, phalanx.run.flow_kind"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(seconds)


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(
    file: Path,
    sizes: Sequence[int],
    found: dict[bool, list[dict[str, float]]],
    curves: dict[tuple[str, bool], Callable[[int], float]],
) -> None:
    """Plot the measured points and the fits, up to the largest world."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"
    titles = {
        "sockets": "Sockets of a rank",
        "store_bytes": "Bytes of a rank in the store",
        "server_cpu_s": "CPU seconds of the store, all ranks",
    }
    shown, axes = pyplot.subplots(1, len(titles), figsize=(11, 3.2), layout="constrained")
    line = [int(n) for n in np.geomspace(min(sizes), max(BEYOND), 60)]
    for plot, (name, title) in zip(axes, titles.items(), strict=True):
        for lazy, color in ((False, "#ef6c00"), (True, "#3f51b5")):
            label = "at first use" if lazy else "all at once"
            plot.plot(line, [curves[name, lazy](n) for n in line], "--", color=color, linewidth=1)
            plot.plot(sizes, [row[name] for row in found[lazy]], "o", color=color, markersize=4, label=label)
        plot.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        plot.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
    axes[0].axhline(1024, color="#9e9e9e", linewidth=1)
    axes[0].annotate("ulimit -n 1024", (4, 1100), color="#616161", fontsize=8)
    axes[0].legend(title="connections", fontsize=8)
    shown.savefig(file)


if __name__ == "__main__":
    main()
