"""A release: one version everywhere, the licences of what it contains, the conda recipe, and the workflow that publishes."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx import __version__
from tests.helpers.ranks import ROOT
from tests.unit.test_packaging import made

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
# how the text of a licence begins, or says what it grants
TEXTS = {"MIT": "Permission is hereby granted, free of charge,", "OFL-1.1": "SIL OPEN FONT LICENSE Version 1.1"}


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("src/phalanx/__init__.py", r'^__version__ = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("CHANGELOG.md", r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$"),  # the first section
        ("README.md", r"\*\*Status.\*\* Version (\S+), tested"),
        ("conda/recipe.yaml", r'^  version: "(.+)"$'),
    ],
)
def test_the_version_is_one(file: str, pattern: str) -> None:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match is not None and match[1] == PROJECT["version"] == __version__


def entries() -> list[tuple[str, list[str], str, str]]:
    """Of each part of NOTICE: its name, the patterns of its files, the licence, and the file with the licence's text."""
    blocks = (ROOT / "NOTICE").read_text().split("\n\n")
    listed = []
    for block in blocks[blocks.index(next(b for b in blocks if "under those projects' licences" in b)) + 1 :]:
        name, *_ = block.strip().splitlines()
        match = re.search(r"  Where: +(.+)\n  Licence: +(\S+), in (\S+)$", block.strip())
        assert match is not None, block
        listed.append((name, match[1].split(", "), match[2], match[3]))
    return listed


def vendored(file: str) -> bool:
    """Whether a file looks like the work of others: minified, a font, or with a note of copyright."""
    if re.search(r"\.(min\.(js|css)|woff2?|ttf|otf)$", file):
        return True
    readable = not file.endswith((".safetensors", ".parquet", ".png", "LICENSE"))
    return readable and "opyright" in (ROOT / file).read_text()


def test_what_is_of_others_has_its_licence() -> None:
    """NOTICE names each file, and the text of its licence, which the wheel contains."""
    listed = entries()
    assert len(listed) >= 8
    for name, patterns, licence, text in listed:
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), name
        assert TEXTS[licence] in (ROOT / text).read_text(), name
        assert "Copyright (c)" in (ROOT / text).read_text(), name
    folders = ("src", "docs", "assets", "configs", "tasks", "launch", "examples", "scripts")
    tracked = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = [pattern for _, patterns, _, _ in listed for pattern in patterns]
    others = [file for file in tracked.split() if vendored(file)]
    assert len(others) > 20
    assert [file for file in others if not any(fnmatch(file, pattern) for pattern in known)] == []
    assert sorted(PROJECT["license-files"]) == sorted({"LICENSE", "NOTICE", *(text for *_, text in listed)})


def test_assets_are_made_here() -> None:
    """Each folder of models and data is written by a command of the Makefile or a script of assets/make, as NOTICE says."""
    makers = (ROOT / "Makefile").read_text() + "".join(file.read_text() for file in (ROOT / "assets/make").glob("*.py"))
    for folder in (ROOT / "assets").iterdir():
        written = (f"assets/{folder.name}", f'ASSETS / "{folder.name}"')
        assert folder.name == "make" or any(words in makers for words in written), folder


def test_the_recipe_is_that_of_the_project() -> None:
    names = {"torch": "pytorch", "huggingface-hub": "huggingface_hub"}
    wanted = [f"python {PROJECT['requires-python']}"]
    for requirement in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(.+)", requirement).groups()  # type: ignore[union-attr]
        wanted.append(f"{names.get(name, name)} {bounds}")
    assert RECIPE["requirements"]["run"] == wanted
    assert RECIPE["build"]["python"]["entry_points"] == [f"phalanx = {PROJECT['scripts']['phalanx']}"]
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    assert RECIPE["about"]["license_file"] == PROJECT["license-files"]


def commands(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


@pytest.mark.parametrize(("tag", "status"), [(f"v{__version__}", 0), (__version__, 1), ("v0.0.1", 1)])
def test_a_tag_that_is_not_the_version_publishes_nothing(tag: str, status: int) -> None:
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # yaml reads the key `on` as True
    check, *_ = commands("build")
    done = subprocess.run(
        ["bash", "-ec", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}, check=False
    )
    assert done.returncode == status


def test_what_is_published_was_built_checked_and_installed(tmp_path: Path) -> None:
    jobs: dict[str, Any] = WORKFLOW["jobs"]
    assert commands("build")[1:] == ["make wheel", "make conda"]
    assert commands("install") == ["make test-wheel"] and commands("sbom") == ["make sbom"]
    assert jobs["install"]["needs"] == jobs["sbom"]["needs"] == "build"
    assert {row["python"] for row in jobs["install"]["strategy"]["matrix"]["include"]} == {"3.11", "3.12", "3.13"}
    publish = jobs["publish"]
    assert set(publish["needs"]) == {"install", "sbom"} and publish["if"] == "github.ref_type == 'tag'"
    assert publish["permissions"]["id-token"] == "write" and publish["environment"] == "pypi"
    assert all("permissions" not in job for name, job in jobs.items() if name != "publish")
    used = [step["uses"] for step in publish["steps"] if "uses" in step]
    assert any(name.startswith("pypa/gh-action-pypi-publish@") for name in used)
    assert "dist/* sbom/*.cdx.json" in commands("publish")[-1]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    wheel, bill = (made(target, tmp_path, f"RELEASE_VENV={tmp_path}/r") for target in ("wheel", "sbom"))
    assert "python -m build\n" in wheel and "twine check --strict dist/*" in wheel
    assert "cyclonedx-py environment" in bill and ".cdx.json" in bill
