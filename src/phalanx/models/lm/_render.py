"""Render chats by a chat template in a confined process: `python -P _render.py SANDBOX LIMIT_S`.

The first line of its input is the JSON list [template, date]. Its first answer is [problem, variables that the template
reads, confinements that this machine lacks]. Each further line has the variables of one rendering, and is answered by
[problem, text]. To start fast, it imports neither phalanx nor transformers, whose environment for templates
(`apply_chat_template`) it reproduces.
"""

import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 2**30  # bytes of address space
MARKS = ("generation_begins", "generation_ends")
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's texts: the variables of MARKS, if given, stand around them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in MARKS)
        return nodes.Scope([first, *body, last], lineno=line)


class SafeNamespace(Namespace):
    """Jinja's Namespace, without names that give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


class Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without the other attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def environment(day: date) -> jinja2.Environment:
    """The Jinja environment of templates, with this date."""

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    extensions: list[Any] = [Generation, jinja2.ext.loopcontrols]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": day.strftime, "dict": Dict()}
    env.globals["namespace"] = SafeNamespace
    return env


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the keys that templates read."""
    for name in REASONING:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def with_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Messages, or a part of one, with `change` applied to the arguments of their tool calls."""
    if isinstance(value, list):
        return [with_arguments(item, change) for item in value]
    if isinstance(value, dict):
        result = {}
        for name, item in value.items():
            result[name] = change(item) if name == "arguments" else with_arguments(item, change)
        return result
    return value


def as_object(arguments: Any) -> Any:
    """Parse arguments if they are the JSON text of an object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def as_text(arguments: Any) -> Any:
    """Serialise arguments to JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def rendered(template: jinja2.Template, line: str) -> str:
    """The text for one line of the input. Raises whatever the template raises."""
    variables = json.loads(line)
    messages = [with_reasoning(message) for message in variables["messages"]]
    try:
        text = rendered_with(template, variables, with_arguments(messages, as_object))
    except TypeError:  # some templates concatenate arguments and texts
        text = rendered_with(template, variables, with_arguments(messages, as_text))
    most = 2**20 + 20 * len(line)
    if len(text) > most:
        raise ValueError(f"{len(text)} characters from a chat of {len(line)}; at most {most} are read")
    return text


def rendered_with(template: jinja2.Template, variables: dict[str, Any], messages: list[Any]) -> str:
    """The text of one chat."""
    random.seed(0)  # for the filter `random`, so that all ranks render the same prompt
    return template.render(**{**variables, "messages": messages})


def reason(error: Exception) -> str:
    """An exception as one line."""
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY} bytes of memory"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main(sandbox: str, limit_s: float) -> None:
    """Answer until stdin ends, or a rendering fails."""
    missing = runpy.run_path(sandbox)["confine"](MEMORY)
    source, day = json.loads(sys.stdin.readline())
    # no handler for this signal, so that it also ends code that runs in C
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        env = environment(date.fromisoformat(day))
        variables = sorted(jinja2.meta.find_undeclared_variables(env.parse(source)) - {*MARKS})
        template = env.from_string(source)
    except Exception as error:  # whatever jinja2 raises for such a text
        print(json.dumps([reason(error), [], missing]), flush=True)
        return
    print(json.dumps([None, variables, missing]), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            text = rendered(template, line)
        except Exception as error:  # whatever a template raises
            print(json.dumps([reason(error), ""]), flush=True)
            return
        print(json.dumps([None, text]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's
    main(sys.argv[1], float(sys.argv[2]))
    os._exit(0)
