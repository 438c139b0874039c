"""`phalanx rerun RUN` and `phalanx verify RUN`: train again what a run's folder describes, and compare the results."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from phalanx.config.messages import counted, cut, told_as
from phalanx.config.shipped import ROOT, located
from phalanx.config.sources import override
from phalanx.config.trust import Use
from phalanx.exit import show, show_mistake
from phalanx.run.provenance import (
    KERNELS,
    describe_processor,
    digest_path,
    file_of,
    installed_versions,
    read_provenance,
    texts_of,
)
from phalanx.run.telemetry.run_folder import CONFIG_FILE, read_config
from phalanx.tools.reproduce.differences import compare_runs

ABOUT = {
    "rerun": "Train again what a run's folder describes, with the same versions, files and number of ranks.",
    "verify": "Train again what a run's folder describes, anywhere and on any number of ranks, and say whether the "
    "results are equal, or the first step, metric and layer that differ.",
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
    entry, given = entries[0], [word for word in overrides if word != "trust_run=true"]
    if output.resolve() == run.resolve():
        raise ValueError(f"trainer.output_dir: {output} is the run itself; expected another folder")
    texts = dict(texts_of(OmegaConf.to_container(override(OmegaConf.create(config), given))))
    moved, different = _compare_inputs(entry["inputs"], texts)
    different += _compare_machine(entry)
    if len(entries) > 1:
        different.append(f"the run was resumed after step {entries[-1]['step']}")
    task = ROOT / entry["task"]
    if task not in (ROOT / "tasks").glob("train_*.py"):  # a file elsewhere is code of whoever wrote this folder
        raise ValueError(
            f"{run}: its task, {cut(entry['task'])}, is not one of Phalanx; start it yourself, with {CONFIG_FILE}"
        )
    ranks = max(entry["ranks"].get("world", 1), 1)
    moved += _fit_layout(config, ranks_here(ranks))
    words = [str(run / CONFIG_FILE), *moved, "trainer.resume=never", f"trainer.output_dir={output}", *given]
    return Rerun(task, words, ranks, different)


def _compare_inputs(inputs: dict[str, dict[str, str]], texts: dict[str, str]) -> tuple[list[str], list[str]]:
    """Overrides for files that are where the run found them and not where its configuration says, and lines about
    files with other contents. texts: the values of the configuration; a file that it no longer names is not needed.
    """
    moved, different = list[str](), list[str]()
    for key, file in sorted(inputs.items()):
        if key not in texts:
            continue
        value, name = texts[key], file_of(texts[key])
        places, here = [Path(located(name)), ROOT / file.get("path", name)], list[Path]()
        for path in places:
            with suppress(OSError):
                equal = digest_path(path) == file.get("sha256")
                here.insert(0 if equal else len(here), path)
                if equal:
                    break
        else:
            if not here:
                raise ValueError(f"{key}: {value} of the run is missing here; {key}=PATH names another place")
            different.append(f"{key} has other contents ({here[0]})")
        if here[0] != places[0]:
            moved.append(f"{key}={here[0]}{value.removeprefix(name)}")
    return moved, different


def _compare_machine(entry: dict[str, Any]) -> list[str]:
    """Lines about versions, a processor and a number of ranks that are not those of a start."""
    here, different = installed_versions(), list[str]()
    for name, version in entry["versions"].items():
        if here.get(name) != version:
            shown = "source code" if name == "source" else f"{name} {version}"
            different.append(f"{shown} there, {'another' if name == 'source' else here.get(name, 'none')} here")
    before, processor = entry["processor"], describe_processor(torch.device("cpu"))
    for name in ("model_name", "model", "instructions"):  # of the first that differs; a GPU is compared by verify
        if "device" not in before and before.get(name) != processor.get(name):
            different.append(f"the processor's {name} {before.get(name)} there, {processor.get(name)} here")
            break
    for name in KERNELS:
        if before.get(name) != processor.get(name):
            different.append(f"{name} {before.get(name, 'not set')} there, {processor.get(name, 'not set')} here")
    there = entry["ranks"].get("world", 1)
    if ranks_here(there) != there:
        different.append(f"{counted(there, 'rank')} there, {ranks_here(there)} here")
    return different


def _fit_layout(config: dict[str, Any], ranks: int) -> list[str]:
    """Overrides for parts of the layout that do not divide so many ranks, on which the results do not depend."""
    sizes, others = config.get("parallel"), {"fsdp_size": "null", "ulysses_sequence_parallel_size": "1"}
    words = []
    for name, other in others.items():
        size = sizes.get(name) if isinstance(sizes, dict) else None
        if isinstance(size, int) and size > 0 and ranks % size:
            words.append(f"parallel.{name}={other}")
    return words


def ranks_here(ranks: int) -> int:
    """The number of ranks of a job that is started here, by default `ranks`."""
    each = os.environ.get("NPROC_PER_NODE", "")
    return int(each) * nodes_here() if each.isdigit() else ranks


def nodes_here() -> int:
    """The number of nodes of a job that is started here."""
    nodes = os.environ.get("NNODES", "1").partition(":")[0]
    return int(nodes) if nodes.isdigit() and int(nodes) else 1


def _check_trust(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for a configuration that names code, a server or an environment variable."""
    with told_as(ValueError, key=("checkpoint: ", "")):
        Use(sections=tuple(config)).checked(config, file)
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
    env.setdefault("NPROC_PER_NODE", str(max(again.ranks // nodes_here(), 1)))
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
    whole = Path(os.path.abspath(given.run))  # also of `.`; the folder beside a link is beside the link
    output = whole.with_name(f"{whole.name}_{command}")
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
        return show_mistake(error)
    show("\n".join(result.lines()))
    return int(not (result.equal or result.within_rounding))
