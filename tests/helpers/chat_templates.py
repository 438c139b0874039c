"""Chat templates, and what follows a turn of the model in them: seventeen conversations, each with every end token.

What is right is read from the whole conversation, rendered by transformers' apply_chat_template. FAMILIES are short
templates with what those of model families do; `packaged` finds the templates that an installed package ships.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.turns import TurnRenderer
from tests.helpers.tiny import byte_tokenizer

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SCHEMA = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
_BAR = "\uff5c"  # in DeepSeek's tokens
# tokens that end a turn, and of these the ones that begin a message
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<turn|>", "<end_of_turn>"),
    *("<|END_OF_TURN_TOKEN|>", f"<{_BAR}end\u2581of\u2581sentence{_BAR}>", "<|eot|>", "<|eom|>", "<|endoftext|>"),
    *("<end_of_utterance>", "<|user|>", "<|observation|>", "<|tool_response>", "</s>"),
)
_OPEN = ("<|user|>", "<|observation|>", "<|tool_response>")
_SPECIAL = re.compile(
    rf"<[|{_BAR}][^<>|{_BAR}\s]*[|{_BAR}]?>|</?s>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]{{3,}}\]"
)

_EACH, _DONE = "{% for m in messages %}", "{% endfor %}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
_HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_NUMBERED = (
    "{% macro number(id) %}{% set ns = namespace(count=0, found=none) %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}{% if c.id == id and ns.found is none %}{% set ns.found = ns.count %}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% endfor %}{% endfor %}{{ ns.found }}{% endmacro %}"
)
FAMILIES = {
    # Qwen: thoughts only in the last turn, and the answers of tools in one message of the user
    "thinking": _TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<answer>{{ m.content }}</answer>"
    + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% else %}"
    + "<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    + "{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    # Command R7B and Cohere's later ones: calls are counted over the conversation
    "numbered": _NUMBERED
    + _TOOLS
    + _EACH
    + "<|START_OF_TURN_TOKEN|>{{ m.role }}{% if m.role == 'tool' %}{\"call\": {{ number(m.tool_call_id) }}, "
    + '"text": {{ m.content | tojson }}}{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}'
    + "{{ number(c.id) }}{{ c.function | tojson }}{% endfor %}{% endif %}<|END_OF_TURN_TOKEN|>"
    + _DONE
    + "<|START_OF_TURN_TOKEN|>assistant",
    # Mistral: identifiers of nine letters, and the tools before the last message of the user
    "identified": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}<s>"
    + _EACH
    + "{% if m.role == 'user' %}{% if tools and m == users[-1] %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    + "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length < 9 %}"
    + "{{ raise_exception('an id has nine letters') }}{% endif %}[RESULT]{{ m.content }}[ID]{{ m.tool_call_id[-9:] }}"
    + "[/RESULT]{% elif m.tool_calls %}[CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}[ID]{{ c.id }}"
    + "{% endfor %}</s>{% else %}{{ m.content }}{{ '</s>' if m.role == 'assistant' else '' }}{% endif %}"
    + _DONE,
    # Kimi K2: the answer repeats the identifier in its text, and the name of the tool in its head
    "repeated": _TOOLS
    + _EACH
    + "<|im_start|>{{ m.name or m.role }}\n{% if m.role == 'tool' %}# Answer to {{ m.tool_call_id }}\n{% endif %}"
    + "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.id }} {{ c.function.arguments | tojson }}</call>"
    + "{% endfor %}<|im_end|>"
    + _DONE
    + _HEAD,
    # GLM: a message begins with the token of its role, which is what ends the turn before
    "openers": _TOOLS
    + _EACH
    + "{% if m.role != 'tool' %}<|{{ m.role }}|>\n{{ m.content }}"
    + _CALLS
    + "{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n<answer>{{ m.content }}"
    + "</answer>{% endif %}"
    + _DONE
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|user|> <|endoftext|> #}",
    # Gemma 4: calls are answered within the turn, and the token that begins an answer is an end token
    "within": _TOOLS
    + _EACH
    + "{% set again = m.role == 'assistant' and messages[loop.index0 - 1].role == 'tool' %}{% if m.role == 'tool' %}"
    + "<|tool_response>{{ m.name }}:{{ m.content }}<tool_response|>{% else %}{% if not again %}<|turn>{{ m.role }}\n"
    + "{% endif %}{{ m.content }}{% if m.tool_calls %}"
    + _CALLS
    + "{% if loop.last %}<|tool_response>{% endif %}{% else %}<turn|>\n{% endif %}{% endif %}"
    + _DONE
    + "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}",
    # Llama 3.1: one call, and two end tokens of which the template writes one
    "single": _TOOLS
    + "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endfor %}"
    + _EACH
    + "<|head|>{{ m.role }}\n\n{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}<|eot_id|>"
    + _DONE
    + "{% if add_generation_prompt %}<|head|>assistant\n\n{% endif %}{# <|eom_id|> #}",
    # gpt-oss: a call and the last turn have end tokens that earlier turns do not have
    "channels": _TOOLS
    + _EACH
    + "{% if m.role == 'tool' %}<|start|>{{ messages[loop.index0 - 1].tool_calls[0].function.name }} to=assistant<|message|>"
    + "{{ m.content }}<|end|>{% elif m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
    + "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    + "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endif %}"
    + _DONE
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # SmolLM3 and Nemotron: the prompt decides how turns begin
    "switched": _TOOLS
    + _EACH
    + _CHATML
    + _DONE
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think></think>' if 'brief' in messages[0].content }}"
    + "{% endif %}",
    # Phi-3: an end token after the whole conversation
    "ended": _TOOLS + _EACH + _CHATML + _DONE + _HEAD.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}"),
}
# Templates that no rule fits, and why they are refused
REFUSED = {
    # DeepSeek V3: only the first answer of a conversation has a head
    "first": (
        _EACH + "{% if m.role == 'tool' and loop.index0 == 2 %}<answers>{% endif %}" + _CHATML + _DONE + _HEAD,
        "renders a message of the role 'tool' differently after different turns",
    ),
    "silent": (
        _EACH.replace("messages", "messages if m.role != 'tool'") + _CHATML + _DONE + _HEAD,
        "omits the text of a message of the role 'tool'",
    ),
    "alternating": (
        _EACH
        + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + _CHATML
        + _DONE
        + _HEAD,
        "TemplateError: roles must alternate",
    ),
}


def packaged(package: str) -> dict[str, str]:
    """The chat templates in the folder of an installed package, by name; none if it is not installed."""
    found = find_spec(package)
    folders = (found.submodule_search_locations or ()) if found else ()
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.jinja"))
    templates = {file.stem: file.read_text() for file in files}
    return {name: template for name, template in templates.items() if "messages" in template}


def tokenizer_of(template: str) -> Any:
    """A tokenizer of bytes and of the template's special tokens."""
    specials = ["<pad>", *dict.fromkeys([*ENDS, *_SPECIAL.findall(template)])]
    tokenizer = byte_tokenizer([], specials)
    tokenizer.bos_token = "<s>" if "<s>" in specials else ""
    tokenizer.eos_token = next((token for token in ENDS if token in template), "</s>")
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"zebra {number}"}


def called(number: int, *ids: str) -> dict[str, Any]:
    calls = []
    for i, each in enumerate(ids):
        function = {"name": "look", "arguments": {"text": f"zebra {number + i}"}}
        calls.append({"type": "function", "id": each, "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text: str, written: str) -> dict[str, Any]:
    return {"role": "tool", "name": "look", "content": text, "tool_call_id": written}


SYSTEM, ASK = {"role": "system", "content": "Be brief."}, user("What is there?")
A, B, C = "call00000", "call00001", "call00002"
GIVEN, OTHER = "aB3xY9z01", "Zq8Lk2m0P"
FIRST = [ASK, called(0, A), result("a door", A)]
SECOND = [*FIRST, called(1, B), result("a wall", B)]
TWICE = [ASK, called(0, GIVEN), result("a door", GIVEN), called(1, OTHER), result("a wall", OTHER)]
# By name: a conversation, and the number of messages behind its last turn. If its name says so, the model wrote the
# identifiers of its calls.
TALKS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "first": (FIRST, 1),
    "second": (SECOND, 1),
    "third": ([*SECOND, called(2, C), result("a roof", C)], 1),
    "system": ([SYSTEM, *FIRST], 1),
    "system second": ([SYSTEM, *SECOND], 1),
    "given": ([ASK, called(0, GIVEN), result("a door", GIVEN)], 1),
    "given second": (TWICE, 1),
    "given system": ([SYSTEM, *TWICE], 1),
    "two": ([ASK, called(0, A, B), result("a door", A), result("a wall", B)], 2),
    "two given": ([ASK, called(0, GIVEN, OTHER), result("a door", GIVEN), result("a wall", OTHER)], 2),
    "two second": ([*FIRST, called(1, B, C), result("a wall", B), result("a roof", C)], 2),
    "lines": ([ASK, called(0, A), result("a\n\nb: {'c': \"d\"}\n", A)], 1),
    "user": ([ASK, said(0), user("And?")], 1),
    "user second": ([ASK, said(0), user("And?"), said(1), user("Why?")], 1),
    "user behind tool": ([*FIRST, said(1), user("And?")], 1),
    "system user": ([SYSTEM, ASK, said(0), user("And?")], 1),
    "turns in the prompt": ([SYSTEM, user("Hi."), said(0), ASK, called(1, A), result("a door", A)], 1),
}


def check(template: str) -> tuple[int, list[str]]:
    """Compare what follows the last turn of each conversation. Returns the number of those that are right, and a line
    for each that is not. Raises ValueError for a template that is refused.
    """
    tokenizer = tokenizer_of(template)
    ends = [token for token in ENDS if token in template or token == tokenizer.eos_token]
    ids = {end: tokenizer.convert_tokens_to_ids(end) for end in ends}
    turns = TurnRenderer(tokenizer, LMDataConfig(), "models/m", [SCHEMA], list(ids.values()))
    opens = _opens(tokenizer)
    right, wrong = 0, []
    for name, (messages, behind) in TALKS.items():
        kept = messages if "given" in name else _without_ids(messages)
        history, answers = kept[:-behind], kept[-behind:]
        for end in ends:
            expected = _expected(tokenizer, messages, behind, ends, end, opens)
            if expected is None or answers[0]["role"] not in turns.roles:  # a conversation that it does not render
                continue
            now = tokenizer.decode(turns.answer(answers, history, ids[end]))
            right += now == expected
            wrong += [f"{name}, ended by {end}: {now!r}; expected {expected!r}"] if now != expected else []
    turns.close()
    return right, wrong


def _opens(tokenizer: Any) -> list[str]:
    """The end tokens with which the template begins messages."""
    try:
        texts = [_whole(tokenizer, messages) for messages, _ in (TALKS["first"], TALKS["user"])]
    except Exception:  # whatever a template raises
        return []
    return [token for token in _OPEN if any(token in text for text in texts)]


def _expected(
    tokenizer: Any, messages: list[dict[str, Any]], behind: int, ends: list[str], end: str, opens: list[str]
) -> str | None:
    """What follows the last turn of the model in the whole conversation, after the end token that was sampled; None if
    the template does not render the conversation.
    """
    last = max(re.findall(r"zebra \d", json.dumps(messages)))
    try:
        alone = _whole(tokenizer, messages[:-behind], add_generation_prompt=False).rstrip()
        text = _whole(tokenizer, messages)
    except Exception:  # whatever a template raises
        return None
    said = [message["content"] for message in messages[-behind:]]
    if last not in text or not all(each in text or json.dumps(each)[1:-1] in text for each in said):
        return None
    closing = alone[alone.index(last) :]
    length = min([closing.index(each) for each in ends if each in closing] or [len(closing)])
    rest = text[text.index(last) + length :]
    token = next((each for each in ends if rest.startswith(each)), "")
    # a token that begins a message follows every turn but those that it has ended; one that ends turns follows none,
    # but those that a token has ended with which the template begins messages
    return rest if token != end and (token in opens or end in opens) else rest[len(token) :]


def _whole(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"tools": [SCHEMA], "tokenize": False, "add_generation_prompt": True} | options
    return str(tokenizer.apply_chat_template(messages, **options))


def _without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in kept:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    return kept


def check_packaged(template: str) -> None:
    """Assert that what follows a turn is right in each conversation, or that the template is refused in one line."""
    try:
        right, wrong = check(template)
    except ValueError as refusal:
        assert str(refusal).startswith("model.path: 'models/m': its chat template ") and "\n" not in str(refusal)
        return
    assert not wrong and right >= 4
