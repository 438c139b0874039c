"""Training and evaluation by a call from Python: in a script, in a notebook, or on every rank of torchrun.

A call runs a task of tasks/ as the command line would, with its schema, its checks and its messages. It differs in
three ways: rows and functions may be objects (see phalanx.tools.given), a mistake is an exception, and the process goes
on.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch.distributed as dist
from omegaconf import OmegaConf

from phalanx.config.load import load
from phalanx.config.messages import ConfigError, reason
from phalanx.config.registry import import_file
from phalanx.config.shipped import ROOT, located
from phalanx.config.sources import override, read
from phalanx.data.data_files import DataError
from phalanx.distributed.collectives import same_everywhere
from phalanx.distributed.launch_env import Launch
from phalanx.exit import Stopped, rank
from phalanx.garbage import uncollected
from phalanx.models.flow.folder import model_index
from phalanx.run import folder_lock
from phalanx.run.checkpoint_folder import find
from phalanx.run.cli import report_uncaught, start_process
from phalanx.run.kind import kind_class, kind_of_folder
from phalanx.run.rules import load_config
from phalanx.run.watchdog import STOP_SIGNALS
from phalanx.run.world import stop_world
from phalanx.tools.given import Given, Rows
from phalanx.tools.opening import is_checkpoint
from phalanx.tools.run_result import EvaluationResult
from phalanx.tools.run_result import RunResult as RunResult
from phalanx.types import JobError

# The task for each kind of model folder, see phalanx.run.kind.KINDS.
TRAINING = {"lm": "grpo", "flow": "flowgrpo"}
SUPERVISED = {"lm": "sft", "flow": "flow_matching"}
P = ParamSpec("P")
R = TypeVar("R")
Files = str | Path | Sequence[str | Path]
Reward = str | Callable[..., Any] | Mapping[str, Any]


def _in_short(call: Callable[P, R]) -> Callable[P, R]:
    """Raise mistakes and failures without a traceback through this package: their lines say what is wrong and where.
    PHALANX_TRACEBACK=1 keeps it.
    """

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (ConfigError, DataError, JobError) as error:
            if os.environ.get("PHALANX_TRACEBACK") == "1":
                raise
            raise error.with_traceback(None) from None

    return wrapped


@_in_short
def train(
    model: "str | Path | Mapping[str, Any] | None" = None,
    data: "Rows | Files | Mapping[str, Any] | None" = None,
    reward: "Reward | Sequence[Reward] | None" = None,
    *,
    val_data: "Rows | Files | Mapping[str, Rows | Files] | None" = None,
    task: str | None = None,
    config: "str | Path | Mapping[str, Any] | None" = None,
    **keys: Any,
) -> RunResult:
    """Train a model, on all ranks of this program together.

    model: a folder or hub id, or the section `model` of the configuration.
    data: the rows to train on (dicts, or a datasets.Dataset), data files, or the section `data`.
    reward: a function, the name of a built-in reward, or an entry of `reward.functions` whose `path` may be a function;
        or a list of these.
    val_data: held-out rows or files, or several validation sets by their names.
    task: a task of tasks/train_<task>.py; None: reinforcement learning of the kind of model that the folder has.
        "sft" is supervised fine-tuning of any kind.
    config: a YAML file, or its content as a dict.
    keys: further keys, which override those of `config`: sections as dicts, such as optim={"lr": 1e-5}, or dotted keys,
        `**{"optim.lr": 1e-5}`.

    Unless a launcher has started the process, the run begins anew whatever is in its folder (trainer.resume=never).

    Raises ConfigError or DataError for a mistake, and JobError for a failure of the job, each with the line that the
    command line prints; KeyboardInterrupt, after a checkpoint, if the job is interrupted; phalanx.exit.Stopped if it is
    stopped by another signal.
    """
    settings = [*_section("model", "path", model), *_section("data", "train_files", data)]
    settings += [*_section("reward", "functions", _function_entries(reward)), *_section("", "data.val_files", val_data)]
    call = _Call(config, [*settings, *keys.items()])
    name = call.task(task)
    words = []
    if name in ("sft", "block_diffusion"):
        words = call.columns("data.train_files", prompt_key="prompt", response_key="completion")
    if "RANK" not in os.environ and call.value("trainer.resume") is None:
        words.append("trainer.resume=never")
    return RunResult(call.run(f"train_{name}", words), trusted=True)


def sft(
    model: "str | Path | Mapping[str, Any] | None" = None,
    data: "Rows | Files | Mapping[str, Any] | None" = None,
    **keys: Any,
) -> RunResult:
    """Supervised fine-tuning: see `train`, whose `task` it sets.

    Rows of language models have chats in `messages`, or `prompt` and `completion`; those of image models `prompt` and
    `image`.
    """
    return train(model, data, task="sft", **keys)


@_in_short
def evaluate(
    model: "str | Path | RunResult | Mapping[str, Any] | None" = None,
    data: "Rows | Files | Mapping[str, Any] | None" = None,
    reward: "Reward | Sequence[Reward] | None" = None,
    *,
    config: "str | Path | Mapping[str, Any] | None" = None,
    **keys: Any,
) -> EvaluationResult:
    """Sample and score held-out prompts, see tasks/evaluate.py, whose keys it takes.

    model: a folder, a run's result, or a checkpoint; a result and a checkpoint bring their settings.
    data: the rows, or data files, or the section `data`, such as {"val_files": {"easy": ..., "hard": ...}}.
    Others as of `train`.
    """
    if isinstance(model, RunResult):
        keys, model = {"checkpoint": str(model.folder), "trust_run": model.trusted, **keys}, None
    elif isinstance(model, str | Path) and is_checkpoint(Path(model).expanduser()):
        keys, model = {"checkpoint": str(model), **keys}, None
    settings = [*_section("model", "path", model), *_section("data", "val_files", data)]
    settings += _section("reward", "functions", _function_entries(reward))
    call = _Call(config, [*settings, *keys.items()])
    return EvaluationResult(call.run("evaluate", call.columns("data.val_files", prompt_key="prompt")))


Setting = tuple[str, Any]  # a dotted key, and a value with rows and functions


def _section(section: str, leaf: str, value: Any) -> list[Setting]:
    """The settings of an argument: the keys of a section, or the value of its `leaf`; none for None."""
    if value is None:
        return []
    if section and isinstance(value, Mapping):
        return [(f"{section}.{name}", each) for name, each in value.items()]
    return [(f"{section}.{leaf}".lstrip("."), value)]


def _function_entries(reward: Any) -> Any:
    """The entries of reward.functions, or the section `reward` as it is."""
    if reward is None or (isinstance(reward, Mapping) and "functions" in reward):
        return reward
    entries = []
    for each in reward if isinstance(reward, list | tuple) else [reward]:
        if isinstance(each, str):
            each = {"path" if ":" in each else "name": each}
        entries.append(each if isinstance(each, Mapping) else {"path": each})
    return entries


class _Call:
    """The settings of a call: a YAML file, if there is one, and what overrides it."""

    def __init__(self, config: "str | Path | Mapping[str, Any] | None", settings: Sequence[Setting]) -> None:
        """Raises ConfigError for a file that cannot be read, and for values that no configuration can have."""
        if not isinstance(config, str | Path | Mapping | None):
            raise ConfigError(f"config: {type(config).__name__}; expected a YAML file, or its content as a dict")
        self.path = str(config) if isinstance(config, str | Path) else None
        self.given = Given([*(config.items() if isinstance(config, Mapping) else ()), *settings])
        file = OmegaConf.create({}) if self.path is None else read(self.path)
        self._user = override(file, self.given.words())

    def value(self, key: str) -> Any:
        """The value that the user has set; None if there is none."""
        return OmegaConf.select(self._user, key)

    def task(self, name: str | None) -> str:
        """The task that trains the model: `name`, or that of the model folder. Raises ConfigError if there is none."""
        if name is None or name == "sft":
            path = self.value("model.path")
            if path is None:
                raise ConfigError("model is not set; give the folder of a model, or a hub id")
            kind = _kind(str(path), self.value("model.revision"))
            name = (TRAINING if name is None else SUPERVISED)[kind]
            if name == "sft" and self.value("model.block_size") is not None:
                name = "block_diffusion"
        known = sorted(path.stem.removeprefix("train_") for path in (ROOT / "tasks").glob("train_*.py"))
        if name not in known:
            raise ConfigError(f"task={name!r}: expected one of {', '.join(known)}")
        return name

    def columns(self, key: str, **names: str) -> list[str]:
        """Overrides that set keys to the `names` of columns which the rows of `key` have, as TRL calls them, for rows
        without `messages`.
        """
        columns, words = self.given.columns.get(key, set()), []
        for name, column in names.items():
            if "messages" not in columns and column in columns and self.value(f"data.{name}") is None:
                words.append(f"data.{name}={column}")
        return words

    def run(self, task: str, words: Sequence[str] = ()) -> Path:
        """Run a task in this process; returns its folder. words: further overrides, before those of the user."""
        file = str(ROOT / "tasks" / f"{task}.py")
        start_process()
        if rank() == 0:
            logging.getLogger("phalanx").setLevel(logging.INFO)
        if "RANK" in os.environ:
            report_uncaught()
        module = import_file(file, "task")
        schema, words = get_type_hints(module.build)["cfg"], list(words)
        first: Any = load(schema, self.path, [*words, *self.given.words()])
        folder = first.trainer.output_dir if "trainer" in vars(first) else first.output_dir
        if folder is None:
            folder = _evaluation_folder(first.checkpoint or first.model.get("path", ""), self.given.words())
            words.append(f"output_dir={folder}")
        self.given.write(Path(folder))
        config = load_config(schema, self.path, [*words, *self.given.words(Path(folder))])
        with _as_before(file):
            _run(module.build, config, [*words, *self.given.words()])
        return Path(folder)


def _evaluation_folder(model: str, words: list[str]) -> str:
    """A folder for the evaluation of a checkpoint or a model: the same one for the same weights, prompts and rewards,
    so that another call reads its records.
    """
    place = Path(model).expanduser()
    newest = find(place / "checkpoints") if (place / "checkpoints").is_dir() else place
    meta = newest / "meta.json" if newest is not None else place  # of a checkpoint: it has the checksums of all files
    text = repr(words) + (meta.read_text(encoding="utf-8") if meta.is_file() else "")
    return f"outputs/evaluation/{place.name}-{sha256(text.encode()).hexdigest()[:8]}"


def _run(build: Callable[[Any], Callable[[], None]], config: Any, words: list[str]) -> None:
    """Build and run a job. Raises the exceptions of `train`."""
    try:
        with uncollected():
            job = build(config)
        if dist.is_initialized() and not same_everywhere(words):
            raise ConfigError(
                "the ranks have different settings, rows or functions; expected the same call on every rank"
            )
    except (ConfigError, DataError):
        raise
    except (ValueError, SystemExit) as error:  # as in phalanx.run.cli.run
        raise ConfigError(reason(error) if isinstance(error, SystemExit) else str(error)) from error
    try:
        job()
    except SystemExit as error:
        raise JobError(reason(error)) from error
    except Stopped as stop:
        if stop.number == signal.SIGINT:
            again = "the same call" if "RANK" in os.environ else "the same call with trainer.resume=auto"
            raise KeyboardInterrupt(str(stop).replace("the same command", again)) from None
        raise


@contextmanager
def _as_before(task: str) -> Iterator[None]:
    """Within the block sys.argv names the task, for the run's record. After it, sys.argv and the handlers of signals
    are as before, and a process without other ranks has left its world and unlocked the folder, also after an error.
    """
    argv, sys.argv = sys.argv, [task]
    listens = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR1)}
    alarm = signal.set_wakeup_fd(-1) if listens else -1
    try:
        yield
    finally:
        sys.argv = argv
        if listens:
            faulthandler.unregister(signal.SIGUSR1)
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(alarm)
        if Launch.from_env().alone:
            folder_lock.release()
            stop_world()


def _kind(path: str, revision: str | None) -> str:
    """The kind of a model, one of TRAINING: by the files of its folder, or of the hub. Raises ConfigError."""
    folder = Path(located(path)).expanduser()
    if not folder.is_dir():
        try:
            model_index(path, revision)
        except ValueError:
            return "lm"  # whose loading reports what is missing
        return "flow"
    kind = kind_of_folder(folder)
    for name in TRAINING:
        if kind_class(name) is kind:
            return name
    raise ConfigError(f"model.path: {path} is {kind.words}; give its task")
