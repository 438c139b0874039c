"""The cluster check's findings about fictitious machines, line by line, and its facts about this machine."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.config.tasks import CheckClusterConfig
from phalanx.run.roles import Roles, span
from phalanx.run.rules import load_config
from phalanx.tools.cluster import diagnose, facts
from phalanx.tools.cluster.facts import Gpu, Machine, PathFact, RankInfo
from phalanx.tools.cluster.measure import wrong_sum
from phalanx.tools.cluster.table import table
from phalanx.tools.cluster.wording import difference, listed, name_nodes
from tests.helpers.ranks import ROOT
from tests.helpers.shells import write_tool

MACHINE = Machine(
    versions={"phalanx": "0.1.0 (source abc)", "python": "3.11.7", "torch": "2.13.0", "NCCL": "none"},
    settings={"trainer.seed": "0", "optim.lr": "0.1"},
    memory_gb=100.0,
    memory_free_gb=90.0,
    shm_free_gb=50.0,
    disk_free_gb=500.0,
    open_files=1024,
    infiniband=False,
    infiniband_unused=None,
    locked_gb=0.064,
    paths={"model.path": PathFact("/m", 10), "data.train_files[0]": PathFact("/d.txt", 20)},
)
NODES = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


def machines(**changes: Machine) -> dict[str, Machine]:
    """Three machines that are equal except for the `changes`."""
    return {"a": MACHINE, "b": MACHINE, "c": MACHINE, **changes}


def but(**changes: object) -> Machine:
    return dataclasses.replace(MACHINE, **changes)


def infos(*counts: int, told: int | None = None, hosts: str = "abcdefgh") -> list[RankInfo]:
    """Ranks on hosts a, b, ..., each with its launcher's LOCAL_WORLD_SIZE."""
    on = [node for node, number in enumerate(counts) for _ in range(number)]
    return [RankInfo(rank, node, hosts[node], told or counts[node]) for rank, node in enumerate(on)]


def lines(findings: Iterable[diagnose.Finding]) -> list[str]:
    return [str(finding) for finding in findings]


def rank_lines(ranks: list[RankInfo], expect: int | None = None) -> list[str]:
    return lines(diagnose.ranks(name_nodes(ranks), ranks, expect))


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_ranks_that_are_as_expected() -> None:
    assert rank_lines(infos(8, 8, 8, 8), expect=32) == ["ok       ranks: 32 on 4 nodes, 8 on each"]
    assert rank_lines(infos(2)) == ["ok       ranks: 2 on 1 node"]


def test_too_few_ranks() -> None:
    assert rank_lines(infos(8, 8), expect=32) == [
        "FAIL     ranks: 16 came, but expect=32: 8 on a and 8 on b; check NNODES and NPROC_PER_NODE on every node"
    ]


def test_unequal_nodes() -> None:
    assert rank_lines(infos(8, 4, 8)) == [
        "FAIL     ranks: 4 on b, but 8 on the others; give every node the same NPROC_PER_NODE"
    ]


def test_a_launcher_that_counts_wrong() -> None:
    assert rank_lines(infos(2, 2, told=4)) == [
        "FAIL     ranks: 2 on a and 2 on b, but LOCAL_WORLD_SIZE=4; the launcher must set it to the number of ranks on a node"
    ]


def test_ranks_that_are_dealt_out_like_cards() -> None:
    dealt = [RankInfo(rank, rank % 2, "ab"[rank % 2], 2) for rank in range(4)]
    assert rank_lines(dealt) == [
        "FAIL     ranks: ranks 0, 2 on a and ranks 1, 3 on b; number them node by node, as srun --distribution=block does"
    ]


def test_nodes_are_called_by_host_and_by_number_where_that_is_not_enough() -> None:
    assert name_nodes(infos(2, 1)) == {"a": [0, 1], "b": [2]}
    assert name_nodes(infos(2, 1, 1, hosts="vvw")) == {"v (node 0)": [0, 1], "v (node 1)": [2], "w": [3]}


# -- machines ---------------------------------------------------------------------------------------------------------


def test_versions() -> None:
    same = "phalanx 0.1.0 (source abc), python 3.11.7, torch 2.13.0"
    assert lines(diagnose.versions({"a": MACHINE})) == [f"ok       versions: {same}"]
    assert lines(diagnose.versions(machines())) == [f"ok       versions: {same}, the same on all nodes"]
    odd = machines(b=but(versions={**MACHINE.versions, "torch": "2.12.0", "python": "3.12.1"}))
    assert lines(diagnose.versions(odd)) == [
        "warning  versions: python is 3.12.1 on b, but 3.11.7 on the others; install the same one on all nodes",
        "FAIL     versions: torch is 2.12.0 on b, but 2.13.0 on the others; install the same one on all nodes",
        "ok       versions: phalanx 0.1.0 (source abc), the same on all nodes",
    ]


def test_difference() -> None:
    assert difference({"a": "1", "b": "2"}) == "2 on b, but 1 on a"
    assert difference({"a": "1", "b": "2", "c": "3", "d": "2"}) == "3 on c and 1 on a, but 2 on the others"


def test_configurations_that_differ() -> None:
    odd = machines(c=but(settings={"trainer.seed": "1"}))
    assert lines(diagnose.settings(machines())) == ["ok       configuration: 2 keys, the same on all nodes"]
    assert lines(diagnose.settings(odd)) == [
        "FAIL     configuration: optim.lr is not set on c, but 0.1 on the others; give every node the same file and overrides",
        "FAIL     configuration: trainer.seed is 1 on c, but 0 on the others; give every node the same file and overrides",
    ]


def gpu_infos(**changes: Gpu) -> dict[int, Gpu]:
    """Six ranks with a GPU each; `changes` are keyed as r0, r1, ..."""
    usual = {rank: Gpu(2, "H100", f"uuid-{rank}", 80.0, 79.0, "") for rank in range(6)}
    return usual | {int(name[1:]): info for name, info in changes.items()}


def test_gpus_that_are_right() -> None:
    assert lines(diagnose.gpus(NODES, gpu_infos())) == [
        "ok       GPUs: 2 x H100 on each node, 90 % or more of their memory free"
    ]
    none = dict.fromkeys(range(6), Gpu(0))
    assert lines(diagnose.gpus(NODES, none)) == ["ok       GPUs: none; all ranks run on CPUs"]


def test_gpus_that_others_use() -> None:
    used = Gpu(2, "H100", "uuid-3", 80.0, 12.14, "python (process 77, 66000 MiB)")
    assert lines(diagnose.gpus(NODES, gpu_infos(r3=used))) == [
        "warning  GPUs: rank 3 on b: 12.1 of 80.0 GB free, held by python (process 77, 66000 MiB); stop what else runs there"
    ]


def test_ranks_without_a_gpu() -> None:
    assert lines(diagnose.gpus(NODES, gpu_infos(r4=Gpu(0), r5=Gpu(0)))) == [
        "FAIL     GPUs: none for ranks 4-5 on c, where torch sees 0; lower NPROC_PER_NODE, or check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES there"
    ]


def test_ranks_that_share_a_gpu() -> None:
    assert lines(diagnose.gpus(NODES, gpu_infos(r1=gpu_infos()[0]))) == [
        "FAIL     GPUs: ranks 0-1 on a share one; each needs its own LOCAL_RANK, and must see all GPUs of the node"
    ]


def test_gpus_of_two_kinds() -> None:
    old = Gpu(2, "A100", "uuid-old", 80.0, 80.0, "")
    assert lines(diagnose.gpus(NODES, gpu_infos(r2=old))) == [
        "warning  GPUs: 1 x A100, 1 x H100 on b, but 2 x H100 on the others; the slowest sets the pace, the smallest the batch"
    ]


def test_memory() -> None:
    assert lines(diagnose.memory({"a": MACHINE})) == ["ok       memory: 90.0 GB free, 50.0 GB in /dev/shm"]
    odd = machines(a=but(memory_free_gb=9.9), b=but(shm_free_gb=0.064))
    assert lines(diagnose.memory(odd)) == [
        "warning  memory: 9.9 of 100.0 GB free on a; stop what else runs there",
        "warning  memory: 0.06 GB free in /dev/shm on b; NCCL needs 1 GB: start the container with --shm-size=16g or --ipc=host",
    ]


def test_limits() -> None:
    assert lines(diagnose.limits(machines(), 32)) == ["ok       limits: 1024 open files"]
    infiniband = machines(c=but(open_files=4096, infiniband=True))
    assert lines(diagnose.limits(infiniband, 64)) == [
        "warning  limits: 1024 open files on a and b; 64 ranks may need 2048: ulimit -n 2048",
        "warning  limits: there is InfiniBand, but locked memory is limited on c: ulimit -l unlimited, or memlock in "
        "/etc/security/limits.conf",
    ]
    unlimited = machines(c=but(infiniband=True, locked_gb=None))
    assert lines(diagnose.limits(unlimited, 32)) == ["ok       limits: 1024 open files"]
    unused = but(infiniband=True, locked_gb=None, infiniband_unused="no port is active; look at ibstat")
    assert lines(diagnose.limits(machines(b=unused, c=unused), 32)) == [
        "warning  limits: NCCL would use NET/Socket (TCP) although InfiniBand is there on b and c: no port is active; look at "
        "ibstat"
    ]
    assert lines(diagnose.limits({"a": unused}, 8)) == ["ok       limits: 1024 open files"]  # a single node


def test_paths() -> None:
    assert lines(diagnose.paths(machines())) == [
        "ok       paths: model.path and data.train_files[0] can be read, the same on all nodes"
    ]
    assert lines(diagnose.paths({"a": but(paths={})})) == [
        "ok       paths: nothing to check; give model.path and data.train_files, or a training configuration"
    ]
    gone = PathFact("/m", problem="'/m': no such folder")
    odd = machines(
        b=but(paths={"model.path": gone, "data.train_files[0]": PathFact("/d.txt", 19)}),
        c=but(paths={"model.path": gone, "data.train_files[0]": PathFact("/d.txt", 20)}),
    )
    assert lines(diagnose.paths(odd)) == [
        "FAIL     paths: model.path: '/m': no such folder (on b and c)",
        "FAIL     paths: data.train_files[0]: /d.txt has 19 bytes on b, but 20 bytes on the others; copy it again, or share it",
    ]


def test_a_hub_model_that_is_not_everywhere() -> None:
    odd = machines(c=but(paths={"model.path": PathFact("org/model", here=False)}))
    assert lines(diagnose.paths(odd))[0] == (
        "warning  paths: model.path: org/model is incomplete in the hub's cache of c; every rank there would download it: "
        "run hf download org/model there first"
    )


def test_disk() -> None:
    assert lines(diagnose.disk(machines(), "/out", 50)) == ["ok       disk: 500.0 GB free at /out"]
    assert lines(diagnose.disk(machines(b=but(disk_free_gb=3.21)), "/out", 50)) == [
        "warning  disk: 3.2 GB free at /out on b, less than min_free_gb=50; checkpoints may not fit"
    ]


def test_shared_disk_of_one_node() -> None:
    assert lines(diagnose.shared("/out", {"a": []}, 10)) == ["ok       shared disk: /out can be written"]


# -- measurements -----------------------------------------------------------------------------------------------------


def test_clocks() -> None:
    assert lines(diagnose.clocks({"a": 0.0})) == []
    assert lines(diagnose.clocks({"a": 0.0, "b": -0.25, "c": 0.0})) == ["ok       clocks: within 0.250 s of a"]
    assert lines(diagnose.clocks({"a": 0.0, "b": -3.24, "c": 61.0})) == [
        "warning  clocks: b is 3.2 s behind a; logs and file times will not match: run an NTP client (chrony)",
        "warning  clocks: c is 61.0 s ahead of a; logs and file times will not match: run an NTP client (chrony)",
    ]


def test_sums() -> None:
    right = (torch.arange(10) % 7 + 1).float() * 3  # of two ranks, which contribute once and twice
    assert wrong_sum(right, 2) is None
    right[4] += 1
    problem = wrong_sum(right, 2)
    assert problem == "1 of 10 sums are wrong; the first is 16 and should be 15"
    assert lines(diagnose.sums(NODES, {0: None, 1: problem, 2: None})) == [
        f"FAIL     all-reduce: wrong on rank 1 on a: {problem}; suspect a GPU, a cable or the network's driver"
    ]
    assert lines(diagnose.sums(NODES, dict.fromkeys(range(6)))) == ["ok       all-reduce: correct on 6 ranks"]


def test_bandwidth() -> None:
    usual = {"all": 40.0, "node": 200.0, "link": 25.0}
    measured = dict.fromkeys(range(6), usual)
    assert lines(diagnose.bandwidths(NODES, measured)) == [
        "ok       bandwidth: all-reduce over all ranks 40 GB/s, inside a node 200 GB/s, from node to node 50 GB/s"
    ]
    slow = {**measured, 2: {**usual, "node": 119.0}, 4: {**usual, "link": 2.0}}
    assert lines(diagnose.bandwidths(NODES, slow))[1:] == [
        "warning  bandwidth: b has 119 GB/s inside, the median is 200; all nodes will wait",
        "warning  bandwidth: c gets 27 GB/s from b, the median is 50; all nodes will wait",
    ]
    pair = {"all": 1.5, "node": 1.6}
    assert lines(diagnose.bandwidths({"a": [0, 1]}, {0: pair, 1: pair})) == [
        "ok       bandwidth: all-reduce over all ranks 1.5 GB/s"
    ]
    assert lines(diagnose.bandwidths({"a": [0]}, {0: {}})) == []


def test_roles() -> None:
    """The rank that receives the weights last is named; the actor's ranks do not count."""
    roles = Roles({"rollout": (0, 1, 2), "inference": (3,), "actor": (4, 5)})
    assert lines(diagnose.placement(roles)) == [
        "ok       placement: rollout ranks 0-2, inference rank 3, actor ranks 4-5"
    ]
    seconds = {0: 0.05, 1: 0.05, 2: 0.0625, 3: 0.05, 4: 0.5, 5: None}
    assert lines(diagnose.roles(NODES, roles, seconds)) == [
        "ok       roles: weights from rank 4 to the 4 ranks that sample or score in 0.0625 s per GB (rank 2 on b)"
    ]
    text = table(NODES, {}, {}, {}, {}, roles).splitlines()
    assert text[0].split()[:4] == ["node", "ranks", "device", "roles"]
    assert [" ".join(line.split()[3:7]) for line in text[1:]] == [
        "rollout 0-1 - -",
        "rollout 2, inference 3",
        "actor 4-5 - -",
    ]


# -- words ------------------------------------------------------------------------------------------------------------


def test_lists() -> None:
    assert [listed(list("abc")[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert listed([str(n) for n in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert span([0, 1, 2, 5, 7, 8], ", ") == "0-2, 5, 7-8"


def test_table() -> None:
    rates = {"all": 40.0, "node": 200.0, "link": 25.0}
    ahead = {"a": 0.0, "b": -0.25, "c": 1.5}
    text = table(NODES, machines(), gpu_infos(), ahead, dict.fromkeys(range(6), rates))
    assert [line.split() for line in text.splitlines()][1:] == [
        [*f"{name} {ranks} 2 x H100 79.0 of 80.0 90.0 of 100.0 50.0 500.0 {clock} 200 50".split()]
        for name, ranks, clock in (("a", "0-1", "+0.000"), ("b", "2-3", "-0.250"), ("c", "4-5", "+1.500"))
    ]
    assert text.isascii()
    bare = table({"a": [0]}, {}, {}, {}, {})
    assert bare.splitlines()[1].split() == ["a", "0", *["-"] * 8]


# -- this machine -----------------------------------------------------------------------------------------------------


def test_a_training_configuration_is_taken_as_it_is() -> None:
    """For both kinds of training, with the same overrides."""
    for file in ("configs/flowgrpo/quickstart.yaml", "configs/flow_matching/digits.yaml"):
        cfg = load_config(CheckClusterConfig, str(ROOT / file), ["expect=2", "trainer.seed=3"])
        assert (cfg.expect, cfg.trainer.seed, cfg.data.train_files != []) == (2, 3, True)
    assert load_config(CheckClusterConfig, None, []).model.path == ""
    with pytest.raises(ConfigError, match=r"^unknown key trainer.sead; did you mean trainer.seed\?$"):
        load_config(CheckClusterConfig, None, ["trainer.sead=1"])


def test_memory_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has vm_stat instead, and no /dev/shm."""
    page = "Mach Virtual Memory Statistics: (page size of 16384 bytes)"
    (tmp_path / "bin").mkdir()
    write_tool(
        tmp_path, "vm_stat", f"printf '%s\\n' '{page}' 'Pages free:   100.' 'Pages active: 7.' 'Pages inactive: 22.'"
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    total, free = facts.main_memory(tmp_path / "none")
    assert free == 122 * 16384 / 1e9
    assert total == pytest.approx(facts.main_memory()[0]) and 0 < facts.main_memory()[1] < total
    assert lines(diagnose.memory({"a": but(shm_free_gb=None)})) == ["ok       memory: 90.0 GB free"]


def test_this_machine(tmp_path: Path, sd3_folder: Path) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("a cat\n")
    reward = f"reward.functions=[{{name: ocr}}, {{path: '{tmp_path}/reward.py:score'}}]"
    cfg = load_config(
        CheckClusterConfig,
        None,
        [f"model.path={sd3_folder}", f"data.train_files=[{data}]", f"trainer.output_dir={tmp_path}/a/b", reward],
    )
    machine = facts.look_at_machine(cfg)
    assert machine.versions["torch"] == torch.__version__
    assert machine.settings["trainer.output_dir"] == f"{tmp_path}/a/b"
    assert 0 < machine.memory_free_gb < machine.memory_gb
    assert machine.disk_free_gb > 0
    size = sum(file.stat().st_size for file in sd3_folder.rglob("*") if file.is_file())
    assert machine.paths == {
        "model.path": PathFact(str(sd3_folder), size),
        "data.train_files[0]": PathFact(str(data), 6),
        "reward.functions[1].path": PathFact(
            f"{tmp_path}/reward.py", problem=f"{tmp_path}/reward.py: no such file or directory"
        ),
    }
    assert Machine.of(dataclasses.asdict(machine)) == machine
    assert not (tmp_path / "a").exists()


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    assert facts.look_at_path("model.path", f"{tmp_path}/none") == PathFact(
        f"{tmp_path}/none", problem=f"'{tmp_path}/none': no such folder"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part").write_text("12345")
    assert facts.look_at_path("data.val_files[0]", f"{tmp_path}/data:train") == PathFact(f"{tmp_path}/data:train", 5)
    below = f"{tmp_path}/data/part/x.jsonl"
    assert facts.look_at_path("data.val_files[0]", below).problem == f"{below}: not a directory"


def test_who_holds_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a script that imitates nvidia-smi."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\n[ "$2" = GPU-1234 ] && printf "77, /usr/bin/python3, 66000 MiB\\n{os.getpid()}, python, 300 MiB\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts.gpu_users("1234") == "python3 (process 77, 66000 MiB)"
    assert facts.gpu_users("other") == ""
