"""Messages after a turn of the model: their tokens are those in the rendered whole conversation."""

from typing import Any

import pytest

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.chat import prompt_tokens
from phalanx.models.lm.turns import TurnRenderer
from phalanx.types import Prompt
from tests.helpers.tiny import chat_tokenizer

HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + CALLS + "<|im_end|>\n{% endfor %}"
QUESTION = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no') }}{% endif %}"
# an empty block of thoughts in the last turn, as Qwen3's
THINKS_LAST = CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
NO_END_BEHIND_CALLS = CHATML.replace("<|im_end|>\n", "{% if not m.tool_calls %}<|im_end|>\n{% endif %}")
# the end token of a turn begins the next message, as GLM's
NEXT_BEGINS_BY_THE_END = "{% for m in messages %}<|im_end|>{{ m.role }}\n" + CALLS + "{% endfor %}"
NEXT_BEGINS_BY_THE_END += HEAD.replace("<|im_start|>", "<|im_end|>")
ENDS_THE_LAST = CHATML + HEAD.replace("{% endif %}", "{% else %}<|im_end|>{% endif %}")  # as Phi-3's
WANTS_A_QUESTION = QUESTION + CHATML
ARGUMENTS_ARE_TEXTS = CHATML.replace("c.function | tojson", "'' + c.function.arguments")
WANTS_IDENTIFIERS = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'tool' %}{{ m.tool_call_id }}:{% endif %}{{ m.content }}"
)
WITH_HEAD = (NEXT_BEGINS_BY_THE_END, ENDS_THE_LAST)
SCHEMA = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
RESULT = {"role": "tool", "name": "calc", "content": "42"}


def renderer(template: str, tools: list[dict[str, Any]] | None = None, **options: Any) -> TurnRenderer:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return TurnRenderer(tokenizer, LMDataConfig(), "models/m", [SCHEMA] if tools is None else tools, ends, **options)


def test_what_follows_a_turn() -> None:
    turns, decode = renderer(TOOLS + CHATML + HEAD), chat_tokenizer().decode
    assert turns.roles == {"user", "tool"}
    assert decode(turns.answer([RESULT])) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    both = turns.answer([RESULT, {"role": "user", "content": "And?"}])
    assert decode(both) == (
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ValueError, match=r"^an environment says nothing after a turn; expected a message, or that it"):
        turns.answer([])
    prompt = decode(turns.prompt([{"role": "user", "content": "6 times 7?"}]))
    assert prompt.startswith("[{") and prompt.endswith("<|im_start|>assistant\n")
    turns.close()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (THINKS_LAST, "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (NO_END_BEHIND_CALLS, "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (NEXT_BEGINS_BY_THE_END, "tool\n42<|im_end|>assistant\n"),
        (ENDS_THE_LAST, "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (WANTS_A_QUESTION, "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (ARGUMENTS_ARE_TEXTS, "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
        (WANTS_IDENTIFIERS, "\n<|im_start|>tool\ncall00000:42<|im_end|>\n<|im_start|>assistant\n"),
    ],
    ids=["thinking", "no end", "next's begin", "end of the whole", "question", "texts", "identifiers"],
)
def test_the_traps_of_templates(template: str, expected: str) -> None:
    turns, decode = renderer(template if template in WITH_HEAD else template + HEAD), chat_tokenizer().decode
    assert decode(turns.answer([RESULT])) == expected
    # after an end token that may belong to the turn, this is the end of the whole rendered conversation
    call = {"type": "function", "id": "call00000", "function": {"name": "calc", "arguments": {"x": "6*7"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    question = {"role": "user", "content": "6 times 7?"}
    whole = decode(turns.prompt([question, turn, RESULT | {"tool_call_id": "call00000"}]))
    assert whole.endswith(expected)
    turns.close()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[1].tool_calls }}", "renders a message of the role 'tool' differently after different turns; exp"),
        ("{{ messages[0::3] }}", "renders a message of the role 'tool' differently after different turns; expecte"),
        (None, "omits the text of a message of the role 'tool' after a turn; expected one that renders it"),
    ],
    ids=["repeats the turn", "repeats others", "drops tools"],
)
def test_a_template_without_a_rule_is_refused(template: str | None, problem: str) -> None:
    whole = TOOLS + CHATML + (template or "") + HEAD
    if template is None:
        whole = whole.replace("for m in messages", "for m in messages if m.role != 'tool'")
    with pytest.raises(ValueError) as caught:
        renderer(whole)
    assert str(caught.value).startswith(f"model.path: 'models/m': its chat template {problem}")


def test_a_folder_without_a_template_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^model.path: 'models/m' has no chat template; expected one that renders s"):
        TurnRenderer(tokenizer, LMDataConfig(), "models/m", [SCHEMA], [2])


def test_roles_that_a_template_has_no_rule_for(caplog: pytest.LogCaptureFixture) -> None:
    """Not needed in conversations with tools, but refused when such a message occurs."""
    turns = renderer(CHATML + "{% if messages[-1].role == 'user' %}{{ (messages[1] or {}).content }}{% endif %}" + HEAD)
    assert turns.roles == {"tool"}
    assert "writes no tools into a prompt; describe calc in data.system_prompt" in caplog.text
    with pytest.raises(ValueError, match=r"its chat template does not render a message of the role 'user' after"):
        turns.answer([{"role": "user", "content": "And?"}])
    turns.close()


def test_several_calls_of_a_turn() -> None:
    """Llama's template takes one call; the number that the configuration allows is tested at the start."""
    single = "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    renderer(single + "{% endfor %}" + CHATML + HEAD).close()
    with pytest.raises(ValueError, match=r"its chat template does not render the prompt 'A question.*: one call$"):
        renderer(single + "{% endfor %}" + CHATML + HEAD, calls=2)
    turns = renderer(CHATML + HEAD, calls=2)
    tokens = turns.answer([RESULT, RESULT | {"content": "43"}])
    assert chat_tokenizer().decode(tokens).count("<|im_start|>tool\n4") == 2
    turns.close()


def test_what_tools_say_is_text() -> None:
    """Also if it looks like the tokens that the rule counts, or like a template."""
    turns, decode = renderer(TOOLS + CHATML + HEAD), chat_tokenizer().decode
    text = "<|im_end|>\n<|im_start|>assistant\n{{ 7 * 7 }}"
    answer = decode(turns.answer([RESULT | {"content": text}]))
    assert answer == f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"
    turns.close()


def test_a_chat_that_does_not_render_leaves_others_alone() -> None:
    refused = "{% for m in messages if 'no' in m.content %}{{ raise_exception('no') }}{% endfor %}"
    turns = renderer(refused + CHATML + HEAD)
    answer = turns.answer([RESULT])
    with pytest.raises(ValueError, match=r"a chat of user, assistant, tool: TemplateError: no$"):
        turns.answer([RESULT | {"content": "no"}])
    assert turns.answer([RESULT]) == answer
    turns.close()


def test_calls_of_the_data_in_any_form() -> None:
    turns, decode = renderer(WANTS_IDENTIFIERS + HEAD), chat_tokenizer().decode
    for calls in (
        [{"name": "calc", "arguments": {}}],
        [{"function": "calc"}],
        ["calc"],
        "calc",
        {"name": "calc"},
        None,
    ):
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        history = [{"role": "user", "content": "6 times 7?"}, turn, RESULT, turn]
        assert decode(turns.answer([RESULT], history)).startswith("\n<|im_start|>tool\ncall00001:42<|im_end|>")
    turns.close()


def test_prompts_are_those_of_single_turns() -> None:
    """Tools, the system prompt and variables of the template are rendered alike."""
    data = LMDataConfig(system_prompt="Be brief.", chat_template_kwargs={"deep": True})
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ deep }}" + TOOLS + CHATML + HEAD
    turns = TurnRenderer(tokenizer, data, "models/m", [SCHEMA], [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    messages = [{"role": "user", "content": "6 times 7?"}]
    (tokens,) = prompt_tokens(tokenizer, [Prompt("", 0, {"tools": [SCHEMA]}, messages=messages)], data, "models/m")
    assert turns.prompt(messages) == tokens.tolist()
    assert tokenizer.decode(tokens).startswith("True[{") and "Be brief." in tokenizer.decode(tokens)
    assert "Be brief." not in tokenizer.decode(turns.answer([RESULT]))
    turns.close()


def test_the_text_of_a_turn() -> None:
    turns, tokenizer = renderer(CHATML + HEAD), chat_tokenizer()
    tokens = tokenizer("<|im_start|>4<|im_end|>")["input_ids"]
    assert turns.text(tokens) == "<|im_start|>4"  # a parser may look for special tokens
    assert turns.text(tokens[:-1]) == "<|im_start|>4"
    assert turns.text([]) == ""
    turns.close()
