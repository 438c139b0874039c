"""Prompts as a language model reads them: rendered by its folder's chat template, and tokenized.

A template is code of a stranger: it runs in a confined process (_render.py) under limits of time, memory and size.
"""

import json
import logging
import signal
import subprocess
import sys
from array import array
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from phalanx import sandbox
from phalanx.config.lm import LMDataConfig
from phalanx.config.messages import cut, nearest
from phalanx.types import Prompt

log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("_render.py")
SECONDS = 5.0  # of a processor, for one chat
TOGETHER = 2**14  # prompts that one process renders
_OURS = ("messages", "tools", "documents", "add_generation_prompt")  # variables that no configuration sets
_PROBED = frozenset({"system", "user", "assistant"})  # roles of the chats that a template is tried with
_PROBES = 8


def prompt_tokens(tokenizer: Any, prompts: Sequence[Prompt], data: LMDataConfig, path: str) -> "list[array[int]]":
    """Tokens of prompts with the chat template, however many, behind which a response begins; `path`: the model's.

    Raises ValueError, with one line, for a template or a prompt that cannot be rendered, for a template that leaves
    texts of a chat out, and for data.chat_template_kwargs that it does not read.
    """
    tokens: list[array[int]] = []
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        if tokenizer.chat_template is None:
            if data.chat_template_kwargs:
                raise ValueError(f"data.chat_template_kwargs: {path!r} has no chat template, which would read them")
            texts = []
            for prompt in some:
                messages = _messages(prompt, data.system_prompt)
                texts.append("\n\n".join(message.get("content", "") for message in messages))
            encoded = tokenizer(texts)
        else:
            encoded = tokenizer(_rendered(tokenizer, some, data, path), add_special_tokens=False)
        for ids in encoded["input_ids"]:
            tokens.append(array("i", ids))
    return tokens


def _messages(prompt: Prompt, system: str | None) -> list[dict[str, Any]]:
    """The chat of a prompt; `system`: see data.system_prompt."""
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    if system is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _rendered(tokenizer: Any, prompts: Sequence[Prompt], data: LMDataConfig, path: str) -> list[str]:
    """The prompts' texts. A folder may have a template of its own for chats with tools."""
    by_template: dict[str, list[int]] = {}
    chats = []
    for number, prompt in enumerate(prompts):
        tools = prompt.meta.get("tools")
        schemas = isinstance(tools, list) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
        chat = {"messages": _messages(prompt, data.system_prompt), "tools": tools if schemas else None}
        chats.append(chat)
        try:
            template = tokenizer.get_chat_template(None, chat["tools"])
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"model.path: {path!r}: its chat templates have none for a prompt: {reason}") from error
        by_template.setdefault(template, []).append(number)
    texts = [""] * len(prompts)
    fixed = {"documents": None, **tokenizer.special_tokens_map, "add_generation_prompt": True}
    fixed |= data.chat_template_kwargs
    for template, numbers in by_template.items():
        some = _of_template(template, [chats[number] for number in numbers], fixed, data, path)
        for number, text in zip(numbers, some, strict=True):
            texts[number] = text
    return texts


def _of_template(
    template: str, chats: list[dict[str, Any]], fixed: dict[str, Any], data: LMDataConfig, path: str
) -> list[str]:
    """The texts of chats, all by one template, which is tried first with chats of the same roles."""
    probes: list[dict[str, Any]] = []
    for roles in dict.fromkeys(tuple(message["role"] for message in chat["messages"]) for chat in chats):
        if _PROBED.issuperset(roles) and len(probes) < _PROBES:
            messages = [{"role": role, "content": f"sentence {i} of a chat"} for i, role in enumerate(roles)]
            probes.append({"messages": messages, "tools": None})
    every = [*chats, *probes]
    variables, texts, problem = _ask(template, _day(data), [{**chat, **fixed} for chat in every])
    its = f"model.path: {path!r}: its chat template"
    if variables is None:
        raise ValueError(f"{its} cannot be used: {problem}")
    _check_kwargs(data.chat_template_kwargs, variables, path)
    if problem is not None:
        asked = every[len(texts)]["messages"]
        last = next((message["content"] for message in reversed(asked) if message["role"] == "user"), "")
        raise ValueError(f"{its} does not render the prompt {cut(last)!r}, a chat of {_roles(asked)}: {problem}")
    for probe, text in zip(probes, texts[len(chats) :], strict=True):
        for message in probe["messages"]:
            if message["role"] != "assistant" and message["content"] not in text:
                raise ValueError(
                    f"{its} leaves out the text of the {message['role']} in a chat of {_roles(probe['messages'])}; "
                    "expected one that renders it"
                )
    return texts[: len(chats)]


def _roles(messages: list[dict[str, Any]]) -> str:
    return ", ".join(message["role"] for message in messages)


def _check_kwargs(kwargs: dict[str, Any], variables: Sequence[str], path: str) -> None:
    """Raise ValueError for variables that the template does not read, or that are not the configuration's."""
    free = [name for name in variables if name not in _OURS]
    for name in kwargs:
        if name not in free:
            reads = f"it reads {', '.join(free)}" if free else "it reads no variable but the chat"
            raise ValueError(
                f"data.chat_template_kwargs: the chat template of {path!r} has no variable {name!r} to set; {reads}"
                f"{nearest(str(name), free)}"
            )


def _day(data: LMDataConfig) -> str:
    return data.chat_template_date or date.today().isoformat()


def _ask(template: str, day: str, chats: Sequence[dict[str, Any]]) -> tuple[list[str] | None, list[str], str | None]:
    """Render chats in a process, by one template: the variables that it reads (None: it cannot be used), the texts of
    the chats up to the first that fails, and the problem with that one.
    """
    lines = [json.dumps(line) for line in ([template, day], *chats)]
    command = [sys.executable, "-P", str(_CHILD), str(sandbox.__file__), str(SECONDS)]
    # no set has another order in another rank
    given = sandbox.environment() | {"PYTHONHASHSEED": "0"}
    result = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, encoding="utf-8", env=given, check=False
    )
    problem = None
    if result.returncode != 0:
        late = result.returncode in (-signal.SIGPROF, -signal.SIGXCPU)
        problem = f"it takes more than {SECONDS:g} s" if late else f"its process ended with {result.returncode}"
        if result.stderr.strip():
            problem += f" ({result.stderr.strip().splitlines()[-1]})"
    answered, _, _ = result.stdout.rpartition("\n")  # the last line of a process that was ended may be a part
    head, *answers = answered.splitlines() or [json.dumps([problem, [], []])]
    refused, variables, missing = json.loads(head)
    if missing:
        _tell_missing(" and no ".join(missing))
    if refused is not None:
        return None, [], refused
    texts: list[str] = []
    for answer in answers:
        failed, text = json.loads(answer)
        if failed is not None:
            return variables, texts, failed
        texts.append(text)
    return variables, texts, problem


@cache
def _tell_missing(names: str) -> None:
    log.warning("this machine has no %s: chat templates run without that confinement", names)
