"""tasks/serve_reward.py, started as by its users, and training jobs that request scores from it."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import torch

from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.zoo.rewards.http import Http, ServerError
from tests.helpers.checks import mistakes, wait_for
from tests.helpers.jobs import base_overrides, fit, tiny_config
from tests.helpers.ranks import LIMIT_S, ROOT, end_with_parent, free_port, launch_environment, run_ranks
from tests.helpers.tasks import run_task

TASK = "tasks/serve_reward.py"
JPEG = "reward.functions=[{name: jpeg_incompressibility}]"


@contextmanager
def started(command: Sequence[str], **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server that has printed where it listens, and that line."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=launch_environment({"NPROC_PER_NODE": "1", **env}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=LIMIT_S)


def python(*arguments: str) -> list[str]:
    return [sys.executable, TASK, *arguments]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of jpeg_incompressibility in a separate process."""
    with started(python(JPEG, "port=0", "reward.num_workers=2")) as (_, line):
        yield line.split(": ")[1]


@pytest.mark.quick("python-SIGINT")
@pytest.mark.parametrize(
    ("command", "number", "status"),
    [(python(JPEG, "port=0"), signal.SIGINT, 130), (["sh", "train.sh", TASK, JPEG, "port=0"], signal.SIGTERM, 143)],
    ids=["python-SIGINT", "train.sh-SIGTERM"],
)
def test_it_serves_until_it_is_told_to_stop(command: list[str], number: signal.Signals, status: int) -> None:
    with started(command, SCORER_TOKEN="secret-word") as (process, line):
        head, url = line.split(": ")
        assert head == "jpeg_incompressibility on cpu, without a token"
        assert Http(url)(torch.zeros(1, 3, 8, 8), ["a"], [{}]) == [pytest.approx(0.6, abs=0.3)]
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert f"stopped by {number.name}\n" in err
    assert "secret-word" not in out + err
    assert "serve_reward.py" not in err  # no traceback of ours; torchrun prints its own
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


SLOW = """
import time
from pathlib import Path

def slow(images, prompts, metadata):
    here = Path(__file__).parent
    (here / "begun").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    return [3]
"""


def refuses(url: str) -> bool:
    """Whether the address refuses connections."""
    try:
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_requests_under_way_are_answered_first(tmp_path: Path) -> None:
    """A later request is refused."""
    (tmp_path / "slow.py").write_text(SLOW)
    with started(python(f"reward.functions=[{{path: '{tmp_path}/slow.py:slow'}}]", "port=0")) as (process, line):
        asks = Http(line.split(": ")[1], retries=0)
        arguments = (torch.zeros(1, 3, 8, 8), ["a"], [{}])
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(asks, *arguments)
            wait_for((tmp_path / "begun").exists)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses(line.split(": ")[1]))
            with pytest.raises(ServerError, match="no connection"):
                asks(*arguments)
            (tmp_path / "go").touch()
            assert asked.result() == [3.0]
        assert process.wait(timeout=LIMIT_S) == 143


def peak_mb(pid: int) -> float:
    """The peak memory of a process in MB."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


@pytest.mark.long
def test_memory_has_a_bound() -> None:
    """With small files of large pictures from 8 clients at once, which would take 1,300 MB if decoded concurrently."""
    budget = 200
    with started(python(JPEG, "port=0", f"max_memory_mb={budget}")) as (process, line):
        asks = Http(line.split(": ")[1], retries=0, encoding="multipart")
        asks(torch.zeros(1, 3, 8, 8), ["a"], [{}])
        before = peak_mb(process.pid)
        large = torch.zeros(1, 3, 1, 1).expand(8, 3, 2048, 2048)
        with pytest.raises(ServerError, match=r"8 images of 2048 x 2048 take 1309 MB, more than max_memory_mb=200"):
            asks(large, ["a"] * 8, [{}] * 8)
        with ThreadPoolExecutor(8) as pool:  # 164 MB each
            answers = list(pool.map(lambda _: asks(large[:1], ["a"], [{}]), range(8)))
        assert len({tuple(scores) for scores in answers}) == 1
        assert peak_mb(process.pid) - before < 3 * budget  # the allocator keeps freed memory, per thread


def bare(name: str) -> str:
    """Code for a process in which a package is not installed."""
    return f"import runpy, sys; sys.modules[{name!r}] = None; sys.argv = ['x', 'port=0']; runpy.run_path({TASK!r}, run_name='__main__')"


@pytest.mark.quick("key")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            python(JPEG, "host=0.0.0.0", "port=0"),
            "host=0.0.0.0 can be reached from other machines, and there is no token; give token_env, or allow_open=true "
            "if everybody may use the server",
        ),
        (python("prot=1"), "unknown key prot; did you mean port?"),
        ([sys.executable, "-c", bare("fastapi")], "the package fastapi is not installed; pip install 'phalanx[serve]'"),
        (
            [sys.executable, "-c", bare("python_multipart")],
            "the package python_multipart is not installed; pip install 'phalanx[serve]'",
        ),
    ],
    ids=["open", "key", "fastapi", "multipart"],
)
def test_it_does_not_start(command: list[str], message: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout, mistakes(done.stderr)) == (2, "", f"error: {message}\n")


# --- training


def trained(folder: Path, model: Path, functions: str, ranks: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a tiny job's metrics.jsonl without times and memory, and its weights."""
    cfg = tiny_config(model, folder, f"reward.functions={functions}", f"data.val_files=[{folder / 'prompts.txt'}]")
    weights = run_ranks(fit, ranks, cfg, timeout=200)[0]
    rows = read_metrics(folder / "out" / METRICS_FILE)
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows], weights


@pytest.mark.full
@pytest.mark.seldom("multipart")
@pytest.mark.parametrize("encoding", ["json", "multipart"])
def test_a_job_learns_the_same_from_a_server(server: str, encoding: str, sd3_folder: Path, tmp_path: Path) -> None:
    """On two ranks: all numbers of metrics.jsonl except times, and the weights, are bit-equal."""
    name = "jpeg_incompressibility"
    kwargs = f"{{url: '{server}', encoding: {encoding}, batch_size: 3, concurrency: 2}}"
    local, weights = trained(tmp_path / "local", sd3_folder, f"[{{name: {name}}}]", 2)
    remote, others = trained(
        tmp_path / "remote",
        sd3_folder,
        f"[{{name: {name}, path: 'phalanx.zoo.rewards.http:Http', kwargs: {kwargs}}}]",
        2,
    )
    assert json.dumps(remote) == json.dumps(local)
    assert local[-1]["step"] == 2 and local[-1]["reward/std"] > 0 and "val/prompts/reward/mean" in local[0]
    assert all(torch.equal(weights[key], others[key]) for key in weights)


def test_a_dead_server_ends_a_job_of_two_ranks(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text('the "alpha"\na "beta"\na "gamma"\nthe "delta"\n')
    url = f"http://127.0.0.1:{free_port()}/score"
    functions = f"reward.functions=[{{name: http, kwargs: {{url: '{url}', retries: 1, backoff_s: 0.1}}}}]"
    done = run_task(["tasks/train_flowgrpo.py", *base_overrides(sd3_folder, tmp_path), functions], nproc=2)
    assert done.returncode == 1
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error")]
    prompts = PromptStream(load_prompts([str(tmp_path / "prompts.txt")], ""), 4, seed=0).batch(0)
    assert said in [  # from the rank that was first
        [
            f"error: rank {rank}: reward 'http' raised ServerError: {url}: no connection (All connection attempts "
            f'failed) (try 2 of 2) on the prompt "{prompts[2 * rank].text}"'
        ]
        for rank in range(2)
    ]


@pytest.mark.full
def test_a_job_goes_on_without_its_server_where_that_is_configured(sd3_folder: Path, tmp_path: Path) -> None:
    """Each rank reports the missing scores, and the job still learns from its other reward."""
    (tmp_path / "prompts.txt").write_text('the "alpha"\na "beta"\na "gamma"\nthe "delta"\n')
    url = f"http://127.0.0.1:{free_port()}/score"
    kwargs = f"{{url: '{url}', retries: 0, on_error: value, error_value: 0.25}}"
    functions = f"reward.functions=[{{name: http, kwargs: {kwargs}}}, {{name: jpeg_incompressibility}}]"
    arguments = [*base_overrides(sd3_folder, tmp_path), functions, "trainer.total_training_steps=1"]
    done = run_task(["tasks/train_flowgrpo.py", *arguments], nproc=2)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "error_value=0.25 instead of a score" in line]
    assert {line.split(" on ")[0] for line in told} == {"ERROR: rank 0", "ERROR: rank 1"}
    (row,) = read_metrics(tmp_path / "out" / METRICS_FILE)
    assert row["reward/http"] == 0.25 and row["reward/http_degraded"] == 1
    assert row["reward/std"] > 0


@pytest.mark.full
def test_the_share_of_images_without_a_score_is_logged(sd3_folder: Path, tmp_path: Path) -> None:
    """On two ranks with different shares; the held-out prompts are padded with the last one for the second rank."""
    (tmp_path / "picky.py").write_text(
        "def picky(images, prompts, metadata):\n    return [{'b': 1.0}[text[-2]] for text in prompts]\n"
    )
    (tmp_path / "val.txt").write_text('the "b"\nthe "b"\nthe "x"\n')
    with started(python(f"reward.functions=[{{path: '{tmp_path}/picky.py:picky'}}]", "port=0")) as (_, line):
        kwargs = f"{{url: '{line.split(': ')[1]}', retries: 0, batch_size: 1, on_error: value, error_value: 0.5}}"
        functions = f"[{{name: http, kwargs: {kwargs}}}, {{name: jpeg_incompressibility}}]"
        cfg = tiny_config(
            sd3_folder,
            tmp_path,
            f"reward.functions={functions}",
            f"data.val_files=[{tmp_path / 'val.txt'}]",
            "reward.num_workers=2",
            "trainer.total_training_steps=1",
        )
        (tmp_path / "prompts.txt").write_text('the "b"\na "b"\na "x"\nmy "b"\n')
        run_ranks(fit, 2, cfg, timeout=200)
    before, row = read_metrics(tmp_path / "out" / METRICS_FILE)
    assert (row["reward/http"], row["reward/http_degraded"]) == (0.875, 0.25)
    assert before["val/val/reward/http_degraded"] == pytest.approx(1 / 3)
    assert before["val/val/reward/http"] == pytest.approx(2.5 / 3)
    assert not any(key.startswith("reward/jpeg_incompressibility_") for key in row)
