"""Convert a script or a configuration of another trainer, which is not run, to a configuration of Phalanx.

The names and values are those of config/foreign_keys.yaml. What has no equal here is left as a comment with the reason.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from phalanx.config.aliases import counterpart, foreign_keys
from phalanx.config.load import rows_of
from phalanx.config.messages import ConfigError, cut
from phalanx.config.registry import import_file
from phalanx.config.secrets import hide
from phalanx.config.shipped import ROOT
from phalanx.exit import show, show_mistake
from phalanx.run.rules import load_config
from phalanx.tools.foreign_files import ForeignFile, Line, read_foreign
from phalanx.tools.foreign_values import Unknown, attempt, formula

DEFAULT = " (their default)"
NOTHING, LACKING = "nothing to set for it here", "no equal here"
# Other values than plain names are code that `load_config` would import.
NAMES = ("algorithm.name", "model.family", "rollout.engine", "trainer.logger")
SECRET = re.compile(r"secret|password|api_?key|(hub|hf|auth|access|write|read)_?token", re.IGNORECASE)
RANKS, ALGORITHM, REWARDS = "the environment variable ", "algorithm.name", "reward.functions"


class _Conversion:
    """The settings of a file: `settings` holds value and origin by the keys here, `left` other lines with reasons."""

    def __init__(self, file: ForeignFile, task: str, algorithm: str | None) -> None:
        self.file, self.task = file, task
        self.settings: dict[str, tuple[Any, str]] = {}
        self.left: dict[str, str] = {}
        self.trainers = [file.trainer] if f"of_{file.trainer}" in foreign_keys() else []
        if file.trainer in ("trl", "ms_swift"):
            supervised = ["trl_supervised"] if task in ("sft", "dpo") else []
            self.trainers = [*supervised, *self.trainers, *(["trl"] if file.trainer != "trl" else [])]
        self.lines = self._defaults() | file.lines
        self.names = _values(self.lines) | {"samples_per_row": 2 if task == "dpo" else 1}
        self.rules: dict[str, dict[Any, dict[str, Any]]] = {}
        for trainer in [*reversed(self.trainers)] or [file.trainer]:
            self.rules |= foreign_keys().get(f"settings_of_{trainer}", {})
        self.types: dict[str, str] = {}
        self._start(algorithm, [])
        name = self.settings.get(ALGORITHM, (None, ""))[0]
        if name is not None:
            with suppress(ConfigError):  # one that is unknown here becomes a comment below
                self._start(algorithm, [f"{ALGORITHM}={name}"])

    def _start(self, algorithm: str | None, words: list[str]) -> None:
        """Convert all lines to the keys of the job with these overrides, since an algorithm has keys of its own."""
        self.types = {row.key: row.type for row in rows_of(schema_of(self.task), None, words)}
        self.settings, self.left = {}, {}
        if algorithm is not None:
            self.settings[ALGORITHM] = algorithm, self.file.method
        for second in (False, True):  # keys with other names, then those with rules, which say more
            for key, line in self.lines.items():
                rule = self._settings_by_rule(key, line.value)
                if (rule is not None) is second:
                    try:
                        self._convert_line(key, line, rule)
                    except Unknown as error:
                        self._leave_line(line, str(error))

    def _defaults(self) -> dict[str, Line]:
        """The trainer's defaults of keys that the file leaves out."""
        lines, trainer = dict[str, Line](), self.file.trainer
        for table in (f"defaults_of_{trainer}", f"defaults_of_{trainer}_{self.task}"):
            for key, value in foreign_keys().get(table, {}).items():
                if key not in self.file.lines:
                    value = attempt(_computed_value, value, _values(lines | self.file.lines))
                    lines[key] = Line(value, f"{key}: {value}{DEFAULT}")
        return lines

    def _settings_by_rule(self, key: str, value: Any) -> dict[str, Any] | None:
        """The settings for a value of a key whose values are settings of other forms."""
        rule = self.rules.get(key, {})
        plain = value is None or isinstance(value, str | int | float)
        return rule.get(value if plain and value in rule else "*")

    def _convert_line(self, key: str, line: Line, rule: dict[str, Any] | None) -> None:
        words = key if key in self.types else counterpart(key, self.types, self.trainers)
        hint = f"; here it is {words}" if words else ""
        if isinstance(line.value, Unknown):
            raise Unknown(f"{line.value}{hint}")
        if rule is not None:
            for ours, value in rule.items():
                try:
                    self._set_key(ours, _computed_value(value, self.names), key, line)
                except Unknown as error:
                    raise Unknown(f"{error}{hint}") from None
            if not rule and "*" not in self.rules[key]:
                self._leave_line(line, NOTHING)
        elif words in self.types and (isinstance(line.value, dict) or not self.types[words].startswith("dict")):
            self._set_key(words, line.value, key, line)
        elif words is not None and words.startswith(RANKS):
            self.file.ranks[words.removeprefix(RANKS)] = str(line.value)
        elif words is not None and words.startswith(REWARDS):
            self._set_key(REWARDS, _reward_entries(line.value, hint), key, line)
        else:  # a part of a section without fixed keys
            head, _, leaf = key.rpartition(".")
            section = counterpart(head, self.types, self.trainers)
            if section is None or not self.types.get(section, "").startswith("dict"):
                raise Unknown(f"here it is {words}" if words else LACKING if words is None else NOTHING)
            self._set_key(section, {**self.settings.get(section, ({}, ""))[0], leaf: line.value}, head, line)

    def _set_key(self, key: str, value: Any, origin: str, line: Line) -> None:
        """Set a key to a value, in its type and with the names of values here. Raises Unknown."""
        if key not in self.types:
            raise Unknown(f"this job has no {key}")
        kind, names = self.types[key], foreign_keys()["values"].get(key, {})
        value = names.get(value, value) if isinstance(value, str) else value
        if kind.startswith("list") and not isinstance(value, list | None):
            value = [value]
        if kind.startswith("int") and isinstance(value, float):
            ranks = [self.file.ranks.get("NPROC_PER_NODE", ""), self.file.ranks.get("NNODES", "1")]
            if not value.is_integer() and key.endswith("_per_gpu") and all(count.isdecimal() for count in ranks):
                key, value = key.removesuffix("_per_gpu"), value * int(ranks[0]) * int(ranks[1])
            if not value.is_integer():
                raise Unknown(f"{key} would be {value:g}, which is no integer")
            value = int(value)
        if key in NAMES and not re.fullmatch(r"[\w, '\[\]-]*", str(value)):
            raise Unknown(f"here it is {key}; code of the file is not loaded")
        if "${" in str(value) or (value is None and kind == "str"):
            raise Unknown(f"here it is {key}")
        for name in value if key in ("data.train_files", "data.val_files") and value else ():
            if not re.search(r"^hf://|^[~./]|\.\w+$", str(name)):
                raise Unknown(f"here it is {key}, in which a data set of a hub is hf://owner/name:split")
        for entry in value if key == REWARDS else ():
            if "path" in entry:
                entry["path"] = entry["path"].removeprefix("pkg://")  # verl's form of a module
        self.settings[key] = value, f"{origin}, their default" if line.text.endswith(DEFAULT) else origin

    def _leave_line(self, line: Line, why: str) -> None:
        """Keep a line as a comment; defaults that need nothing here are no line."""
        if line.text.endswith(DEFAULT) and (why == NOTHING or why.startswith("this job has no")):
            return
        text = re.sub(r"(?<=[=: ])\S.*", "…", line.text) if SECRET.search(line.text.split("=")[0]) else line.text
        self.left[text] = why

    def load(self, name: str) -> None:
        """Load the settings of the file `name`; those that are refused become comments. Raises ConfigError."""
        while True:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "config.yaml")
                path.write_text(self.text(), encoding="utf-8")
                try:
                    load_config(schema_of(self.task), str(path), [])
                    return
                except ConfigError as error:
                    message = " ".join(str(error).split())
            places = dict[str, int]()
            for key in self.settings:
                section = rf"{re.escape(key.rpartition('.')[0])}\.\w+"  # a default beside it may be what is refused
                for rank, words in enumerate((re.escape(key), section)):
                    match = re.search(rf"(?<![\w.]){words}(?!\w|\.\w)", message)
                    if match is not None and key != "model.path":
                        places.setdefault(key, match.start() + rank * len(message))
            if not places:
                raise ConfigError(f"{name}: {message}")
            key = min(places, key=lambda each: places[each])
            value, origin = self.settings.pop(key)
            self.left[f"{origin}: {value}"] = message

    def text(self) -> str:
        """The settings as YAML, in the order of the schema, each with the key that it comes from."""
        lines, before = list[str](), list[str]()
        for key in self.types:
            if key not in self.settings:
                continue
            value, origin = self.settings[key]
            *sections, leaf = key.split(".")
            for depth, section in enumerate(sections):
                if before[: depth + 1] != sections[: depth + 1]:
                    lines.append(f"{'  ' * depth}{section}:")
            before = sections
            text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
            if "\n" in text.strip():  # of a text with several lines, which stay one
                text = json.dumps([value], ensure_ascii=False)
            lines.append(f"{'  ' * len(sections)}{leaf}: {text.strip()[1:-1]}  # {_comment_text(origin)}")
        return "\n".join(lines) + "\n"


def schema_of(task: str) -> Any:
    """The schema of a training task, which its `build` takes."""
    return get_type_hints(import_file(str(ROOT / "tasks" / f"train_{task}.py"), "task").build)["cfg"]


def _values(lines: dict[str, Line]) -> dict[str, Any]:
    return {key: line.value for key, line in lines.items() if not isinstance(line.value, Unknown)}


def _computed_value(value: Any, names: dict[str, Any]) -> Any:
    """A value of settings_of_... or defaults_of_...: of a formula its result. Raises Unknown, also for a reason."""
    if isinstance(value, str) and value.startswith("="):
        value = formula(value[1:], names)
    if isinstance(value, str) and value.startswith("!"):
        raise Unknown(value[1:])
    return value


def _reward_entries(value: Any, hint: str) -> list[dict[str, Any]]:
    """The entries of reward.functions for names with weights, a list of sections, or names. Raises Unknown."""
    known, entries = foreign_keys()["rewards"], list[dict[str, Any]]()
    for each in value.items() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        name, weight = each if isinstance(each, tuple) else (each, 1.0)
        if isinstance(each, dict):
            name, weight = each.get("reward_model"), each.get("weight", 1.0)
        if not isinstance(name, str) or name not in known:
            raise Unknown(f"no reward here is its {name}{hint}; a function of your own is {{path: file.py:name}}")
        entries.append({"name": known[name], "weight": weight})
    return entries


def _comment_text(text: str) -> str:
    """A text for a comment: one line, without secrets and characters that YAML refuses."""
    words = "".join(letter if letter.isprintable() else " " for letter in hide(text))
    return cut(" ".join(words.split()))


def convert(name: str, trainer: str | None = None) -> str:
    """The configuration of a file, as YAML with comments. trainer: such as verl; None: recognise it.

    Raises ConfigError, in one line, for a file that cannot be read, is not recognised, or has no known setting.
    """
    known = foreign_keys()["tasks"]
    if trainer is not None and trainer not in known:
        raise ConfigError(f"from={trainer}: expected one of {', '.join(known)}")
    file = read_foreign(name, trainer)
    for key, values in foreign_keys()["only"].get(file.trainer, {}).items():
        if key in file.lines and file.lines[key].value not in values:
            raise ConfigError(f"{name}: {key} is {file.lines[key].value}; expected {', '.join(values)}")
    task, methods, algorithm = known[file.trainer], foreign_keys()["methods"], None
    if task is None:
        method = file.method or ("grpo" if "num_generations" in file.lines else "")
        if method not in methods:
            raise ConfigError(f"{name}: its method is {method or 'not in the file'}; expected {', '.join(methods)}")
        task, algorithm = (*methods[method], None)[:2]
    job = _Conversion(file, task, algorithm)
    if all(origin.endswith("their default") for _, origin in job.settings.values()):
        script = file.trainer == "trl" and not name.endswith((".sh", ".yaml", ".yml"))
        hint = "; if they come from the command line, convert a .sh file with the command" if script else ""
        raise ConfigError(f"{name}: none of its {len(file.lines)} settings is known here{hint}")
    lacking = [key for key in ("model.path", "data.train_files") if key not in job.settings]
    if "model.path" in lacking:
        job.settings["model.path"] = "MODEL", "to set"
    job.load(name)
    if task in ("grpo", "flowgrpo") and REWARDS not in job.settings:
        lacking.append(REWARDS)
    ranks = "".join(f"{key}={value} " for key, value in sorted(file.ranks.items()) if str(value).isdecimal())
    lines = [f"# {ranks}phalanx train {task} config.yaml"]
    lines.append(
        f"# Converted from {_comment_text(name)} ({file.trainer}). Keys that are left out have the defaults of Phalanx."
    )
    if lacking:
        lines.append(f"# To set before: {', '.join(lacking)}.")
    body = job.text()
    for needless, title in ((False, "Lines without an equal here, and why"), (True, "Lines that need nothing here")):
        left = [f"\n# {title}:"]
        for text, why in job.left.items():
            if (why == NOTHING) is needless:
                left.append(f"# {_comment_text(text)}" + ("" if needless else f"  # {_comment_text(why)}"))
        body += "\n".join([*left, ""]) if left[1:] else ""
    return "\n".join(lines) + "\n" + body


def main(argv: Sequence[str]) -> int:
    """`phalanx convert`; returns 0, or 2 for a file that cannot be converted."""
    parser = argparse.ArgumentParser(prog="phalanx convert", description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", metavar="FILE", help="a shell script, YAML or Python file, or FILE.py:FUNCTION")
    known = ", ".join(foreign_keys()["tasks"])
    parser.add_argument("trainer", metavar="from=TRAINER", nargs="?", help=f"one of {known}; default: recognised")
    given = parser.parse_args(argv)
    try:
        if given.trainer is not None and not given.trainer.startswith("from="):
            raise ConfigError(f"{given.trainer}: expected from=TRAINER")
        text = convert(given.file, given.trainer and given.trainer.removeprefix("from="))
    except ConfigError as error:
        return show_mistake(error)
    return show(text.rstrip("\n"))
