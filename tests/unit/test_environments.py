"""Conversations with environments: levels, errors, deadlines, texts, counters."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phalanx.config.environment import EnvironmentConfig
from phalanx.environments import Conversation, EnvironmentFailure, Environments, Turn
from phalanx.environments.texts import Odd, in_texts, joined, messages_of, text_of, turn_of

ENVIRONMENTS = '''
import asyncio, threading, time


class Counter:
    """Stateful tools that fail in different ways."""

    def __init__(self, start: int = 0) -> None:
        self.count, self.closed = start, False

    def reset(self, **row):
        self.row = row
        return f" Begin at {self.count}, seed {row['seed']}, sample {row['sample_seed']}."

    def add(self, amount: int, times: int = 1) -> int:
        """Adds to the count.

        Args:
            amount: what to add
            times: how often
        """
        self.count += amount * times
        return self.count

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return f"waited on {threading.current_thread().name}"

    async def block(self) -> str:
        """Blocks the event loop."""
        time.sleep(1e6)

    def hang(self) -> str:
        """Hangs."""
        time.sleep(1e6)

    def spin(self) -> str:
        """Never ends."""
        while True:
            pass

    def fail(self) -> str:
        """Raises."""
        raise KeyError("no such thing")

    def leave(self) -> str:
        """Exits."""
        raise SystemExit(3)

    def long(self) -> str:
        """Says much."""
        return "a" * 10_000_000 + "z"

    def digits(self) -> int:
        """A number of 5000 digits."""
        return 10 ** 5000

    def table(self) -> dict:
        """A table."""
        return {"ä": [1, 2], "half": "\\ud800"}

    def get_reward(self) -> dict:
        return {"count": self.count, "even": self.count % 2 == 0}

    def close(self):
        self.closed = True
        CLOSED.append(self.count)


CLOSED = []
'''


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(*calls: dict[str, Any], text: str = "", **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls), **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "envs.py"
    path.write_text(ENVIRONMENTS)
    return path


def opened(file: Path, name: str = "Counter", **keys: Any) -> tuple[Environments, Conversation]:
    keys = {"timeout_s": 60.0, "num_workers": 2, "max_calls_per_turn": 3} | keys
    environments = Environments(EnvironmentConfig(path=f"{file}:{name}", **keys))
    return environments, environments.open({"prompt": "Count.", "answer": "7"}, 11, 22)


def heard(conversation: Conversation, *calls: dict[str, Any]) -> list[str]:
    turn = conversation.hear(said(*calls)).result(60)
    return [message["content"] for message in turn.messages]


def test_a_conversation_with_tools(file: Path) -> None:
    environments, conversation = opened(file, kwargs={"start": 2})
    names = [schema["function"]["name"] for schema in environments.tools()]
    assert names == ["add", "wait", "block", "hang", "spin", "fail", "leave", "long", "digits", "table"]
    assert environments.tools()[0]["function"]["parameters"]["required"] == ["amount"]
    assert conversation.reset().result(60) == [{"role": "user", "content": " Begin at 2, seed 11, sample 22."}]
    turn = conversation.hear(said(call("add", amount=2), call("add", amount="3", times=2))).result(60)
    assert turn == Turn(
        [{"role": "tool", "name": "add", "content": "4"}, {"role": "tool", "name": "add", "content": "10"}]
    )
    assert conversation.hear(said(text="It is 10.")).result(60) == Turn(done=True)
    assert conversation.reward().result(60) == {"count": 10.0, "even": 1.0}
    assert (conversation.ended, conversation.calls, conversation.failures, conversation.mistakes) == ("done", 2, 0, 0)
    conversation.close()
    environments.close()


def test_an_environment_cannot_change_the_data(file: Path) -> None:
    path = file.with_name("changing.py")
    path.write_text(
        "class Changing:\n    def reset(self, goods, seed):\n        goods['apple'].append(seed)\n        return str(goods)\n"
        '    def look(self) -> str:\n        """Looks."""\n'
    )
    environments, _ = opened(path, "Changing")
    row: dict[str, Any] = {"prompt": "x", "goods": {"apple": [1]}}
    for seed in (2, 3):
        added = environments.open(row, seed, 0).reset().result(60)
        assert added == [{"role": "user", "content": f"{{'apple': [1, {seed}]}}"}]
    assert row == {"prompt": "x", "goods": {"apple": [1]}}


def test_mistakes_of_the_model_are_answered(file: Path) -> None:
    _, conversation = opened(file, max_calls_per_turn=6)
    conversation.reset().result(60)
    assert heard(
        conversation,
        call("ad", amount=1),
        call("reset"),
        call("add"),
        call("add", amount="many"),
        call("add", amount=1, speed=2),
        {"type": "function", "function": {"name": "add", "arguments": [1]}},
        call("add", amount=1),
    ) == [
        "error: there is no tool ad; did you mean add?; the tools: add, wait, block, hang, spin, fail, leave, long, "
        "digits, table",
        "error: there is no tool reset; the tools: add, wait, block, hang, spin, fail, leave, long, digits, table",
        "error: add needs amount; its parameters: amount, times",
        "error: add: amount: Input should be a valid integer, unable to parse string as an integer",
        "error: add has no parameter speed; its parameters: amount, times",
        "error: the arguments of add should be an object with its parameters: amount, times\n"
        "error: 1 further call did not run: a turn may have 6 calls",
    ]
    (answer,) = conversation.hear(said(call("add", amount=1), error="no JSON")).result(60).messages
    assert answer["content"] == "1\nerror: no JSON"
    turn = conversation.hear(said(error="no JSON")).result(60)
    assert turn == Turn([{"role": "tool", "content": "error: no JSON"}])
    assert (conversation.calls, conversation.failures, conversation.mistakes) == (1, 0, 9)


def test_results_become_texts_of_a_limited_length(file: Path) -> None:
    _, conversation = opened(file, max_observation_length=4)
    conversation.reset().result(60)
    start = time.process_time()
    long, table, digits = heard(conversation, call("long"), call("table"), call("digits"))
    assert long == "a" * 63 + "z"
    assert table == '{"ä": [1, 2], "half": "?"}'
    assert digits == "an integer of 5001 digits or so"
    assert time.process_time() - start < 2


PARTS = [{"type": "text", "text": "a door"}, {"type": "text", "text": " and a wall", "annotations": None}]


def test_parts_of_a_message_are_a_text() -> None:
    """As in TRL and OpenAI's messages; lists of other objects are data."""
    assert text_of(PARTS, 99, "right") == "a door and a wall"
    assert (
        text_of([{"type": "text", "text": "a", "page": 3}], 99, "right") == '[{"type": "text", "text": "a", "page": 3}]'
    )
    assert text_of([{"type": "image", "name": "a"}], 99, "right") == '[{"type": "image", "name": "a"}]'
    assert text_of([], 99, "right") == "[]"
    told = [{"role": "user", "content": "a door and a wall"}]
    for value in (PARTS, {"role": "user", "content": PARTS}, [{"role": "user", "content": PARTS}]):
        assert messages_of(value, 99, "right", "reset") == told
        assert turn_of((value, 1.0, False), 99, "right", "step").messages == told
    picture = [*PARTS, {"type": "image_url", "image_url": {"url": "a.png"}}]
    for call in (lambda: text_of(picture, 4, "right"), lambda: messages_of(picture, 4, "right", "a tool")):
        with pytest.raises(
            Odd, match=r"^a tool returned an image; the model sees only those of the prompt, expected a"
        ):
            call()


def test_answers_have_the_identifiers_of_their_calls(file: Path) -> None:
    environments, conversation = opened(file)
    conversation.reset().result(60)
    turn = conversation.hear(
        said(call("add", amount=2) | {"id": "aB3xY9z01"}, call("add", amount=2) | {"id": 0})
    ).result(60)
    assert [message.get("tool_call_id") for message in turn.messages] == ["aB3xY9z01", "0"]
    turn = conversation.hear(said(call("add", amount=2) | {"id": None})).result(60)
    assert "tool_call_id" not in turn.messages[0]
    conversation.close()
    environments.close()


def test_images_are_no_texts() -> None:
    image = Image.new("RGB", (2, 2))
    for value in (image, {"seen": [image]}):
        with pytest.raises(
            Odd, match=r"^a tool returned an image; the model sees only those of the prompt, expected a text"
        ):
            text_of(value, 4, "right")
    parts = [{"type": "image"}, {"type": "text", "text": " what?"}]
    prompt = [{"role": "system", "content": "see"}, {"role": "user", "content": parts}]
    told = in_texts(joined(prompt, [{"role": "user", "content": " now"}]))
    assert told == [prompt[0], {"role": "user", "content": "<image> what? now"}]


def test_what_a_tool_raises_is_read(file: Path) -> None:
    environments, conversation = opened(file)
    conversation.reset().result(60)
    fail, leave = heard(conversation, call("fail"), call("leave"))
    assert fail == "error: KeyError: 'no such thing'"
    assert leave.startswith("error: SystemExit: 3")
    assert conversation.ended is None
    assert heard(conversation, call("add", amount=1)) == ["1"]
    assert heard(conversation, {"type": "function", "function": {"name": "add", "arguments": '{"amount": 2}'}}) == ["3"]
    assert conversation.problem is not None
    line = next(i for i, text in enumerate(ENVIRONMENTS.splitlines(), 1) if "no such thing" in text)
    assert conversation.problem == (
        f"environment Counter: fail raised KeyError: 'no such thing', at {file}:{line}, on the row with the prompt "
        '"Count."'
    )
    with pytest.raises(EnvironmentFailure, match=r'"Count\."; 1 of 1 samples failed in this or another way'):
        environments.check()
    assert environments.check() is None


def test_what_reset_adds_to_the_prompt_is_whole(file: Path) -> None:
    path = file.with_name("long.py")
    path.write_text(
        "class Long:\n    def reset(self, prompt):\n        return prompt * 1000\n    def step(self, text):\n"
        "        return text * 1000\n"
    )
    _, conversation = opened(path, "Long", max_observation_length=4)
    assert conversation.reset().result(60) == [{"role": "user", "content": "Count." * 1000}]
    assert len(conversation.hear({"role": "assistant", "content": "more "}).result(60).messages[0]["content"]) == 64


def test_a_seed_of_the_data_counts(file: Path) -> None:
    path = file.with_name("level.py")
    path.write_text(
        "class Level:\n    def reset(self, seed, sample_seed):\n        return f'{seed} {sample_seed}'\n"
        "    def step(self, text): ...\n"
    )
    environments, _ = opened(path, "Level")
    for row, added in (({}, "7 8"), ({"seed": 3}, "3 8")):
        conversation = environments.open({"prompt": "Play.", **row}, 7, 8)
        assert conversation.reset().result(60) == [{"role": "user", "content": added}]


def test_instances_are_closed(file: Path) -> None:
    path = file.with_name("closing.py")
    path.write_text(
        'import time\nCLOSED = []\nclass Closing:\n    def look(self) -> str:\n        """Looks."""\n'
        "    def close(self):\n        time.sleep(0.3)\n        CLOSED.append(1)\n        raise OSError('busy')\n"
    )
    environments, conversation = opened(path, "Closing", max_error_fraction=1.0)
    conversation.reset().result(60)
    conversation.close()
    conversation.close()
    assert environments.check() is None
    environments.close()
    from phalanx_user_closing import CLOSED  # type: ignore[import-not-found]

    assert CLOSED == [1]
    problem = environments.check()
    assert problem is not None
    assert problem.startswith("environment Closing: close raised OSError: busy, at ")


def test_a_failure_closes_instances_whose_calls_still_run(file: Path) -> None:
    path = file.with_name("abandoned.py")
    path.write_text(
        "import time\nTOLD = []\nclass Slow:\n    def step(self, message: str):\n        time.sleep(0.5)\n"
        "        TOLD.append('stepped')\n        return 'go on'\n    def close(self):\n        TOLD.append('closed')\n"
    )
    environments, conversation = opened(path, "Slow")
    environments.open({"prompt": "x"}, 0, 1)  # a conversation that never began
    conversation.reset().result(60)
    conversation.hear(said(text="x"))
    environments.abandon()
    from phalanx_user_abandoned import TOLD  # type: ignore[import-not-found]

    assert TOLD == ["stepped", "closed"]


@pytest.mark.parametrize(("others", "ends"), [(1, True), (2, False)])
def test_failures_are_counted_over_all_ranks(file: Path, others: int, ends: bool) -> None:
    environments, conversation = opened(file)
    conversation.reset().result(60)
    conversation.hear(said(call("fail"))).result(60)
    counts = iter([1, others])  # of failures and of samples, on all ranks
    if ends:
        with pytest.raises(EnvironmentFailure, match=r"1 of 1 samples failed in this or another way, more than"):
            environments.check(lambda _: next(counts))
    else:
        assert environments.check(lambda _: next(counts)) is not None


def test_on_error_end_and_fail(file: Path) -> None:
    _, conversation = opened(file, on_error="end")
    conversation.reset().result(60)
    assert conversation.hear(said(call("fail"))).result(60) == Turn(done=True)
    assert conversation.ended == "error"
    assert conversation.reward().result(60) is None

    _, conversation = opened(file, on_error="fail")
    conversation.reset().result(60)
    with pytest.raises(EnvironmentFailure, match=r"^environment Counter: fail raised KeyError: 'no such thing', at "):
        conversation.hear(said(call("fail"))).result(60)


@pytest.mark.parametrize("tool", ["hang", "spin", "block"])
def test_hung_calls_end_their_conversations_side_by_side(file: Path, tool: str) -> None:
    environments, _ = opened(file, num_workers=4)
    conversations = [environments.open({"prompt": "x"}, 0, i) for i in range(4)]
    for conversation in conversations:
        conversation.reset().result(60)
    environments._pool._timeout_s = 0.5
    turns = [conversation.hear(said(call(tool))) for conversation in conversations]
    for turn in turns:
        assert turn.result(60) == Turn(done=True)
    environments._pool._timeout_s = 60
    assert {conversation.ended for conversation in conversations} == {"timeout"}
    assert [conversation.reward().result(60) for conversation in conversations] == [None] * 4
    for conversation in conversations:
        conversation.close()
        assert conversation.closed is None, "nothing of an instance is called again"
    # the pool has as many threads as before, and another event loop
    after = environments.open({"prompt": "x"}, 0, 9)
    after.reset().result(60)
    assert heard(after, call("wait", seconds=0), call("add", amount=5))[1] == "5"
    assert after.ended is None


def test_the_time_in_the_queue_does_not_count(file: Path) -> None:
    path = file.with_name("slow.py")
    path.write_text(
        "import time\nclass Slow:\n    def nap(self) -> str:\n        '''Sleeps.'''\n        time.sleep(0.3)\n        return 'up'\n"
    )
    environments, _ = opened(path, "Slow", timeout_s=1.3, num_workers=1)
    conversations = [environments.open({"prompt": "x"}, 0, i) for i in range(5)]
    turns = []
    for conversation in conversations:
        conversation.reset().result(60)
        turns.append(conversation.hear(said(call("nap"))))
    assert [turn.result(60).messages[0]["content"] for turn in turns] == ["up"] * 5


def test_async_tools_run_side_by_side_on_one_thread(file: Path) -> None:
    environments, _ = opened(file, num_workers=1)
    conversations = [environments.open({"prompt": "x"}, 0, i) for i in range(50)]
    for conversation in conversations:
        conversation.reset().result(60)
    start = time.perf_counter()
    turns = [conversation.hear(said(call("wait", seconds=0.5))) for conversation in conversations]
    texts = {turn.result(60).messages[0]["content"] for turn in turns}
    assert texts == {"waited on environments-async"}
    assert time.perf_counter() - start < 20  # one after the other they take 25


@pytest.mark.parametrize(
    ("value", "done"),
    [
        (("m", 1, False, True), True),
        (("m", 1, False, {"info": 1}), False),
        (("m", 1, np.bool_(True)), True),
        (("m", 1, False, np.bool_(True), {}), True),
        ({"observation": "m", "reward": 1, "truncated": np.bool_(True)}, True),
    ],
)
def test_an_end_in_the_forms_of_gym(value: Any, done: bool) -> None:
    assert turn_of(value, 99, "right", "step") == Turn([{"role": "user", "content": "m"}], 1.0, done)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"role": "user", "content": "m", "reward": 1},
            "step returned a message with a reward or done among its keys;",
        ),
        (("m", 10**400, False), "expected a number"),
        (("m", 1, False, "yes"), "step returned 'yes' for truncated; expected true or false"),
    ],
)
def test_a_turn_that_would_lose_its_reward_or_end(value: Any, message: str) -> None:
    with pytest.raises(Odd, match=re.escape(message)):
        turn_of(value, 99, "right", "step")


def test_values_that_json_does_not_have() -> None:
    assert text_of({(1, 2): "x"}, 99, "right") == "{(1, 2): 'x'}"
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (cycle, [10**6000]):
        with pytest.raises(Odd, match=r"^a tool returned a list that JSON cannot represent: "):
            text_of(value, 99, "right")
