"""The reference server of rewards: access, refusals, and failures of rewards and clients."""

import gc
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from phalanx.config.tasks import ServeRewardConfig
from phalanx.run.rules import load_config
from phalanx.tools.reward_server import RewardServer
from phalanx.zoo.rewards.http import Http, ServerError
from tests.helpers.checks import wait_for
from tests.helpers.reward_servers import asked, b64, bomb, only, own_rewards, png, refusal, scores, serving
from tests.helpers.rewards import told


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_rewards(tmp_path_factory.mktemp("rewards"))


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The same for a single test: the file is run anew and records the calls that began."""
    return own_rewards(tmp_path)


# --- who may ask


def test_a_token(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: Path) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SERVER_TOKEN", "s3cret-of-the-server")
    monkeypatch.setenv("OTHER_TOKEN", "an0ther")
    with serving(only(own, "brightness"), "token_env=SERVER_TOKEN") as server:
        wants = "answered 401: this server requires a token: the header Authorization: Bearer <token>"
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
        server = RewardServer(load_config(ServeRewardConfig, None, [functions, "port=0", *overrides]))
        server.close()

    monkeypatch.setenv("SERVER_TOKEN", "secret")
    start("host=localhost")
    start("host=0.0.0.0", "allow_open=true")
    start("host=0.0.0.0", "token_env=SERVER_TOKEN")
    assert told(ValueError, start, "host=0.0.0.0") == (
        "host=0.0.0.0 can be reached from other machines, and there is no token; give token_env, or allow_open=true "
        "if everybody may use the server"
    )


def test_a_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(*overrides: str) -> str:
        return told(ValueError, RewardServer, load_config(ServeRewardConfig, None, list(overrides)))

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
        "reward.functions[0]: vlm_ocr is a judge and needs reward.model, which only training and evaluations have"
    )
    assert problem("port=0", "token_env=NO_SUCH_VARIABLE") == (
        "token_env: the environment variable NO_SUCH_VARIABLE is not set; expected the server's token"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert problem() == "the server runs in one process, not 2; start it with NPROC_PER_NODE=1"


# --- what it refuses


@pytest.fixture(scope="module")
def small(own: Path) -> Iterator[RewardServer]:
    """A server with narrow limits."""
    limits = ["max_images=3", "max_pixels=1000", "max_body_mb=0.02"]
    with serving(only(own, "brightness"), *limits) as server:
        yield server


BAD_REQUESTS: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{", 400, "Invalid JSON: EOF while parsing an object at line 1 column 1"),
    "nested": (b"[" * 10_000, 400, "Invalid JSON: recursion limit exceeded at line 1 column 202"),
    "a list": ([1], 400, "Input should be an object"),
    "no images": (asked(0), 400, "the request contains no images"),
    "images that are no texts": (asked(1, images=[1]), 400, "images.0 should be a valid bytes"),
    "no base64": (asked(1, images=["~"]), 400, "images.0: Data should be valid base64: Invalid symbol 126, offset 0."),
    "too many images": (asked(4), 413, "4 images are more than max_images=3"),
    "too long": (asked(1, more="x" * 30_000), 413, "the body is longer than max_body_mb=0.02; send fewer images"),
    "no prompts": ({"images": b64(png())}, 400, "prompts: Field required"),
    "prompts of numbers": (asked(1, prompts=[1]), 400, "prompts.0 should be a valid string"),
    "too few prompts": (asked(2, prompts=["a"]), 400, "the request has 2 images but 1 prompts"),
    "metadata of texts": (asked(1, metadata=["a"]), 400, "metadata.0 should be an object"),
    "too much metadata": (asked(1, metadata=[{}, {}]), 400, "the request has 1 images but 2 metadata"),
    "no PNG": (asked(1, images=b64(b"GIF89a")), 400, "image 0 is not a complete PNG (UnidentifiedImageError)"),
    "half a PNG": (asked(1, images=b64(png(20, 20)[:60])), 400, "image 0 is not a complete PNG (OSError)"),
    "transparent": (asked(1, images=b64(png(mode="RGBA"))), 400, "image 0 is RGBA; expected RGB with 8 bits a channel"),
    "a large image": (asked(1, images=b64(png(40, 26))), 413, "image 0: 40 x 26 is over 1000 pixels"),
    "a bomb": (asked(1, images=b64(bomb(10_000, 8_000))), 413, "image 0: 10000 x 8000 is over 1000 pixels"),
    "a larger bomb": (asked(1, images=b64(bomb(60_000, 60_000))), 413, "image 0 is over 1000 pixels"),
    "two sizes": (
        asked(2, images=[*b64(png(4, 4)), *b64(png(4, 5))]),
        400,
        "image 1 differs in size from image 0; expected images of one size",
    ),
}


@pytest.mark.parametrize(("body", "status", "detail"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_requests(small: RewardServer, body: Any, status: int, detail: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx2.post(small.url, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()) == (status, {"detail": detail})
    assert httpx2.post(small.url, json=asked(1)).json()["scores"] == [1.0]  # the server still works


def test_bad_forms(small: RewardServer) -> None:
    def answer(data: dict[str, str], count: int) -> tuple[int, str]:
        files = [("images", (f"{i}.png", png(), "image/png")) for i in range(count)]
        got = httpx2.post(small.url, data=data, files=files)
        return got.status_code, got.json()["detail"]

    texts = json.dumps({"prompts": ["a"]})
    assert answer({}, 1) == (400, "the form's field request should be JSON: {prompts: [], metadata: []}")
    assert answer({"request": "x"}, 1) == (400, "Invalid JSON: expected value at line 1 column 1")
    assert answer({"request": texts}, 2) == (400, "the request has 2 images but 1 prompts")
    assert answer({"request": texts}, 4) == (400, "Too many files. Maximum number of files is 3.")
    got = httpx2.post(small.url, content=b"x", headers={"Content-Type": "text/plain"})
    assert (got.status_code, got.json()["detail"]) == (
        415,
        "content-type 'text/plain'; expected application/json or multipart/form-data",
    )


def test_a_request_that_is_too_long_is_told_to_the_client(small: RewardServer) -> None:
    """The client gets the answer although its request is refused while it is still being sent."""
    noise = torch.rand(8, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    problem = f"{small.url}: answered 413: the body is longer than max_body_mb=0.02; send fewer images"
    assert told(ServerError, Http(small.url, retries=0), noise, ["a"] * 8, [{}] * 8) == problem


def test_a_request_that_never_ends(own: Path) -> None:
    head = "POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    with serving(only(own, "brightness"), "max_body_mb=0.02", "read_timeout_s=0.5") as server:
        for length, sent, expected in (
            (1000, 10, "408: the body did not arrive within read_timeout_s=0.5"),
            (10**9, 30_000, "413: the body is longer than max_body_mb=0.02; send fewer images"),
        ):
            with socket.create_connection(server.socket.getsockname(), timeout=60) as connection:
                connection.sendall(head.format(length).encode() + b"x" * sent)
                answer = connection.makefile("rb").read().decode()
            status, _, body = answer.partition("\r\n\r\n")
            assert f"{status.split()[1]}: {json.loads(body)['detail']}" == expected


# --- its rewards


def test_rewards_that_fail(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = 'on the prompts "p0" (+3 more)'
    for name, problem in (
        ("boom", f"raised KeyError: 'no such\\nthing' {where}"),
        ("nan", f"returned nan for 4 of 4 images {where}; expected finite numbers"),
    ):
        with serving(only(own, name)) as server:
            assert refusal(server.url, retries=0) == f"answered 500: reward {name!r} {problem} (try 1 of 1)"
    (record,) = caplog.records  # with its traceback, for the operator of the server
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)


def test_a_reward_that_hangs(fresh: Path) -> None:
    with serving(only(fresh, "gated"), "reward.timeout_s=0.3") as server:
        user, health = sys.modules["phalanx_user_own"], server.url.replace("score", "health")
        problem = "answered 504: reward 'gated' was not done within reward.timeout_s=0.3 seconds (try 1 of 1)"
        assert refusal(server.url, 1, retries=0) == problem
        wait_for(lambda: httpx2.get(health).status_code == 503)
        assert httpx2.get(health).json() == {"detail": "a call of reward 'gated' hangs; restart the server"}
        assert refusal(server.url, 1, retries=0) == problem  # it waited for the first one and never began
        user.gate.set()
        wait_for(lambda: httpx2.get(health).status_code == 200)
        assert user.begun == [["p0"]]
        user.gate.clear()
        # the same for a call whose client has disconnected
        assert refusal(server.url, 1, retries=0, read_timeout_s=0.1).startswith("silent")
        wait_for(lambda: httpx2.get(health).status_code == 503)
        user.gate.set()


def test_workers_of_rewards(own: Path) -> None:
    """CPU rewards run on several threads, rewards on the device one at a time."""
    functions = f"[{{path: '{own}:meets'}}, {{path: '{own}:OneAtATime'}}]"  # `meets` needs four concurrent calls
    with serving(f"reward.functions={functions}", "reward.num_workers=4") as server:
        assert scores(server.url, 4, batch_size=1, concurrency=4, retries=0) == [1.0] * 4


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
        assert len(scores(server.url, retries=8, backoff_s=0.1)) == 4


def hung_up(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server closes a connection within seconds while `drip` is sent repeatedly."""
    deadline = time.monotonic() + 60
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
    """Otherwise they could occupy the server forever."""
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
        assert len(scores(server.url, retries=8, backoff_s=0.1)) == 4


def test_a_connection_is_kept_while_its_request_is_scored(own: Path) -> None:
    with serving(only(own, "naps", seconds=0.7), "read_timeout_s=0.5") as server, httpx2.Client() as client:
        for _ in range(2):  # on one connection
            assert client.post(server.url, json=asked(1)).json()["scores"] == [0.0]


# --- requests that wait


def held(kind: torch.dtype, count: int) -> int:
    """The number of tensors with this number of elements in this process, once garbage is collected."""
    gc.collect()  # a traceback of the client may hold what it sent
    return sum(type(each) is torch.Tensor and each.numel() == count and each.dtype == kind for each in gc.get_objects())


def test_requests_wait_as_bytes_and_go_with_their_clients(fresh: Path) -> None:
    """One request is scored while seven wait; after all their clients have left, the next one does not wait for them."""
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
    """Once the client has given up, nothing remains of its calls but the first, which is running."""
    with serving(only(fresh, "gated")) as server:
        user = sys.modules["phalanx_user_own"]
        silent = "silent for read_timeout_s=0.1 (try 4 of 4)"
        assert refusal(server.url, 6, batch_size=1, concurrency=6, retries=3, read_timeout_s=0.1) == silent
        wait_for(lambda: held(torch.uint8, 3 * 8 * 8) == 0)  # none waits
        user.gate.set()
        assert scores(server.url, 1, retries=0) == [1.0]
        assert len(user.begun) == 2
