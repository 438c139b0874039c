"""The check itself: all ranks go through the same steps together, and rank 0 writes down what is found.

A step ends after `timeout_s` seconds, also where it hangs in a library or in a file system: it runs on a thread of its
own, while the main thread talks over the store. What would wait for a stuck rank is then left out.
"""

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.cluster import facts, judge, measure
from phalanx.cluster.board import Board, open_store
from phalanx.cluster.disk import PATIENCE_S, SharedFolder
from phalanx.cluster.judge import FAIL, Finding
from phalanx.cluster.table import table
from phalanx.cluster.words import listed, name_nodes, on_nodes, reason
from phalanx.config.schema import ParallelConfig
from phalanx.config.tasks import CheckClusterConfig
from phalanx.distributed import mesh
from phalanx.types import JobError

GRACE_S = 5.0  # for notes to arrive after a step's time limit
NETWORK = (
    "set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME for GPUs, to the interface that reaches the other nodes (ip addr); "
    "let firewalls pass all TCP ports between nodes; look at MASTER_ADDR and MASTER_PORT"
)


class ClusterCheck:
    """`ClusterCheck(cfg).run()` on every rank of the world. `findings` and what they rest on are rank 0's."""

    def __init__(self, cfg: CheckClusterConfig) -> None:
        self.cfg, self.launch = cfg, mesh.Launch.from_env()
        # one thread for all steps, since CUDA's current device is a thread's
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")
        self._stuck = False
        self._can_connect = True
        self.findings: list[Finding] = []
        self.nodes: dict[str, list[int]] = {}
        self.seats: dict[int, facts.Seat] = {}
        self.machines: dict[str, facts.Machine] = {}
        self.ahead: dict[str, float] = {}
        self.rates: dict[int, dict[str, float]] = {}

    def run(self) -> None:
        """Go through all steps, print what was found, and raise JobError, on all ranks, where training would fail."""
        self.board = Board(self.launch.rank, self.launch.world_size, self._open_store())
        steps = {
            "ranks": self._ranks,
            "machines": self._machines,
            "shared disk": self._shared_disk,
            "groups": self._groups,
            "clocks": self._clocks,
            "all-reduce": self._sums,
            "bandwidth": self._bandwidth,
        }
        left = list(steps)
        while left and self._agree(steps[left.pop(0)]()):
            pass
        if self.launch.rank == 0:
            print(table(self.nodes, self.machines, self.seats, self.ahead, self.rates))
            print(*self.findings, sep="\n", flush=True)
        verdict = self._agree(self._verdict(left))
        self.board.gather(None, GRACE_S)  # the store may end with rank 0: all have read it by now
        if verdict is not None:
            raise JobError(verdict)
        mesh.stop()

    def _verdict(self, left: list[str]) -> str | None:
        failed = list(dict.fromkeys(f.topic for f in self.findings if f.level == FAIL))
        if not failed:
            return None
        rest = f" (not checked: {', '.join(left)})" if left else ""
        return f"training would fail here; to be mended: {listed(failed)}{rest}"

    # -- steps: on rank 0 each returns whether the next one is possible --------------------------------------------

    def _ranks(self) -> bool:
        limit = self.cfg.timeout_s
        notes = self.board.gather(asdict(facts.Place.here(self.launch)), limit)
        places = [facts.Place(**note) for note in notes.values()]
        self.nodes = name_nodes(places)
        self.firsts = self._agree([ranks[0] for ranks in self.nodes.values()])  # one rank of each node
        if self.launch.rank != 0:
            return True
        if len(places) < self.launch.world_size:
            self.findings.append(judge.absent(self.launch.world_size, self.nodes, limit, _master()))
            return False
        self.findings += judge.ranks(self.nodes, places, self.cfg.expect)
        self._can_connect = judge.regular(self.nodes, places)
        return True

    def _machines(self) -> bool:
        seats = self._ask(
            "GPUs", lambda: asdict(facts.look_at_seat(self.launch.local_rank)), "look at nvidia-smi there"
        )
        if not self._agree(seats is not None):
            return False
        look = self._on_firsts(lambda: asdict(facts.look_at_machine(self.cfg)))
        machines = self._ask("machines", look, "try ls on the paths of the configuration there")
        if seats is None or machines is None:
            return False
        self.seats = {rank: facts.Seat.of(note) for rank, note in seats.items()}
        self.machines = {name: facts.Machine.of(machines[ranks[0]]) for name, ranks in self.nodes.items()}
        gpus = list(judge.gpus(self.nodes, self.seats))
        self._can_connect &= all(finding.level != FAIL for finding in gpus)
        self.findings += [
            *judge.versions(self.machines),
            *judge.settings(self.machines),
            *gpus,
            *judge.memory(self.machines),
            *judge.limits(self.machines, self.launch.world_size),
            *judge.paths(self.machines),
            *judge.disk(self.machines, str(self._output_dir), self.cfg.min_free_gb),
        ]
        return True

    def _shared_disk(self) -> bool:
        folder = SharedFolder(self._output_dir, self._agree(secrets.token_hex(4)), self.launch.rank)
        topic, advice = "shared disk", "trainer.output_dir must be a folder that every node can write to"
        written = self._ask(topic, self._on_firsts(folder.write), advice)
        if self._agree(written is not None):
            wanted = self.firsts if self.launch.rank == 0 else self.firsts[:1]
            patience = min(PATIENCE_S, self.cfg.timeout_s / 2)
            missing = self._ask(topic, self._on_firsts(lambda: folder.missing(wanted, patience)), advice)
            if missing is not None:
                names = dict(zip(self.firsts, self.nodes, strict=True))
                unseen = {name: [names[other] for other in missing[first]] for first, name in names.items()}
                self.findings.append(judge.shared(str(self._output_dir), unseen, patience))
        if self._agree(not self._stuck):
            self._ask(topic, self._on_firsts(folder.remove), advice)
        return self._can_connect and not self._stuck

    def _groups(self) -> bool:
        # NCCL ends the process where its own time limit passes; the check's comes first
        limits = ParallelConfig(timeout_s=2 * self.cfg.timeout_s + 30)

        def connect() -> None:
            self.world = mesh.start(limits)

        return self._ask("groups", connect, NETWORK) is not None

    def _clocks(self) -> bool:
        offsets = self._ask("clocks", lambda: measure.clock_offset(self.world), NETWORK)
        if offsets is None:
            return False
        self.ahead = {name: offsets[ranks[0]] for name, ranks in self.nodes.items()}
        self.findings += judge.clocks(self.ahead)
        return True

    def _sums(self) -> bool:
        problems = self._ask("all-reduce", lambda: measure.check_sums(self.world), NETWORK)
        if problems is None:
            return False
        self.findings.append(judge.sums(self.nodes, problems))
        return True

    def _bandwidth(self) -> bool:
        rates = self._ask("bandwidth", lambda: measure.bandwidths(self.world), "raise timeout_s if the network is slow")
        if rates is None:
            return False
        self.rates = rates
        self.findings += judge.bandwidths(self.nodes, rates)
        return True

    def _open_store(self) -> dist.Store:
        try:  # whatever else listens at that port may leave torch waiting for ever
            opened = self._worker.submit(open_store, self.launch, self.cfg.timeout_s)
            return opened.result(2 * self.cfg.timeout_s + GRACE_S)
        except TimeoutError as error:
            raise JobError(f"what listens at {_master()} does not answer; it is no store of torch's") from error

    # -- all ranks together ------------------------------------------------------------------------------------------

    @property
    def _output_dir(self) -> Path:
        return Path(self.cfg.trainer.output_dir).absolute()

    def _on_firsts(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return work if self.launch.rank in self.firsts else lambda: None

    def _agree(self, value: Any) -> Any:
        """Rank 0's value, which it may have only after two time limits: its own work's, and that of the notes."""
        return self.board.agree(value, 2 * self.cfg.timeout_s + 3 * GRACE_S)

    def _ask(self, topic: str, work: Callable[[], Any], advice: str) -> dict[int, Any] | None:
        """Do `work` on all ranks; rank 0 gets what it returned on each, or None, and a finding, where it failed."""
        begin, limit = time.monotonic(), self.cfg.timeout_s
        try:
            note = {"value": self._worker.submit(work).result(limit)}
        except TimeoutError:
            note = {"stuck": f"not done within {limit:g} s"}
        except (RuntimeError, ValueError, OSError) as error:
            note = {"error": reason(error)}
        notes = self.board.gather(note, max(GRACE_S, begin + limit + GRACE_S - time.monotonic()))
        if self.launch.rank != 0:
            return None
        silent = {rank: "no answer" for rank in range(self.launch.world_size) if rank not in notes}
        failed = {rank: note["error"] for rank, note in notes.items() if "error" in note}
        stuck = {rank: note["stuck"] for rank, note in notes.items() if "stuck" in note}
        self._stuck |= bool(silent or stuck)
        # who is silent, or has an error of its own, is why others are stuck
        for those in (silent, failed, stuck):
            if those:
                text = f"{next(iter(those.values()))} ({on_nodes(self.nodes, those)})"
                self.findings.append(Finding(FAIL, topic, f"{text}; {advice}"))
                return None
        return {rank: note["value"] for rank, note in notes.items()}


def _master() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
