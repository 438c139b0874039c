"""Settings in scripts and configurations of other trainers, in shell, YAML or Python; nothing is run."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.aliases import foreign_keys
from phalanx.config.files import read_bytes
from phalanx.config.messages import ConfigError, cut, nearest
from phalanx.config.sources import parse_yaml
from phalanx.tools.foreign_values import Unknown, attempt, evaluate, expanded, plain, shell_value

MOST_BYTES = 1 << 20
MARK = "\0"  # in place of a command within a command
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OVERRIDE = re.compile(r"(\+{0,2}[a-z_]\w*(?:\.[\w@/]+)+)=(.*)", re.DOTALL)
# A quoted text or an escaped character, which stay, or a comment, alone in its line or behind a word.
_COMMENT = re.compile(r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*")|^[ \t]*#[^\n]*\n?|(?<=\s)#[^\n]*""", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_METHOD = re.compile(
    r"\b([A-Z]+)(?:Config|Trainer)\b|\btrl (?!import\b)(\w+)|\bswift (sft|pt)\b|\brlhf_type[\s:=]+(\w+)|\b(\w+)\.py"
)


@dataclass
class Line:
    """A setting: its value, or an Unknown with the reason, and the line as it stands in the file."""

    value: Any
    text: str


@dataclass
class ForeignFile:
    """The settings of a file.

    trainer: one of `recognised` in foreign_keys.yaml. method: such as grpo, empty if the file names none. lines: the
    settings by their keys. ranks: NNODES and NPROC_PER_NODE, where the file sets them.
    """

    trainer: str = ""
    method: str = ""
    lines: dict[str, Line] = field(default_factory=dict)
    ranks: dict[str, str] = field(default_factory=dict)


def read_foreign(name: str, trainer: str | None) -> ForeignFile:
    """Read a file, or the function NAME in FILE.py:NAME. trainer: None: recognise it.

    Raises ConfigError, in one line, for a file that cannot be read and for one of no known trainer.
    """
    place, _, function = name.partition(".py:") if ".py:" in name else (name, "", "")
    path = Path(f"{place}.py" if function else place)
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
        file = ForeignFile()
        if path.suffix == ".py":
            _read_python(file, ast.parse(text), function)
        elif path.suffix in (".yaml", ".yml"):
            _read_yaml(file, parse_yaml(text))
        else:
            _read_shell(file, text)
    except FileNotFoundError:
        siblings = [str(near) for near in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file{nearest(str(path), siblings)}") from None
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: not valid Python: {error}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error.problem}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {'' if isinstance(error, ConfigError) else 'cannot be read: '}{reason}") from None
    text = " ".join([*text.split(), *file.lines])
    file.trainer = _recognised_trainer(path, text) if trainer is None else trainer
    for match in _METHOD.finditer(text):
        method = match[match.lastindex or 0].lower()
        if method in foreign_keys()["methods"] or not (file.method or match[5]):
            file.method = method
            break
    return file


def _recognised_trainer(path: Path, text: str) -> str:
    """The trainer of a file with these words and keys. Raises ConfigError."""
    for word in foreign_keys()["not_converted"]:
        if word in text:
            raise ConfigError(f"{path}: {word} has no equal here")
    marks: dict[str, list[str]] = foreign_keys()["recognised"]
    for trainer, words in marks.items():
        for word in words:
            if re.search(rf"(?<!\w){re.escape(word)}", text):
                return trainer
    raise ConfigError(f"{path}: of no known trainer; name one of {', '.join(marks)}, such as from=verl")


# --- YAML


def _read_yaml(file: ForeignFile, content: Any) -> None:
    if not isinstance(content, dict):
        raise ConfigError("the top level must be sections (key: value)")
    flat = dict(_leaves("", content))
    for key, value in flat.items():
        text = f"{key}: {value}"
        for _ in range(4):  # references to references
            if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)) and match[1] in flat:
                value = flat[match[1]]
            elif isinstance(value, str):
                value = _REFERENCE.sub(lambda match: cut(str(flat.get(match[1], match[0]))), value)
        unknown = isinstance(value, str) and "${" in value
        file.lines[key] = Line(
            Unknown("its value is computed elsewhere") if unknown else plain(value, str(value)), text
        )


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The dotted keys of a value's leaves; the only section of a list is one of the list's key."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and key != "rewards":
        value = value[0]
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}".lstrip("."), item)
    else:
        yield key, value


# --- shell


def _read_shell(file: ForeignFile, text: str) -> None:
    """Read `key.key=value` and `--key value` in all commands of a script."""
    variables: dict[str, str | None] = {"HOME": "~"}
    computed = list[str]()
    for words in _command_words(text, computed):
        while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in ("export", "local")):
            name, equals, value = words.pop(0).partition("=")
            if equals:
                _assign_variable(variables, name, value)
        options = _read_options(file, words, variables)
        for word in words:
            match = _OVERRIDE.fullmatch(word)
            if match is not None and not word.startswith("--"):
                file.lines[match[1].lstrip("+")] = Line(
                    attempt(shell_value, [match[2]], variables), _as_it_stood(word, computed)
                )
        for name, values in options.items():
            text = _as_it_stood(" ".join([f"--{name}", *values]), computed)
            file.lines[name.replace("-", "_")] = Line(attempt(shell_value, values, variables), text)
    for name in foreign_keys()["launched"].values():
        count = variables.get(name)
        if count is not None:
            file.ranks.setdefault(name, count)


def _assign_variable(variables: dict[str, str | None], name: str, word: str) -> None:
    """Set a variable; it is unknown if the script gives it several values, as in its conditions."""
    try:
        value: str | None = expanded(word, variables)
    except Unknown:
        value = None
    variables[name] = value if variables.get(name, value) == value else None


def _as_it_stood(word: str, computed: list[str]) -> str:
    """A word with the parts that a shell would compute, see `_command_words`."""
    for i in range(len(computed) - 1, -1, -1):
        word = word.replace(f"${MARK}{i}{MARK}", computed[i])
    return word


def _command_words(text: str, computed: list[str]) -> Iterator[list[str]]:
    """The words of each command of a script, without comments. What a shell would run within it is moved to `computed`,
    with a mark in its place.
    """

    def moved(match: re.Match[str]) -> str:
        computed.append(match[0])
        return f"${MARK}{len(computed) - 1}{MARK}"

    text = _COMMENT.sub(lambda match: match[1] or "", f"{text}\n")
    text, before = text.replace("\\\n", " ").replace("2>&1", " "), ""
    while text != before:  # the innermost first
        before, text = text, re.sub(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`", moved, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words = list[str]()
    for word in lexer:
        if set(word) <= set(";&|()<>\n"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def _read_options(file: ForeignFile, words: list[str], variables: dict[str, str | None]) -> dict[str, list[str]]:
    """The options of a trainer's command, or of an array of options; those of its launcher set `file.ranks`."""
    start = 0 if words and words[0].startswith("--") else len(words)
    for i, word in enumerate(words):
        if word.endswith((".py", "/swift", "/trl")) or word in ("swift", "trl", "-m"):
            start = i + 1
            break
    options, launched = dict[str, list[str]](), foreign_keys()["launched"]
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = [value] if equals else []
            rank = launched.get(name.replace("-", "_"))
            if i < start and rank is not None and (equals or words[i + 1 :]):
                given = attempt(shell_value, [value if equals else words[i + 1]], variables)
                file.ranks[rank] = str(given) if isinstance(given, int) else ""
            if i < start:
                del options[name]
        elif options and i > start and not _OVERRIDE.fullmatch(word):
            options[next(reversed(options))].append(word)
    return options


# --- Python


def _read_python(file: ForeignFile, tree: ast.Module, function: str) -> None:
    """Read the settings of a function that assigns `config.a.b`, or else the arguments of the `calls` of TRL."""
    functions: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(line.startswith("config.") for line in ast.unparse(node).split()):
            functions[node.name] = node
    if function and function not in functions:
        raise ConfigError(f"no function {function} that sets config{nearest(function, [*functions])}")
    if functions:
        names = [*functions] if not function else [function]
        if len(names) > 1:
            raise ConfigError(f"name its function, as in FILE.py:{names[-1]}; it has {', '.join(names)}")
        _read_function(file, functions, names[0], {}, 0)
        return
    values = _assigned_once(tree)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            _read_call(file, call, values)


def _read_function(
    file: ForeignFile, functions: dict[str, ast.FunctionDef], name: str, values: dict[str, Any], depth: int
) -> None:
    """Read the assignments of a function and of those that it calls. values: of names so far, which it adds to."""
    for statement in functions[name].body:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) in functions and depth < 8:
                _read_function(file, functions, ast.unparse(value.func), values, depth + 1)
                continue
            target = ast.unparse(node.targets[-1] if isinstance(node, ast.Assign) else node.target)
            try:
                if node is not statement or isinstance(node, ast.AugAssign):
                    raise Unknown("it is set within a condition")
                result: Any = evaluate(value, values)
                values[target] = result
            except Unknown as error:
                result = error
                values.pop(target, None)
            if target.startswith("config.") or target == "gpu_number":
                file.lines[target.removeprefix("config.")] = Line(result, ast.unparse(node))


def _assigned_once(tree: ast.Module) -> dict[str, Any]:
    """The values of names that are assigned once."""
    values, several = dict[str, Any](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in values:
                several.add(name)
            try:
                values[name] = evaluate(node.value, values)
            except Unknown:
                several.add(name)
    for name in several:
        values.pop(name, None)
    return values


def _read_call(file: ForeignFile, call: ast.Call, values: dict[str, Any]) -> None:
    """Add the arguments of one of the `calls` of TRL."""
    calls, name = foreign_keys()["calls"], ast.unparse(call.func).rpartition(".")[2]
    kind = name if name in calls else re.sub(r"^[A-Z]+(?=Config$|Trainer$)", "", name)
    if kind not in calls or (kind == "from_pretrained" and "AutoModel" not in ast.unparse(call.func)):
        return
    positions, keywords = calls[kind].get("positions", ()), calls[kind].get("keywords", {})
    arguments: list[tuple[str, ast.expr]] = list(zip(positions, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg not in foreign_keys()["objects"]:
            arguments.append((keywords.get(keyword.arg or "**", keyword.arg or "**"), keyword.value))
    for key, node in arguments:
        value = attempt(evaluate, node, values)
        if key not in file.lines or isinstance(file.lines[key].value, Unknown):
            file.lines[key] = Line(value, f"{key}={ast.unparse(node)}")
