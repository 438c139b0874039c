"""The reward `http` against the reference server, and against servers that are dead, slow, or lie."""

import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import torch
import uvicorn

from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.config.tasks import ServeRewardConfig
from phalanx.exit import place
from phalanx.rewards import RewardError, RewardOutput, RewardSet
from phalanx.tools.reward_server import RewardServer
from phalanx.types import Prompt
from phalanx.zoo.rewards.http import MAX_ANSWER, Http, ServerError
from tests.helpers.checks import wait_for
from tests.helpers.ranks import ROOT, free_port
from tests.helpers.reward_servers import (
    Answer,
    Strange,
    asked,
    listening,
    only,
    own_rewards,
    refusal,
    says,
    scores,
    serving,
    strange,
)
from tests.helpers.rewards import entry, rewards, scored, told
from tests.unit.test_rewards_ocr import words


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_rewards(tmp_path_factory.mktemp("rewards"))


# --- the same scores


@pytest.fixture(scope="module")
def ocr_server() -> Iterator[RewardServer]:
    with serving("reward.functions=[{name: ocr, kwargs: {detect: false}}]", "reward.num_workers=2") as server:
        yield server


@pytest.mark.parametrize("encoding", ["json", "multipart"])
def test_the_scores_are_those_of_the_local_reward(ocr_server: RewardServer, encoding: str) -> None:
    """Scores are bitwise equal and in order; the last request is smaller."""
    shown = [f"{i * 37 % 1000:03d}" for i in range(1, 22)]
    noise = torch.rand(21, 3, 24, 48, generator=torch.Generator().manual_seed(0))
    images = (words(*shown) + noise * 1e-3).clamp(0, 1)  # not on 8-bit levels
    wanted = [text if i % 3 else text[:1] + "77" for i, text in enumerate(shown)]
    prompts = [Prompt(f'say "{text}"', i, {"ground_truth": text}) for i, text in enumerate(wanted)]
    remote = entry("http", url=ocr_server.url, encoding=encoding, batch_size=8, concurrency=2)
    both = rewards(entry("ocr", detect=False), remote)
    terms = scored(both, *((images[part], prompts[part]) for part in (slice(0, 20), slice(20, 21))))
    assert terms["http"] == terms["ocr"]
    assert len(set(terms["ocr"])) > 2


def test_images_have_eight_bits(own: Path) -> None:
    images = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    with serving(only(own, "brightness")) as server:
        seen = Http(server.url)(images, ["a"] * 3, [{}] * 3)
    assert seen == ((images * 255).round() / 255).mean((1, 2, 3)).tolist()
    assert seen != images.mean((1, 2, 3)).tolist()


def test_prompts_metadata_and_weights(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    functions = f"[{{path: '{own}:brightness', weight: 2}}, {{path: '{own}:bonus', weight: 0.5}}]"
    with serving(f"reward.functions={functions}") as server:
        asks = Http(server.url)
        for _ in range(2):
            got = asks(
                torch.ones(2, 3, 4, 4), ["é", "abc"], [{"bonus": 1, "raw": b"x"}, {"bonus": 7.5, "nan": float("nan")}]
            )
        assert got == [2 + 0.5 * (1 + 1), 2 + 0.5 * (7.5 + 3)]
        answer = httpx2.post(server.url, json=asked(1, metadata=[{"bonus": 3}]))
    assert answer.json() == {"scores": [4.5], "terms": {"brightness": [1.0], "bonus": [5.0]}}
    assert caplog.messages == [
        f"{asks.shown}: metadata 'raw' is not sent, since JSON cannot hold it (bytes)",
        f"{asks.shown}: metadata 'nan' is not sent, since JSON cannot hold it (float)",
    ]


def test_completions_are_sent_as_they_are() -> None:
    """Texts are sent as JSON for any `encoding`, in requests of batch_size, the last of which is smaller."""
    seen: list[dict[str, Any]] = []

    def answer(request: "Strange", body: dict[str, Any]) -> None:
        seen.append(body)
        request.reply({"scores": [float(len(text)) for text in body["completions"]]})

    functions = [RewardFunctionConfig(name="http")]
    texts = ["a", "", "\x00é\n", "x" * 100_000, "b"]
    prompts = [Prompt(f"p{i}", i, {"ground_truth": i}) for i in range(5)]
    with strange(answer) as server:
        functions[0].kwargs = {"url": server.url, "batch_size": 2, "concurrency": 1, "encoding": "multipart"}
        reward = RewardSet(RewardConfig(functions=functions), "cpu", outputs="completions")
        assert scored(reward, (texts, prompts)) == {"http": [1, 0, 3, 100_000, 1]}
    assert [body["completions"] for body in seen] == [texts[:2], texts[2:4], texts[4:]]
    assert seen[2] == {"completions": ["b"], "prompts": ["p4"], "metadata": [{"ground_truth": 4}]}


def test_the_server_of_the_documentation() -> None:
    page = (ROOT / "docs" / "serving-rewards.md").read_text()
    source = page.partition('```python title="scorer.py"\n')[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "scorer"}
    exec(compile(source, "scorer.py", "exec", dont_inherit=True), names)
    server = uvicorn.Server(uvicorn.Config(names["app"], log_config=None, lifespan="off"))
    with socket.socket() as address:
        address.bind(("127.0.0.1", 0))
        with listening(server, address):
            assert scores(f"http://127.0.0.1:{address.getsockname()[1]}/score", 2) == [128 / 255] * 2


# --- servers that lie, refuse, break or are slow


def pour(request: Strange, _: Any) -> None:
    """An answer without an end."""
    request.send_response(200)
    request.end_headers()
    while not request.server.over.is_set():
        request.wfile.write(b"0" * 65536)


def die(request: Strange, _: Any) -> None:
    request.close_connection = True


def hang(request: Strange, _: Any) -> None:
    request.server.over.wait(30)


def drip(request: Strange, _: Any) -> None:
    """Each byte arrives in time, the complete answer never does."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not request.server.over.wait(0.05):
        request.wfile.write(b"a")


def unusable(reason: str, said: str) -> str:
    return f"its answer is not usable, {reason}: {said}"


def scores_say(scores: str, reason: str, more: str = "") -> tuple[Answer, str]:
    """An answer with these scores in JSON, and the message about it."""
    said = f'{{"scores": {scores}}}'
    return says(said.encode()), unusable(f"scores{reason}", more or said)


LIES: dict[str, tuple[Answer, str]] = {
    "too few": (says({"scores": [1.0, 2.0]}), "2 scores for 4 samples"),
    "too many": (says({"scores": [1.0] * 5}), "5 scores for 4 samples"),
    "nan": scores_say("[0.5, NaN, 0, 0]", ".1=nan should be a finite number"),
    "infinity": scores_say("[0.5, 0, -1e999, 0]", ".2=-inf should be a finite number"),
    "huge": (says({"scores": [-1e7, 0, 0, 0]}), "score 0 is -10000000.0; expected numbers up to max_abs=1e+06"),
    "an endless number": (
        says(b'{"scores": [1' + b"0" * 400 + b", 0, 0, 0]}"),
        unusable(f"scores.0=1{'0' * 190}…", f'{{"scores": [1{"0" * 187}…'),
    ),
    "a text": scores_say('[0, 0, 0, "0.5"]', ".3='0.5' should be a valid number"),
    "a truth value": scores_say("[true, 0, 0, 0]", ".0=True should be a valid number"),
    "a list of lists": scores_say("[[0], [0], [0], [0]]", ".0=[0] should be a valid number"),
    "no list": scores_say("0.5", "=0.5 should be a valid array"),
    "no scores": (says([0, 0, 0, 0]), unusable("Input should be an object", "[0, 0, 0, 0]")),
    "other keys": (says({"score": 1}), unusable("scores: Field required", '{"score": 1}')),
    "a page": (
        says(b"<html>\n\x1b[31m <b>hello</b>"),
        unusable("Invalid JSON: expected value at line 1 column 1", "<html> [31m <b>hello</b>"),
    ),
    "nothing": (says(b""), unusable("Invalid JSON: EOF while parsing a value at line 1 column 0", "nothing")),
    "nested": (
        says(b"[" * 100_000),
        unusable("Invalid JSON: recursion limit exceeded at line 1 column 202", f"{'[' * 200}…"),
    ),
    "giant": (says(b" " * (MAX_ANSWER + 1)), f"its answer is longer than {MAX_ANSWER} bytes"),
    "endless": (pour, f"its answer is longer than {MAX_ANSWER} bytes"),
    "404": (says({"detail": "no\nsuch page"}, 404), "answered 404: no such page"),
    "403": (says(b"go away", 403), "answered 403: go away"),
    "422": (says({"detail": [{"loc": 1}]}, 422), """answered 422: {"detail": [{"loc": 1}]}"""),
    "204": (says(b"", 204), "answered 204: nothing"),
    "drip": (drip, "no answer within timeout_s=0.5"),
}
TROUBLES: dict[str, tuple[Answer, str]] = {
    "500": (says(b"busy", 500), "answered 500: busy (try 2 of 2)"),
    "dead": (
        die,
        "the connection broke (RemoteProtocolError: Server disconnected without sending a response.) (try 2 of 2)",
    ),
    "silent": (hang, "silent for read_timeout_s=0.2 (try 2 of 2)"),
}


@pytest.mark.parametrize("name", [*LIES, *TROUBLES])
def test_answers_without_scores(name: str) -> None:
    """Invalid answers and refusals are final; other failures are retried once."""
    answer, problem = (LIES | TROUBLES)[name]
    limits = {"drip": {"timeout_s": 0.5}, "silent": {"read_timeout_s": 0.2}}.get(name, {})
    with strange(answer) as server:
        assert refusal(server.url, **limits) == problem
        wait_for(lambda: len(server.seen) >= (1 if name in LIES else 2))  # a client that gives up may be ahead of it
        assert len(server.seen) == (1 if name in LIES else 2)


def test_redirects_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    with strange(says({"scores": [0] * 4})) as other, strange(says(b"", 307, Location=other.url)) as server:
        expected = f"answered 307, a redirect to {other.url}, which is not followed; give that as url"
        assert refusal(server.url, token_env="SCORER_TOKEN") == expected
        assert server.seen[0]["Authorization"] == "Bearer secret"
        assert other.seen == []


SECRET = "s3cret/of+the=client"
ESCAPED = SECRET.replace("/", "\\/")  # as some languages write JSON
ECHOES: dict[str, tuple[Answer, str]] = {
    "a detail": (
        lambda request, _: request.reply({"detail": f"no: {dict(request.headers)['Authorization']}"}, 403),
        "answered 403: no: Bearer ***",
    ),
    "its end cut off": (says({"detail": "x" * 190 + SECRET}, 403), f"answered 403: {'x' * 190}***"),
    "a body": (says(f'{{"error": "{ESCAPED} {SECRET.upper()}"}}'.encode(), 400), 'answered 400: {"error": "*** ***"}'),
    "no JSON": (says(SECRET.encode()), unusable("Invalid JSON: expected value at line 1 column 1", "***")),
    "no scores": (says({"seen": SECRET}), unusable("scores: Field required", '{"seen": "***"}')),
    "a score": scores_say(
        f'[0, "{SECRET}", 0, 0]', ".1='***' should be a valid number", '{"scores": [0, "***", 0, 0]}'
    ),
    "a redirect": (
        says(b"", 307, Location=f"http://x/?auth=Bearer%20{quote(SECRET, safe='')}&{SECRET}"),
        "answered 307, a redirect to http://x/?auth=Bearer%20***&***, which is not followed; give that as url",
    ),
    "no HTTP": (
        lambda request, _: request.wfile.write(f"Bearer {SECRET}\r\n\r\n".encode()) and None,
        "the connection broke (RemoteProtocolError: illegal status line: bytearray(b'Bearer ***')) (try 1 of 1)",
    ),
}


@pytest.mark.parametrize(("answer", "problem"), ECHOES.values(), ids=ECHOES)
def test_a_token_that_is_said_back_is_not_shown(
    answer: Answer, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    with strange(answer) as server:
        assert refusal(server.url, retries=0, token_env="SCORER_TOKEN") == problem
        scores(server.url, retries=0, token_env="SCORER_TOKEN", on_error="value", error_value=0.0)
        assert server.seen[0]["Authorization"] == f"Bearer {SECRET}"
    (message,) = caplog.messages
    assert message.endswith(f"because of {server.url}: {problem}")


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with strange(says({"scores": [1, 2, 3, 4]})) as server:
        assert scores(server.url) == [1.0, 2.0, 3.0, 4.0]


# --- servers that are dead or slow


def test_no_server() -> None:
    """The address is shown without its query, which may contain a key."""
    address = f"http://127.0.0.1:{free_port()}/score"
    problem = f"{address}: no connection (All connection attempts failed) (try 3 of 3)"
    assert told(ServerError, scores, f"{address}?key=secret", retries=2) == problem


def test_a_server_that_accepts_no_connection() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address), socket.socket() as second:  # the queue of connections is full now
            second.setblocking(False)
            second.connect_ex(address)
            url = f"http://127.0.0.1:{address[1]}/score"
            assert refusal(url, connect_timeout_s=0.2) == "no connection within connect_timeout_s=0.2 (try 2 of 2)"


def test_it_waits_as_long_as_the_server_asks() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
    impossible = f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT"  # which no calendar has
    for value, waits in (("1", True), (later, False), ("1000", False), ("soon", None), (impossible, None)):
        first: list[float] = []

        def answer(request: Strange, _: Any, first: list[float] = first, value: str = value) -> None:
            first.append(time.monotonic())
            request.reply({"scores": [1] * 4}) if len(first) > 1 else request.reply(b"", 429, Retry_After=value)

        with strange(answer) as server:
            if waits is False:
                problem = refusal(server.url, timeout_s=5)
                seconds = int(problem.split(" in ")[1].split()[0])
                assert 990 <= seconds <= 1000
                assert problem == (
                    f"answered 429: nothing (try 1 of 2; the next one, in {seconds} s, would be past timeout_s=5)"
                )
            else:
                assert scores(server.url) == [1.0] * 4
                assert first[1] - first[0] >= (waits or 0)


def test_it_tries_again_after_pauses_that_grow() -> None:
    times: list[float] = []

    def fourth_time(request: Strange, _: Any) -> None:
        times.append(time.monotonic())
        request.reply({"scores": [7] * 4}) if len(times) > 3 else request.reply(b"", 503)

    with strange(fourth_time) as server:
        assert scores(server.url, retries=3, backoff_s=0.1) == [7.0] * 4
    pauses = [b - a for a, b in pairwise(times)]
    for pause, mean in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert 0.5 * mean <= pause < 1.5 * mean + 20


@pytest.mark.parametrize("status", [408, 425, 429])
def test_statuses_after_which_it_tries_again(status: int) -> None:
    def second_time(request: Strange, _: Any) -> None:
        request.reply({"scores": [7] * 4}) if len(request.server.seen) > 1 else request.reply(b"", status)

    with strange(second_time) as server:
        assert scores(server.url, retries=1) == [7.0] * 4


def test_a_null_costs_its_own_sample_only() -> None:
    prompts = [Prompt(f"p{i}", i, {}) for i in range(3)]
    with strange(says({"scores": [0.5, None, 1]})) as server:
        lenient = rewards(entry("http", url=server.url), on_error="zero")
        assert str(scored(lenient, (torch.zeros(3, 3, 4, 4), prompts))) == "{'http': [0.5, nan, 1.0]}"
        problem = f"{server.url}: its answer has null for a score"
        assert lenient.problem == f"reward 'http' has no score on the prompt \"p1\": {problem}"
        said = told(RewardError, scored, rewards(entry("http", url=server.url)), (torch.zeros(3, 3, 4, 4), prompts))
        assert said == f"reward 'http' has no score for 1 of 3 images on the prompt \"p1\": {problem}"
        asks = Http(server.url, on_error="value", error_value=-1)
        got = asks(torch.zeros(3, 3, 4, 4), ["p"] * 3, [{}] * 3)
        assert got == RewardOutput([0.5, -1, 1.0], {"degraded": [0, 1, 0]})


# --- at once, in order


def test_requests_run_side_by_side_and_keep_their_order() -> None:
    lock, meeting, now, most = threading.Lock(), threading.Barrier(4), 0, 0

    def answer(request: Strange, body: dict[str, Any]) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        numbers = [int(prompt[1:]) for prompt in body["prompts"]]
        if len(body["prompts"]) > 1 or numbers == [14]:
            meeting.wait(60)  # passes only if four requests run at once
            time.sleep(0 if numbers[0] % 4 else 0.2)  # the first one finishes last
        with lock:
            now -= 1
        request.reply({"scores": numbers})

    with strange(answer) as server:
        assert scores(server.url, 15, batch_size=2, concurrency=4) == list(range(15))
        assert most == 4 and len(server.seen) == 8
        assert scores(server.url, 3, batch_size=1, concurrency=1) == [0, 1, 2]


# --- going on without scores


def test_it_goes_on_with_a_value_where_that_is_configured(caplog: pytest.LogCaptureFixture) -> None:
    """Only the images of failed requests get error_value, and their number is logged at 2, 4, 8, ..."""

    def answer(request: Strange, body: dict[str, Any]) -> None:
        bad = "p2" in body["prompts"]
        request.reply({"scores": [1.0] if bad else [float(p[1:]) for p in body["prompts"]]})

    with strange(answer) as server:
        asks = Http(server.url, batch_size=2, on_error="value", error_value=-1)
        for _ in range(5):
            got = asks(torch.zeros(5, 3, 4, 4), [f"p{i}" for i in range(5)], [{}] * 5)
            assert got == RewardOutput([0.0, 1.0, -1, -1, 4.0], {"degraded": [0, 0, 1, 1, 0]})
    assert asks.degraded == 10
    assert caplog.messages == [
        f"{place()}: {count} samples have got error_value=-1 instead of a score since the start; "
        f"the last ones because of {server.url}: 1 scores for 2 samples"
        for count in (2, 4, 8)
    ]
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_a_dead_server_ends_the_collection_or_not() -> None:
    url = f"http://127.0.0.1:{free_port()}/score"
    batch = torch.zeros(2, 3, 4, 4), [Prompt("a", 0, {}), Prompt("b", 1, {})]
    assert told(RewardError, scored, rewards(entry("http", url=url, retries=0)), batch) == (
        f"reward 'http' raised ServerError: {url}: no connection (All connection attempts failed) (try 1 of 1) "
        'on the prompts "a" (+1 more)'
    )
    goes_on = rewards(entry("http", url=url, retries=0, on_error="value", error_value=0.25))
    assert scored(goes_on, batch) == {"http": [0.25, 0.25], "http_degraded": [1.0, 1.0]}
    assert scored(goes_on) == {"http": [], "http_degraded": []}


def test_extras_stay_with_their_images(own: Path) -> None:
    """Six calls at once, three of them on the worker threads of one reward, of which the first ones finish last."""
    with serving(only(own, "picky"), "reward.num_workers=6") as server:
        kwargs = {"url": server.url, "retries": 0, "batch_size": 1, "concurrency": 1}
        goes_on = entry("http", **kwargs, on_error="value", error_value=-1)
        three = rewards(goes_on, entry("brightness", f"{own}:brightness"), num_workers=3)
        texts = ["slow 0", "broken 1"], ["slow 2"], ["broken 3"], ["4", "broken 5"], ["6"], ["7"]
        batches = [
            (torch.full((len(t), 3, 4, 4), float(i)), [Prompt(p, 0, {}) for p in t]) for i, t in enumerate(texts)
        ]
        assert scored(three, *batches) == {
            "http": [0, -1, 2, -1, 4, -1, 6, 7],
            "http_degraded": [0, 1, 0, 1, 0, 1, 0, 0],
            "brightness": [0, 0, 1, 2, 3, 3, 4, 5],
        }
        last = torch.zeros(1, 3, 4, 4), [Prompt("8", 0, {})]
        assert scored(three, last) == {"http": [8], "http_degraded": [0], "brightness": [0]}
        # no extra where an error ends the job; two servers need different names
        ends = rewards(entry("http", url=server.url), entry("strict", "phalanx.zoo.rewards.http:Http", url=server.url))
        assert scored(ends, last) == {"http": [8], "strict": [8]}


def test_a_server_serves_scores_without_extras(own: Path) -> None:
    """A server that itself queries another one, which is dead."""
    kwargs = f"url: 'http://127.0.0.1:{free_port()}/', retries: 0, on_error: value, error_value: 0.25"
    with serving(f"reward.functions=[{{name: http, kwargs: {{{kwargs}}}}}]") as server:
        answer = httpx2.post(server.url, json=asked(2))
    assert answer.json() == {"scores": [0.25, 0.25], "terms": {"http": [0.25, 0.25]}}


# --- arguments

NO_ADDRESS = "is not an address; expected one such as http://127.0.0.1:8077/score"
TOGETHER = "on_error=value and error_value, a number, go together; give both or neither"


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"url": "localhost:8077"}, f"url='localhost:8077' {NO_ADDRESS}"),
        ({"url": "ftp://x/"}, f"url='ftp://x/' {NO_ADDRESS}"),
        ({"url": "http://x:y/"}, f"url='http://x:y/' {NO_ADDRESS}"),
        ({"url": 3}, "url=3 should be a valid string"),
        ({"url": "http://me:pass@x/"}, "url contains a user or a password; give a token by token_env"),
        ({"encoding": "pickle"}, "encoding='pickle' should be 'json' or 'multipart'"),
        ({"batch_size": 0}, "batch_size=0 should be greater than 0"),
        ({"batch_size": 2.5}, "batch_size=2.5 should be a valid integer"),
        ({"concurrency": True}, "concurrency=True should be a valid integer"),
        ({"timeout_s": 0}, "timeout_s=0 should be greater than 0"),
        ({"read_timeout_s": "5"}, "read_timeout_s='5' should be a valid number"),
        ({"max_abs": float("inf")}, "max_abs=inf should be a finite number"),
        ({"on_error": "zero"}, "on_error='zero' should be 'raise' or 'value'"),
        ({"on_error": "value"}, TOGETHER),
        ({"error_value": 0.0}, TOGETHER),
        ({"on_error": "value", "error_value": float("nan")}, "error_value=nan should be a finite number"),
        (
            {"token_env": "NO_SUCH_VARIABLE"},
            "token_env: the environment variable NO_SUCH_VARIABLE is not set; expected the server's token",
        ),
        (
            {"token_env": "BAD_TOKEN"},
            "token_env: the environment variable BAD_TOKEN is not a token; expected only letters, digits and signs",
        ),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_TOKEN", "two words\r\n")
    http = entry("http", **{"url": "http://x/", **kwargs})
    assert told(ValueError, rewards, http) == f"reward.functions[0] (http): {problem}"


def test_the_client_waits_as_long_as_the_server_may_take() -> None:
    """It checks certificates by default, within the time limit of a call."""
    assert Http("http://x/").read_timeout_s >= ServeRewardConfig().reward.timeout_s


def test_retries_draw_no_random_numbers_of_the_job() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    refusal(f"http://127.0.0.1:{free_port()}/score", retries=2)
    assert random.random() == expected
