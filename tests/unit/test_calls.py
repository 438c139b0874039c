"""Parsers of tool calls in texts, by the format of the model family."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.models.lm.calls import FORMATS, parser
from phalanx.types import JobError

PROPERTIES = {
    "x": {"type": "integer"},
    "on": {"type": "boolean"},
    "text": {"type": "string"},
    "items": {"type": "array"},
    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "label": {"type": ["string", "null"]},
}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"properties": PROPERTIES}}}]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def coder(name: str, *arguments: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name: str, *arguments: tuple[str, str]) -> str:
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>{name}\n{body}</tool_call>"


def gemma(text: str) -> str:
    return f"<|tool_call>call:{text}<tool_call|>".replace("`", '<|"|>')


CALL = '{"name": "calc", "arguments": {"x": 1}}'
TO_CALC = " to=functions.calc<|channel|>commentary json<|message|>"  # as the template writes it
TO_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"  # as the model does
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", " It is <b>4</b>. ", "It is <b>4</b>.", []),
        ("hermes", f"I see.\n{hermes(CALL)}\n", "I see.", [call("calc", x=1)]),
        ("hermes", f"{hermes(CALL)}{hermes(CALL)} done", "done", [call("calc", x=1), call("calc", x=1)]),
        ("hermes", f"<tool_call>{CALL}", "", [call("calc", x=1)]),
        ("hermes", hermes('{"name": "now"}'), "", [call("now")]),
        ("hermes", hermes('{"name": "calc", "arguments": "{\\"x\\": 1}"}'), "", [call("calc", x=1)]),
        ("qwen3_coder", f"Hm.{coder('calc', ('x', '1'), ('on', 'True'))}", "Hm.", [call("calc", x=1, on=True)]),
        ("qwen3_coder", coder("calc", ("text", "1\n\n<b>2</b>")), "", [call("calc", text="1\n\n<b>2</b>")]),
        (
            "qwen3_coder",
            coder("calc", ("text", "12"), ("items", "[1, 2]")),
            "",
            [call("calc", text="12", items=[1, 2])],
        ),
        ("qwen3_coder", coder("calc", ("x", "one"), ("y", "2")), "", [call("calc", x="one", y="2")]),
        ("qwen3_coder", coder("calc", ("limit", "None"), ("label", "7")), "", [call("calc", limit=None, label="7")]),
        ("qwen3_coder", coder("other"), "", [call("other")]),
        (
            "qwen3_coder",
            "<tool_call><function=calc><parameter=text>a\n<parameter=x>1</parameter></function></tool_call>",
            "",
            [call("calc", text="a", x=1)],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=calc><parameter=text>a<parameter=x>1</parameter></function></tool_call>",
            "",
            [call("calc", text="a", x=1)],
        ),
        (
            "qwen3_coder",
            coder("calc", ("text", "the tag <parameter=y> is")),
            "",
            [call("calc", text="the tag <parameter=y> is")],
        ),
        ("llama3", '{"name": "calc", "parameters": {"x": 1}}', "", [call("calc", x=1)]),
        ("llama3", '{"name": "Anna", "age": 3}', '{"name": "Anna", "age": 3}', []),
        ("llama3", '{"name": "Anna", "age"', '{"name": "Anna", "age"', []),
        ("llama3", '{"name": {"first": "Anna"}, "parameters": 3}', '{"name": {"first": "Anna"}, "parameters": 3}', []),
        (
            "llama3",
            '{"of": {"name": "Anna"}}; {"name": "b", "parameters": {}}',
            '{"of": {"name": "Anna"}}; {"name": "b", "parameters": {}}',
            [],
        ),
        ("llama3", f'<|python_tag|>{CALL}; {{"name": "now"}}', "", [call("calc", x=1), call("now")]),
        ("llama3", 'The set {"a", "b"}.', 'The set {"a", "b"}.', []),
        ("llama3", "{x | x > 0}", "{x | x > 0}", []),
        ("glm45", f"Hm.\n{glm('calc', ('x', '1'), ('on', 'true'))}", "Hm.", [call("calc", x=1, on=True)]),
        ("glm45", glm("calc", ("text", "1\n"), ("items", "[1, 2]")), "", [call("calc", text="1\n", items=[1, 2])]),
        ("glm45", "<tool_call>now</tool_call><tool_call>now", "", [call("now"), call("now")]),
        (
            "glm45",
            "<tool_call>calc<arg_key>text</arg_key><arg_value>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>",
            "",
            [call("calc", text="a", x=1)],
        ),
        ("gpt_oss", "<|channel|>final<|message|>It is 4.", "It is 4.", []),
        ("gpt_oss", TO_CALC + '{"x": 1}', "", [call("calc", x=1)]),
        ("gpt_oss", f'{TO_NOW}{{}}<|call|><|start|>assistant{TO_CALC}{{"x": 1}}', "", [call("now"), call("calc", x=1)]),
        (
            "gpt_oss",
            f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{TO_NOW}{{}}",
            "Now.",
            [call("now")],
        ),
        ("gpt_oss", "It is to=4.", "It is to=4.", []),
        ("gemma4", f"Hm. {gemma('calc{x:1,on:true,limit:null}')}", "Hm.", [call("calc", x=1, on=True, limit=None)]),
        ("gemma4", gemma("now{}") + gemma("now{}"), "", [call("now"), call("now")]),
        (
            "gemma4",
            gemma('calc{text:"a, key: b {c:1}\\" d: e", x:1}'),
            "",
            [call("calc", text='a, key: b {c:1}" d: e', x=1)],
        ),
        ("gemma4", gemma("calc{text:`a, key: b`,x:1}"), "", [call("calc", text="a, key: b", x=1)]),
        ("gemma4", gemma('calc{text:`a:1,{\\"b\\":2}`}'), "", [call("calc", text='a:1,{\\"b\\":2}')]),
        (
            "gemma4",
            gemma("calc{items:[1,{a:`x`, `b`:-2.5}],label:`c`}"),
            "",
            [call("calc", items=[1, {"a": "x", "b": -2.5}], label="c")],
        ),
    ],
)
def test_calls(form: str, text: str, content: str, calls: list[dict[str, Any]]) -> None:
    message = parser(form, TOOLS)(text)
    assert message == {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", hermes("{calc}"), "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("hermes", hermes("[1]"), "expected a JSON object with a name and arguments"),
        ("hermes", hermes('{"name": 3}'), "expected a JSON object with a name and arguments"),
        ("hermes", hermes('{"name": "calc", "arguments": [1]}'), "the arguments should be a JSON object"),
        ("hermes", hermes("[" * 100_000), "it is nested too deeply"),
        (
            "hermes",
            hermes('{"x": ' + "9" * 5000 + "}"),
            "Exceeds the limit (4300 digits) for integer string conversion",
        ),
        ("hermes", hermes('{"name": "\\ud83d"}'), "\\ud83d is half of a surrogate pair, which is not valid text"),
        ("qwen3_coder", hermes(CALL), "expected <function=name> after <tool_call>"),
        ("qwen3_coder", hermes("<function=calc>\n<parameter=x>\n1"), "no </parameter> after <parameter=x>"),
        ("llama3", "<|python_tag|>print(1)", "Expecting value: line 1 column 1 (char 0)"),
        ("llama3", '{"name": "calc", "parameters": 3}', "the parameters should be a JSON object"),
        ("glm45", glm(""), "expected the name of a function after <tool_call>"),
        ("glm45", "<tool_call>calc<arg_key>x</arg_key><arg_value>1", "no </arg_value> after <arg_key>x</arg_key>"),
        ("glm45", glm("calc <arg_key>x</arg_key>5"), "malformed <arg_key>"),
        ("qwen3_coder", hermes("<function=calc>\n<parameter=x\n1</parameter>"), "malformed <parameter="),
        (
            "qwen3_coder",
            "<tool_call><function=calc><parameter=x>1</parameter></function>" + coder("other", ("text", "a")),
            "it has another call within it; expected </tool_call> before the next one",
        ),
        (
            "glm45",
            "<tool_call>calc<arg_key>x</arg_key><arg_value>1</arg_value>" + glm("calc", ("text", "a")),
            "it has another call within it; expected </tool_call> before the next one",
        ),
        ("hermes", f"<tool_call>{CALL}{hermes(CALL)}", "Extra data: line 1 column 40 (char 39)"),
        ("llama3", f'{CALL}; {{"name": "b"}}', "expected a JSON object with a name and parameters"),
        ("gpt_oss", TO_CALC + "{x}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("gpt_oss", TO_CALC + "[1]", "the arguments should be a JSON object"),
        ("gemma4", gemma("calc"), "expected call:name{...} after <|tool_call>"),
        ("gemma4", "<|tool_call>calc{x:1}", "expected call:name{...} after <|tool_call>"),
        ("gemma4", gemma("calc{x:one}"), "Expecting value: line 1 column 6 (char 5)"),
        ("gemma4", gemma("calc{text:`a}"), "Expecting "),
        ("llama3", f"{CALL}; and more", "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_malformed_call_is_a_line(form: str, text: str, problem: str) -> None:
    message = parser(form, TOOLS)(text)
    error = message["error"]
    assert error.startswith(f"malformed call: {problem}") and "\n" not in error and len(error) < 300
    json.dumps(message)


def test_good_calls_beside_a_malformed_one() -> None:
    message = parser("hermes")(f"{hermes(CALL)}{hermes('{')}{hermes(CALL)}")
    assert message["tool_calls"] == [call("calc", x=1)] * 2 and message["error"].startswith("malformed call: ")


@pytest.mark.parametrize("begin", ["<think>", ""])
def test_a_call_among_thoughts_is_none(begin: str) -> None:
    thought = f"I could call {hermes(CALL)}"
    message = parser("hermes")(f"{begin}\n{thought}\n</think>\n\nIt is 4.")
    assert message == {"role": "assistant", "content": "It is 4.", "reasoning_content": thought}
    never = parser("hermes")(f"<think>{thought}")
    assert never == {"role": "assistant", "content": "", "reasoning_content": thought}


def test_thoughts_of_other_families() -> None:
    message = parser("gpt_oss")(f"{ANALYSIS}{TO_NOW}{{}}")
    assert message["reasoning_content"] == "Let me see." and message["tool_calls"] == [call("now")]
    thought = f"I could call {gemma('now{}')}"
    message = parser("gemma4")(f"<|channel>thought\n{thought}\n<channel|>It is 4.")
    assert message == {"role": "assistant", "content": "It is 4.", "reasoning_content": thought}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought", "<channel|>"),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ],
)
def test_thoughts_that_the_prompt_opened(form: str, begin: str, end: str) -> None:
    """Or the turn, at its start or behind other thoughts. They last until they are closed."""
    drafts = {"gemma4": gemma("now{}"), "qwen3_coder": coder("now"), "glm45": glm("now")}
    drafts |= {"llama3": '<|python_tag|>{"name": "now"}', "gpt_oss": f"{TO_NOW}{{}}"}
    draft = drafts.get(form, hermes('{"name": "now"}'))
    if form == "gpt_oss":  # which has other tags
        begin, end = "<|start|>assistant<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        draft = draft.replace("<|channel|>", "").replace("<|message|>", "")
    read, prompt = parser(form, TOOLS), f"Why?\n{begin}\n"
    thinks = {"role": "assistant", "content": "", "reasoning_content": f"or {draft} first"}
    assert read(f"or {draft} first", prompt) == thinks
    if form == "gpt_oss":
        return
    assert read(f"or {draft} first{end} It is 4.", prompt) == thinks | {"content": "It is 4."}
    assert read(f"{begin}or {draft} first") == thinks
    twice = read(f"{begin}a{end}{begin}or {draft} first{end}{draft}")
    if form != "llama3":
        assert twice == thinks | {"reasoning_content": f"a\nor {draft} first", "tool_calls": [call("now")]}
    assert "tool_calls" in read(draft, f"{begin}\n\n{end}\n\n")  # no thoughts
    assert "tool_calls" in read(draft, f"What is {begin}?")


def test_identifiers_that_the_model_writes() -> None:
    (made,) = parser("hermes")(hermes('{"name": "now", "arguments": {}, "id": "aB3xY9z01"}'))["tool_calls"]
    assert made == call("now") | {"id": "aB3xY9z01"}


LONG = 100_000


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "part",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "a", "arguments": {}}',
        '<tool_call>["</tool_call>',
        "<tool_call><function=calc><parameter=x></tool_call>",
        "<parameter=",
        "<parameter=x>",
        "<think>",
        "</think>",
        '{"name": "a"};',
        '{"name": [',
        "[",
        '{"name": "a", "parameters": {"name": ',
        "<arg_key>x</arg_key>",
        "<arg_key>x</arg_key><arg_value>",
        "<|start|>assistant to=a<|message|>",
        " to=",
        "<|message|>",
        "<|tool_call>call:a{",
        '<|"|>',
        '"',
        '\\"',
        "<parameter=x>\n",
        "\n<parameter=y>",
        "<think></think>",
        "[THINK]",
        "{a:",
        "a,",
        "\\ud83d",
        "9",
        " ",
    ],
)
def test_long_texts_take_little_time(form: str, part: str) -> None:
    """No text of a policy may delay a step."""
    read = parser(form, TOOLS)
    for begin in ("", "<tool_call>", "<tool_call><function=calc>", '{"name": ', "<|tool_call>call:a{"):
        start = time.process_time()
        assert read(begin + part * (LONG // len(part)))["role"] == "assistant"
        assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("format", "text", "error"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "parameters": {"n": 1}}</tool_call>',
            "expected a JSON object with a name",
        ),
        ("hermes", '<tool_call>{"name": "f", "n": 1}</tool_call>', "expected a JSON object with a name and arguments"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>', "NaN is not a finite number"),
        ("gemma4", "<|tool_call>call:f{n:1e400}<tool_call|>", "1e400 is not a finite number"),
        (
            "glm45",
            "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value> b</arg_value></tool_call>",
            "'b' is outside",
        ),
        (
            "qwen3_coder",
            '<tool_call><function=f>{"s": 1}</function></tool_call>',
            "is outside the arguments; expected <pa",
        ),
        ("qwen3_coder", "<function=f>\n</function>\n</tool_call>", "no <tool_call> before </tool_call>"),
    ],
)
def test_no_call_runs_without_what_was_written(format: str, text: str, error: str) -> None:
    message = parser(format)(text)
    assert error in message["error"] and "tool_calls" not in message


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a </think> b"}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>a </think> b</parameter></function></tool_call>"),
        ("llama3", '{"name": "f", "parameters": {"s": "a </think> b"}}'),
        ("gemma4", '<|tool_call>call:f{s:<|"|>a <channel|> b<|"|>}<tool_call|>'),
    ],
)
def test_an_argument_has_the_tag_that_ends_thoughts(format: str, text: str) -> None:
    [call] = parser(format)(text)["tool_calls"]
    assert call["function"]["arguments"]["s"] in ("a </think> b", "a <channel|> b")


def test_an_answer_in_json_has_more_than_a_call() -> None:
    text = '{"name": "Pump", "parameters": {"power": 3}, "price": 5}'
    assert parser("llama3")(text) == {"role": "assistant", "content": text}


def test_a_parser_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_calls.py").write_text(
        "def read(text):\n"
        "    if text == 'bad':\n"
        "        raise ValueError('no\\nverb')\n"
        "    if text == 'bug':\n"
        "        return 1 / 0\n"
        "    if text == 'flat':\n"
        "        return {'content': '', 'tool_calls': [{'name': 'look', 'arguments': {}}]}\n"
        "    return text if text == 'text' else {'content': text.upper()}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("my_calls:read", f"{tmp_path}/my_calls.py:read"):
        read = parser(path)
        assert read("a") == {"role": "assistant", "content": "A"}
        assert read("bad") == {"role": "assistant", "content": "bad", "error": "malformed call: no verb"}
        with pytest.raises(JobError, match=r"^environment.format='.*:read' raised ZeroDivisionError: division by zero"):
            read("bug")
        with pytest.raises(JobError, match=r":read' returned str; expected a message \{role, content\}, with tool_cal"):
            read("text")
        with pytest.raises(
            JobError, match=r"returned the tool_calls \[\{'name': 'look'.*; expected a list of \{type: f"
        ):
            read("flat")
    sys.modules.pop("my_calls", None)


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError) as caught:
        parser("hermess")
    assert str(caught.value) == (
        "environment.format='hermess' is unknown; did you mean hermes? known: hermes, qwen3_coder, llama3, glm45, gpt_oss, "
        "gemma4, module:function or path/to/file.py:function"
    )
    with pytest.raises(
        ConfigError, match=r"^environment.format='nowhere:read': no module 'nowhere' on the Python path"
    ):
        parser("nowhere:read")
