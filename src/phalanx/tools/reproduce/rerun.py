"""`phalanx rerun RUN` and `phalanx verify RUN`: train again what a run's folder describes, and compare the results."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.messages import ConfigError, cut
from phalanx.config.shipped import ROOT, located
from phalanx.config.trust import Use
from phalanx.exit import show
from phalanx.run.provenance import digest_path, file_of, installed_versions, read_provenance, texts_of
from phalanx.run.telemetry.run_folder import CONFIG_FILE, read_config
from phalanx.tools.reproduce.differences import compare_runs

ABOUT = {
    "rerun": "Train again what a run's folder describes, with the same versions, files and number of ranks.",
    "verify": "Train again what a run's folder describes, anywhere and on any number of ranks, and say whether the "
    "results are equal, or the first step, metric and tensor that differ.",
}
CODE = re.compile(r"\.py(:\w+)?$|^[\w.]+:\w+$|\$\{")  # values that name a file or a module of Python


@dataclass(frozen=True)
class Rerun:
    """The command line that repeats a run, the `ranks` of the run, and what is `different` here."""

    task: Path
    words: list[str]
    ranks: int
    different: list[str]


def prepare_rerun(run: Path, output: Path, overrides: Sequence[str]) -> Rerun:
    """How to repeat the run in a folder, with its files in `output`.

    Raises ValueError if something it needs is missing: its configuration, the record of its start, a file that it read.
    """
    entries, config = read_provenance(run), read_config(run)[1]
    if not config:
        raise ValueError(f"{run}: no {CONFIG_FILE} that can be read; give the trainer.output_dir of a run")
    if "trust_run=true" not in overrides:
        _check_trust(config, run / CONFIG_FILE)
    if not entries or entries[0]["step"] != 0:
        raise ValueError(f"{run}: no provenance.json with the start of the run; an older version may have written it")
    texts = dict(texts_of(config))
    entry, moved, different = entries[0], list[str](), list[str]()
    for key, file in sorted(entry["inputs"].items()):
        value = texts.get(key, "")
        named = Path(located(file_of(value)))
        path = named if named.exists() or "*" in value else ROOT / file.get("path", "")
        try:
            digest = digest_path(path)
        except OSError:
            raise ValueError(f"{key}: {value} of the run is missing here; {key}=PATH names another place") from None
        if path != named:
            moved.append(f"{key}={path}{value.removeprefix(file_of(value))}")
        if digest != file.get("sha256"):
            different.append(f"{key} has other contents ({path})")
    here = installed_versions()
    for name, version in entry["versions"].items():
        if here.get(name) != version:
            shown = "source code" if name == "source" else f"{name} {version}"
            different.append(f"{shown} there, {'another' if name == 'source' else here.get(name, 'none')} here")
    if len(entries) > 1:
        different.append(f"the run was resumed after step {entries[-1]['step']}")
    task = ROOT / entry["task"]
    if task not in (ROOT / "tasks").glob("train_*.py"):  # a file elsewhere is code of whoever wrote this folder
        raise ValueError(
            f"{run}: its task, {cut(entry['task'])}, is not one of Phalanx; start it yourself, with {CONFIG_FILE}"
        )
    words = [str(run / CONFIG_FILE), *moved, "trainer.resume=never", f"trainer.output_dir={output}", *overrides]
    if "trust_run=true" in words:
        words.remove("trust_run=true")
    return Rerun(task, words, max(entry["ranks"].get("world", 1), 1), different)


def _check_trust(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for a configuration that names code, a server or an environment variable."""
    try:
        Use(sections=tuple(config)).checked(config, file)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("checkpoint: ")) from None
    for key, value in texts_of(config):
        dotted = "." in value and key.rpartition(".")[2].startswith(("name", "logger"))
        if dotted or CODE.search(value):
            raise ValueError(
                f"{file} would run code: {key}={cut(value, 80)}; give trust_run=true if you trust that run"
            )


def start_again(again: Rerun) -> int:
    """Train; returns the exit status. The number of ranks is the run's, unless NPROC_PER_NODE is set."""
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    env.setdefault("NPROC_PER_NODE", str(again.ranks))
    return subprocess.run(
        ["sh", str(ROOT / "train.sh"), str(again.task), *again.words], env=env, check=False
    ).returncode


def main(command: str, argv: Sequence[str]) -> int:
    """Run the command; verify returns 0 for equal results, also within rounding, and 1 for others. 2: a mistake."""
    parser = argparse.ArgumentParser(prog=f"phalanx {command}", description=ABOUT[command])
    parser.add_argument("run", metavar="RUN", type=Path, help="trainer.output_dir of a run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="further overrides of its configuration")
    if command == "rerun":
        parser.add_argument("--anyway", action="store_true", help="with other versions or files too")
    given = parser.parse_args(argv)
    output = given.run.with_name(f"{given.run.resolve().name}_{command}")
    for word in given.overrides:
        if word.startswith("trainer.output_dir="):
            output = Path(word.partition("=")[2])
    try:
        again = prepare_rerun(given.run, output, given.overrides)
        if command == "rerun" and again.different and not given.anyway:
            hint = "; --anyway runs it nevertheless"
            raise ValueError(f"{given.run} cannot be repeated exactly: {'; '.join(again.different)}{hint}")
        for line in again.different:
            print(f"different: {line}", file=sys.stderr)
        status = start_again(again)
        if status or command == "rerun":
            return status
        result = compare_runs(given.run, output)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    show("\n".join(result.lines()))
    return int(not (result.equal or result.within_rounding))
