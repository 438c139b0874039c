"""What follows a turn of the model in a conversation: the tokens that the chat template gives it in the whole."""

from typing import Any

import pytest

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.turns import TurnRenderer
from tests.tiny import chat_tokenizer

HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + CALLS + "<|im_end|>\n{% endfor %}"
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
    prompt = decode(turns.prompt([{"role": "user", "content": "6 times 7?"}]))
    assert prompt.startswith("[{") and prompt.endswith("<|im_start|>assistant\n")
    turns.close()


def test_a_template_that_repeats_the_turn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model.path: 'models/m': its chat template renders what follows a turn"):
        renderer(TOOLS + CHATML + "{{ messages[1].tool_calls }}" + HEAD)
