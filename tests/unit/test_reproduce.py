"""phalanx diff, rerun and verify: on runs of the tiny language model, and on folders that are made by hand."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.run.provenance import BLOCK, BLOCKS, digest_inputs, digest_path, read_provenance
from phalanx.tools.reproduce import rerun
from phalanx.tools.reproduce.differences import compare_runs
from phalanx.tools.reproduce.differences import main as compare
from phalanx.tools.reproduce.rows import write_row
from phalanx.tools.reproduce.tensors import tensor_distance
from tests.helpers.ranks import ROOT
from tests.helpers.tasks import run_task

STEPS = 2
QUICKSTART = ["tasks/train_grpo.py", "configs/grpo/quickstart.yaml", f"trainer.total_training_steps={STEPS}"]
QUICKSTART += ["model.cpu_linear=torch", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[]"]
QUICKSTART += [
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=8",
]


def train(folder: Path, *overrides: str, nproc: int = 1) -> Path:
    done = run_task([*QUICKSTART, f"trainer.output_dir={folder}", *overrides], nproc=nproc)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs: `one`, its repetition `again`, `two` on two ranks, and `other` with another seed."""
    root = tmp_path_factory.mktemp("runs")
    train(root / "one")
    train(root / "again")
    train(root / "two", nproc=2)
    train(root / "other", "trainer.seed=1")
    return root


def test_equal_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = compare_runs(runs / "one", runs / "again")
    assert result.equal
    assert result.tensors is not None
    assert len(result.tensors) > 50
    assert (result.steps, result.checkpoint, result.settings) == (STEPS, STEPS, [])
    assert compare([str(runs / "one"), str(runs / "again")]) == 0
    assert capsys.readouterr().out.startswith(f"equal to the last bit ({STEPS} steps, ")


def test_a_checkpoint_that_was_not_renamed_is_none(runs: Path, tmp_path: Path) -> None:
    """The job ended between its last file and the rename."""
    for name in ("one", "again"):
        shutil.copytree(runs / name, tmp_path / name)
        checkpoints = tmp_path / name / "checkpoints"
        shutil.copytree(checkpoints / f"step_{STEPS:06d}", checkpoints / f"step_{STEPS + 1:06d}.tmp")
    assert compare_runs(tmp_path / "one", tmp_path / "again").checkpoint == STEPS


def test_other_ranks_are_within_rounding(runs: Path) -> None:
    result = compare_runs(runs / "one", runs / "two")
    assert result.settings == ["ranks:", "  world: 1 and 2"]
    assert result.parted is None
    assert result.verdict().startswith(("equal within rounding", "equal to the last bit"))
    assert 0 <= max((result.tensors or {}).values()) < 1e-3


@pytest.mark.full
def test_other_instructions_are_within_rounding(runs: Path, tmp_path: Path) -> None:
    """As on an older processor: torch and its libraries are limited when a process starts, which no fork can be."""
    older = "DEFAULT" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "AVX2"
    limits = {"ATEN_CPU_CAPABILITY": older.lower(), "MKL_ENABLE_INSTRUCTIONS": older, "ONEDNN_MAX_CPU_ISA": older}
    env = os.environ | limits | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *QUICKSTART, f"trainer.output_dir={tmp_path / 'older'}"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = compare_runs(runs / "one", tmp_path / "older")
    assert f"  instructions: {torch.backends.cpu.get_cpu_capability()} and {older}" in result.settings
    assert result.first is not None, "no kernel was another"
    assert result.within_rounding
    again = rerun.prepare_rerun(tmp_path / "older", tmp_path / "x", [])
    assert f"ATEN_CPU_CAPABILITY {older.lower()} there, not set here" in again.different


def test_another_seed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = compare_runs(runs / "one", runs / "other")
    assert result.settings == ["configuration:", "  trainer.seed: 0 and 1"]
    assert result.parted is not None
    assert result.parted[0] == 1
    assert compare([str(runs / "one"), str(runs / "other")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"different from step 1 ({STEPS} steps")
    assert f"; the first layer that differs at step {STEPS} is model.lm.model.embed_tokens, by " in said[-1]
    # the first tensor in the order of the model, not of the checkpoint's files
    assert "first model.lm.model.embed_tokens.weight: " in said[-3]


def test_what_is_written_at_the_start(runs: Path) -> None:
    (entry,) = read_provenance(runs / "two")
    assert (entry["step"], entry["task"], entry["ranks"]["world"]) == (0, "tasks/train_grpo.py", 2)
    assert entry["versions"]["torch"] == torch.__version__
    assert entry["inputs"]["data.train_files[0]"]["path"] == "assets/words/train.jsonl"
    assert entry["inputs"]["model.path"]["path"] == "assets/words/base"


def test_a_resumed_run_keeps_its_first_start(runs: Path) -> None:
    train(runs / "again", "trainer.total_training_steps=3")
    assert [entry["step"] for entry in read_provenance(runs / "again")] == [0, STEPS]
    again = rerun.prepare_rerun(runs / "again", runs / "x", [])
    assert again.different == [f"the run was resumed after step {STEPS}"]


# -- a run again -------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Run tasks in forks, as `start_again` would by train.sh; returns the words of the last one."""
    seen: list[str] = []

    def start(again: rerun.Rerun) -> int:
        seen[:] = again.words
        return run_task(
            [str(again.task), *again.words], nproc=int(os.environ.get("NPROC_PER_NODE", again.ranks))
        ).returncode

    monkeypatch.setattr(rerun, "start_again", start)
    return lambda: seen


def test_verify(
    runs: Path, launched: Callable[[], list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert rerun.main("verify", [str(runs / "one"), f"trainer.output_dir={tmp_path / 'v'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("equal to the last bit")
    # with other weights in the folder of the run, the same command says where they differ
    assert rerun.main("verify", [str(runs / "other"), f"trainer.output_dir={tmp_path / 'w'}", "trainer.seed=0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("different from step 1")


def test_rerun_refuses_what_is_different(
    runs: Path, launched: Callable[[], list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (copy / name).write_bytes((runs / "one" / name).read_bytes())

    def refused(change: Callable[[Any], None], *words: str) -> str:
        entries = read_provenance(runs / "one")
        change(entries[0])
        (copy / "provenance.json").write_text(json.dumps(entries))
        assert rerun.main("rerun", [str(copy), *words]) == 2
        assert not launched()
        return capsys.readouterr().err

    def newer(entry: Any) -> None:
        entry["versions"]["torch"] = "1.0"

    assert f"torch 1.0 there, {torch.__version__} here; --anyway runs it nevertheless" in refused(newer)

    def edited(entry: Any) -> None:
        entry["inputs"]["data.train_files[0]"]["sha256"] = "0" * 64

    assert "data.train_files[0] has other contents (assets/words/train.jsonl)" in refused(edited)

    def elsewhere(entry: Any) -> None:
        entry["task"] = str(tmp_path / "mine.py")

    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    assert "is not one of Phalanx" in refused(elsewhere)
    assert "is not one of Phalanx" in refused(lambda entry: entry.update(task="tasks/../src/phalanx/garbage.py"))
    assert "no provenance.json" in refused(lambda entry: entry.update(ranks="two"))
    config = (copy / "config.yaml").read_text()
    for key, value in (("    path: null", "    path: mine.py:score"), ("\n  name: grpo", "\n  name: mine.algorithm")):
        (copy / "config.yaml").write_text(config.replace(key, value, 1))
        assert "would run code" in refused(lambda entry: None)
    (copy / "config.yaml").write_text(config.replace("assets/words/train.jsonl", "gone.jsonl"))
    gone = refused(lambda entry: entry["inputs"]["data.train_files[0]"].update(path="gone.jsonl"))
    assert gone == (
        "error: data.train_files[0]: gone.jsonl of the run is missing here; data.train_files[0]=PATH names another "
        "place\n"
    )
    assert "is the run itself; expected another folder" in refused(lambda entry: None, f"trainer.output_dir={copy}/.")
    assert "no config.yaml" in refused(lambda entry: (copy / "config.yaml").unlink())


def test_what_has_moved_is_given_or_found(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of the command line takes the place of the run's; the folder in which the run was started is not needed."""
    run = tmp_path / "run"
    shutil.copytree(runs / "one", run)
    config, (entry,) = (run / "config.yaml").read_text(), read_provenance(run)
    (run / "config.yaml").write_text(config.replace("assets/words/train.jsonl", "mine/train.jsonl"))
    entry["inputs"]["data.train_files[0]"]["path"] = str(tmp_path / "before" / "train.jsonl")
    (run / "provenance.json").write_text(json.dumps([entry]))
    here = tmp_path / "here.jsonl"
    shutil.copy(ROOT / "assets/words/train.jsonl", here)
    for key in (f"data.train_files[0]={here}", f"data.train_files=[{here}]"):
        again = rerun.prepare_rerun(run, tmp_path / "x", [key])
        assert (again.different, again.words[-1]) == ([], key)
    with here.open("a") as file:
        file.write("\n")
    (line,) = rerun.prepare_rerun(run, tmp_path / "x", [f"data.train_files[0]={here}"]).different
    assert line == f"data.train_files[0] has other contents ({here})"
    # a file of the same name in another working folder is not that of the run
    for folder, lines in (("before", ""), ("elsewhere/mine", "other")):
        (tmp_path / folder).mkdir(parents=True)
        content = (ROOT / "assets/words/train.jsonl").read_text()
        (tmp_path / folder / "train.jsonl").write_text(content + lines)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = rerun.prepare_rerun(run, tmp_path / "x", [])
    assert again.different == []
    assert f"data.train_files[0]={tmp_path / 'before' / 'train.jsonl'}" in again.words


def test_another_machine_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    monkeypatch.setenv("NNODES", "2")
    assert rerun.prepare_rerun(runs / "two", tmp_path / "x", []).different == ["2 ranks there, 6 here"]
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    again = rerun.prepare_rerun(runs / "two", tmp_path / "x", [])
    assert (again.different, len(again.words)) == ([], 3)
    monkeypatch.setenv("NNODES", "1")
    config = runs / "two" / "config.yaml"
    shutil.copytree(runs / "two", tmp_path / "sharded")
    (tmp_path / "sharded" / "config.yaml").write_text(config.read_text().replace("fsdp_size: 1", "fsdp_size: 2"))
    assert "parallel.fsdp_size=null" in rerun.prepare_rerun(tmp_path / "sharded", tmp_path / "x", []).words
    monkeypatch.delenv("NPROC_PER_NODE")
    assert len(rerun.prepare_rerun(tmp_path / "sharded", tmp_path / "x", []).words) == 3
    (entry,) = read_provenance(runs / "two")
    shutil.copytree(runs / "two", tmp_path / "two")
    entry["processor"]["instructions"] = "AVX9"
    (tmp_path / "two" / "provenance.json").write_text(json.dumps([entry]))
    (line,) = rerun.prepare_rerun(tmp_path / "two", tmp_path / "x", []).different
    assert line.startswith("the processor's instructions AVX9 there, ")


@pytest.mark.full
def test_the_oldest_checkpoint_that_differs_names_the_layer(runs: Path, tmp_path: Path) -> None:
    """Later ones differ in all layers. Runs without a checkpoint in common say so."""
    pair = tmp_path / "a", tmp_path / "b"
    train(pair[0], "trainer.save_freq=1")
    train(pair[1], "trainer.save_freq=1", "optim.lr_warmup_steps=2")
    result = compare_runs(*pair)
    assert (result.checkpoint, result.layer and result.layer[:2]) == (STEPS, (1, "model.lm.model.embed_tokens"))
    shutil.rmtree(pair[0] / "checkpoints" / "step_000001")
    assert (compare_runs(*pair).layer or (0,))[0] == STEPS
    for run in pair:  # of a longer run in the same folder, before this one
        shutil.copytree(pair[0] / "checkpoints" / "step_000002", run / "checkpoints" / "step_000009")
    assert compare_runs(*pair).checkpoint == STEPS
    shutil.rmtree(pair[0] / "checkpoints" / "step_000009")
    shutil.rmtree(pair[0] / "checkpoints")
    result = compare_runs(*pair)
    assert "no checkpoint of a step that both have; weights are not compared" in result.settings
    assert result.layer is None is result.tensors


def test_a_row_of_a_board(
    runs: Path, launched: Callable[[], list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A row is verified without the checkpoints of its run, and names the first weight that differs."""
    write_row(runs / "one", tmp_path / "row")
    assert {file.name for file in (tmp_path / "row").iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "provenance.json",
        "weights.json",
    }
    assert sum(file.stat().st_size for file in (tmp_path / "row").iterdir()) < 30_000
    assert str(ROOT) not in (tmp_path / "row" / "config.yaml").read_text()
    assert rerun.main("verify", [str(tmp_path / "row")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"equal to the last bit ({STEPS} steps, ")
    weights = json.loads((tmp_path / "row" / "weights.json").read_text())
    name = "model.lm.model.layers.1.mlp.up_proj.weight"
    weights["weights"][name] = ["0" * 16, weights["weights"][name][1] * (1 + 2e-3)]
    (tmp_path / "row" / "weights.json").write_text(json.dumps(weights))
    result = compare_runs(tmp_path / "row", tmp_path / "row_verify")
    assert result.verdict().endswith(f"no metric by more than rounding, but the weight {name} by 2.0e-03 in its norm")
    weights["weights"][name][1] /= 1 + 2e-3
    (tmp_path / "row" / "weights.json").write_text(json.dumps(weights))
    assert f"  first {name}: in its digest but not in its norm" in compare_runs(tmp_path / "row", runs / "one").lines()
    metrics = tmp_path / "row" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))  # as of a shorter run
    assert compare_runs(tmp_path / "row", runs / "one").settings == [
        f"steps: {STEPS - 1} and {STEPS}",
        f"only one run has step {STEPS}, of which weights are recorded; weights are not compared",
    ]
    (tmp_path / "row" / "weights.json").write_text("{}")
    assert compare([str(tmp_path / "row"), str(runs / "one")]) == 2
    assert capsys.readouterr().err.endswith("weights.json: damaged, or of another program\n")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        write_row(tmp_path / "row", tmp_path / "x")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_digests(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a.bin").write_bytes(b"abc")
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / folder.name).write_text("bytecode")
    same = digest_path(one)
    assert same == digest_path(other)
    assert digest_path(one / "sub" / "*.bin") == digest_path(one / "sub")
    (other / "sub" / "a.bin").write_bytes(b"abd")
    assert digest_path(other) != same
    (other / "sub" / "a.bin").rename(other / "sub" / "b.bin")
    (other / "sub" / "b.bin").write_bytes(b"abc")
    assert digest_path(other) != same
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(BLOCK * BLOCKS * 2)
    before = digest_path(large)
    with large.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert digest_path(large) != before
    with pytest.raises(FileNotFoundError):
        digest_path(tmp_path / "none")


def test_inputs_are_what_values_name(tmp_path: Path) -> None:
    code = tmp_path / "score.py"
    code.write_text("def score(): ...")
    config = {
        "reward": {"functions": [{"path": f"{code}:score", "name": None}]},
        "algorithm": {"name": "grpo", "other": "src"},  # words, though a folder of that name may be here
        "trainer": {"output_dir": str(tmp_path)},
        "data": {"train_files": ["hf://x/y", "none/there.jsonl"]},
    }
    assert digest_inputs(config) == {"reward.functions[0].path": {"path": str(code), "sha256": digest_path(code)}}


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (
            {"reward/mean": 0.5, "perf/step_s": 9.0, "tools/seconds_mean": 2.0, "writer/time/reward": 1},
            "equal to the last bit (1 step, 2 metrics)",
        ),
        ({"reward/mean": 0.5 + 1e-7}, "equal within rounding (1 step, 2 metrics): first in reward/mean of step 1, "),
        (
            {"reward/mean": 0.6},
            "different from step 1 (1 step, 2 metrics): first in reward/mean of step 1, 0.5 and 0.6",
        ),
        (
            {"reward/mean": None},
            "different from step 1 (1 step, 2 metrics): first in reward/mean of step 1, 0.5 and nan",
        ),
        ({"reward/max": 1.0}, "different: only one run has reward/max in step 1"),
    ],
)
def test_rows(other: dict[str, Any], verdict: str, tmp_path: Path) -> None:
    row = {"step": 1, "reward/mean": 0.5, "actor/lr": 1e-4, "perf/step_s": 1.0, "tools/seconds_mean": 1.0}
    for name, content in (("a", row), ("b", row | other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(content) + "\n")
    assert compare_runs(tmp_path / "a", tmp_path / "b").verdict().startswith(verdict)


def test_what_comes_first_is_reported(tmp_path: Path) -> None:
    """A response that is cut in one run alone has a metric of its own; before it, runs part in another metric."""
    for name, steps in (
        ("a", [{"x": 1.0}, {"x": 1.0}, {"x": 1.0}]),
        ("b", [{"x": 1.0}, {"x": 2.0}, {"x": 1.0, "y": 1.0}]),
    ):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step} | row) for step, row in enumerate(steps)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert compare_runs(tmp_path / "a", tmp_path / "b").verdict() == (
        "different from step 1 (3 steps, 1 metric): first in x of step 1, 1.0 and 2.0, relative difference 5.0e-01"
    )
    lines[2] = json.dumps({"step": 2, "x": 4.0})
    (tmp_path / "b" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert (
        "relative difference 5.0e-01; most in x of step 2, 1.0 and 4.0"
        in compare_runs(tmp_path / "a", tmp_path / "b").verdict()
    )
    lines = [json.dumps({"step": 0, "x": 1.0, "y": 1.0}), json.dumps({"step": 1, "x": 2.0})]
    (tmp_path / "b" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert compare_runs(tmp_path / "a", tmp_path / "b").verdict() == "different: only one run has y in step 0"


def test_no_step_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, step in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "no step in common" in capsys.readouterr().out
    assert compare([str(tmp_path / "a"), str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"error: {tmp_path}: no metrics.jsonl in it; give the trainer.output_dir of a run\n"
    )


def test_the_distance_of_tensors() -> None:
    one = torch.tensor([3.0, 4.0])
    assert tensor_distance(one, one.clone()) == 0
    assert tensor_distance(one, one + torch.tensor([0.0, 5e-7])) == pytest.approx(1e-7, rel=0.1)
    assert tensor_distance(one, one.bfloat16()) > 0  # equal values in another precision are another result
    broken = torch.tensor([3.0, math.nan])
    assert tensor_distance(broken, broken.clone()) == 0
    assert tensor_distance(one, broken) == tensor_distance(broken, one) == math.inf
