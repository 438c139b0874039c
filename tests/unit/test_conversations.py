"""The seam between the model's tokens and an environment's messages: what a turn says, and what follows it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config.environment import EnvironmentConfig
from phalanx.config.lm import LMDataConfig
from phalanx.environments import Environments
from phalanx.models.lm.calls import parser
from phalanx.models.lm.turns import TurnRenderer
from phalanx.rollout.lm.conversations import Talk, _Partner
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.session import Request
from tests.helpers.chat_templates import FAMILIES, tokenizer_of

TOOLS = '''
class Room:
    def look(self, text: str) -> list:
        """Looks.

        Args:
            text: where
        """
        return [{"type": "text", "text": "a door "}, {"type": "text", "text": f"in {text}"}]
'''
MISTRAL = """
import json


def read(text):
    head, tag, calls = text.partition("[CALLS]")
    made = []
    for each in json.loads(calls) if tag else []:
        function = {"name": each["name"], "arguments": each["arguments"]}
        made.append({"type": "function", "id": each["id"], "function": function})
    return {"content": head, "tool_calls": made}
"""


class Talked:
    """A conversation with scripted turns of a model with one of the families' templates."""

    def __init__(self, family: str, folder: Path, format: str) -> None:
        (folder / "room.py").write_text(TOOLS)
        config = EnvironmentConfig(path=f"{folder}/room.py:Room", format=format, num_workers=1, max_turns=4)
        self.tokenizer = tokenizer_of(FAMILIES[family])
        self.environments = Environments(config)
        tools = self.environments.tools()
        self.ends = ["</s>", "<|im_end|>", "<|user|>", "<|observation|>", "<|endoftext|>"]
        ids = [self.tokenizer.convert_tokens_to_ids(end) for end in self.ends]
        turns = TurnRenderer(self.tokenizer, LMDataConfig(), "models/m", tools, ids)
        messages = [{"role": "user", "content": "What is there?"}]
        prompt = turns.prompt(messages)
        conversation = self.environments.open({"prompt": "What is there?"}, 0, 0)
        conversation.reset().result(30)
        request = Request(prompt=prompt, name=(), decoding=Decoding(512, 1.0, ids, 0), room=512)
        self.talk = Talk(conversation, turns, parser(format, tools), request, messages, prompt)
        self.partner = _Partner([self.talk], config, SimpleNamespace(tokenizer=self.tokenizer, readable=list, ends=ids))  # type: ignore[arg-type]

    def say(self, text: str) -> str | None:
        """The text that follows a turn of the model; None if the conversation is over."""
        heard = self.partner.hear(0, self.tokenizer(text)["input_ids"]).result(30)
        answer = self.partner.answer(0, heard)
        return None if answer is None else str(self.tokenizer.decode(answer))

    def close(self) -> None:
        self.talk.renderer.close()
        self.environments.close()


def written(name: str, where: str) -> str:
    return json.dumps([{"name": "look", "arguments": {"text": where}, "id": name}])


def test_answers_have_the_identifiers_that_the_model_wrote(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(MISTRAL)
    talked = Talked("identified", tmp_path, f"{tmp_path}/calls.py:read")
    assert talked.say(f"[CALLS]{written('aB3xY9z01', 'A')}</s>") == "[RESULT]a door in A[ID]aB3xY9z01[/RESULT]"
    assert talked.say(f"[CALLS]{written('Zq8Lk2m0P', 'B')}</s>") == "[RESULT]a door in B[ID]Zq8Lk2m0P[/RESULT]"
    # one that the template refuses does not end the job
    assert talked.say(f"[CALLS]{written('short', 'C')}</s>") == "[RESULT]a door in C[ID]call00000[/RESULT]"
    assert talked.talk.messages[2]["tool_call_id"] == "aB3xY9z01"
    talked.close()


def test_calls_without_identifiers_are_numbered_over_the_conversation(tmp_path: Path) -> None:
    talked = Talked("repeated", tmp_path, "hermes")
    for number, where in enumerate("ABC"):
        call = json.dumps({"name": "look", "arguments": {"text": where}})
        assert talked.say(f"<tool_call>{call}</tool_call><|im_end|>") == (
            f"<|im_start|>look\n# Answer to call0000{number}\na door in {where}<|im_end|><|im_start|>assistant\n"
        )
    talked.close()


@pytest.mark.parametrize(
    ("end", "head"), [("<|observation|>", ""), ("<|endoftext|>", "<|observation|>"), ("<|user|>", "<|observation|>")]
)
def test_the_end_token_that_was_sampled(end: str, head: str, tmp_path: Path) -> None:
    talked = Talked("openers", tmp_path, "glm45")
    call = "<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>A</arg_value>\n</tool_call>"
    assert talked.say(call + end) == f"{head}<answer>a door in A</answer><|assistant|>"
    talked.close()


def test_thoughts_that_the_prompt_and_the_answer_open(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"text": "A"}}</tool_call>'
    for said in (call, f"{call}</think>\nI see.", f"Well.</think>{call}"):
        talked = Talked("thinking", tmp_path, "hermes")
        answer = talked.say(f"Well.</think>{call}<|im_end|>")
        assert answer is not None and answer.endswith("<|im_start|>assistant\n<think>\n")
        calls = "tool_calls" in (talked.talk.messages[-2])
        assert calls and talked.talk.conversation.calls == 1
        assert (talked.say(f"{said}<|im_end|>") is None) == (not said.startswith("Well"))
        assert talked.talk.conversation.calls == 1 + said.startswith("Well")
        talked.close()
