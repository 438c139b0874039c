"""A reward server: POST /score takes images and returns scores; docs/serving-rewards.md describes the protocol.

It runs in one process. As in a training job, CPU rewards run on `reward.num_workers` threads, and rewards with a model
on the device run one call at a time; requests wait their turn. Client data is never unpickled, and every size is
limited.
"""

import asyncio
import ipaddress
import logging
import secrets
import signal
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import python_multipart  # noqa: F401 - FastAPI needs it to parse forms, but would fail only at the first request
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image
from pydantic import BaseModel, ValidationError
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.config.messages import ConfigError, place, without_folders
from phalanx.config.secrets import hide
from phalanx.config.tasks import ServeRewardConfig
from phalanx.distributed.launch_env import Launch
from phalanx.exit import Stopped
from phalanx.functional.advantage import combine
from phalanx.rewards.call import Call, DaemonPool, Scored, Task
from phalanx.rewards.protocol import ScoreRequest, Texts, complaint
from phalanx.rewards.registry import build_terms
from phalanx.rewards.wrappers import scorer
from phalanx.tools.memory_budget import MemoryBudget
from phalanx.types import Outputs, Prompt
from phalanx.zoo.rewards.http import read_token

log = logging.getLogger(__name__)
Checked = TypeVar("Checked", bound=BaseModel)

_POLL_S = 0.2  # interval at which a waiting request checks whether its client is still connected
CALL_BYTES = 12  # per image value in a call: 4 for the float, and 8 for intermediate values of rewards
STOP_S = 10  # for the requests in progress when the server is told to stop
BROKEN_PNG = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)  # raised by PIL


class RewardServer:
    """The job: `RewardServer(cfg)` loads the rewards (a ValueError is the user's mistake), `run()` serves."""

    def __init__(self, cfg: ServeRewardConfig) -> None:
        self.cfg = cfg
        size = Launch.from_env().world_size
        if size > 1:
            raise ConfigError(f"the server runs in one process, not {size}; start it with NPROC_PER_NODE=1")
        self._token = read_token(cfg.token_env) if cfg.token_env is not None else None
        self.socket = bind(cfg.host, cfg.port, guarded=self._token is not None or cfg.allow_open)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.terms = build_terms(cfg.reward.functions, self.device)
        for term in self.terms:
            if term.takes == "videos":
                raise ConfigError(
                    f"reward.functions: {term.name} takes videos, but the server receives images; use it in the job"
                )
        self._cpu_pool = DaemonPool(cfg.reward.num_workers, "reward")
        self._device_pool = DaemonPool(1, "reward-device")
        self._turns: set[Call] = set()  # those that are not done
        self._memory = MemoryBudget(int(cfg.max_memory_mb * 1e6))
        self._releases: set[asyncio.Task[None]] = set()
        self.app = FastAPI(openapi_url=None)
        self.app.add_api_route("/score", self.score, methods=["POST"], response_model=None)
        self.app.add_api_route("/health", self.health, methods=["GET"], response_model=None)

    @property
    def url(self) -> str:
        """The URL for POST requests."""
        host, port = self.socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/score"

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C; raises Stopped once the requests in progress are answered."""

        def stop(number: int, _: object) -> None:
            raise Stopped(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)  # uvicorn catches these signals while it serves, and raises them again after
        names = ", ".join(term.name for term in self.terms)
        guard = "with a token" if self._token is not None else "without a token"
        print(f"{names} on {self.device}, {guard}: {self.url}", flush=True)
        try:
            self.listener().run(sockets=[self.socket])
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def listener(self) -> uvicorn.Server:
        """The HTTP server."""
        config = uvicorn.Config(
            self.app,
            http=_impatient_protocol(self.cfg.read_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=self.cfg.max_requests + 1,  # uvicorn refuses the request that reaches this number
            timeout_graceful_shutdown=STOP_S,
        )
        return uvicorn.Server(config)

    async def health(self) -> dict[str, str]:
        """Status 200 if requests are served, 503 if a call of a reward hangs."""
        for turn in list(self._turns):
            begun = 0.0 if turn.task is None else turn.task.start  # time in the queue does not count
            if 0 < begun < time.perf_counter() - self.cfg.reward.timeout_s:
                raise HTTPException(503, f"a call of reward {turn.term.name!r} hangs; restart the server")
        return {"status": "ok"}

    async def score(self, request: Request) -> dict[str, Any]:
        """The weighted scores of a request's images, and the scores of each reward."""
        files, prompts = await self._request_contents(request)
        terms = await self._within_budget(request, files, prompts)
        total = combine([terms[term.name] for term in self.terms], [term.share for term in self.terms])
        return {"scores": total.tolist(), "terms": {name: values.tolist() for name, values in terms.items()}}

    # -- reading --------------------------------------------------------------------------------------------------

    async def _request_contents(self, request: Request) -> tuple[list[bytes], list[Prompt]]:
        """The PNG files of a request and their prompts; its body is released."""
        body = await self._read_body(request)
        kind = request.headers.get("content-type", "")
        if kind.startswith("multipart/form-data"):
            texts, files = await self._read_form(request, body)
        elif kind.startswith("application/json"):
            content = await asyncio.to_thread(_parse_body, ScoreRequest, body)
            texts, files = content, content.images
        else:
            raise HTTPException(415, f"content-type {kind!r}; expected application/json or multipart/form-data")
        if not files:
            raise HTTPException(400, "the request contains no images")
        if len(files) > self.cfg.max_images:
            raise HTTPException(413, f"{len(files)} images are more than max_images={self.cfg.max_images}")
        return files, _request_prompts(texts, len(files))

    async def _read_body(self, request: Request) -> bytes:
        """The body of a request. Even a request that is refused is read to its end, because the answer would be lost
        if the connection were closed with unread bytes; the bytes of such a request are discarded.
        """
        allowed = self._token is None or secrets.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()
        )
        limit = int(self.cfg.max_body_mb * 1e6)
        chunks: list[bytes] = []
        size, more, in_time = 0, True, True
        try:
            async with asyncio.timeout(self.cfg.read_timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise _disconnect_error()
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if allowed and size <= limit:
                        chunks.append(chunk)
                    else:
                        chunks.clear()
                    more = message.get("more_body", False)
        except TimeoutError:
            in_time = False
        if not allowed:
            problem = "this server requires a token: the header Authorization: Bearer <token>"
            raise HTTPException(401, problem, {"WWW-Authenticate": "Bearer"})
        if size > limit:
            raise HTTPException(413, f"the body is longer than max_body_mb={self.cfg.max_body_mb:g}; send fewer images")
        if not in_time:
            raise HTTPException(408, f"the body did not arrive within read_timeout_s={self.cfg.read_timeout_s:g}")
        return b"".join(chunks)

    async def _read_form(self, request: Request, body: bytes) -> tuple[Texts, list[bytes]]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        limits = {"max_files": self.cfg.max_images, "max_fields": 1, "max_part_size": len(body)}
        async with Request(request.scope, receive).form(**limits) as form:
            texts = form.get("request")
            images = [image for image in form.getlist("images") if not isinstance(image, str)]
            files = [await image.read() for image in images]
        if not isinstance(texts, str):
            raise HTTPException(400, "the form's field request should be JSON: {prompts: [], metadata: []}")
        return _parse_body(Texts, texts), files

    def _image_size(self, files: list[bytes]) -> tuple[int, int]:
        """Height and width of the PNG files, from their headers; nothing is decompressed."""
        limit, sizes = self.cfg.max_pixels, []
        for i, file in enumerate(files):
            with _open_png(i, file, limit) as image:
                if image.width * image.height > limit:
                    raise HTTPException(413, f"image {i}: {image.width} x {image.height} is over {limit} pixels")
                if image.mode != "RGB":
                    raise HTTPException(400, f"image {i} is {image.mode}; expected RGB with 8 bits a channel")
                sizes.append((image.height, image.width))
            if sizes[i] != sizes[0]:
                raise HTTPException(400, f"image {i} differs in size from image 0; expected images of one size")
        return sizes[0]

    def _decode_images(self, files: list[bytes], size: tuple[int, int]) -> Tensor:
        """Decode PNG files to images uint8 [B, H, W, 3]."""
        images = torch.empty(len(files), *size, 3, dtype=torch.uint8)
        for i, file in enumerate(files):
            with _open_png(i, file, self.cfg.max_pixels) as image:
                images[i] = torch.from_numpy(np.array(image))
        return images

    # -- scoring --------------------------------------------------------------------------------------------------

    async def _within_budget(self, request: Request, files: list[bytes], prompts: list[Prompt]) -> dict[str, Tensor]:
        """The scores [B] of each reward, computed once there is memory for the images. The memory is released when the
        last call that uses them is done, which may be after the answer.
        """
        height, width = await asyncio.to_thread(self._image_size, files)
        at_once = min(len(self.terms), self.cfg.reward.num_workers + 1)
        need = len(files) * height * width * 3 * (1 + at_once * CALL_BYTES)
        if need > self._memory.limit:
            raise HTTPException(
                413,
                f"{len(files)} images of {width} x {height} take {need / 1e6:.0f} MB, "
                f"more than max_memory_mb={self.cfg.max_memory_mb:g}; send fewer images",
            )
        try:
            async with asyncio.timeout(self.cfg.reward.timeout_s):
                await self._memory.reserve(need)
        except TimeoutError:
            raise HTTPException(503, "other requests occupy all of max_memory_mb; try again") from None
        turns: list[Call] = []
        try:
            images = await asyncio.to_thread(self._decode_images, files, (height, width))
            files.clear()
            turns += [Call(term, images, prompts) for term in self.terms]
            del images
            return await self._score_turns(request, turns)
        finally:
            release = asyncio.create_task(self._release_memory(turns, need))
            self._releases.add(release)  # asyncio keeps only weak references to tasks
            release.add_done_callback(self._releases.discard)

    async def _release_memory(self, turns: list[Call], size: int) -> None:
        """Release memory once the calls of these turns are done."""
        calls = [asyncio.wrap_future(turn.task) for turn in turns if turn.task is not None]
        await asyncio.gather(*calls, return_exceptions=True)
        self._memory.release(size)

    async def _score_turns(self, request: Request, turns: list[Call]) -> dict[str, Tensor]:
        """The scores [B] of each reward. If a request waits too long or its client disconnects, its remaining calls are
        cancelled; calls that are running continue, because threads cannot be stopped.
        """
        calls = [self._begin_call(turn) for turn in turns]
        limit = self.cfg.reward.timeout_s
        done = asyncio.gather(*map(asyncio.wrap_future, calls), return_exceptions=True)
        try:
            async with asyncio.timeout(limit):
                while not done.done():
                    await asyncio.wait([done], timeout=_POLL_S)
                    if not done.done() and await request.is_disconnected():
                        raise _disconnect_error()
        except TimeoutError:
            pass  # reported below, after errors of rewards
        finally:
            done.cancel()  # this also cancels calls that have not begun
        for call in calls:
            failure = call.exception() if call.done() and not call.cancelled() else None
            if failure is not None:
                shown, cause = str(failure), failure.__cause__
                if cause is not None:  # clients must not see file names, and the log contains the traceback
                    log.error("%s", failure, exc_info=cause)
                    shown = shown.removesuffix(place(cause))
                raise HTTPException(500, without_folders(hide(shown)))
        scores = {}
        for term, call in zip(self.terms, calls, strict=True):
            if call.cancelled() or not call.done():
                raise HTTPException(504, f"reward {term.name!r} was not done within reward.timeout_s={limit:g} seconds")
            scores[term.name] = call.result().rows[term.name]
        return scores

    def _begin_call(self, turn: Call) -> Task[Scored]:
        """Queue a call of a reward."""
        pool = self._device_pool if turn.term.on_device else self._cpu_pool
        call = turn.task = pool.submit(lambda: scorer(turn.term, copy=as_floats)(turn))
        self._turns.add(turn)
        call.add_done_callback(lambda _: self._end_call(turn))
        return call

    def _end_call(self, turn: Call) -> None:
        self._turns.discard(turn)
        turn.subject = None  # because a pool keeps cancelled calls until it reaches them


def as_floats(images: Outputs) -> Tensor:
    """Images uint8 [B, H, W, 3] as floats [B, 3, H, W] in 0..1; they wait as bytes, a fourth of the memory."""
    # contiguous like a rollout's images, so that sums over pixels have the same order and scores are bit-identical
    assert isinstance(images, Tensor)
    count, height, width, channels = images.shape
    return torch.empty(count, channels, height, width).copy_(images.permute(0, 3, 1, 2)).div_(255)


@contextmanager
def _open_png(number: int, file: bytes, limit: int) -> Iterator[Image.Image]:
    """Open a PNG file of a request; its pixels are decoded on demand."""
    try:
        with Image.open(BytesIO(file), formats=["PNG"]) as image:
            yield image
    except Image.DecompressionBombError:
        raise HTTPException(413, f"image {number} is over {limit} pixels") from None
    except BROKEN_PNG as error:
        raise HTTPException(400, f"image {number} is not a complete PNG ({type(error).__name__})") from None


def _disconnect_error() -> HTTPException:
    return HTTPException(400, "the client has disconnected")  # nobody reads it


def _impatient_protocol(limit_s: float) -> type[H11Protocol]:
    """uvicorn's connection class, but closing connections that do not send a whole request head within `limit_s`.
    uvicorn's own limit applies only after an answer, and ends with the next byte.
    """

    class Impatient(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._limit = self.loop.call_later(limit_s, self._close_if_idle)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._limit.cancel()
            self._limit = self.loop.call_later(limit_s, self._close_if_idle)

        def connection_lost(self, exc: Exception | None) -> None:
            self._limit.cancel()
            super().connection_lost(exc)

        def _close_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

    return Impatient


def bind(host: str, port: int, guarded: bool) -> socket.socket:
    """Bind a listening socket. Raises ConfigError if that fails, or if the address is public and not `guarded`."""
    where = f"host={host} port={port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not guarded and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"host={host} can be reached from other machines, and there is no token; give token_env, or "
                "allow_open=true if everybody may use the server"
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # early connections wait until the server runs
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; give a free port of this machine, e.g. port=8077") from None
    return listener


def _parse_body(model: type[Checked], body: bytes | str) -> Checked:
    """Validate a client's JSON against a model."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(400, complaint(error)) from None


def _request_prompts(texts: Texts, count: int) -> list[Prompt]:
    """The prompts of a request with `count` images, with their metadata, which is optional."""
    metadata = [{}] * count if texts.metadata is None else texts.metadata
    for name, values in (("prompts", texts.prompts), ("metadata", metadata)):
        if len(values) != count:
            raise HTTPException(400, f"the request has {count} images but {len(values)} {name}")
    return [Prompt(text, i, meta) for i, (text, meta) in enumerate(zip(texts.prompts, metadata, strict=True))]
