"""The reward `http` against the reference server, and against servers that are dead, slow, or lie."""

import base64
import gc
import json
import logging
import random
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import torch
import uvicorn
from PIL import Image

from phalanx.config import load
from phalanx.config.run import RewardConfig, RewardFunctionConfig
from phalanx.config.tasks import ServeRewardConfig
from phalanx.exit import place
from phalanx.jobs.reward_server import RewardServer
from phalanx.rewards import RewardError, RewardOutput, RewardSet
from phalanx.rewards.http import MAX_ANSWER, Http, ServerError
from phalanx.types import Prompt
from tests.ranks import ROOT, free_port
from tests.rewards import entry, rewards, scored, told
from tests.unit.test_rewards_ocr import words

REWARDS = """
import threading
import time

from phalanx.rewards import DeviceReward

def brightness(images, prompts, metadata):
    return images.mean((1, 2, 3))

def bonus(images, prompts, metadata):
    return [meta["bonus"] + len(prompt) for meta, prompt in zip(metadata, prompts, strict=True)]

begun = []

def picky(images, prompts, metadata):
    if any("broken" in prompt for prompt in prompts):
        raise ValueError("broken")
    time.sleep(0.2 if "slow" in prompts[0] else 0)
    return [float(prompt[-1]) for prompt in prompts]

def naps(images, prompts, metadata, seconds):
    begun.append(prompts)
    time.sleep(seconds)
    return [0.0] * len(images)

gate = threading.Event()

def gated(images, prompts, metadata):
    begun.append(prompts)
    assert gate.wait(30)
    return [1.0] * len(images)

def nan(images, prompts, metadata):
    return [float("nan")] * len(images)

def boom(images, prompts, metadata):
    raise KeyError("no such\\nthing")

class OneAtATime(DeviceReward):
    def __init__(self, device):
        self.busy = threading.Lock()

    def __call__(self, images, prompts, metadata):
        assert self.busy.acquire(blocking=False), "two calls at once"
        time.sleep(0.05)
        self.busy.release()
        return [1.0] * len(images)
"""

# --- what the tests talk to


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "own.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The same for one test: a file runs once, and remembers what was begun."""
    file = tmp_path / "own.py"
    file.write_text(REWARDS)
    return file


def only(own: Path, name: str, **kwargs: Any) -> str:
    """The override of a server with one reward of REWARDS."""
    return f"reward.functions=[{{path: '{own}:{name}', kwargs: {json.dumps(kwargs)}}}]"


@contextmanager
def serving(*overrides: str) -> Iterator[RewardServer]:
    """The reference server on a free port of this machine, in a thread."""
    server = RewardServer(load(ServeRewardConfig, None, ["port=0", *overrides]))
    try:
        with listening(server.listener(), server.socket):
            yield server
    finally:
        server.close()


@contextmanager
def listening(listener: uvicorn.Server, address: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=listener.run, kwargs={"sockets": [address]})
    thread.start()
    try:
        wait_for(lambda: listener.started)
        yield
    finally:
        listener.should_exit = True
        thread.join()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


Answer = Callable[["Strange", dict[str, Any]], None]


class Strange(BaseHTTPRequestHandler):
    """One request to a strange server; `answer` of the server says what happens."""

    protocol_version = "HTTP/1.1"
    server: "StrangeServer"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append(dict(self.headers))
        self.server.answer(self, json.loads(body))

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class StrangeServer(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Strange)
        self.answer = answer
        self.seen: list[dict[str, str]] = []
        self.over = threading.Event()  # ends what hangs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # a client that gave up


@contextmanager
def strange(answer: Answer) -> Iterator[StrangeServer]:
    server = StrangeServer(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def says(content: Any, status: int = 200, **headers: str) -> Answer:
    return lambda request, _: request.reply(content, status, **headers)


def scores(url: str, count: int = 4, **kwargs: Any) -> list[float]:
    """The scores of `count` small grey images."""
    options = {"retries": 1, "backoff_s": 0.01, "timeout_s": 20.0, **kwargs}
    return Http(url, **options)(torch.full((count, 3, 8, 8), 0.5), [f"p{i}" for i in range(count)], [{}] * count)


def refusal(url: str, count: int = 4, **kwargs: Any) -> str:
    """What is wrong, without the address."""
    shown, _, problem = told(ServerError, scores, url, count, **kwargs).partition(": ")
    assert shown == url
    return problem


# --- the same scores


@pytest.fixture(scope="module")
def ocr_server() -> Iterator[RewardServer]:
    with serving("reward.functions=[{name: ocr, kwargs: {detect: false}}]", "reward.num_workers=2") as server:
        yield server


@pytest.mark.parametrize("encoding", ["json", "multipart"])
def test_the_scores_are_those_of_the_local_reward(ocr_server: RewardServer, encoding: str) -> None:
    """Bit for bit, in order, with a last request that is smaller."""
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
    """In JSON whatever `encoding` says, in requests of batch_size, with a last one that is smaller."""
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
    """Each byte comes in time, the answer never does."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not request.server.over.wait(0.05):
        request.wfile.write(b"a")


def unusable(reason: str, said: str) -> str:
    return f"its answer is not usable, {reason}: {said}"


def scores_say(scores: str, reason: str, more: str = "") -> tuple[Answer, str]:
    """An answer with such scores in JSON, and what is said of it."""
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
    "null": scores_say("[null, 0, 0, 0]", ".0=None should be a valid number"),
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
    """A lie or a refusal would come again, and is not asked for; after other troubles there is a second try."""
    answer, problem = (LIES | TROUBLES)[name]
    limits = {"drip": {"timeout_s": 0.5, "read_timeout_s": 0.4}, "silent": {"read_timeout_s": 0.2}}.get(name, {})
    begin = time.monotonic()
    with strange(answer) as server:
        assert refusal(server.url, **limits) == problem
        assert len(server.seen) == (1 if name in LIES else 2)
        assert time.monotonic() - begin < (2 if name == "drip" else 20)


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
    """The address is shown without its query, which may hold a key."""
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
                assert scores(server.url, timeout_s=5) == [1.0] * 4
                assert (first[1] - first[0] >= 1) is (waits is True)


def test_it_tries_again_after_pauses_that_grow() -> None:
    times: list[float] = []

    def fourth_time(request: Strange, _: Any) -> None:
        times.append(time.monotonic())
        request.reply({"scores": [7] * 4}) if len(times) > 3 else request.reply(b"", 503)

    with strange(fourth_time) as server:
        assert scores(server.url, retries=3, backoff_s=0.1) == [7.0] * 4
    pauses = [b - a for a, b in pairwise(times)]
    for pause, mean in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert 0.5 * mean <= pause < 1.5 * mean + 0.3


# --- at once, in order


def test_requests_run_side_by_side_and_keep_their_order() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def answer(request: Strange, body: dict[str, Any]) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        numbers = [int(prompt[1:]) for prompt in body["prompts"]]
        time.sleep(0.2 if numbers[0] % 4 else 0.4)  # the first of them is the last to be done
        with lock:
            now -= 1
        request.reply({"scores": numbers})

    with strange(answer) as server:
        begin = time.monotonic()
        assert scores(server.url, 15, batch_size=2, concurrency=4) == list(range(15))
        assert time.monotonic() - begin < 8 * 0.2
        assert most == 4 and len(server.seen) == 8
        assert scores(server.url, 3, batch_size=1, concurrency=1) == [0, 1, 2]


# --- going on without scores


def test_it_goes_on_with_a_value_where_that_is_configured(caplog: pytest.LogCaptureFixture) -> None:
    """Only the images of the requests that failed get it, and their number is told at 2, 4, 8, ..."""

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
    """Six calls at once, three of them on the worker threads of one reward, and the first ones are done last."""
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
        # nothing to tell of where an error ends the job; two servers have names of their own
        ends = rewards(entry("http", url=server.url), entry("strict", "phalanx.rewards.http:Http", url=server.url))
        assert scored(ends, last) == {"http": [8], "strict": [8]}


def test_a_server_serves_scores_without_extras(own: Path) -> None:
    """A server that itself asks another one, which is dead."""
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
        ({"url": "http://me:pass@x/"}, "url holds a user or a password; give a token by token_env"),
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
            "token_env: the environment variable NO_SUCH_VARIABLE is not set; it holds the server's token",
        ),
        (
            {"token_env": "BAD_TOKEN"},
            "token_env: the environment variable BAD_TOKEN holds no token: letters, digits, signs alone",
        ),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_TOKEN", "two words\r\n")
    http = entry("http", **{"url": "http://x/", **kwargs})
    assert told(ValueError, rewards, http) == f"reward.functions[0] (http): {problem}"


# --- the reference server: who may ask


def test_a_token(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: Path) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SERVER_TOKEN", "s3cret-of-the-server")
    monkeypatch.setenv("OTHER_TOKEN", "an0ther")
    with serving(only(own, "brightness"), "token_env=SERVER_TOKEN") as server:
        wants = "answered 401: this server wants a token: the header Authorization: Bearer <token>"
        assert refusal(server.url) == wants
        assert refusal(server.url, token_env="OTHER_TOKEN") == wants
        assert scores(server.url, token_env="SERVER_TOKEN") == pytest.approx([0.5] * 4, abs=0.002)
        answer = httpx2.post(server.url, content=b"x")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx2.get(server.url.replace("score", "health")).json() == {"status": "ok"}
    assert "s3cret" not in caplog.text and "an0ther" not in caplog.text


def test_strangers_must_be_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*overrides: str) -> None:
        functions = "reward.functions=[{name: jpeg_compressibility}]"
        server = RewardServer(load(ServeRewardConfig, None, [functions, "port=0", *overrides]))
        server.close()

    monkeypatch.setenv("SERVER_TOKEN", "secret")
    start("host=localhost")
    start("host=0.0.0.0", "allow_open=true")
    start("host=0.0.0.0", "token_env=SERVER_TOKEN")
    assert told(ValueError, start, "host=0.0.0.0") == (
        "host=0.0.0.0 can be reached from other machines, and there is no token; give token_env, or allow_open=true "
        "where everybody may use the server"
    )


def test_a_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(*overrides: str) -> str:
        return told(ValueError, RewardServer, load(ServeRewardConfig, None, list(overrides)))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert problem(f"port={port}") == (
            f"host=127.0.0.1 port={port}: Address already in use; give a free port of this machine, e.g. port=8077"
        )
    assert problem("host=no.such.host.invalid", "port=8077").startswith("host=no.such.host.invalid port=8077: ")
    assert problem("port=0").startswith("reward.functions is empty: nothing to optimise;")
    assert problem("port=0", "reward.functions=[{name: vlm_ocr}]") == (
        "reward.functions[0]: vlm_ocr is a judge, which asks reward.model: training jobs have one"
    )
    assert problem("port=0", "token_env=NO_SUCH_VARIABLE") == (
        "token_env: the environment variable NO_SUCH_VARIABLE is not set; it holds the server's token"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert problem() == "the server is one process, and there are 2; start it with NPROC_PER_NODE=1"


# --- the reference server: what it refuses


def png(width: int = 4, height: int = 4, mode: str = "RGB") -> bytes:
    buffer = BytesIO()
    Image.new(mode, (width, height), 255 if mode == "L" else "white").save(buffer, "PNG")
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def asked(count: int, **other: Any) -> dict[str, Any]:
    return {"images": b64(png()) * count, "prompts": ["ab"] * count, **other}


def b64(file: bytes) -> list[str]:
    return [base64.b64encode(file).decode()]


@pytest.fixture(scope="module")
def small(own: Path) -> Iterator[RewardServer]:
    """A server with narrow limits."""
    limits = ["max_images=3", "max_pixels=1000", "max_body_mb=0.02", "read_timeout_s=0.5"]
    with serving(only(own, "brightness"), *limits) as server:
        yield server


BAD_REQUESTS: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 400, "Invalid JSON: EOF while parsing an object at line 1 column 1"),
    "nested": (b"[" * 10_000, 400, "Invalid JSON: recursion limit exceeded at line 1 column 202"),
    "a list": ([1], 400, "Input should be an object"),
    "no images": (asked(0), 400, "there are no images"),
    "images that are no texts": (asked(1, images=[1]), 400, "images.0 should be a valid bytes"),
    "no base64": (asked(1, images=["~"]), 400, "images.0: Data should be valid base64: Invalid symbol 126, offset 0."),
    "too many images": (asked(4), 413, "4 images are more than max_images=3"),
    "too long": (asked(1, more="x" * 30_000), 413, "the body is longer than max_body_mb=0.02; send fewer images"),
    "no prompts": ({"images": b64(png())}, 400, "prompts: Field required"),
    "prompts of numbers": (asked(1, prompts=[1]), 400, "prompts.0 should be a valid string"),
    "too few prompts": (asked(2, prompts=["a"]), 400, "there are 2 images and 1 prompts"),
    "metadata of texts": (asked(1, metadata=["a"]), 400, "metadata.0 should be an object"),
    "too much metadata": (asked(1, metadata=[{}, {}]), 400, "there are 1 images and 2 metadata"),
    "no PNG": (asked(1, images=b64(b"GIF89a")), 400, "image 0 is not a whole PNG (UnidentifiedImageError)"),
    "half a PNG": (asked(1, images=b64(png(20, 20)[:60])), 400, "image 0 is not a whole PNG (OSError)"),
    "transparent": (asked(1, images=b64(png(mode="RGBA"))), 400, "image 0 is RGBA; expected RGB with 8 bits a channel"),
    "a large image": (asked(1, images=b64(png(40, 26))), 413, "image 0: 40 x 26 is over 1000 pixels"),
    "a bomb": (asked(1, images=b64(bomb(10_000, 8_000))), 413, "image 0: 10000 x 8000 is over 1000 pixels"),
    "a larger bomb": (asked(1, images=b64(bomb(60_000, 60_000))), 413, "image 0 is over 1000 pixels"),
    "two sizes": (
        asked(2, images=[*b64(png(4, 4)), *b64(png(4, 5))]),
        400,
        "image 1 has another size than image 0; the images of a request have one",
    ),
}


@pytest.mark.parametrize(("body", "status", "detail"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_requests(small: RewardServer, body: Any, status: int, detail: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx2.post(small.url, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()) == (status, {"detail": detail})
    assert httpx2.post(small.url, json=asked(1)).json()["scores"] == [1.0]  # it goes on


def test_bad_forms(small: RewardServer) -> None:
    def answer(data: dict[str, str], count: int) -> tuple[int, str]:
        files = [("images", (f"{i}.png", png(), "image/png")) for i in range(count)]
        got = httpx2.post(small.url, data=data, files=files)
        return got.status_code, got.json()["detail"]

    texts = json.dumps({"prompts": ["a"]})
    assert answer({}, 1) == (400, "the form's field request should be JSON: {prompts: [], metadata: []}")
    assert answer({"request": "x"}, 1) == (400, "Invalid JSON: expected value at line 1 column 1")
    assert answer({"request": texts}, 2) == (400, "there are 2 images and 1 prompts")
    assert answer({"request": texts}, 4) == (400, "Too many files. Maximum number of files is 3.")
    got = httpx2.post(small.url, content=b"x", headers={"Content-Type": "text/plain"})
    assert (got.status_code, got.json()["detail"]) == (
        415,
        "content-type 'text/plain'; expected application/json or multipart/form-data",
    )


def test_a_request_that_is_too_long_is_told_to_the_client(small: RewardServer) -> None:
    """Though it is refused while it is still being sent."""
    noise = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    problem = f"{small.url}: answered 413: the body is longer than max_body_mb=0.02; send fewer images"
    assert told(ServerError, Http(small.url, retries=0), noise, ["a"] * 8, [{}] * 8) == problem


def test_a_request_that_never_ends(small: RewardServer) -> None:
    host, port = small.socket.getsockname()
    head = "POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    for length, sent, expected in (
        (1000, 10, "408: the body was not there within read_timeout_s=0.5"),
        (10**9, 30_000, "413: the body is longer than max_body_mb=0.02; send fewer images"),
    ):
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(head.format(length).encode() + b"x" * sent)
            answer = connection.makefile("rb").read().decode()
        status, _, body = answer.partition("\r\n\r\n")
        assert f"{status.split()[1]}: {json.loads(body)['detail']}" == expected


# --- the reference server: its rewards


def test_rewards_that_fail(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = 'on the prompts "p0" (+3 more)'
    for name, problem in (
        ("boom", f"raised KeyError: 'no such\\nthing' {where}"),
        ("nan", f"returned nan for 4 of 4 images {where}; expected finite numbers"),
    ):
        with serving(only(own, name)) as server:
            assert refusal(server.url, retries=0) == f"answered 500: reward {name!r} {problem} (try 1 of 1)"
    (record,) = caplog.records  # with its traceback, for whoever keeps the server
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)


def test_a_reward_that_hangs(fresh: Path) -> None:
    with serving(only(fresh, "naps", seconds=2), "reward.timeout_s=0.3") as server:
        health = server.url.replace("score", "health")
        problem = "answered 504: reward 'naps' was not done within reward.timeout_s=0.3 seconds (try 1 of 1)"
        assert refusal(server.url, 1, retries=0) == problem
        wait_for(lambda: httpx2.get(health).status_code == 503)
        assert httpx2.get(health).json() == {"detail": "a call of reward 'naps' hangs; start the server again"}
        assert refusal(server.url, 1, retries=0) == problem  # it has waited behind the first one, and is not begun
        wait_for(lambda: httpx2.get(health).status_code == 200)
        assert sys.modules["phalanx_user_own"].begun == [["p0"]]
        # and of a call whose client has left
        assert refusal(server.url, 1, retries=0, read_timeout_s=0.1).startswith("silent")
        assert httpx2.get(health).status_code == 200
        wait_for(lambda: httpx2.get(health).status_code == 503)


def test_workers_of_rewards(own: Path) -> None:
    """CPU rewards on several threads, rewards on the device one at a time."""
    functions = f"[{{path: '{own}:naps', kwargs: {{seconds: 0.3}}}}, {{path: '{own}:OneAtATime'}}]"
    with serving(f"reward.functions={functions}", "reward.num_workers=4") as server:
        begin = time.monotonic()
        assert scores(server.url, 4, batch_size=1, concurrency=4, retries=0) == [1.0] * 4
        assert time.monotonic() - begin < 1.0


@pytest.mark.parametrize("most", [1, 2])
def test_more_connections_than_allowed(own: Path, most: int) -> None:
    with serving(only(own, "brightness"), f"max_requests={most}") as server:
        address = server.socket.getsockname()
        with ExitStack() as others:
            for _ in range(most - 1):
                others.enter_context(socket.create_connection(address))
            time.sleep(0.1)
            assert len(scores(server.url, retries=0)) == 4
            others.enter_context(socket.create_connection(address))
            time.sleep(0.1)
            assert refusal(server.url, retries=0) == "answered 503: Service Unavailable (try 1 of 1)"
        assert len(scores(server.url, retries=5, backoff_s=0.1)) == 4


def hung_up(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server closes a connection within seconds, while `drip` comes on it again and again."""
    deadline = time.monotonic() + 5
    connection.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            if not connection.recv(65536):
                return True
        except TimeoutError:
            connection.sendall(drip)
        except ConnectionError:
            return True
    return False


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
LONG = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "drip", "waits"),
    [(b"", b"", 1), (HEAD, b"", 1), (HEAD, b"x", 1), (HEAD + b"\r\n" + HEAD, b"x", 1), (LONG, b"x", 2)],
    ids=["silent", "half a head", "a head without an end", "a second one", "a body without an end"],
)
def test_connections_without_a_request_are_closed(own: Path, sent: bytes, drip: bytes, waits: int) -> None:
    """So that they do not take up all of the server for ever."""
    limits = ["max_requests=3", "read_timeout_s=0.4"]
    with serving(only(own, "brightness"), *limits) as server, ExitStack() as stack:
        address = server.socket.getsockname()
        begin = time.monotonic()
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(sent)
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(hung_up, strangers, [drip] * 3))
        assert time.monotonic() - begin >= 0.4 * waits
        assert len(scores(server.url, retries=0)) == 4


def test_a_connection_is_kept_while_its_request_is_scored(own: Path) -> None:
    with serving(only(own, "naps", seconds=0.5), "read_timeout_s=0.2") as server, httpx2.Client() as client:
        for _ in range(2):  # on one connection
            assert client.post(server.url, json=asked(1)).json()["scores"] == [0.0]
            time.sleep(0.1)


# --- the reference server: requests that wait


def held(kind: torch.dtype, count: int) -> int:
    """How many tensors of so many numbers this process holds."""
    return sum(type(each) is torch.Tensor and each.numel() == count and each.dtype == kind for each in gc.get_objects())


def test_requests_wait_as_bytes_and_go_with_their_clients(fresh: Path) -> None:
    """One is scored while seven wait; then all their clients leave, and the next one is not behind them."""
    size, body = 3 * 37 * 41, json.dumps(asked(1, images=b64(png(37, 41)))).encode()
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(f"reward.functions=[{{path: '{fresh}:brightness'}}, {{path: '{fresh}:gated'}}]") as server:
        user = sys.modules["phalanx_user_own"]
        with ExitStack() as clients:
            for _ in range(8):
                client = clients.enter_context(socket.create_connection(server.socket.getsockname()))
                client.sendall(head.encode() + body)
            wait_for(lambda: (held(torch.uint8, size), held(torch.float32, size), len(user.begun)) == (7, 1, 1))
        wait_for(lambda: held(torch.uint8, size) == 0)
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(scores, server.url, 2)
            wait_for(lambda: held(torch.uint8, 2 * 3 * 8 * 8) > 0)
            user.gate.set()
            assert last.result() == pytest.approx([1.0 + 128 / 255] * 2)
        assert user.begun == [["ab"], ["p0", "p1"]]


def test_a_client_that_asks_again_finds_a_server_that_recovers(fresh: Path) -> None:
    """Of each of its calls but the first, nothing is left once it has given up."""
    with serving(only(fresh, "naps", seconds=1)) as server:
        silent = "silent for read_timeout_s=0.1 (try 4 of 4)"
        assert refusal(server.url, 6, batch_size=1, concurrency=6, retries=3, read_timeout_s=0.1) == silent
        begin = time.monotonic()
        assert scores(server.url, 1, retries=0) == [0.0]
        assert time.monotonic() - begin < 3
        assert len(sys.modules["phalanx_user_own"].begun) <= 3


def test_the_client_waits_as_long_as_the_server_may_take() -> None:
    """By default, and within its limit for a whole call."""
    assert Http("http://x/").read_timeout_s >= ServeRewardConfig().reward.timeout_s


def test_retries_draw_no_random_numbers_of_the_job() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    refusal(f"http://127.0.0.1:{free_port()}/score", retries=2)
    assert random.random() == expected
