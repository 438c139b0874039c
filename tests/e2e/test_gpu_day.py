"""benchmarks/gpu_day.py on a CPU at tiny shapes, so that no minute on a GPU is lost to its mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import ROOT, launch_environment, run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_day
import gpu_fast
import gpu_right
import gpu_tiny
import step
from gpu_lines import Line, Stage

from phalanx.distributed.launch_env import Launch
from phalanx.run.kind import kind_of

RECORDED = json.loads(gpu_tiny.RECORDED.read_text())["tiny"]
# packages of the tests that an image with torch, transformers and `make gpu-wheels` lacks
MISSING = ("rich", "rapidfuzz", "onnxruntime", "rapidocr", "fastapi", "uvicorn", "wandb", "antlr4", "jsonschema")
START = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing}))
sys.argv = ["benchmarks/gpu_day.py", *{args}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def step_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    return list(gpu_tiny.step_of(kind, "cpu", folder))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=() if name in ("sd3 lora", "lm packed", "blocks") else pytest.mark.full, id=name)
        for name in gpu_tiny.KINDS
    ],
)
def test_the_recorded_numbers_are_those_of_this_cpu(kind: str, tmp_path: Path) -> None:
    """What a GPU is compared with. `python benchmarks/gpu_day.py --record` writes them anew after a change of numerics."""
    [[row]] = run_ranks(step_of, 1, kind, tmp_path, init=False)
    line = gpu_tiny.compared(kind, {"cpu": row}, RECORDED[kind])
    assert line.good, line
    for key in row.keys() & gpu_tiny.FLOORS.keys():
        changed = {**RECORDED[kind], key: 1.01 * RECORDED[kind][key] + 0.01}
        assert gpu_tiny.compared(kind, {"cpu": row}, changed).good is False, key


def test_a_gpu_that_differs_fails() -> None:
    row, expected = RECORDED["lm packed"], RECORDED["lm packed"]
    far, inexact = {**row, "actor/grad_norm": 1.03 * row["actor/grad_norm"]}, {**row, gpu_tiny.RATIO: 1e-4}
    for other, good in ((row, True), (far, False), (inexact, False)):
        assert gpu_tiny.compared("lm packed", {"cpu": row, "cuda": other}, expected, "cuda").good is good
    lost = gpu_tiny.compared("lm packed", {"cpu": row, "cuda": None}, expected, "cuda")
    assert lost.good is False and lost.note == "no step on cuda: see lm_packed-cuda.log"


def sleeper() -> None:
    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)


def hangs() -> Iterator[Line]:
    yield Line("before it hangs", True)
    sleeper()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def dies() -> Iterator[Line]:
    yield Line("before it dies", True)
    os.abort()


def raises() -> Iterator[Line]:
    yield Line("before it raises", True, 3.0, "s")
    raise ValueError("no such thing\nat all")


def leaves_children() -> Iterator[Line]:
    sleeper()  # in a session of its own
    if os.fork() == 0:  # holds the stage's pipe
        time.sleep(600)
    yield Line("after it", True)


def run(stages: dict[str, Callable[[], Iterator[Line]]], folder: Path, *args: str, limit: float = 60.0) -> Any:
    """The exit status and the lines of these stages, run in a process of its own."""
    folder.mkdir(exist_ok=True)
    known = {name: Stage("right", stage, 1, limit if name != "hangs" else 1.5) for name, stage in stages.items()}
    status, out = output(known, folder, *args)
    rows = [json.loads(text) for text in (folder / "results.jsonl").read_text().splitlines()]
    return status, {(row["stage"], row["name"]): row for row in rows}, out


def output(known: dict[str, Stage], folder: Path, *args: str) -> tuple[int, str]:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(folder / "out", os.O_WRONLY | os.O_CREAT), 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # in place of pytest's
        gpu_day.BEGAN = time.time()  # these tests may run long after the import
        os._exit(gpu_day.main(["--out", str(folder), *args], known))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (folder / "out").read_text()


def test_a_stage_that_hangs_dies_raises_or_leaves_children_does_not_end_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    stages = {f.__name__: f for f in (hangs, dies, raises, leaves_children)}
    status, lines, out = run(stages, tmp_path)
    assert status == 1
    bad = {key: row["value"] for key, row in lines.items() if row["good"] is False}
    assert bad == {
        ("hangs", "ended at its limit"): 1.5,
        ("dies", "exit status, or the signal"): -signal.SIGABRT,
        ("raises", "the stage"): None,
    }
    for name in ("before it hangs", "before it dies", "before it raises", "after it"):
        assert [row["good"] for (_, title), row in lines.items() if title == name] == [True]
    assert lines["raises", "the stage"]["note"] == "ValueError: no such thing"
    assert "raises| at all" in out  # the end of its log
    killed = {stage: row["note"] for (stage, name), row in lines.items() if name == "took"}
    assert killed["leaves_children"] == "2 processes that it left were killed"
    assert killed["hangs"] == "1 processes that it left were killed" and killed["dies"] == ""
    assert time.monotonic() - start < 60
    assert "4 lines passed, 3 failed (hangs: ended at its limit; dies: exit status, or the signal" in out


def test_a_stage_that_does_not_fit_the_budget_is_skipped_and_the_output_is_bounded(tmp_path: Path) -> None:
    def many() -> Iterator[Line]:
        for i in range(400):
            yield Line(f"line {i}", i % 50 != 0, i)

    status, lines, out = run({"many": many}, tmp_path)
    assert status == 1 and len(lines) == 401 and len(out) < gpu_day.MOST
    assert "line 10 " in out and "line 399 " not in out and "FAIL many      line 150 " in out
    status, lines, out = run({"many": many}, tmp_path / "again", "--budget", "0.1")
    assert status == 1 and list(lines) == [("many", "skipped")] and "it takes about 1" in out


def test_a_full_disk_loses_no_line_of_the_output(tmp_path: Path) -> None:
    def two() -> Iterator[Line]:
        yield Line("first", True)
        yield Line("second", True)

    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    status, out = output({"two": Stage("right", two, 1, 60)}, tmp_path)
    assert status == 0 and "second" in out and "2 lines passed, 0 failed, 0 skipped" in out
    assert "results.jsonl lacks lines: OSError: [Errno 28] No space left on device" in out


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        gpu_day.main(["--out", str(tmp_path / "file" / "day")], {})
    assert ended.value.code == 2
    assert "error: --out: [Errno 20] Not a directory: " in capsys.readouterr().err


def test_the_jobs_of_a_gpu_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of a GPU; their batches, for example, have to divide."""
    for name, value in {"ON_CPU": False, "PROMPTS": 64, "EACH": 8, "RESPONSE": 256, "ROWS": 32}.items():
        monkeypatch.setattr(gpu_fast, name, value)
    words = [stage.run.args[1] for stage in gpu_fast.stages().values() if isinstance(stage.run, partial)]
    words += [gpu_fast.flow_words(config, 4) for config in (gpu_fast.QWEN, gpu_fast.SD3)]
    words.append(gpu_right.two_layers("model.use_remove_padding=true"))
    assert len(words) == 14
    for some in words:
        args, cfg = step.parse(some)
        assert kind_of(cfg).check(Launch.from_env()).samples >= 16, args.shapes


def test_an_unknown_stage_is_told() -> None:
    with pytest.raises(SystemExit):
        gpu_day.main(["--only", "nothing"])


def day(folder: Path, *args: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of a command, with an empty PATH and without the packages of the tests."""
    words = ["--out", str(folder), *args]
    env = launch_environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": "/empty"})
    code = START.format(missing=MISSING, args=words)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(text) for text in (folder / "results.jsonl").read_text().splitlines()]
    assert not [row for row in rows if row["good"] is False]
    assert {len(row["more"]["row"]) for row in rows if "row" in row["more"]} == {len(gpu_fast.COLUMNS)}
    assert len(done.stdout) < gpu_day.MOST and "| Qwen2.5-0.5B | " in done.stdout
    return {(row["stage"], row["name"].strip()): row for row in rows}


@pytest.mark.full
def test_the_stages_run_on_a_cpu(tmp_path: Path) -> None:
    stages = ("facts", "attention", "packed", "numerics", "fsdp", "qwen60", "lm05", "trl", "lm05c", "transfers")
    lines = day(tmp_path, "--only", *stages)
    passed = [name for (_, name), row in lines.items() if row["good"]]
    assert {"flash, no mask", "packed by sdpa, off from padded", "TRL, Qwen2.5-0.5B"} <= set(passed)
    ratios = [row["value"] for (_, name), row in lines.items() if "ratio - 1" in name and row["good"]]
    assert len(ratios) == 6 and not any(ratios)
    off = {name: row["value"] for (stage, name), row in lines.items() if stage == "numerics" and row["good"]}
    assert off.pop("sampler off from trainer, Qwen-Image") == 0 and len(off) == 2 and min(off.values()) > 0
    assert lines["fsdp", "FSDP2, both offloads, resumed: other tensors"]["good"]
    step = lines["lm05", "Qwen2.5-0.5B"]["more"]["step"]
    assert step["responses"] == 8 and step["planned_gb"] > 0 and step["ms_per_pass"] > 0
    for name in ("cuDNN, mask", "varlen_attn, 65,400 packed tokens"):
        assert lines["attention", name]["good"] is None


@pytest.mark.full
@pytest.mark.long
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    lines = day(tmp_path, "--budget", "500")
    assert {stage for stage, _ in lines} == set(gpu_day.STAGES)
    assert sum("ratio - 1" in name and row["value"] == 0 for (_, name), row in lines.items()) == 11
    assert lines["kill", "2 rank(s), one killed: the job ends"]["good"]
    assert lines["compile", "new ones in 4 steps of other lengths"]["value"] == 0
