"""Calls of tools in texts, by the format of the model family."""

from phalanx.models.lm.calls import parser


def test_hermes() -> None:
    read = parser("hermes")
    assert read("It is 4. ") == {"role": "assistant", "content": "It is 4."}
    text = 'Let me see.\n<tool_call>\n{"name": "calc", "arguments": {"x": "1+1"}}\n</tool_call>\n'
    call = {"type": "function", "function": {"name": "calc", "arguments": {"x": "1+1"}}}
    assert read(text) == {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert "tool_calls" not in read(f"<think>{text}</think>4")
    assert read("<tool_call>{</tool_call>")["error"].startswith("malformed call: Expecting property name")
