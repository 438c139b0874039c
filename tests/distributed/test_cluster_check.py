"""The cluster check on real ranks: joint measurements, and that it ends with a reason if a rank does not cooperate."""

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.parallel import ParallelConfig
from phalanx.config.tasks import CheckClusterConfig
from phalanx.distributed.launch_env import Launch
from phalanx.run.rules import load_config
from phalanx.run.world import start_world
from phalanx.tools.cluster import check, measure
from phalanx.tools.cluster.check import ClusterCheck
from phalanx.tools.cluster.notes import KVExchange, open_store
from phalanx.types import JobError
from tests.helpers.ranks import free_port, run_ranks

HOST = socket.gethostname()
ADVICE_OF_MACHINES = "try ls on the paths of the configuration there"
SHORT_S = 1.0  # limit of steps that must time out; all others have the configured limit


def sums(impostor: int | None) -> str | None:
    world = start_world(ParallelConfig())
    if world.rank == impostor:
        world = replace(world, rank=world.rank + 4)  # contributes another rank's numbers
    return measure.check_sums(world)


# rank 2 contributes 7 times the pattern instead of 3 times: 14 instead of 10 in all
@pytest.mark.parametrize(
    ("impostor", "found"), [(None, None), (2, "1 of 1 sums are wrong; the first is 14 and should be 10")]
)
def test_all_see_the_wrong_numbers_of_one_rank(impostor: int | None, found: str | None) -> None:
    assert run_ranks(sums, 4, impostor, local_world=2) == [found] * 4


def offset(shift: float) -> float | None:
    world = start_world(ParallelConfig())
    here = shift if world.rank >= 2 else 0.0
    return measure.clock_offset(world, clock=lambda: time.time() + here)


@pytest.mark.parametrize("shift", [0.0, 7.5, -3.25])
def test_a_clock_that_is_off_is_measured(shift: float) -> None:
    zero, none, second, also_none = run_ranks(offset, 4, shift, local_world=2)
    assert (zero, none, also_none) == (0.0, None, None)
    assert second == pytest.approx(shift, abs=0.5)  # half a round trip, which takes long on a busy machine


def rates() -> dict[str, float]:
    return measure.bandwidths(start_world(ParallelConfig()))


@pytest.mark.parametrize(
    ("world", "local", "kinds"),
    [(4, 2, {"all", "node", "link"}), (2, 1, {"all", "link"}), (2, 2, {"all", "node"}), (1, 1, set())],
)
def test_what_is_measured_follows_the_layout(world: int, local: int, kinds: set[str]) -> None:
    for found in run_ranks(rates, world, local_world=local):
        assert set(found) == kinds
        assert all(0.001 < rate < 1000 for rate in found.values()), found


# -- the whole check --------------------------------------------------------------------------------------------------


class Hasty(ClusterCheck):
    """A check with the full time limit for steps that succeed, and SHORT_S for the one that does not."""

    hangs: tuple[int, str] = -1, ""  # rank and topic

    def _ask_ranks(self, topic: str, work: Callable[[], Any]) -> dict[int, Any] | None:
        plain = self.cfg.timeout_s
        if self.hangs == (self.launch.rank, topic):
            self.cfg.timeout_s = SHORT_S
        try:
            return super()._ask_ranks(topic, work)
        finally:
            self.cfg.timeout_s = plain


def whole(
    port: int,
    overrides: list[list[str]],
    env: list[dict[str, str]] | None = None,
    kind: type[ClusterCheck] = Hasty,
    patience_s: float = check.PATIENCE_S,
) -> tuple[list[str], str | None]:
    """Rank 0's findings and the outcome of the check; `overrides` and `env` are those of each rank."""
    rank, check.PATIENCE_S = int(os.environ["RANK"]), patience_s
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(env[rank] if env else {})}
    checked = kind(load_config(CheckClusterConfig, None, overrides[rank]))
    try:
        checked.run()
    except JobError as error:
        return [str(finding) for finding in checked.findings], str(error)
    return [str(finding) for finding in checked.findings], None


def topics(findings: list[str]) -> list[str]:
    return [finding.split(":")[0] for finding in findings]


def test_two_nodes_that_share_a_disk(tmp_path: Path) -> None:
    here = [f"trainer.output_dir={tmp_path}/a/b", "min_free_gb=0", "expect=2"]
    (findings, verdict), other = run_ranks(whole, 2, free_port(), [here, here], local_world=1, init=False)
    assert (verdict, other) == (None, ([], None))
    assert findings[0] == "ok       ranks: 2 on 2 nodes, 1 on each"
    assert f"ok       shared disk: {tmp_path}/a/b can be written and is the same on all nodes" in findings
    named = ["ranks", "versions", "configuration", "GPUs", "memory", "limits", "paths", "disk", "shared disk"]
    named += ["clocks", "all-reduce", "bandwidth"]
    assert [topic.split(maxsplit=1)[1] for topic in topics(findings)] == named
    assert list(tmp_path.iterdir()) == []


def test_roles_are_placed_and_their_weights_timed(tmp_path: Path) -> None:
    here = [f"trainer.output_dir={tmp_path}/a", "min_free_gb=0", "placement={rollout: 2, inference: 0, actor: 1}"]
    (findings, verdict), *_ = run_ranks(whole, 3, free_port(), [here] * 3, init=False)
    assert verdict is None
    assert findings[1] == "ok       placement: rollout rank 2, inference rank 0, actor rank 1"
    rate = re.fullmatch(
        r"ok       roles: weights from rank 1 to the 2 ranks that sample or score in (.+) s per GB \(rank [02] on .+\)",
        findings[-1],
    )
    assert rate is not None and 0.001 < float(rate[1]) < 1000


def test_a_placement_that_does_not_fit(tmp_path: Path) -> None:
    """All steps but the last are executed; if the nodes' configurations differ, the first node's is used."""
    good, bad = "placement={rollout: 0, actor: 1}", "placement={rollout: 0, actor: 2}"
    own = [f"trainer.output_dir={tmp_path}/a", "min_free_gb=0"]
    for first, other, failed in ((bad, bad, "placement"), (good, bad, "configuration"), (bad, good, "placement")):
        given = [[*own, first], [*own, other]]
        (findings, verdict), (_, told) = run_ranks(whole, 2, free_port(), given, local_world=1, init=False)
        assert verdict == told and verdict is not None and failed in verdict
        wrong = "FAIL     placement: actor: '2': this world has ranks 0 to 1" in findings
        assert wrong == (first is bad)
        assert topics(findings)[-1] == ("ok       bandwidth" if first is bad else "ok       roles")


def test_two_nodes_that_do_not_share_a_disk(tmp_path: Path) -> None:
    own = [[f"trainer.output_dir={tmp_path}/{rank}"] for rank in range(2)]
    (findings, verdict), (_, other) = run_ranks(
        whole, 2, free_port(), own, None, ClusterCheck, 1.0, local_world=1, init=False
    )
    first, second = f"{HOST} (node 0)", f"{HOST} (node 1)"
    assert (
        f"FAIL     shared disk: {tmp_path}/0: {first} does not see what {second} wrote and {second} does not see what "
        f"{first} wrote within 1 s; trainer.output_dir must be on a file system that all nodes share"
    ) in findings
    assert (
        f"FAIL     configuration: trainer.output_dir is {tmp_path}/1 on {second}, but {tmp_path}/0 on {first}; "
        "give every node the same file and overrides"
    ) in findings
    assert verdict == other == "training would fail here; to fix: configuration and shared disk"
    assert topics(findings)[-1] == "ok       bandwidth"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_one_node_cannot_write_to(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    own = [[f"trainer.output_dir={tmp_path}/free"], [f"trainer.output_dir={tmp_path}/taken/run"]]
    (findings, _), _ = run_ranks(whole, 2, free_port(), own, local_world=1, init=False)
    (line,) = [finding for finding in findings if "shared disk" in finding]
    assert line.startswith(f"FAIL     shared disk: {tmp_path}/taken/run")
    assert line.endswith(
        f"not a directory (rank 1 on {HOST} (node 1)); trainer.output_dir must be a folder that every node can write to"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_unequal_nodes_end_without_groups(tmp_path: Path) -> None:
    same = [f"trainer.output_dir={tmp_path}"]
    nodes = [{"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(size)} for node, size in ((0, 2), (0, 2), (1, 1))]
    results = run_ranks(whole, 3, free_port(), [same] * 3, nodes, init=False)
    assert results[0][0][0] == (
        f"FAIL     ranks: 1 on {HOST} (node 1), but 2 on {HOST} (node 0); give every node the same NPROC_PER_NODE"
    )
    assert {verdict for _, verdict in results} == {
        "training would fail here; to fix: ranks (not checked: groups, clocks, all-reduce, bandwidth)"
    }


def stuck(port: int, pipe: Path, overrides: list[str]) -> tuple[list[str], str | None, float]:
    """Rank 1's data file is a pipe without a writer, so that opening it hangs like a dead network disk."""
    begin, Hasty.hangs = time.monotonic(), (1, "machines")
    try:
        hung = [*overrides, f"data.train_files=[{pipe}]"]
        return *whole(port, [overrides, hung]), time.monotonic() - begin
    finally:
        if os.environ["RANK"] == "1":
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # releases the hanging thread


def test_a_rank_that_hangs_is_named_in_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    overrides = [f"trainer.output_dir={tmp_path}"]
    results = run_ranks(stuck, 2, free_port(), tmp_path / "pipe", overrides, local_world=1, init=False)
    assert results[0][0][-1] == (
        f"FAIL     machines: not finished within {SHORT_S:g} s (rank 1 on {HOST} (node 1)); {ADVICE_OF_MACHINES}"
    )
    rest = "shared disk, groups, clocks, all-reduce, bandwidth"
    for _, verdict, seconds in results:
        assert verdict == f"training would fail here; to fix: machines (not checked: {rest})"
        assert seconds < CheckClusterConfig().timeout_s


def leaves_early(port: int, who: int) -> tuple[list[str], str | None] | None:
    """One rank registers and then ends."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch, Hasty.hangs, check.GRACE_S = Launch.from_env(), (1 - who, "GPUs"), 0.5
    if launch.rank != who:
        return whole(port, [[]] * 2)
    exchange = KVExchange(launch.rank, 2, open_store(launch, 60))
    exchange.gather({"rank": who, "node": who, "host": HOST, "local_world_size": 1}, 60)
    return None


def test_a_rank_that_ends_early_is_named() -> None:
    result, _ = run_ranks(leaves_early, 2, free_port(), 1, local_world=1, init=False)
    assert result[0][-1] == f"FAIL     GPUs: no answer (rank 1 on {HOST} (node 1)); check nvidia-smi there"


def test_the_others_end_where_rank_0_does() -> None:
    _, result = run_ranks(leaves_early, 2, free_port(), 0, local_world=1, init=False)
    assert result == ([], "rank 0 is gone; its own log says why")


class Late(ClusterCheck):
    """The first step begins when rank 1 has arrived, and rank 0 keeps the store until rank 1 has ended."""

    def _check_ranks(self) -> bool:
        if self.launch.rank == 0:
            self.exchange._wait_keys(["1/1"], 60)
            self.cfg.timeout_s, check.GRACE_S = SHORT_S, 0.5
        return super()._check_ranks()

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.launch.rank == 1:
                self.exchange._store.set("over", "")
            else:
                self.exchange._wait_keys(["over"], 60)


def test_ranks_that_never_come_are_named() -> None:
    """Ranks 0 and 1 of 3 run without torchrun, which would wait for the third."""
    port = free_port()
    env = [{"WORLD_SIZE": "3"}] * 2
    results = run_ranks(whole, 2, port, [[]] * 2, env, Late, local_world=1, init=False)
    assert results[0][0] == [
        f"FAIL     ranks: 2 of 3 came within {SHORT_S:g} s: rank 0 on {HOST} (node 0) and rank 1 on {HOST} (node 1); look "
        f"at the logs of rank 2, and whether their machines reach MASTER_ADDR=127.0.0.1, MASTER_PORT={port} through the "
        "firewalls"
    ]
    steps = "machines, shared disk, groups, clocks, all-reduce, bandwidth"
    verdict = f"training would fail here; to fix: ranks (not checked: {steps})"
    assert [result[1] for result in results] == [verdict, verdict]


SECOND_OF_TWO = [["timeout_s=0.2"]], [{"RANK": "1", "WORLD_SIZE": "2"}]


def test_a_master_that_is_not_there() -> None:
    port = free_port()
    ((_, said),) = run_ranks(whole, 1, port, *SECOND_OF_TWO, init=False)
    assert said == (
        f"rank 0 (MASTER_ADDR=127.0.0.1, MASTER_PORT={port}) was not reached within 0 s: Connection refused; "
        "MASTER_ADDR must name the node of rank 0 as all nodes see it, rank 0 must be running there, and firewalls must let "
        "the port through"
    )


def stranger() -> tuple[int, str | None]:
    """The master's port belongs to a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check.GRACE_S = 0.5
        return port, whole(port, *SECOND_OF_TWO)[1]


def test_a_port_that_something_else_listens_at() -> None:
    ((port, said),) = run_ranks(stranger, 1, init=False)
    assert said == (
        f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: something listens there, but does not answer as torch's store would"
    )


def test_groups_that_cannot_be_made_say_what_to_look_at(tmp_path: Path) -> None:
    same, env = [[f"trainer.output_dir={tmp_path}"]] * 2, [{"GLOO_SOCKET_IFNAME": "none0"}] * 2
    results = run_ranks(whole, 2, free_port(), same, env, local_world=1, init=False)
    assert results[0][0][-1] == (
        f"FAIL     groups: GLOO_SOCKET_IFNAME=none0: {HOST} has {', '.join(name for _, name in socket.if_nameindex())} "
        f"(rank 0 on {HOST} (node 0) and rank 1 on {HOST} (node 1)); {check.NETWORK}"
    )
    assert "GLOO_SOCKET_IFNAME" in check.NETWORK and "MASTER_ADDR" in check.NETWORK
    rest = "clocks, all-reduce, bandwidth"
    assert results[1][1] == f"training would fail here; to fix: groups (not checked: {rest})"
