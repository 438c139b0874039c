"""Random losses of ranks in jobs that go on in place, and whether each row is as if nothing had been lost.

    python -m benchmarks.kills [--kinds text,flow] [--layouts 1x2,2x2,4x2] [--kills 6] [--seed 0] [--leaks 0]
        [--sharded] [--spares 1]

A layout is the ranks of a node x nodes. Each job loses ranks at random moments of sampling, scoring, updates, saving
and validation, and while the others form the world anew: by SIGKILL, by SIGSTOP or, where this machine allows network
namespaces, by a wire that is cut. A lost node comes back at once, or later than the others wait for it. All rows are
compared with those of the same job without losses: they are equal bit for bit until the job runs on fewer ranks. With
`--sharded` all ranks share one copy of the weights, and nodes have copies of each other's part (trainer.peer_copy).
With `--spares` the place of a lost node is taken by another one.

The ranks are copies of this process, which has imported the libraries, so a start costs less than a second; the small
launcher here restarts a node's ranks as torchrun does. Each of `--leaks` recoveries of one process is followed by a
count of its threads, by name, files and memory. The last line is JSON.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.exit import MARKS
from phalanx.run import rl  # noqa: F401  # what each rank would import
from phalanx.run.disaggregated import workers  # noqa: F401
from phalanx.run.rules import load_config
from tests.faults import task
from tests.faults.conftest import ADDRESSES, Hosts, no_namespaces
from tests.faults.jobs import kill, rows, steps
from tests.helpers import lm
from tests.helpers.jobs import base_overrides
from tests.helpers.ranks import before_forks, end_with_parent, free_port, rank_environment
from tests.helpers.tiny import tiny_sd3
from tests.helpers.tiny_vision import shown_prompts, tiny_vision
from tests.pretended.jobs import without_faults

LIMIT_S = 90.0  # from a loss to the next step
SLOW_S = 25.0
LATE_S = 9.0  # a node that comes back later than the others wait for it
CUT_S = 10.0
PAUSE_S = 0.06  # at the start of each phase
HEARTBEAT_S = 6.0
# differences of nearly equal numbers, and a time
LOOSE = ("actor/ratio_std", "actor/approx_kl", "tools/seconds_mean")
PHASES = (*task.PHASES, "forming")
WORDS = (
    "trainer.save_freq=2",
    "trainer.test_freq=3",
    f"parallel.heartbeat_timeout_s={HEARTBEAT_S:.0f}",
    "parallel.timeout_s=60",
    "rollout.micro_batch_size_per_gpu=2",
    "actor.ppo_micro_batch_size_per_gpu=1",
)
PARTIAL = ("rollout.partial_rollout.tokens=4", "rollout.max_staleness=2", "rollout.correction=token_tis")
LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
TALK = '''
import random, time


class Talk:
    """Answers with another length each time, and sometimes ends the conversation."""

    def reset(self, seed, sample_seed, prompt):
        self.number, self.random = seed % 1000, random.Random(sample_seed)
        return f" Number {self.number}."

    def step(self, message: str):
        time.sleep(0.01)
        reward = (len(message) * 7 + self.number) % 5 / 8
        return "and " * self.random.randrange(6) + "more", reward, self.random.random() < 0.2
'''


@dataclass
class Kind:
    """A kind of job: its tiny model, and its settings with files in a folder."""

    schema: type[Any]
    make: Callable[[Path], Path]
    settings: Callable[[Path, Path], list[str]]


def _text(model: Path, folder: Path) -> list[str]:
    held_out = folder / "held_out.jsonl"
    words = lm.lm_overrides(model, folder)
    held_out.write_text('{"prompt": "Ann has 11 books."}\n{"prompt": "Ann has 12 books."}\n')
    return [*words, "trainer.undo_steps=true", f"data.val_files=[{held_out}]", "data.max_response_length=24"]


def _tools(model: Path, folder: Path) -> list[str]:
    words = _text(model, folder)
    (folder / "envs.py").write_text(TALK)
    words += [f"environment.path={folder}/envs.py:Talk", "environment.max_turns=3", "environment.join=4"]
    return [*words, "data.max_response_length=64", "reward.functions=[{name: environment}]"]


def _vision(model: Path, folder: Path) -> list[str]:
    words = _text(model, folder)
    shown_prompts(folder, "prompts.jsonl")
    return [*words, "data.max_prompt_length=100", f"data.val_files=[{folder}/prompts.jsonl]"]


def _sweep(model: Path, folder: Path) -> list[str]:
    return [*_text(model, folder), "model.lora_rank=4", "sweep={optim.lr: [1e-3, 5e-4]}"]


def _partial(model: Path, folder: Path) -> list[str]:
    return [*_text(model, folder), *PARTIAL]


def _talks(model: Path, folder: Path) -> list[str]:
    """Conversations that go on in the next steps."""
    return [*_tools(model, folder), *PARTIAL]


def _ahead(model: Path, folder: Path) -> list[str]:
    return [*_text(model, folder), "rollout.schedule=one_step_off"]


def _flow(model: Path, folder: Path) -> list[str]:
    words = base_overrides(model, folder)
    (folder / "prompts.txt").write_text('a sign that says "alpha"\n"beta"\n"gamma" in red\n"delta"\n')
    (folder / "held_out.txt").write_text('the word "eta"\n"theta" in red\n')
    return [*words, "model.lora_rank=4", "actor.ema.decay=0.9", f"data.val_files=[{folder}/held_out.txt]"]


def _talker(folder: Path) -> Path:
    """A model whose turns are short, because many of its tokens are end tokens."""
    made = lm.tiny_lm(folder)
    settings = json.loads((made / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(300, 340)]
    (made / "generation_config.json").write_text(json.dumps(settings))
    return made


KINDS = {
    "text": Kind(LMRLConfig, lm.tiny_lm, _text),
    "flow": Kind(FlowRLConfig, tiny_sd3, _flow),
    "tools": Kind(LMRLConfig, _talker, _tools),
    "sweep": Kind(LMRLConfig, lm.tiny_lm, _sweep),
    "partial": Kind(LMRLConfig, lm.tiny_lm, _partial),
    "talks": Kind(LMRLConfig, _talker, _talks),
    "roles": Kind(LMRLConfig, lm.tiny_lm, _text),
    "ahead": Kind(LMRLConfig, lm.tiny_lm, _ahead),
    "vision": Kind(LMRLConfig, lambda folder: tiny_vision(folder, "qwen3_vl"), _vision),
}


class Net:
    """Where nodes meet: two network namespaces with a wire between them or, if there are none, one port."""

    def __init__(self, hosts: Hosts | None) -> None:
        self.hosts = hosts
        self.address = "127.0.0.1" if hosts is None else ADDRESSES[0]

    def enter(self, node: int) -> None:
        """In a child: join the node's namespace."""
        if self.hosts is not None:
            with Path("/run/netns", self.hosts.names[node]).open() as file:
                if LIBC.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")


@dataclass
class Node:
    """A node's ranks, and the launcher that starts them again, as torchrun does, if one ends with an error."""

    number: int
    ranks: int
    start: Callable[["Node", int], Any]
    restarts: int = 0
    processes: list[Any] = field(default_factory=list)
    due: float = 0.0  # when lost ranks are started again
    late: bool = False
    status: int | None = None

    def look(self) -> None:
        if self.status is not None:
            return
        codes = [process.exitcode for process in self.processes]
        if self.processes and all(code == 0 for code in codes):
            self.status = 0
        elif self.processes and any(code not in (None, 0) for code in codes):
            self.end()
            self.due = time.monotonic() + (LATE_S if self.late else 0.3)
            self.late = False
        if not self.processes and self.status is None and time.monotonic() >= self.due:
            self.processes = [self.start(self, local) for local in range(self.ranks)]
            self.restarts += 1

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.is_alive():
                    kill(process.pid, number)
            deadline = time.monotonic() + 2
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self.processes = []

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.is_alive()]


def _serve(net: Net, port: int, ready: Any) -> None:
    """The job's store, which outlives the ranks of node 0, as that of its launcher does."""
    end_with_parent(signal.SIGKILL)
    net.enter(0)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    ready.set()
    while store is not None:
        time.sleep(1)


def _rank(net: Net, folder: Path, env: dict[str, str], config: Any) -> None:
    """A rank of a job: what a task's file does."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    net.enter(int(env["GROUP_RANK"]))
    with (folder / f"node_{env['GROUP_RANK']}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    torch.set_num_threads(1)
    build: Callable[[Any], Callable[[], None]] = without_faults(task.build) if env.get("PRETENDED") else task.build
    from phalanx.exit import begin
    from phalanx.run.cli import run, start_process

    start_process()
    begin()
    run(build, config)


class Campaign:
    """A job of two nodes, its losses, and the seconds from each to the next step."""

    def __init__(
        self,
        kind: str,
        ranks: int,
        model: Path,
        folder: Path,
        total: int,
        net: Net,
        pause_s: float,
        sharded: bool = False,
        spares: int = 0,
        *,
        pretended: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        self.sharded = sharded
        self.kind, self.ranks, self.folder, self.net, self.pause_s = kind, ranks, folder, net, pause_s
        words, wide = [*KINDS[kind].settings(model, folder), *WORDS], 2 * ranks if sharded else ranks
        roles = kind in ("roles", "ahead")
        if roles and ranks == 1:
            words.append("placement={rollout: 1 ranks, actor: 1 ranks}")
        elif roles:
            wide = ranks // 2
            words.append(f"placement={{rollout: 0-{wide - 1} of each node, actor: {wide}-{ranks - 1} of each node}}")
        words += ["trainer.peer_copy=true"] * sharded
        words += [f"parallel.fsdp_size={wide}", f"trainer.total_training_steps={total}"]
        self.config = load_config(KINDS[kind].schema, None, words)
        self.runs = list(self.config.runs) or [""]
        self.context, self.port = multiprocessing.get_context("fork"), free_port()
        self.spares, self.pretended = spares, pretended
        self.nodes = [Node(number, ranks, self._start) for number in range(2 + spares)]

    def _start(self, node: Node, local: int) -> Any:
        marks = self.folder / f"marks_{node.number}"
        marks.mkdir(exist_ok=True)
        env = rank_environment(node.number * self.ranks + local, 2 * self.ranks, self.ranks)
        env |= {"MASTER_ADDR": self.net.address, "MASTER_PORT": str(self.port), "TORCHELASTIC_RUN_ID": "kills"}
        env |= {"TORCHELASTIC_RESTART_COUNT": str(node.restarts), "TORCHELASTIC_MAX_RESTARTS": "1000"}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "IN_PLACE": "1", "NNODES": "2", "PHASE_S": str(self.pause_s)}
        env |= {"SPARES": str(self.spares), MARKS: str(marks), "OMP_NUM_THREADS": "1"}
        env |= {"PRETENDED": "1"} if self.pretended else {}
        process = self.context.Process(target=_rank, args=(self.net, self.folder, env, self.config))
        process.start()
        return process

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        before_forks()
        ready = self.context.Event()
        server = self.context.Process(target=_serve, args=(self.net, self.port, ready))
        server.start()
        try:
            assert ready.wait(30)
            yield
        finally:
            for node in self.nodes:
                for process in node.processes:
                    process.kill()
                    process.join()
            server.kill()
            server.join()

    def until(self, happened: Callable[[], Any], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not happened():
            for node in self.nodes:
                node.look()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    @property
    def done(self) -> int:
        return min(max(steps(self.folder, run), default=0) for run in self.runs)

    @property
    def ended(self) -> bool:
        return all(node.status is not None for node in self.nodes)

    @property
    def phases(self) -> dict[int, str]:
        """What each process that has been a rank last does or did."""
        found = dict[int, str]()
        for number in range(2 * self.ranks):
            with contextlib.suppress(OSError, ValueError):
                pid, _, name = (self.folder / f"phase_{number}").read_text().split()
                found[int(pid)] = name
        return found

    def phase(self, pid: int) -> str:
        """What a rank does now, `forming` before its first phase and while it meets others again."""
        return self.phases.get(pid, "forming")

    @property
    def training(self) -> list[Node]:
        """The nodes all of whose ranks have begun to train; the others are spare ones."""
        pids = self.phases.keys()
        return [node for node in self.nodes if len(node.pids()) == self.ranks and pids >= set(node.pids())]

    def trains(self) -> bool:
        """Whether all ranks train, or none is left."""
        return self.ended or len(self.training) == 2

    @property
    def said(self) -> str:
        logs = sorted(self.folder.glob("node_*.log"))
        return "".join(f"--- {log.stem}\n{log.read_text()}" for log in logs)

    def lose(self, chance: random.Random, wanted: str, how: str, late: float) -> dict[str, Any]:
        """Lose a rank in the wanted phase, and wait for the next step."""
        self.until(self.trains, LIMIT_S)  # else the only nodes with the state might be lost
        node = self.nodes[1] if how == "cut" else chance.choice(self.training)
        node.late = chance.random() < late
        pid = chance.choice(node.pids())
        twice = how == "kill" and wanted == "forming"
        self.until(lambda: twice or self.phase(pid) == wanted or pid not in node.pids(), 4)
        time.sleep(chance.uniform(0, 0.08))
        moment, begin, done = self.phase(pid), time.monotonic(), self.done
        if how == "cut":
            assert self.net.hosts is not None
            self.net.hosts.link(up=False)
            self.until(lambda: False, CUT_S)
            self.net.hosts.link(up=True)
        else:
            kill(pid, signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
        if how == "freeze" and self.sharded:  # the others wait for it
            self.until(lambda: False, CUT_S)
            kill(pid, signal.SIGCONT)
        if twice:  # a second one of this node while it forms the world anew with the others
            node.late = False
            self.until(lambda: pid not in node.pids() and len(node.pids()) == self.ranks, LIMIT_S)
            self.until(lambda: False, chance.uniform(0, 4))
            kill(chance.choice(node.pids()), signal.SIGKILL)
        goes_on = self.until(lambda: self.ended or self.done > done, SLOW_S)
        if not goes_on:  # their stacks are in the logs
            for other in [pid for each in self.nodes for pid in each.pids()]:
                kill(other, signal.SIGUSR1)
            goes_on = self.until(lambda: self.ended or self.done > done, LIMIT_S)
        seconds = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a frozen rank that the others left runs again
        return {"phase": moment, "how": how + " twice" * twice, "s": round(seconds, 2), "goes_on": goes_on}


def run_whole(campaign: Campaign) -> None:
    """The same job without a loss."""
    with campaign.running():
        assert campaign.until(lambda: campaign.ended, 300), campaign.said
    assert not any(node.status for node in campaign.nodes), campaign.said


def differences(folder: Path, whole: Path, run: str) -> tuple[float, str]:
    """The largest difference of a metric, relative or absolute, and which one it is; 0.0 and "" if all rows are equal
    bit for bit. Raises ValueError for other steps or metrics.
    """
    largest = 0.0, ""
    for row, wanted in zip(rows(folder, run), rows(whole, run), strict=True):
        if row.keys() != wanted.keys():
            raise ValueError(f"step {wanted['step']}: {sorted(row.keys() ^ wanted.keys())}")
        for key, value in wanted.items():
            if row[key] != value and key not in LOOSE and not key.startswith("idle/"):
                largest = max(largest, (abs(row[key] - value) / max(1.0, abs(value)), f"{key} of step {row['step']}"))
    return largest


def campaign_of(kind: str, ranks: int, args: argparse.Namespace, model: Path, folder: Path, net: Net) -> dict[str, Any]:
    """Lose ranks of one job; returns what happened."""
    chance, total = random.Random(f"{args.seed} {kind} {ranks}"), 6 + 2 * args.kills
    whole = Campaign(kind, ranks, model, folder / "whole", total, net, 0.0, args.sharded)
    run_whole(whole)
    job = Campaign(kind, ranks, model, folder / "kills", total, net, PAUSE_S, args.sharded, args.spares)
    ways = args.ways.split(",")
    if net.hosts is None:
        ways = [way for way in ways if way != "cut"]
    losses: list[dict[str, Any]] = []
    phases = (*PHASES, "peer_copy") if args.sharded else PHASES
    with job.running():
        job.until(lambda: job.done > 0, LIMIT_S)
        while len(losses) < args.kills and not job.ended and job.done < total - 1:
            wanted = phases[len(losses) % len(phases)]
            losses.append(job.lose(chance, wanted, chance.choice(ways), args.late))
            print(kind, f"{ranks}x2", losses[-1], file=sys.stderr, flush=True)
            if not losses[-1]["goes_on"]:
                break
        ends = job.until(lambda: job.ended, 300)
    result: dict[str, Any] = {"losses": losses, "ends": ends and not any(node.status for node in job.nodes)}
    worlds = re.findall("with nodes ([0-9, ]+)", job.said)
    result["worlds"] = dict(Counter(worlds))
    result["state lost"] = job.said.count("no rank has the state")
    if result["ends"]:
        result["difference"], result["of"] = max(differences(job.folder, whole.folder, run) for run in job.runs)
        result["fewer"] = any("," not in nodes for nodes in worlds)
    else:
        print(job.said, file=sys.stderr)
    return result


def footprint(pid: int) -> dict[str, Any]:
    """A process's threads by name, open files, and resident memory in MB."""
    threads = Counter[str]()
    for entry in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            threads[(entry / "comm").read_text().strip()] += 1
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) / 1e3
    return {"threads": dict(threads), "files": len(os.listdir(f"/proc/{pid}/fd")), "mb": round(memory, 1)}


def leaks(kind: str, count: int, model: Path, folder: Path, net: Net, sharded: bool) -> dict[str, Any]:
    """What one process holds after each of many recoveries."""
    chance, job = random.Random(0), Campaign(kind, 1, model, folder / "leaks", 100_000, net, 0.0, sharded)
    found: list[dict[str, Any]] = []
    with job.running():
        job.until(lambda: job.done > 0, LIMIT_S)
        (survivor,) = job.nodes[0].pids()
        while len(found) < count:
            told, done = job.said.count("with nodes 0, 1"), job.done
            time.sleep(chance.uniform(0, 0.5))
            kill(job.nodes[1].pids()[0], signal.SIGKILL)
            came = job.until(
                lambda: job.said.count("with nodes 0, 1") > told and job.done > done + 1,  # noqa: B023
                LIMIT_S,
            )
            assert came and job.nodes[0].pids() == [survivor], job.said
            found.append(footprint(survivor))
            print(len(found), found[-1], file=sys.stderr, flush=True)
    return {"first": found[0], "third": found[2], "last": found[-1], "mb": [each["mb"] for each in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--layouts", default="1x2,2x2,4x2")
    parser.add_argument("--kills", type=int, default=6, help="per kind and layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default="kill,kill,kill,kill,freeze,cut", help="to lose a rank, drawn by chance")
    parser.add_argument("--late", type=float, default=0.3, help="fraction of the lost nodes that come back late")
    parser.add_argument("--leaks", type=int, default=0, help="recoveries of one process of each kind, instead")
    parser.add_argument("--sharded", action="store_true", help="all ranks share one copy of the weights")
    parser.add_argument("--spares", type=int, default=0, help="spare nodes; no wire is cut then")
    parser.add_argument("--folder", help="where to keep the files of the jobs")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed
    net = Net(None if args.spares or no_namespaces() else Hosts(f"ki{os.getpid() % 100000}"))
    try:
        with contextlib.ExitStack() as stack:
            name = args.folder or stack.enter_context(tempfile.TemporaryDirectory())
            for kind in args.kinds.split(","):
                model = KINDS[kind].make(Path(name, f"model_{kind}"))
                if args.leaks:
                    result[kind] = leaks(kind, args.leaks, model, Path(name, kind), net, args.sharded)
                    continue
                for layout in args.layouts.split(","):
                    folder = Path(name, f"{kind}_{layout}")
                    result[f"{kind} {layout}"] = campaign_of(kind, int(layout[0]), args, model, folder, net)
    finally:
        if net.hosts is not None:
            net.hosts.close()
    for key, found in {} if args.leaks else result.items():
        seconds = [loss["s"] for loss in found["losses"]]
        same = f"{found['difference']:.1e} {found['of']}" if found["ends"] and found["of"] else "bit for bit"
        same = same if found["ends"] else "no end"
        print(
            f"{key:12} {len(seconds)} losses, median {statistics.median(seconds):.1f} s, most {max(seconds)} s: {same}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
