"""Prompts by a chat template, in a confined process: the same tokens as transformers', and limits for broken ones."""

from datetime import date
from typing import Any

import pytest

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.chat import prompt_tokens
from phalanx.types import Prompt
from tests.helpers.tiny import chat_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
CALLS = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}{% endfor %}"
# what transformers offers beyond jinja2
RICH = """
{%- set ns = namespace(last=0, seen=[]) %}
{%- for m in messages %}
    {%- if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
{%- endfor %}
{{- bos_token or "" }}{{ documents is none }}{{ dict(a=1) | tojson }}{{ dict.fromkeys(["x"]) }}
{%- for m in messages %}
    {%- if m.role == "assistant" %}{% generation %}{{ m.reasoning_content }}|{{ m.content }}{% endgeneration %}
    {%- else %}
<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}
    {%- endif %}
{%- endfor %}
{{ ns.last }}{{ messages[-1].content.split(" ") | length }}{{ messages[0]["content"][:4] | upper }}
"""
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " What is ½ of “8”? {{ 7 * 7 }}<|im_end|> "}
TURNS = [USER, {"role": "assistant", "content": "4", "thinking": "half of 8"}, {"role": "user", "content": "And of 4?"}]
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED = [
    USER,
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]},
]
CALLED += [{"role": "tool", "name": "add", "content": "9"}]


def tokens(template: str, prompts: list[Prompt], **data: Any) -> list[list[int]]:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    return [ids.tolist() for ids in prompt_tokens(tokenizer, prompts, LMDataConfig(**data), "models/m")]


def chat(messages: list[dict[str, Any]], **meta: Any) -> Prompt:
    return Prompt("the last message", 0, meta, messages=messages)


@pytest.mark.parametrize(
    "template", [CHATML + HEAD, RICH, TOOLS + CALLS + CHATML + HEAD], ids=["chatml", "rich", "tools"]
)
def test_the_tokens_are_transformers(template: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    chats = [[USER], [SYSTEM, USER], [SYSTEM, *TURNS], CALLED]
    ours = tokens(template, [chat(messages, tools=[SCHEMA]) for messages in chats])
    for messages, ids in zip(chats, ours, strict=True):
        theirs = tokenizer.apply_chat_template(messages, [SCHEMA], add_generation_prompt=True, return_dict=True)
        assert ids == theirs["input_ids"]


@pytest.mark.parametrize("arguments", [{"x": "½"}, '{"x": "½"}'], ids=["object", "text"])
def test_arguments_are_what_the_template_reads(arguments: Any) -> None:
    """Data have arguments as objects or as JSON text; templates read objects, or concatenate text."""
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": arguments}}
    row = chat([USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "9"}], tools=[SCHEMA])
    expected = {
        "f.arguments | tojson": '{"x": "½"}',
        "f.name ~ f.arguments.x": "add½",
        "f.name + f.arguments": 'add{"x": "½"}',
    }
    for written, text in expected.items():
        each = "{% for m in messages if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ " + written + " }}"
        (ids,) = tokens(each + "{% endfor %}" + CHATML, [row])
        assert chat_tokenizer().decode(ids).startswith(f"{text}<|im_start|>")


def test_a_text_and_a_system_prompt() -> None:
    tokenizer = chat_tokenizer()
    text = Prompt("What is 1+1?", 0, {})
    own = chat([SYSTEM, USER])
    got = tokens(CHATML + HEAD, [text, own], system_prompt="Think.")
    decoded = [tokenizer.decode(ids) for ids in got]
    assert decoded[0] == (
        "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded[1].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n What is ½ of “8”?")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(s='a' * 1024) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHATML + LOOPS, "{row}: it takes more than 0.5 s"),
        (CHATML + "{{ 'a' * 3000000000 }}", "{row}: it takes more than 1073741824 bytes of memory"),
        (CHATML + DOUBLED, "{row}: it takes more than 1073741824 bytes of memory"),
        (CHATML + "{{ 'a' * 2000000 }}", "{row}: ValueError: 20000"),
        (
            CHATML + "{{ ''.__class__.__mro__ }}",
            "{row}: SecurityError: access to attribute '__class__' of 'str' object",
        ),
        (CHATML + "{{ messages[9].content }}", "{row}: UndefinedError: list object has no element 9"),
        (CHATML + "{% if %}", " cannot be used: TemplateSyntaxError: Expected an expression, got 'end of statement"),
        (CHATML + "{{ raise_exception('no\nsuch role') }}", "{row}: TemplateError: no such role"),
        ("Hello!", " omits the text of the user in a chat of user; expected one that renders it"),
    ],
    ids=["time", "memory", "doubled", "size", "sandbox", "undefined", "syntax", "raise", "dropped"],
)
def test_a_broken_template_is_one_line(template: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.models.lm.chat.SECONDS", 0.5 if LOOPS in template else 60.0)
    with pytest.raises(ValueError) as caught:
        tokens(template, [Prompt("What is 1+1?", 0, {})])
    row = " does not render the prompt 'What is 1+1?', a chat of user"
    start = "model.path: 'models/m': its chat template" + problem.format(row=row)
    assert str(caught.value).startswith(start) and "\n" not in str(caught.value)


def test_the_row_that_a_template_does_not_take_is_named() -> None:
    rows = [Prompt("one", 0, {}), chat([SYSTEM, {"role": "user", "content": "two"}]), Prompt("three", 2, {})]
    with pytest.raises(ValueError) as caught:
        tokens(NO_SYSTEM + HEAD, rows)
    assert str(caught.value) == (
        "model.path: 'models/m': its chat template does not render the prompt 'two', a chat of system, user: "
        "TemplateError: System role not supported"
    )


def test_messages_that_a_template_drops() -> None:
    silent = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    assert tokens(silent, [Prompt("one", 0, {})])
    with pytest.raises(ValueError, match=r"omits the text of the system in a chat of system, user; expected"):
        tokens(silent, [Prompt("one", 0, {}), chat([SYSTEM, USER])])
    first = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"omits the text of the user in a chat of user, assistant, user; exp"):
        tokens(first, [chat([*TURNS])])


def test_no_template_and_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    texts = [ids.tolist() for ids in prompt_tokens(tokenizer, [chat([SYSTEM, USER])], LMDataConfig(), "m")]
    assert texts == [tokenizer(f"{SYSTEM['content']}\n\n{USER['content']}")["input_ids"]]
    monkeypatch.setattr("phalanx.models.lm.chat.TOGETHER", 8)
    got = tokens(CHATML + HEAD, [Prompt(f"What is {i} + 1?", i, {}) for i in range(20)])
    for i, ids in enumerate(got):
        assert chat_tokenizer().decode(ids).startswith(f"<|im_start|>user\nWhat is {i} + 1?<|im_end|>")
    assert len(got) == 20


def test_variables_of_the_template() -> None:
    one, template = [Prompt("one", 0, {})], CHATML + HEAD + THINKING
    (plain,), (quiet,) = tokens(template, one), tokens(template, one, chat_template_kwargs={"enable_thinking": False})
    decode = chat_tokenizer().decode
    assert decode(quiet) == decode(plain) + "<think></think>"
    with pytest.raises(ValueError) as caught:
        tokens(template, one, chat_template_kwargs={"enable_thinkin": False})
    assert str(caught.value) == (
        "data.chat_template_kwargs: the chat template of 'models/m' has no variable 'enable_thinkin' to set; "
        "it reads enable_thinking; did you mean enable_thinking?"
    )
    with pytest.raises(ValueError, match=r"no variable 'messages' to set; it reads no variables except the chat$"):
        tokens(CHATML + HEAD, one, chat_template_kwargs={"messages": []})


def test_a_chat_that_json_cannot_hold_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="Object of type set is not JSON serializable"):
        tokens(CHATML, [chat([USER | {"seen": {1}}])])


def test_the_date_is_fixed() -> None:
    one, template = [Prompt("one", 0, {})], CHATML + "{{ strftime_now('%d %b %Y') }}"
    (ids,) = tokens(template, one, chat_template_date="2024-07-26")
    assert chat_tokenizer().decode(ids).endswith("<|im_end|>\n26 Jul 2024")
    (ids,) = tokens(template, one)
    assert chat_tokenizer().decode(ids).endswith(date.today().strftime("%d %b %Y"))
