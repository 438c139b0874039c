"""The cluster check: all ranks execute the same steps together, and rank 0 collects the findings.

A step is given up after `timeout_s` seconds, even if it hangs in a library or a file system: it runs on a second
thread, while the main thread communicates over the store. Steps that would wait for a stuck rank are then skipped.
"""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.config.messages import ConfigError
from phalanx.config.parallel import ParallelConfig
from phalanx.config.tasks import CheckClusterConfig
from phalanx.distributed.launch_env import Launch
from phalanx.run.roles import Roles, roles_of
from phalanx.run.world import start_world, stop_world
from phalanx.tools.cluster import diagnose, facts, measure
from phalanx.tools.cluster.diagnose import FAIL, Finding
from phalanx.tools.cluster.disk import PATIENCE_S, SharedFolder
from phalanx.tools.cluster.notes import KVExchange, master, open_store
from phalanx.tools.cluster.table import table
from phalanx.tools.cluster.wording import listed, name_nodes, on_nodes, reason
from phalanx.types import JobError

GRACE_S = 5.0  # extra time after a step's limit for the notes of ranks to arrive
NETWORK = (
    "set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME for GPUs, to the interface that reaches the other nodes (ip addr); "
    "let firewalls pass all TCP ports between nodes; check MASTER_ADDR and MASTER_PORT"
)
# printed if a step fails
ADVICE = {
    "GPUs": "check nvidia-smi there",
    "machines": "try ls on the paths of the configuration there",
    "shared disk": "trainer.output_dir must be a folder that every node can write to",
    "groups": NETWORK,
    "clocks": NETWORK,
    "all-reduce": NETWORK,
    "bandwidth": "raise timeout_s if the network is slow",
    "roles": NETWORK,
}


class ClusterCheck:
    """The check on one rank: all ranks call `run` together. Only rank 0 has the findings and facts."""

    def __init__(self, cfg: CheckClusterConfig) -> None:
        self.cfg, self.launch = cfg, Launch.from_env()
        # one thread for all steps, because CUDA's current device is per thread
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")
        self._stuck = False
        self._can_connect = True
        self.findings: list[Finding] = []
        self.nodes: dict[str, list[int]] = {}
        self.gpus: dict[int, facts.Gpu] = {}
        self.machines: dict[str, facts.Machine] = {}
        self.ahead: dict[str, float] = {}
        self.rates: dict[int, dict[str, float]] = {}
        self.roles: Roles | None = None  # None if ranks have no roles

    def run(self) -> None:
        """Execute all steps and print the findings; raises JobError on all ranks if training would fail."""
        self.exchange = KVExchange(self.launch.rank, self.launch.world_size, self._open_store())
        steps = {
            "ranks": self._check_ranks,
            "machines": self._check_machines,
            "shared disk": self._shared_disk,
            "groups": self._check_groups,
            "clocks": self._check_clocks,
            "all-reduce": self._check_sums,
            "bandwidth": self._check_bandwidth,
        }
        if self.cfg.placement:
            steps["roles"] = self._across_roles
        left = list(steps)
        while left and self._agree_value(steps[left.pop(0)]()):
            pass
        if self.launch.rank == 0:
            print(table(self.nodes, self.machines, self.gpus, self.ahead, self.rates, self.roles))
            print(*self.findings, sep="\n", flush=True)
        verdict = self._agree_value(self._final_verdict(left))
        # the store may end with rank 0, which therefore waits until all ranks have read the verdict
        self.exchange.gather(None, GRACE_S)
        if verdict is not None:
            raise JobError(verdict)
        stop_world()

    def _final_verdict(self, left: list[str]) -> str | None:
        failed: list[str] = []
        for finding in self.findings:
            if finding.level == FAIL and finding.topic not in failed:
                failed.append(finding.topic)
        rest = f" (not checked: {', '.join(left)})" if left else ""
        return f"training would fail here; to fix: {listed(failed)}{rest}" if failed else None

    # -- steps: each returns True, on rank 0, if the next step is possible --------------------------

    def _check_ranks(self) -> bool:
        limit = self.cfg.timeout_s
        notes = self.exchange.gather(asdict(facts.RankInfo.here(self.launch)), limit)
        infos = [facts.RankInfo(**note) for note in notes.values()]
        self.nodes = name_nodes(infos)
        placed = self._place_roles()
        # the first rank of each node collects facts that are common to its ranks
        self.firsts = self._agree_value([ranks[0] for ranks in self.nodes.values()])
        if self.launch.rank != 0:
            return True
        size = self.launch.world_size
        if len(infos) < size:
            self.findings.append(diagnose.absent(size, self.nodes, limit, master()))
            return False
        self.findings += diagnose.ranks(self.nodes, infos, self.cfg.expect)
        self._can_connect = not diagnose.any_failed(diagnose.ranks(self.nodes, infos))  # ignoring cfg.expect
        self.findings += placed
        return True

    def _place_roles(self) -> list[Finding]:
        """Assign roles to the ranks."""
        try:
            roles = roles_of(self.cfg.placement, self.launch)
        except ConfigError as error:
            return [Finding(FAIL, "placement", str(error).removeprefix("placement").lstrip(".: "))]
        if roles.collocated:
            return []
        self.roles = roles
        return diagnose.placement(roles)

    def _check_machines(self) -> bool:
        gpu_notes = self._ask_ranks("GPUs", lambda: asdict(facts.look_at_gpu(self.launch.local_rank)))
        if not self._agree_value(gpu_notes is not None):
            return False
        machine_notes = self._ask_firsts("machines", lambda: asdict(facts.look_at_machine(self.cfg)))
        if gpu_notes is None or machine_notes is None:
            return False
        for rank, note in gpu_notes.items():
            self.gpus[rank] = facts.Gpu(**note)
        for name, ranks in self.nodes.items():
            self.machines[name] = facts.Machine.of(machine_notes[ranks[0]])
        gpus = diagnose.gpus(self.nodes, self.gpus)
        # NCCL would fail or hang with two ranks on one GPU
        self._can_connect &= not diagnose.any_failed(gpus)
        self.findings += [
            *diagnose.versions(self.machines),
            *diagnose.settings(self.machines),
            *gpus,
            *diagnose.memory(self.machines),
            *diagnose.limits(self.machines, self.launch.world_size),
            *diagnose.paths(self.machines),
            *diagnose.disk(self.machines, str(self._output_dir), self.cfg.min_free_gb),
        ]
        return True

    def _shared_disk(self) -> bool:
        # a new name per check, because a network file system may still show the marks of an earlier check
        folder = SharedFolder(self._output_dir, self._agree_value(secrets.token_hex(4)), self.launch.rank)
        written = self._ask_firsts("shared disk", folder.write)
        if self._agree_value(written is not None):
            # the first node checks all nodes' marks, the others only that of the first, which needs few reads
            expected = self.firsts if self.launch.rank == 0 else self.firsts[:1]
            patience = min(PATIENCE_S, self.cfg.timeout_s / 2)
            missing = self._ask_firsts("shared disk", lambda: folder.missing(expected, patience))
            if missing is not None:
                names = dict(zip(self.firsts, self.nodes, strict=True))
                unseen = {}
                for first, name in names.items():
                    unseen[name] = [names[other] for other in missing[first]]
                self.findings += diagnose.shared(str(self._output_dir), unseen, patience)
        if self._agree_value(not self._stuck):
            self._ask_firsts("shared disk", folder.remove)
        return self._can_connect and not self._stuck

    def _check_groups(self) -> bool:
        # longer than the check's time limit, because NCCL ends the process at its own
        limits = ParallelConfig(timeout_s=2 * self.cfg.timeout_s + 30)

        def connect() -> None:
            self.world = start_world(limits)

        return self._ask_ranks("groups", connect) is not None

    def _check_clocks(self) -> bool:
        offsets = self._ask_ranks("clocks", lambda: measure.clock_offset(self.world))
        if offsets is None:
            return False
        for name, ranks in self.nodes.items():
            self.ahead[name] = offsets[ranks[0]]
        self.findings += diagnose.clocks(self.ahead)
        return True

    def _check_sums(self) -> bool:
        problems = self._ask_ranks("all-reduce", lambda: measure.check_sums(self.world))
        if problems is None:
            return False
        self.findings += diagnose.sums(self.nodes, problems)
        return True

    def _check_bandwidth(self) -> bool:
        rates = self._ask_ranks("bandwidth", lambda: measure.bandwidths(self.world))
        if rates is None:
            return False
        self.rates = rates
        self.findings += diagnose.bandwidths(self.nodes, rates)
        return True

    def _across_roles(self) -> bool:
        """Measure the transfer of weights between roles as in training; skipped without valid roles."""
        # use rank 0's roles, because the nodes' configurations may differ
        ranks_of_role = self._agree_value(None if self.roles is None else self.roles.ranks)
        if ranks_of_role is None:
            return True
        roles = Roles({role: tuple(ranks) for role, ranks in ranks_of_role.items()})
        seconds = self._ask_ranks("roles", lambda: measure.weights_across(self.world, roles, 2 * self.cfg.timeout_s))
        if seconds is None:
            return False
        self.findings += diagnose.roles(self.nodes, roles, seconds)
        return True

    def _open_store(self) -> dist.Store:
        try:  # if another program listens on that port, torch may wait forever
            opened = self._worker.submit(open_store, self.launch, self.cfg.timeout_s)
            return opened.result(2 * self.cfg.timeout_s + GRACE_S)
        except TimeoutError as error:
            problem = "something listens there, but does not answer as torch's store would"
            raise JobError(f"{master()}: {problem}") from error

    # -- all ranks together -------------------------------------------------------------------------

    @property
    def _output_dir(self) -> Path:
        return Path(self.cfg.trainer.output_dir).absolute()

    def _agree_value(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Waits up to two time limits, for rank 0's work and for the others' notes."""
        return self.exchange.agree(value, 2 * self.cfg.timeout_s + 3 * GRACE_S)

    def _ask_firsts(self, topic: str, work: Callable[[], Any]) -> dict[int, Any] | None:
        """Like `_ask_ranks`, but only the first rank of each node does `work`."""
        return self._ask_ranks(topic, work if self.launch.rank in self.firsts else lambda: None)

    def _ask_ranks(self, topic: str, work: Callable[[], Any]) -> dict[int, Any] | None:
        """Do `work` on all ranks; returns the results by rank on rank 0, or None after adding a finding."""
        begin, limit = time.monotonic(), self.cfg.timeout_s
        try:
            note = {"value": self._worker.submit(work).result(limit)}
        except TimeoutError:
            note = {"stuck": f"not finished within {limit:g} s"}
        except (RuntimeError, ValueError, OSError) as error:
            note = {"error": reason(error)}
        # this rank may finish early, but the others may use their whole time limit
        left = begin + limit - time.monotonic()
        notes = self.exchange.gather(note, GRACE_S + max(0.0, left))
        if self.launch.rank != 0:
            return None
        silent, failed, stuck, values = dict[int, Any](), dict[int, Any](), dict[int, Any](), dict[int, Any]()
        kinds = {"error": failed, "stuck": stuck, "value": values}
        for rank in range(self.launch.world_size):
            if rank not in notes:
                silent[rank] = "no answer"
                continue
            [(kind, content)] = notes[rank].items()
            kinds[kind][rank] = content
        self._stuck |= bool(silent or stuck)
        # silent ranks, then failed ones, explain why others are stuck, so they are reported first
        for problems in (silent, failed, stuck):
            if problems:
                text = f"{next(iter(problems.values()))} ({on_nodes(self.nodes, problems)})"
                self.findings.append(Finding(FAIL, topic, f"{text}; {ADVICE[topic]}"))
                return None
        return values
