"""The command `phalanx`: its commands, and how it finds configurations and shipped files."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx import __main__ as command
from phalanx.config.flow import FlowRLConfig
from phalanx.config.shipped import ROOT as SHIPPED
from phalanx.config.shipped import located
from phalanx.run.rules import load_config
from tests.helpers.ranks import ROOT


class Launched(Exception):
    """Raised in place of os.execvpe, which would replace this process."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, str]]:
    words: list[str] = []
    seen: dict[str, str] = {}

    def exec_(file: str, argv: Sequence[str], env: dict[str, str]) -> None:
        words[:] = argv
        seen.update(env)
        raise Launched

    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    monkeypatch.setattr(command.os, "execvpe", exec_)
    return words, seen


QUICKSTART = str(ROOT / "configs/flowgrpo/quickstart.yaml")


@pytest.mark.parametrize(
    ("line", "task", "words"),
    [
        ("train flowgrpo --config quickstart a.b=1", "train_flowgrpo", [QUICKSTART, "a.b=1"]),
        ("train flowgrpo a.b=1 --config quickstart", "train_flowgrpo", [QUICKSTART, "a.b=1"]),
        ("train flow_matching mine.yaml a=1", "train_flow_matching", ["mine.yaml", "a=1"]),
        ("train flowgrpo --help", "train_flowgrpo", ["--help"]),
        ("plan flowgrpo --config flowgrpo/quickstart nproc=8", "train_flowgrpo", [QUICKSTART, "nproc=8", "--plan"]),
        ("sample --config my/sample.yaml n=2", "sample", ["my/sample.yaml", "n=2"]),
        ("export checkpoint=x", "export_checkpoint", ["checkpoint=x"]),
        ("generate checkpoint=x n=2", "generate", ["checkpoint=x", "n=2"]),
        ("evaluate checkpoint=x n=2", "evaluate", ["checkpoint=x", "n=2"]),
        ("check --config flowgrpo/quickstart expect=2", "check_cluster", [QUICKSTART, "expect=2"]),
        ("numerics config=x.yaml", "check_numerics", ["config=x.yaml"]),
        ("serve port=0", "serve_reward", ["port=0"]),
        ("prepare source=x", "prepare_data", ["source=x"]),
    ],
)
def test_a_command_is_a_task(
    line: str, task: str, words: list[str], launched: tuple[list[str], dict[str, str]]
) -> None:
    with pytest.raises(Launched):
        command.main(line.split())
    argv, env = launched
    assert argv == ["sh", str(ROOT / "train.sh"), str(ROOT / "tasks" / f"{task}.py"), *words]
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    alone = task in ("serve_reward", "generate", "prepare_data")
    assert env.get("NPROC_PER_NODE") == ("1" if alone else None)


def test_every_task_has_a_command() -> None:
    patterns = [row.task for row in command.COMMANDS.values() if row.task is not None]
    tasks = {path.stem for path in (ROOT / "tasks").glob("*.py")}
    assert {task for task in tasks if not any(Path(task).match(pattern) for pattern in patterns)} == set()
    assert {pattern for pattern in patterns if not any(Path(task).match(pattern) for task in tasks)} == set()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train flowgrpo --config quikstart",
            "--config: no shipped configuration is named quikstart; did you mean quickstart or quickstart_vl or quickstart_lora?",
        ),
        (
            "plan flowgrpo --config flogrpo/quickstart",
            "--config: no shipped configuration is named flogrpo/quickstart; did you mean flowgrpo/quickstart or "
            "grpo/quickstart or flowgrpo/quickstart_lora?",
        ),
        (
            "train flowgpo",
            "expected a task, one of block_diffusion, dpo, flow_matching, flowgrpo, grpo, joint, sft, got flowgpo",
        ),
        ("evaluat checkpoint=x", "no command 'evaluat'; did you mean evaluate?"),
        ("fly", "no command 'fly'; phalanx --help lists them"),
        ("train", "expected a task, one of block_diffusion, dpo, flow_matching, flowgrpo, grpo, joint, sft, got none"),
    ],
)
def test_a_mistake_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(line.split())
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


def test_a_name_of_several_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in the task's folder is preferred; without a task, the folder must be named."""
    for folder in ("a", "b"):
        (tmp_path / "configs" / folder).mkdir(parents=True)
        (tmp_path / "configs" / folder / "same.yaml").touch()
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.find_config("same", "b") == command.find_config("b/same") == tmp_path / "configs/b/same.yaml"
    with pytest.raises(ValueError, match="--config: same is ambiguous: a/same, b/same; name its folder too"):
        command.find_config("same")


def test_the_help_and_the_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        with contextlib.suppress(SystemExit):
            assert command.main(argv) == 0
        text = capsys.readouterr().out
        assert all(f"\n    {name} " in text for name in command.COMMANDS)
        assert all(kind in text for kind in ("image", "video", "language", "block-diffusion"))
    for name in ("train", "plan"):
        assert command.main([name, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"usage: phalanx {name} TASK [--config NAME] [key=value ...]"
        tasks = [line.split()[0] for line in lines[lines.index("tasks:") + 1 :] if line.startswith("  ")]
        assert tasks == ["block_diffusion", "dpo", "flow_matching", "flowgrpo", "grpo", "joint", "sft"]
    assert command.main(["configs", "--help"]) == 0
    assert capsys.readouterr().out == command.CONFIGS_HELP
    with pytest.raises(SystemExit) as end:
        command.main(["report", "--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: phalanx report [-h]")
    assert command.main(["configs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(list((ROOT / "configs").glob("*/*.yaml")))
    assert (
        "flowgrpo/qwen_image_ocr_lora             FlowGRPO of Qwen-Image with a LoRA: images whose text OCR can read"
        in listed
    )
    assert command.main(["configs", "flowgrpo/quickstart"]) == 0
    assert capsys.readouterr().out == Path(QUICKSTART).read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "phalanx", "configs"],
        ["-m", "phalanx", "--help"],
        ["-m", "phalanx", "train", "--help"],
        ["-m", "phalanx", "--version"],
        ["tasks/train_flowgrpo.py", "--help"],
    ],
)
def test_a_reader_that_leaves_early(words: list[str]) -> None:
    """As in `phalanx configs | head -1`; the interpreter flushes the remaining buffer at exit."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, check=False, env=env, cwd=ROOT
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_shipped_paths_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(FlowRLConfig, QUICKSTART, ["data.val_files=[~/x.txt,assets/none.txt]"])
    assert (cfg.model.path, cfg.data.train_files) == (
        str(ROOT / "assets/digits/base"),
        [str(ROOT / "assets/digits/train.txt")],
    )
    assert cfg.data.val_files == [str(Path.home() / "x.txt"), "assets/none.txt"]  # other paths are unchanged
    own = tmp_path / "assets" / "digits" / "base"
    own.mkdir(parents=True)
    assert located("assets/digits/base") == "assets/digits/base"  # the user's folder takes precedence
    monkeypatch.chdir(ROOT)
    assert load_config(FlowRLConfig, QUICKSTART, []).model.path == "assets/digits/base"


def test_in_a_checkout_everything_lies_where_it_is() -> None:
    assert SHIPPED == ROOT
