"""Reward servers for tests: the reference server, misbehaving ones, and a client's errors about them."""

import base64
import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import uvicorn
from PIL import Image

from phalanx.config.tasks import ServeRewardConfig
from phalanx.run.rules import load_config
from phalanx.tools.reward_server import RewardServer
from phalanx.zoo.rewards.http import Http, ServerError
from tests.helpers.checks import wait_for
from tests.helpers.rewards import told

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
    assert gate.wait(60)
    return [1.0] * len(images)

meeting = threading.Barrier(4)

def meets(images, prompts, metadata):
    meeting.wait(60)
    return [0.0] * len(images)

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


def own_rewards(folder: Path) -> Path:
    """The file of REWARDS."""
    file = folder / "own.py"
    file.write_text(REWARDS)
    return file


def only(own: Path, name: str, **kwargs: Any) -> str:
    """The override for a server with one reward of REWARDS."""
    return f"reward.functions=[{{path: '{own}:{name}', kwargs: {json.dumps(kwargs)}}}]"


@contextmanager
def serving(*overrides: str) -> Iterator[RewardServer]:
    """Run the reference server on a free local port, in a thread."""
    server = RewardServer(load_config(ServeRewardConfig, None, ["port=0", *overrides]))
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


Answer = Callable[["Strange", dict[str, Any]], None]


class Strange(BaseHTTPRequestHandler):
    """A request to a misbehaving server, whose `answer` handles it."""

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
        self.over = threading.Event()  # ends handlers that hang

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # the client gave up


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
    """The scores of `count` small gray images."""
    options = {"retries": 1, "backoff_s": 0.01, "timeout_s": 20.0, **kwargs}
    return Http(url, **options)(torch.full((count, 3, 8, 8), 0.5), [f"p{i}" for i in range(count)], [{}] * count)


def refusal(url: str, count: int = 4, **kwargs: Any) -> str:
    """The client's error message without the address."""
    shown, _, problem = told(ServerError, scores, url, count, **kwargs).partition(": ")
    assert shown == url
    return problem


def png(width: int = 4, height: int = 4, mode: str = "RGB") -> bytes:
    buffer = BytesIO()
    Image.new(mode, (width, height), 255 if mode == "L" else "white").save(buffer, "PNG")
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a large size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def asked(count: int, **other: Any) -> dict[str, Any]:
    return {"images": b64(png()) * count, "prompts": ["ab"] * count, **other}


def b64(file: bytes) -> list[str]:
    return [base64.b64encode(file).decode()]
