"""Whole commands on folders of runs and models as an attacker, or a damaged disk, may leave them.

A change is made to a good folder, in which `out` is a run and `base` its model, beside a folder `outside` with a secret.
"""

import json
import os
import shutil
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.tasks import EvaluateConfig, ExportConfig, GenerateConfig, SampleConfig
from phalanx.exit import Stopped
from phalanx.run.rules import load_config
from phalanx.tools.evaluate import Evaluation
from phalanx.tools.export import Export
from phalanx.tools.generate import Generation
from phalanx.tools.sample import Generator
from phalanx.types import JobError
from tests.helpers.hostile import SECRET, Change, digest, in_child
from tests.helpers.ranks import before_forks

MOST_MEMORY = 500 << 20  # bytes beside those of an ordinary job
ORDINARY = 700 << 20  # of address space, most of it libraries' code
STEP = "out/checkpoints/step_000001"
HUGE = 1 << 40
Words = Callable[[str, Path], list[str]]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def configured(**changes: Any) -> Change:
    """Keys of the run's config.yaml such as `model__path` with other values."""

    def change(folder: Path) -> None:
        file = folder / "out" / "config.yaml"
        content = yaml.safe_load(file.read_text())
        for key, value in changes.items():
            section, _, name = key.partition("__")
            content[section][name] = (
                value.replace("{outside}", str(folder.parent / "outside")) if isinstance(value, str) else value
            )
        file.write_text(yaml.safe_dump(content))

    return change


def meta(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / STEP / "meta.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def sealed(*changes: Change) -> Change:
    """Changes of a checkpoint's files with a meta.json that fits."""

    def change(folder: Path) -> None:
        for each in changes:
            each(folder)
        files = {}
        for file in (folder / STEP).iterdir():
            if file.name != "meta.json":
                large = file.stat().st_size > 1 << 30
                files[file.name] = (file.stat().st_size, 0 if large else zlib.crc32(file.read_bytes()))
        meta(files=files)(folder)

    return change


def settings(name: str, **changes: Any) -> Change:
    """Keys of a JSON file of the model with other values."""

    def change(folder: Path) -> None:
        file = folder / "base" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edited(name: str, edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(edit((folder / name).read_bytes()))

    return change


KINDS = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor", "AutoModel")
AUTO = {"auto_map": dict.fromkeys(KINDS, "evil.Evil"), "trust_remote_code": True}


def evil(folder: Path) -> None:
    (folder / "base" / "evil.py").write_text("import os\nos.system('touch PWNED')\n")


JOBS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "export": (ExportConfig, Export), "generate": (GenerateConfig, Generation),
    "evaluate": (EvaluateConfig, Evaluation), "sample": (SampleConfig, Generator),
}  # fmt: skip


def ended(command: str, words: list[str]) -> str:
    """Run a command as phalanx.run.cli does; returns what is wrong with its end, or "" if it is a result or one line."""
    kind, job = JOBS[command.partition(" ")[0]]
    phase: tuple[type[BaseException], ...] = (ValueError, JobError)
    try:
        built = job(load_config(kind, None, words))
        phase = (JobError, Stopped)
        built.run()
    except phase as error:
        return "more than a line" if len(str(error).splitlines()) > 1 or SECRET in str(error) else ""
    except BaseException:  # reported by the test
        return traceback.format_exc()
    return ""


def attacked(command: str, words: Words, changes: dict[str, Change], good: Path, place: Path) -> None:
    """Run a command on a copy of the good folder after each change; raises AssertionError with what was wrong."""
    os.environ["SECRET"] = SECRET
    os.chdir(place)
    wrong = {}
    for number, (name, change) in enumerate(changes.items()):
        folder, outside = place / str(number) / "given", place / str(number) / "outside"
        shutil.copytree(good, folder)
        outside.mkdir()
        (outside / "secret").write_text(SECRET)
        (outside / "evil.py").write_text("import os\nos.system('touch PWNED')\n")
        configured(model__path=str(folder / "base"))(folder)
        change(folder)
        before, start = digest(outside), time.monotonic()
        problem = ended(command, words(command, folder))
        print(f"{time.monotonic() - start:.1f} s: {command}: {name}{' FAILS' if problem else ''}", flush=True)
        if not problem and digest(outside) != before:
            problem = "it wrote outside"
        if (not problem and any(folder.rglob("PWNED"))) or Path("PWNED").exists():
            problem = "it ran code"
        result = folder / "result"
        written = [result] if result.is_file() else [file for file in result.rglob("*") if file.is_file()]
        if not problem and any(SECRET.encode() in file.read_bytes() for file in written):
            problem = "it read outside"
        if problem:
            wrong[name] = problem
        shutil.rmtree(place / str(number), ignore_errors=True)
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


def survives(command: str, words: Words, changes: dict[str, Change], good: Path, place: Path) -> None:
    """Each dozen of the cases has a fork, since jobs leave threads and memory behind."""
    before_forks()
    names, wrong = list(changes), ""
    for start in range(0, len(names), 12):
        few = {name: changes[name] for name in names[start : start + 12]}
        wrong += in_child(
            lambda few=few: attacked(command, words, few, good, place), MOST_MEMORY + ORDINARY, seconds=400
        )  # type: ignore[misc]
    assert wrong == "", wrong[-20_000:]
