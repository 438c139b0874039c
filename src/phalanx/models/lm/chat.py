"""Prompts of language models: rendered by the chat template of the model's folder, and tokenized.

A template is untrusted code, so it runs in a confined process (_render.py) with limits on time, memory and output size.
"""

import json
import logging
import signal
import subprocess
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
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
SECONDS = 5.0  # limit of CPU time for one chat
TOGETHER = 2**14  # prompts that one process renders
_OURS = ("messages", "tools", "documents", "add_generation_prompt")  # variables that the configuration cannot set
_PROBED = frozenset({"system", "user", "assistant"})  # roles of the chats that a template is tested with
_PROBES = 8  # limit of these chats


def prompt_tokens(tokenizer: Any, prompts: Sequence[Prompt], data: LMDataConfig, path: str) -> "list[array[int]]":
    """Tokens of prompts, rendered by the chat template; a response follows them directly. path: model.path.

    Raises ValueError, in one line, for a template or a prompt that cannot be rendered, for a template that omits texts
    of a chat, and for data.chat_template_kwargs that it does not read.
    """
    tokens: list[array[int]] = []
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        if tokenizer.chat_template is None:
            if data.chat_template_kwargs:
                raise ValueError(f"data.chat_template_kwargs: {path!r} has no chat template, which would read them")
            texts = []
            for prompt in some:
                messages = with_system_prompt(chat_messages(prompt), data.system_prompt)
                texts.append("\n\n".join(message.get("content", "") for message in messages))
            encoded = tokenizer(texts)
        else:
            encoded = tokenizer(rendered(tokenizer, some, data, path), add_special_tokens=False)
        for ids in encoded["input_ids"]:
            tokens.append(array("i", ids))
    return tokens


def chat_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt's chat: a plain text is a message of the user."""
    return prompt.messages or [{"role": "user", "content": prompt.text}]


def with_system_prompt(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """The chat, with the message `system` (data.system_prompt) first if it has no system message."""
    if system is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def rendered(tokenizer: Any, prompts: Sequence[Prompt], data: LMDataConfig, path: str) -> list[str]:
    """The prompts' texts. A folder may have a separate template for chats with tools."""
    by_template: dict[str, list[int]] = {}
    chats = []
    for number, prompt in enumerate(prompts):
        tools = prompt.meta.get("tools")
        schemas = isinstance(tools, list) and bool(tools) and all(isinstance(tool, dict) for tool in tools)
        chat = {
            "messages": with_system_prompt(chat_messages(prompt), data.system_prompt),
            "tools": tools if schemas else None,
        }
        chats.append(chat)
        by_template.setdefault(template_of(tokenizer, chat["tools"], path), []).append(number)
    texts = [""] * len(prompts)
    for template, numbers in by_template.items():
        with closing(ChatRenderer(template, tokenizer, data, path)) as renderer:
            some = _of_template(renderer, [chats[number] for number in numbers])
        for number, text in zip(numbers, some, strict=True):
            texts[number] = text
    return texts


def template_of(tokenizer: Any, tools: list[dict[str, Any]] | None, path: str) -> str:
    """The chat template for chats with these tools. Raises ValueError if the model's folder has none."""
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.path: {path!r}: its chat templates have none for a prompt: {reason}") from error


class ChatRenderer:
    """A chat template of the model's folder `path`, with the variables of the configuration."""

    def __init__(self, template: str, tokenizer: Any, data: LMDataConfig, path: str) -> None:
        """Raises ValueError, in one line, for a template that cannot be used."""
        self.name = f"model.path: {path!r}: its chat template"  # for messages
        self._fixed = {"documents": None, **tokenizer.special_tokens_map, "add_generation_prompt": True}
        self._fixed |= data.chat_template_kwargs
        self._template = template, data.chat_template_date or date.today().isoformat()
        try:
            self._process: TemplateProcess | None = TemplateProcess(*self._template)
        except TemplateProblem as error:
            raise ValueError(f"{self.name} cannot be used: {error}") from error
        try:
            _check_kwargs(data.chat_template_kwargs, self._process.variables, path)
        except ValueError:
            self.close()
            raise

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **variables: Any) -> str:
        """The text of a chat. Raises ValueError, in one line, for a chat that the template does not render."""
        (text,) = self.texts([{"messages": messages, "tools": tools, **variables}])
        return text

    def texts(self, chats: list[dict[str, Any]]) -> list[str]:
        """The texts of many chats; see `text`."""
        if self._process is None:
            self._process = TemplateProcess(*self._template)
        texts: list[str] = []
        try:
            for (text,) in self._process.ask([self._fixed | chat for chat in chats]):
                texts.append(text)
        except TemplateProblem as error:
            self._process = None  # it has ended
            messages = chats[len(texts)]["messages"]
            last = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
            chat = f"the prompt {cut(last)!r}, a chat of {roles_of(messages)}"
            raise ValueError(f"{self.name} does not render {chat}: {error}") from error
        return texts

    def close(self) -> None:
        """End the template's process; the next call of `texts` starts a new one."""
        if self._process is not None:
            self._process.close()
        self._process = None


def _of_template(renderer: ChatRenderer, chats: list[dict[str, Any]]) -> list[str]:
    """The texts of chats by one template, which is also tested on other chats with the same roles."""
    texts = renderer.texts(chats)
    probes = 0
    parts = any(isinstance(message.get("content"), list) for chat in chats for message in chat["messages"])
    for roles in dict.fromkeys(tuple(message["role"] for message in chat["messages"]) for chat in chats):
        if not _PROBED.issuperset(roles) or probes == _PROBES:
            continue
        probes += 1
        sentences = [f"sentence {i} of a chat" for i in range(len(roles))]
        messages: list[dict[str, Any]] = []
        for role, sentence in zip(roles, sentences, strict=True):
            messages.append({"role": role, "content": [{"type": "text", "text": sentence}] if parts else sentence})
        text = renderer.text(messages, None)
        for message, sentence in zip(messages, sentences, strict=True):
            if message["role"] != "assistant" and sentence not in text:
                raise ValueError(
                    f"{renderer.name} omits the text of the {message['role']} in a chat of {roles_of(messages)}; "
                    "expected one that renders it"
                )
    return texts


def roles_of(messages: list[dict[str, Any]]) -> str:
    return ", ".join(message["role"] for message in messages)


def _check_kwargs(kwargs: dict[str, Any], variables: Sequence[str], path: str) -> None:
    """Raise ValueError for variables that the template does not read, or that the configuration cannot set."""
    free = [name for name in variables if name not in _OURS]
    for name in kwargs:
        if name not in free:
            reads = f"it reads {', '.join(free)}" if free else "it reads no variables except the chat"
            raise ValueError(
                f"data.chat_template_kwargs: the chat template of {path!r} has no variable {name!r} to set; {reads}"
                f"{nearest(str(name), free)}"
            )


class TemplateProblem(Exception):
    """A chat template, or a chat, cannot be rendered."""


class TemplateProcess:
    """A chat template in a confined process, which renders one chat at a time.

    Raises TemplateProblem, whose message is part of a line, if the template cannot be used or a chat cannot be
    rendered; the process has then ended.
    """

    def __init__(self, template: str, day: str) -> None:
        command = sandbox.command(_CHILD, str(sandbox.__file__), str(SECONDS))
        # a fixed hash seed, so that sets have the same order on all ranks
        env = sandbox.environment() | {"PYTHONHASHSEED": "0"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._child = subprocess.Popen(command, text=True, encoding="utf-8", env=env, **pipes)
        # variables that the template reads, and confinements that this machine lacks
        (self.variables, missing), *_ = self.ask([[template, day]])
        if missing:
            _tell_missing(" and no ".join(missing))

    def close(self) -> None:
        """End the process."""
        self._child.communicate()

    def ask(self, questions: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield the values of each answer, for a chat its text.

        A thread writes the questions, so that the process never waits for one.
        """
        assert self._child.stdout is not None
        # serialised here, because in the writer thread an error would leave this thread waiting for an answer
        lines = [json.dumps(question) + "\n" for question in questions]
        writer = threading.Thread(target=self._write_lines, args=(lines,), daemon=True)
        writer.start()
        for _ in questions:
            answer = self._child.stdout.readline()
            # without a newline, the process has ended within an answer
            problem, *values = json.loads(answer) if answer.endswith("\n") else [""]
            if problem is None:
                yield values
                continue
            writer.join()  # the process ends
            _, errors = self._child.communicate()
            raise TemplateProblem(problem or self._exit_reason(errors))
        writer.join()

    def _write_lines(self, lines: Sequence[str]) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; its missing answers report that
            self._child.stdin.writelines(lines)
            self._child.stdin.flush()

    def _exit_reason(self, errors: str) -> str:
        """Why the process has ended without an answer."""
        code = self._child.returncode
        late = code in (-signal.SIGPROF, -signal.SIGXCPU)
        problem = f"it takes more than {SECONDS:g} s" if late else f"its process ended with {code}"
        if errors.strip():
            problem += f" ({errors.strip().splitlines()[-1]})"
        return problem


@cache
def _tell_missing(names: str) -> None:
    log.warning("this machine has no %s: chat templates run without that confinement", names)
