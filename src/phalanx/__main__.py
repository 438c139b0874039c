"""The command `phalanx`: runs each task by name, from any folder, with the configurations shipped in the package.

A task command becomes `sh train.sh tasks/<task>.py config.yaml key=value ...` with the shipped files, so ranks are
always started in the same way and train.sh's environment variables keep their meaning.
"""

import ast
import difflib
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from phalanx import __version__
from phalanx.config.shipped import ROOT
from phalanx.exit import show

EPILOG = """\
After a command, --help lists all its keys, and key=value sets one. NAME is a configuration listed by `phalanx configs`,
or the path of a YAML file. One rank is started per visible GPU, unless environment variables say otherwise:

  NPROC_PER_NODE=2                          two ranks, for example on a CPU
  NNODES=4 NODE_RANK=0 MASTER_ADDR=node0    node 0 of four; all nodes run the same command

examples:
  NPROC_PER_NODE=2 phalanx train flowgrpo --config quickstart trainer.seed=1    # images
  NPROC_PER_NODE=2 phalanx train grpo --config grpo/quickstart                  # a language model
  NPROC_PER_NODE=2 phalanx train block_diffusion --config words_sft             # block diffusion
  phalanx plan flowgrpo --config qwen_image_ocr_lora nnodes=1 nproc=8 gpu_memory_gb=80
  phalanx sample checkpoint=outputs/phalanx/quickstart prompt_file=assets/digits/held_out.txt n=2
  phalanx evaluate checkpoint=outputs/phalanx/quickstart_lm n=4 rollout.val.temperature=1
  phalanx watch outputs/phalanx/quickstart
"""
CONFIGS_HELP = """\
usage: phalanx configs [NAME]

List the shipped configurations, or print the one called NAME, such as flowgrpo/quickstart.
"""


@dataclass(frozen=True)
class Command:
    """An entry of COMMANDS. `task` is a file of tasks/ without its .py; the user's TASK takes the place of a *. module:
    one of phalanx.tools, whose `main` runs the command; with several commands, it takes the name, too.
    """

    help: str
    task: str | None = None
    options: tuple[str, ...] = ()  # passed to the task after the user's arguments
    one_rank: bool = False
    module: str | None = None


COMMANDS = {
    "train": Command("train a model: phalanx train TASK --config NAME [key=value ...]", "train_*"),
    "plan": Command("count what a training job needs on a cluster, without training", "train_*", ("--plan",)),
    "sample": Command("sample images or videos from a checkpoint or a model folder", "sample"),
    "generate": Command("sample texts from a language or block-diffusion model", "generate", one_rank=True),
    "evaluate": Command("evaluate a checkpoint or a model folder, alone or against a baseline", "evaluate"),
    "export": Command("write a checkpoint for stock diffusers or transformers", "export_checkpoint"),
    "check": Command("check within a minute that the machines are fit to train on", "check_cluster"),
    "numerics": Command(
        "compare log-probabilities of a job's sampler and trainer, before any update", "check_numerics"
    ),
    "serve": Command("serve rewards over HTTP", "serve_reward", one_rank=True),
    "prepare": Command("make training data for a language model", "prepare_data", one_rank=True),
    "report": Command("write the report of a run, RUN_DIR/report.html: phalanx report RUN_DIR", module="board.report"),
    "watch": Command("follow runs in a browser while they train: phalanx watch RUN_DIR", module="board.watch"),
    "runs": Command("list the runs below a folder, with their machines, progress and status", module="board.runs"),
    "logs": Command("print the output of a rank: phalanx logs RUN_DIR [--rank R] [--follow]", module="board.runs"),
    "stop": Command("stop a run after it has saved a checkpoint: phalanx stop RUN_DIR", module="board.runs"),
    "diff": Command("say where two runs differ first: phalanx diff RUN RUN", module="reproduce.differences"),
    "rerun": Command("train again what a run's folder describes: phalanx rerun RUN", module="reproduce.rerun"),
    "verify": Command(
        "train it again and say whether the results are equal: phalanx verify RUN", module="reproduce.rerun"
    ),
    "convert": Command(
        "convert a script or configuration of verl, TRL and others: phalanx convert FILE > config.yaml",
        module="convert",
    ),
    "configs": Command("list the shipped configurations, or print the one called NAME"),
}


class _Parser(ArgumentParser):
    """Prints errors in one line and help to stdout, even if nobody reads all of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")

    def print_help(self, file: Any = None) -> None:
        show(self.format_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, unless a task replaces this process."""
    parser = _command_parser()
    first = next(iter(sys.argv[1:] if argv is None else argv), "-")
    if not first.startswith("-") and first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "phalanx --help lists them"
        parser.error(f"no command {first!r}; {hint}")
    given, words = parser.parse_known_args(argv)
    wants_help = not {"-h", "--help"}.isdisjoint(words)
    if given.version:
        return show(__version__)
    if given.command is None:
        return show(parser.format_help())
    command = COMMANDS[given.command]
    if "task" in given and given.task is None and wants_help:
        return show(_tasks_help(given.command, command))
    if given.command == "configs" and wants_help:
        return show(CONFIGS_HELP)
    if command.module is not None:
        tool: Any = import_module(f"phalanx.tools.{command.module}")
        several = [other.module for other in COMMANDS.values()].count(command.module) > 1
        return int(tool.main(given.command, words) if several else tool.main(words))
    try:
        if command.task is None:
            return show(_list_configs(words))
        task = _find_task(command.task, given.task) if "*" in command.task else command.task
        if given.config is not None:
            words = [str(find_config(given.config, task.removeprefix("train_"))), *words]
    except ValueError as error:
        parser.error(str(error))
    return _launch_task(task, [*words, *command.options], one_rank=command.one_rank)


def _command_parser() -> ArgumentParser:
    parser = _Parser(
        prog="phalanx",
        usage="phalanx COMMAND [--config NAME] [key=value ...]",
        description="RL post-training of image, video, language and block-diffusion models by plain torchrun.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        # unknown arguments, including --help, go to the task
        words = commands.add_parser(name, help=command.help, add_help=False, allow_abbrev=False)
        if command.task is not None:
            words.add_argument("--config")
            if "*" in command.task:
                words.add_argument("task", nargs="?")
    return parser


def _tasks_help(name: str, command: Command) -> str:
    """The help of a command that takes a task: lists the tasks with the first line of their docstrings."""
    assert command.task is not None
    lines = [
        f"usage: phalanx {name} TASK [--config NAME] [key=value ...]",
        "",
        f"{command.help.partition(': ')[0].capitalize()}.",
        "",
        "tasks:",
    ]
    for path in sorted((ROOT / "tasks").glob(f"{command.task}.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {path.stem.removeprefix(command.task[:-1]):16} {about.splitlines()[0]}")
    lines += ["", f"`phalanx {name} TASK --help` lists a task's keys, and `phalanx configs` the configurations."]
    return "\n".join(lines) + "\n"


def _find_task(pattern: str, given: str | None) -> str:
    """The task named by `pattern`, such as train_*, with `given` for the *. Raises ValueError if it does not exist."""
    known = {path.stem.removeprefix(pattern[:-1]): path.stem for path in (ROOT / "tasks").glob(f"{pattern}.py")}
    if given not in known:
        raise ValueError(f"expected a task, one of {', '.join(sorted(known))}, got {given or 'none'}")
    return known[given]


def configs() -> dict[str, Path]:
    """The files of the shipped configurations by name, such as `flowgrpo/quickstart`."""
    files = sorted((ROOT / "configs").glob("*/*.yaml"))
    return {f"{file.parent.name}/{file.stem}": file for file in files}


def find_config(name: str, folder: str = "") -> Path:
    """The file of a shipped configuration, preferably in `folder`; the path of a YAML file is returned unchanged.

    Raises ValueError for an unknown or ambiguous name.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    known = configs()
    matches = [full for full in known if name in (full, _base_name(full))]
    matches = [full for full in matches if full.startswith(f"{folder}/")] or matches
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise ValueError(f"--config: {name} is ambiguous: {', '.join(matches)}; name its folder too")
    names = list(dict.fromkeys(full if "/" in name else _base_name(full) for full in known))
    near = difflib.get_close_matches(name, names, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    raise ValueError(f"--config: no shipped configuration is named {name}; {hint}")


def _base_name(full: str) -> str:
    return full.rpartition("/")[2]


def _list_configs(words: list[str]) -> str:
    """The output of `phalanx configs`: a named configuration, or a line for each with the first sentence about it."""
    if words:
        return find_config(words[0]).read_text(encoding="utf-8").rstrip()
    lines = []
    for name, file in configs().items():
        comments = [line[2:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        about = next(comment for comment in comments if not comment.startswith("ranks:"))
        lines.append(f"{name:40} {about.partition('. ')[0].rstrip('.')}")
    return "\n".join(lines)


def _launch_task(task: str, words: list[str], *, one_rank: bool) -> NoReturn:
    """Replace this process by train.sh, which finds python3 and torchrun on PATH: this interpreter's come first."""
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    if one_rank:
        env["NPROC_PER_NODE"] = "1"
    os.execvpe("sh", ["sh", str(ROOT / "train.sh"), str(ROOT / "tasks" / f"{task}.py"), *words], env)


if __name__ == "__main__":
    sys.exit(main())
