"""A server of rewards: POST /score takes images and gives scores; docs/serving-rewards.md has the protocol.

One process. CPU rewards run on `reward.num_workers` threads, those with a model on the device one call at a time, as in
a training job; requests wait their turn. Nothing that a client sends is unpickled, and every size has a limit.
"""

import asyncio
import base64
import ipaddress
import json
import logging
import secrets
import signal
import socket
import struct
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import python_multipart  # noqa: F401 - FastAPI reads forms with it, and would say so at the first one only
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from PIL import Image
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.tasks import ServeRewardConfig
from phalanx.distributed.mesh import Launch
from phalanx.ending import Stopped
from phalanx.rewards._base import RewardError
from phalanx.rewards._registry import build_terms
from phalanx.rewards._runner import _Call, _on
from phalanx.rewards.http import read_token
from phalanx.types import Prompt

log = logging.getLogger(__name__)

STOP_S = 10  # for requests under way, when the server is told to stop
BROKEN_PNG = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)  # what PIL raises


@dataclass(frozen=True)
class Asked:
    """A request: PNG files, and the prompt and metadata of each."""

    files: list[bytes]
    prompts: list[Prompt]


class RewardServer:
    """`RewardServer(cfg)` checks all and loads the rewards (a ValueError is the user's mistake), `run()` serves."""

    def __init__(self, cfg: ServeRewardConfig) -> None:
        self.cfg = cfg
        size = Launch.from_env().world_size
        if size > 1:
            raise ConfigError(f"the server is one process, and there are {size}; start it with NPROC_PER_NODE=1")
        self._token = read_token(cfg.token_env) if cfg.token_env is not None else None
        self.socket = bind(cfg.host, cfg.port, guarded=self._token is not None or cfg.allow_open)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.terms = build_terms(cfg.reward.functions, self.device)
        self._cpu_pool = ThreadPoolExecutor(cfg.reward.num_workers, "reward")
        self._device_pool = ThreadPoolExecutor(1, "reward-device")
        self._hung: dict[Future[Tensor], str] = {}
        self.app = FastAPI(openapi_url=None)
        self.app.add_api_route("/score", self.score, methods=["POST"], response_model=None)
        self.app.add_api_route("/health", self.health, methods=["GET"], response_model=None)

    @property
    def url(self) -> str:
        """Where to post."""
        host, port = self.socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/score"

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C; raises Stopped once the requests under way are answered."""

        def stop(number: int, _: object) -> None:
            raise Stopped(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)  # while it serves, uvicorn catches them; it raises them again when it is done
        names = ", ".join(term.name for term in self.terms)
        guard = "with a token" if self._token is not None else "without a token"
        print(f"{names} on {self.device}, {guard}: {self.url}", flush=True)
        try:
            self.listener().run(sockets=[self.socket])
        finally:
            self.close()

    def close(self) -> None:
        """Give the port back, and end the threads that are idle."""
        self.socket.close()
        for pool in (self._cpu_pool, self._device_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def listener(self) -> uvicorn.Server:
        """What listens and speaks HTTP."""
        config = uvicorn.Config(
            self.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=self.cfg.max_requests,
            timeout_graceful_shutdown=STOP_S,
        )
        return uvicorn.Server(config)

    async def health(self) -> JSONResponse:
        """200 where requests are served, 503 where a call of a reward hangs."""
        for name in list(self._hung.values()):
            raise HTTPException(503, f"a call of reward {name!r} hangs; start the server again")
        return JSONResponse({"status": "ok"})

    async def score(self, request: Request) -> JSONResponse:
        """The weighted scores of a request's images, and each reward's own."""
        body = await self._read(request)
        kind = request.headers["content-type"] if "content-type" in request.headers else ""
        if kind.startswith("multipart/form-data"):
            asked = await self._form(request, body)
        elif kind.startswith("application/json"):
            asked = await asyncio.to_thread(self._json, body)
        else:
            raise HTTPException(415, f"content-type {kind!r}; right is application/json or multipart/form-data")
        images = await asyncio.to_thread(self._images, asked.files)
        terms = await self._score(images, asked.prompts)
        total = torch.stack([term.weight * terms[term.name] for term in self.terms]).sum(0)
        return JSONResponse(
            {"scores": total.tolist(), "terms": {name: values.tolist() for name, values in terms.items()}}
        )

    # -- reading --------------------------------------------------------------------------------------------------

    async def _read(self, request: Request) -> bytes:
        """The body. It is read to its end before anything is refused: the answer would be lost if the connection were
        closed on unread bytes. What is refused is not kept.
        """
        allowed = self._token is None or secrets.compare_digest(
            (request.headers["authorization"] if "authorization" in request.headers else "").encode(),
            f"Bearer {self._token}".encode(),
        )
        limit = int(self.cfg.max_body_mb * 1e6)
        chunks, size, more, in_time = [], 0, True, True
        try:
            async with asyncio.timeout(self.cfg.read_timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(400, "the client has left")  # which nobody reads
                    chunk: bytes = message["body"] if "body" in message else b""
                    size += len(chunk)
                    if allowed and size <= limit:
                        chunks.append(chunk)
                    else:
                        chunks.clear()
                    more = "more_body" in message and message["more_body"]
        except TimeoutError:
            in_time = False
        if not allowed:
            wants = "this server wants a token: the header Authorization: Bearer <token>"
            raise HTTPException(401, wants, {"WWW-Authenticate": "Bearer"})
        if size > limit:
            raise HTTPException(413, f"the body is longer than max_body_mb={self.cfg.max_body_mb:g}; send fewer images")
        if not in_time:
            raise HTTPException(408, f"the body was not there within read_timeout_s={self.cfg.read_timeout_s:g}")
        return b"".join(chunks)

    def _json(self, body: bytes) -> Asked:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is not JSON") from None
        if not isinstance(asked, dict) or "images" not in asked:
            raise HTTPException(400, "the body has no images; right is {images: [], prompts: [], metadata: []}")
        images = asked.pop("images")
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise HTTPException(400, "images should be a list of PNG files in base64")
        self._check_count(len(images))
        try:
            files = [base64.b64decode(image, validate=True) for image in images]
        except ValueError:
            raise HTTPException(400, "images should be a list of PNG files in base64") from None
        return Asked(files, _prompts(asked, len(files)))

    async def _form(self, request: Request, body: bytes) -> Asked:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        limits = {"max_files": self.cfg.max_images, "max_fields": 1, "max_part_size": len(body)}
        async with Request(request.scope, receive).form(**limits) as form:
            texts = form["request"] if "request" in form else None
            images = [image for image in form.getlist("images") if not isinstance(image, str)]
            files = [await image.read() for image in images]
        try:
            asked = json.loads(texts) if isinstance(texts, str) else None
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            raise HTTPException(400, "the form's field request should be JSON: {prompts: [], metadata: []}")
        self._check_count(len(files))
        return Asked(files, _prompts(asked, len(files)))

    def _check_count(self, count: int) -> None:
        if count == 0:
            raise HTTPException(400, "there are no images")
        if count > self.cfg.max_images:
            raise HTTPException(413, f"{count} images are more than max_images={self.cfg.max_images}")

    def _images(self, files: list[bytes]) -> Tensor:
        """PNG files -> images float32 [B, 3, H, W] in 0..1."""
        pictures = [self._pixels(i, file) for i, file in enumerate(files)]
        for i, picture in enumerate(pictures):
            if picture.shape != pictures[0].shape:
                raise HTTPException(400, f"image {i} has another size than image 0; the images of a request have one")
        # in memory as a rollout's images are: sums over pixels have the same order, and scores their last bit
        return torch.stack(pictures).permute(0, 3, 1, 2).contiguous().float() / 255

    def _pixels(self, number: int, file: bytes) -> Tensor:
        """uint8 [H, W, 3]. The size is read before anything is decompressed."""
        limit = self.cfg.max_pixels
        try:
            with Image.open(BytesIO(file), formats=["PNG"]) as image:
                if image.width * image.height > limit:
                    raise HTTPException(413, f"image {number}: {image.width} x {image.height} is over {limit} pixels")
                if image.mode != "RGB":
                    raise HTTPException(400, f"image {number} is {image.mode}; right is RGB with 8 bits a channel")
                return torch.from_numpy(np.array(image))
        except Image.DecompressionBombError:
            raise HTTPException(413, f"image {number} is over {limit} pixels") from None
        except BROKEN_PNG as error:
            raise HTTPException(400, f"image {number} is no whole PNG ({type(error).__name__})") from None

    # -- scoring --------------------------------------------------------------------------------------------------

    async def _score(self, images: Tensor, prompts: list[Prompt]) -> dict[str, Tensor]:
        """Each reward's scores [B]. A request that waits too long for its turn is not scored any more."""
        calls: dict[str, Future[Tensor]] = {}
        for term in self.terms:
            pool = self._device_pool if term.on_device else self._cpu_pool
            calls[term.name] = pool.submit(_Call(term, images, prompts).run, nullcontext())
        limit = self.cfg.reward.timeout_s
        waits = {name: asyncio.wrap_future(call) for name, call in calls.items()}
        await asyncio.wait(waits.values(), timeout=limit)
        late = [name for name, wait in waits.items() if not wait.done()]
        for name in late:
            if not calls[name].cancel():  # it runs, and threads cannot be ended
                self._hung[calls[name]] = name
                calls[name].add_done_callback(self._hung.pop)
        if late:
            raise HTTPException(504, f"reward {late[0]!r} was not done within reward.timeout_s={limit:g} seconds")
        errors = {name: wait.exception() for name, wait in waits.items()}
        for name, error in errors.items():
            if isinstance(error, RewardError):
                raise HTTPException(500, str(error))
            if error is not None:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                text = f"reward {name!r} raised {reason} on {_on(prompts)}"
                log.error("%s", text, exc_info=error)
                raise HTTPException(500, text)
        return {name: wait.result() for name, wait in waits.items()}


def bind(host: str, port: int, guarded: bool) -> socket.socket:
    """A socket of this address. Raises ConfigError where it cannot be had, or where strangers could use it."""
    where = f"host={host} port={port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not guarded and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"host={host} can be reached from other machines, and there is no token; give token_env, or "
                "allow_open=true where everybody may use the server"
            )
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; give a free port of this machine, e.g. port=8077") from None
    return found


def _prompts(asked: dict[str, Any], count: int) -> list[Prompt]:
    """The prompts of a request, with their metadata, which may be left out."""
    texts = asked["prompts"] if "prompts" in asked else None
    metadata = asked["metadata"] if "metadata" in asked else [{}] * count
    for name, values, kind, what in (("prompts", texts, str, "texts"), ("metadata", metadata, dict, "objects")):
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise HTTPException(400, f"{name} should be a list of {what}")
        if len(values) != count:
            raise HTTPException(400, f"there are {count} images and {len(values)} {name}")
    assert isinstance(texts, list)
    return [Prompt(text, i, meta) for i, (text, meta) in enumerate(zip(texts, metadata, strict=True))]
