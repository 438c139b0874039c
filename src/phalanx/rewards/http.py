"""Reward: scores of a server, which gets the images as PNG over HTTP; docs/serving-rewards.md has the protocol.

The event loop of a call lives in that call alone: rewards are called from several threads, in forked processes as well.
"""

import asyncio
import base64
import json
import logging
import math
import os
import random
import re
import ssl
import threading
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import Any

import httpx2
from PIL import Image
from torch import Tensor

from phalanx.config.load import Bounds
from phalanx.ending import place
from phalanx.rewards._base import Marked, Marking, to_uint8

log = logging.getLogger(__name__)

ENCODINGS = ("json", "multipart")
ON_ERROR = ("raise", "value")
MAX_ANSWER = 4 * 2**20  # bytes: no honest answer comes near
MAX_PAUSE_S = 30.0
_SHOWN = 200  # characters of an answer in a message
Scored = tuple[float, bool]  # an image's score, and whether it is error_value instead of the server's
_KINDS = {str: "a text", int: "a whole number", float: "a number"}


class ServerError(RuntimeError):
    """The server gave no usable scores; the message is one line with its address."""


class Http(Marking):
    """Asks a server for scores; with on_error=value the mark `degraded` is on the images that got error_value.

    url: where to post, e.g. http://127.0.0.1:8077/score; redirects are not followed, proxies not used.
    encoding: `json` with images in base64, or `multipart`, a quarter smaller.
    batch_size: images a request; concurrency: requests at once, of one call of the reward.
    connect_timeout_s: seconds for a connection.
    read_timeout_s: seconds for the next bytes of an answer; below the server's own limit, slow scores are lost.
    timeout_s: seconds for a call with all its requests and retries; keep it below reward.timeout_s.
    retries: further tries of a request that met no connection, a broken one, a time limit, 5xx or 429.
    backoff_s: seconds before the first of them, doubled for each further one, and up to half more or less by chance.
    token_env: the environment variable that holds the server's token; null: none is sent.
    on_error: what a request without usable scores does: `raise` ends the job, `value` scores its images error_value.
    max_abs: a score whose size is larger is no usable one.
    """

    def __init__(
        self,
        url: str,
        encoding: str = "json",
        batch_size: int = 16,
        concurrency: int = 4,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 300.0,
        timeout_s: float = 240.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        token_env: str | None = None,
        on_error: str = "raise",
        error_value: float | None = None,
        max_abs: float = 1e6,
    ) -> None:
        """Check the arguments; nothing is sent before the first call. Raises ValueError."""
        self.url = url
        self.shown = _address(url)
        _check("encoding", encoding, str, choices=ENCODINGS)
        _check("batch_size", batch_size, int, ge=1)
        _check("concurrency", concurrency, int, ge=1)
        _check("connect_timeout_s", connect_timeout_s, float, gt=0)
        _check("read_timeout_s", read_timeout_s, float, gt=0)
        _check("timeout_s", timeout_s, float, gt=0)
        _check("retries", retries, int, ge=0)
        _check("backoff_s", backoff_s, float, ge=0)
        _check("on_error", on_error, str, choices=ON_ERROR)
        _check("max_abs", max_abs, float, gt=0)
        if (on_error == "value") != (error_value is not None):
            raise ValueError("on_error=value and error_value, a number, go together; give both or neither")
        if error_value is not None:
            _check("error_value", error_value, float, gt=-math.inf)
        self.encoding, self.batch_size, self.concurrency = encoding, batch_size, concurrency
        self.connect_timeout_s, self.read_timeout_s, self.timeout_s = connect_timeout_s, read_timeout_s, timeout_s
        self.retries, self.backoff_s, self.error_value, self.max_abs = retries, backoff_s, error_value, max_abs
        self.marks = () if error_value is None else ("degraded",)
        self.degraded = 0  # images that got error_value, since the start
        self._told = 0  # degraded images at the last warning
        self._left_out: set[str] = set()
        self._lock = threading.Lock()  # of the three above
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "phalanx"}
        self._secret: re.Pattern[str] | None = None
        if token_env is not None:
            token = read_token(token_env)
            self._headers["Authorization"] = f"Bearer {token}"
            self._secret = _spellings(token)
        self._tls = ssl.create_default_context()
        self._chance = random.Random()  # its own: retries leave the job's random numbers alone

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float] | Marked:
        """Images [B, 3, H, W] in 0..1, sent with 8 bits a channel -> B scores. Raises ServerError, one line."""
        found = asyncio.run(self._score(to_uint8(images), prompts, [self._plain(meta) for meta in metadata]))
        scores = [score for score, _ in found]
        return Marked(scores, {"degraded": [float(bad) for _, bad in found]}) if self.marks else scores

    async def _score(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[Scored]:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        free = asyncio.Semaphore(self.concurrency)
        limits = httpx2.Timeout(
            connect=self.connect_timeout_s, read=self.read_timeout_s, write=self.read_timeout_s, pool=None
        )
        async with httpx2.AsyncClient(
            headers=self._headers, timeout=limits, verify=self._tls, trust_env=False, follow_redirects=False
        ) as client:

            async def part(first: int) -> list[Scored]:
                chosen = slice(first, first + self.batch_size)
                async with free:
                    return await self._batch(client, deadline, images[chosen], prompts[chosen], metadata[chosen])

            parts = await asyncio.gather(*(part(first) for first in range(0, len(images), self.batch_size)))
        return [score for scores in parts for score in scores]

    async def _batch(
        self,
        client: httpx2.AsyncClient,
        deadline: float,
        images: Tensor,
        prompts: list[str],
        metadata: list[dict[str, Any]],
    ) -> list[Scored]:
        """The scores of one request's images, or error_value for each of them."""
        # in a thread: PNG takes time, during which other requests go on
        body = await asyncio.to_thread(encode, images, prompts, metadata, self.encoding)
        try:
            return [(score, False) for score in self._scores(await self._answer(client, deadline, body), len(images))]
        except ServerError as error:
            if self.error_value is None:
                raise
            self._degrade(len(images), error)
            return [(self.error_value, True)] * len(images)

    async def _answer(self, client: httpx2.AsyncClient, deadline: float, body: dict[str, Any]) -> bytes:
        """The body of the first answer with status 200."""
        now, tries = asyncio.get_running_loop().time, self.retries + 1
        for attempt in range(1, tries + 1):
            asked = 0.0
            try:
                async with asyncio.timeout_at(deadline):
                    status, headers, content = await self._post(client, body)
            except TimeoutError:
                raise self._error(f"no answer within timeout_s={self.timeout_s:g}") from None
            except httpx2.TransportError as error:
                problem = self._words(error)
            else:
                if status == 200:
                    return content
                problem = self._refusal(status, headers, content)
                asked = _retry_after(headers)
            pause = max(asked, min(MAX_PAUSE_S, self.backoff_s * 2 ** (attempt - 1)) * self._chance.uniform(0.5, 1.5))
            if attempt < tries and now() + pause > deadline:
                late = f"the next one, in {pause:.0f} s, would be past timeout_s={self.timeout_s:g}"
                raise self._error(f"{problem} (try {attempt} of {tries}; {late})")
            if attempt < tries:
                await asyncio.sleep(pause)
        raise self._error(f"{problem} (try {tries} of {tries})")

    def _refusal(self, status: int, headers: httpx2.Headers, content: bytes) -> str:
        """What a status other than 200 says; raises ServerError where another try would say the same."""
        problem = f"answered {status}: {self._said(content)}"
        if 300 <= status < 400 and "location" in headers:
            to = self._printable(headers["location"])
            raise self._error(f"answered {status}, a redirect to {to}, which is not followed; give that as url")
        if status < 500 and status != 429:
            raise self._error(problem)
        return problem

    async def _post(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[int, httpx2.Headers, bytes]:
        async with client.stream("POST", self.url, **body) as response:
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MAX_ANSWER:
                    raise self._error(f"its answer is longer than {MAX_ANSWER} bytes")
            return response.status_code, response.headers, bytes(content)

    def _scores(self, content: bytes, count: int) -> list[float]:
        """The scores in an answer, checked."""
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise self._error(f"its answer is not JSON: {self._said(content)}") from None
        scores = answer["scores"] if isinstance(answer, dict) and "scores" in answer else None
        if not isinstance(scores, list):
            raise self._error(f"its answer has no list 'scores': {self._said(content)}")
        if len(scores) != count:
            raise self._error(f"{len(scores)} scores for {count} images")
        for i, score in enumerate(scores):
            if isinstance(score, bool) or not isinstance(score, int | float):
                raise self._error(f"score {i} is {self._printable(json.dumps(score))}; right are numbers")
            if not abs(score) <= self.max_abs:  # NaN as well
                shown = self._printable(json.dumps(score))
                raise self._error(f"score {i} is {shown}; right are finite numbers up to max_abs={self.max_abs:g}")
        return [float(score) for score in scores]

    def _degrade(self, count: int, error: ServerError) -> None:
        """Count images that get error_value, and warn of the first ones, and whenever their number has doubled."""
        with self._lock:
            self.degraded += count
            if self.degraded < 2 * self._told:
                return
            self._told = self.degraded
            # an error, since only this rank may see it; warnings are shown of rank 0 alone
            log.error(
                "%s: %d images have got error_value=%g instead of a score since the start; the last ones because of %s",
                place(),
                self.degraded,
                self.error_value,
                error,
            )

    def _plain(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The part of an image's metadata that JSON has; what it lacks is left out, with a warning for each key."""
        kept = {}
        for key, value in meta.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                with self._lock:
                    known = key in self._left_out
                    self._left_out.add(key)
                if not known:
                    kind = type(value).__name__
                    log.warning("%s: metadata %r is not sent, since JSON cannot hold it (%s)", self.shown, key, kind)
            else:
                kept[key] = value
        return kept

    def _words(self, error: httpx2.TransportError) -> str:
        if isinstance(error, httpx2.ConnectTimeout):
            return f"no connection within connect_timeout_s={self.connect_timeout_s:g}"
        if isinstance(error, httpx2.TimeoutException):
            return f"silent for read_timeout_s={self.read_timeout_s:g}"
        if isinstance(error, httpx2.ConnectError):
            return f"no connection ({self._printable(str(error))})"
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"the connection broke ({self._printable(reason)})"

    def _error(self, problem: str) -> ServerError:
        return ServerError(f"{self.shown}: {problem}")

    def _said(self, content: bytes) -> str:
        """What an answer says: its `detail`, as FastAPI names an error, or its beginning."""
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        detail = answer["detail"] if isinstance(answer, dict) and "detail" in answer else None
        return self._printable(detail if isinstance(detail, str) else content.decode("utf-8", "replace"))

    def _printable(self, text: str) -> str:
        """A text of the server in one line, without the token, which some servers say back."""
        if self._secret is not None:
            text = self._secret.sub("***", text)  # before it is cut, which would leave a part
        line = "".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN])
        line = " ".join(line.split())
        return f"{line[:_SHOWN]}…" if len(line) > _SHOWN else line or "nothing"


def encode(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], encoding: str) -> dict[str, Any]:
    """Images uint8 [B, 3, H, W] with their prompts and metadata as the body of a request: arguments for httpx2."""
    files = [_png(image) for image in images]
    texts = {"prompts": prompts, "metadata": metadata}
    if encoding == "json":
        return {"json": {"images": [base64.b64encode(file).decode() for file in files], **texts}}
    return {
        "data": {"request": json.dumps(texts)},
        "files": [("images", (f"{i}.png", file, "image/png")) for i, file in enumerate(files)],
    }


def read_token(variable: str) -> str:
    """The token in an environment variable; ValueError, without it, where it cannot be one."""
    token = os.environ[variable] if variable in os.environ else ""
    if not token:
        raise ValueError(f"token_env: the environment variable {variable} is not set; it holds the server's token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"token_env: the environment variable {variable} holds no token: letters, digits, signs alone")
    return token


def _spellings(token: str) -> re.Pattern[str]:
    """The token as texts may hold it: in any case, with signs escaped as in JSON, in Python or in an address."""
    return re.compile("".join(rf"(?:\\?{re.escape(c)}|%{ord(c):02x}|\\u{ord(c):04x})" for c in token), re.IGNORECASE)


def _png(image: Tensor) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, format="PNG", compress_level=1)  # fast, hardly larger
    return buffer.getvalue()


def _address(url: str) -> str:
    """The address as messages show it, without a query, which may hold a key. Raises ValueError."""
    right = "right is such as http://127.0.0.1:8077/score"
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        raise ValueError(f"url={url!r} is no address; {right}") from None
    if parsed.userinfo:
        raise ValueError("url holds a user or a password; give a token by token_env")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r} is no address; {right}")
    return str(parsed.copy_with(query=None, fragment=None))


def _check(name: str, value: Any, kind: type, **bounds: Any) -> None:
    """Raise ValueError for an argument of another type, or out of bounds."""
    right = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
    if kind is float:
        bounds["lt"] = math.inf
    complaint = Bounds(**bounds).complaint(value) if right else _KINDS[kind]
    if complaint is not None:
        raise ValueError(f"{name}={value!r} should be {complaint}")


def _retry_after(headers: httpx2.Headers) -> float:
    """The seconds that a server asks to wait, by a number or a date; 0 where it does not."""
    value = headers["retry-after"] if "retry-after" in headers else ""
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # no date, or one that no calendar has
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
