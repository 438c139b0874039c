"""tasks/check_cluster.py, as a user runs it before a training job: its output and exit status."""

import re
import socket
from pathlib import Path

import pytest

from tests.helpers.jobs import base_overrides
from tests.helpers.ranks import two_nodes
from tests.helpers.tasks import run_task

TASK = "tasks/check_cluster.py"
HOST = socket.gethostname()
CPU = {"CUDA_VISIBLE_DEVICES": ""}
NUMBER = r"\d+(\.\d+)?(e-\d+)?"


def job(model: Path, folder: Path) -> list[str]:
    """The arguments of a tiny training job, which the check accepts unchanged."""
    (folder / "prompts.txt").write_text("a cat\n")
    return [*base_overrides(model, folder), "min_free_gb=0"]


def assert_lines(text: str, patterns: list[str]) -> None:
    lines = text.splitlines()
    assert len(lines) == len(patterns), text
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not like {pattern!r}"


def test_a_machine_that_is_fit(sd3_folder: Path, tmp_path: Path) -> None:
    done = run_task([TASK, *job(sd3_folder, tmp_path), "expect=2"], nproc=2, env=CPU)
    assert done.returncode == 0, done.stderr
    assert_lines(
        done.stdout,
        [
            "node +ranks +device +GPU GB free +RAM GB free +/dev/shm GB +disk GB free +clock s +GB/s inside +GB/s from node before",
            rf"{HOST} +0-1 +cpu +- +{NUMBER} of {NUMBER} +{NUMBER} +{NUMBER} +\+0.000 +{NUMBER} +-",
            "ok       ranks: 2 on 1 node",
            r"ok       versions: phalanx \S+ \(source [0-9a-f]{6}\), python 3\S+, torch 2\S+, .*diffusers \S+, transformers .*",
            r"ok       configuration: \d+ keys",
            "ok       GPUs: none; all ranks run on CPUs",
            f"(ok|warning) +memory: {NUMBER} .*",
            "(ok|warning) +limits: .*",
            r"ok       paths: model.path, data.train_files\[0\] and reward.functions\[0\].path can be read",
            f"ok       disk: {NUMBER} GB free at {tmp_path}/out",
            f"ok       shared disk: {tmp_path}/out can be written",
            "ok       all-reduce: correct on 2 ranks",
            f"ok       bandwidth: all-reduce over all ranks {NUMBER} GB/s",
        ],
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["prompts.txt"]


def test_a_job_that_would_fail(sd3_folder: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    done = run_task([TASK, *job(sd3_folder, tmp_path), f"model.path={gone}", "expect=4"], nproc=2, env=CPU)
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("FAIL")] == [
        f"FAIL     ranks: 2 came, but expect=4: 2 on {HOST}; check NNODES and NPROC_PER_NODE on every node",
        f"FAIL     paths: model.path: '{gone}': no such folder (on {HOST})",
    ]
    assert "error: training would fail here; to fix: ranks and paths\n" in done.stderr


@pytest.mark.full
def test_two_nodes(sd3_folder: Path, tmp_path: Path) -> None:
    first, second = two_nodes([TASK, *job(sd3_folder, tmp_path), "expect=4"], nproc=2, env=CPU)
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr + second.stderr
    lines = first.stdout.splitlines()
    assert [" ".join(line.split()[:5]) for line in lines[1:3]] == [
        f"{HOST} (node 0) 0-1 cpu",
        f"{HOST} (node 1) 2-3 cpu",
    ]
    assert lines[3] == "ok       ranks: 4 on 2 nodes, 2 on each"
    assert f"ok       shared disk: {tmp_path}/out can be written and is the same on all nodes" in lines
    assert any(re.fullmatch(rf"ok       clocks: within 0\.\d+ s of {HOST} \(node 0\)", line) for line in lines)
    assert re.fullmatch(
        f"ok       bandwidth: all-reduce over all ranks {NUMBER} GB/s, inside a node {NUMBER} GB/s, "
        f"from node to node {NUMBER} GB/s",
        next(line for line in lines if line.startswith("ok       bandwidth")),
    )
