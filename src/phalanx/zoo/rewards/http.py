"""Reward: scores from a server, to which images, as PNG, or texts are posted; see docs/serving-rewards.md.

Each call runs its own event loop, because rewards are called from several threads, also in forked processes.
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
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from io import BytesIO
from itertools import chain
from typing import Any, Literal

import httpx2
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from phalanx.exit import place
from phalanx.media.pictures import Picture, pil_image, to_uint8
from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.protocol import Refusal, ScoreAnswer, complaint
from phalanx.types import Outputs

log = logging.getLogger(__name__)

MAX_ANSWER = 4 * 2**20  # bytes; valid answers are far smaller
MAX_PAUSE_S = 30.0
_RETRIED = (408, 425, 429)  # statuses below 500 after which a request is retried
_SHOWN = 200  # maximum characters of an answer in a message
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)  # a url may contain a password
# a sample's score, 1 if it is error_value and 0 if it is from the server, and what the server says about the sample
Scored = tuple[float, float, str | None]


class ServerError(RuntimeError):
    """The server gave no usable scores; the message is one line with its address."""


class _Retryable(Exception):
    """A request failed and may be retried. Arguments: the problem, and the seconds that the server asks to wait."""


@dataclass(config=_STRICT, eq=False, repr=False)
class Http(RewardWithExtras):
    """Asks a server for scores. With on_error=value, the extra `degraded` is 1 for samples that got error_value.

    url: where to post, e.g. http://127.0.0.1:8077/score; redirects are not followed, and no proxy is used.
    encoding: `json` with images in base64, or `multipart`, a quarter smaller; completions are always sent as JSON.
    batch_size: samples per request; concurrency: concurrent requests of one call of the reward.
    connect_timeout_s: seconds for a connection.
    read_timeout_s: seconds for the next bytes of an answer; at least the server's own limit, or slow scores are lost.
    timeout_s: seconds for a call with all its requests and retries; keep it below reward.timeout_s.
    retries: retries of a request after a failed or broken connection, a time limit, or status 5xx, 408, 425 or 429.
    backoff_s: seconds before the first retry; doubled for each further one, with random jitter of up to a half.
    token_env: the environment variable with the server's token; null: no token is sent.
    on_error: how to treat a request without usable scores: `raise` ends the job, `value` uses error_value.
    max_abs: a score with a larger absolute value is not usable.
    """

    url: str
    encoding: Literal["json", "multipart"] = "json"
    batch_size: PositiveInt = 16
    concurrency: PositiveInt = 4
    connect_timeout_s: PositiveFloat = 5.0
    read_timeout_s: PositiveFloat = 300.0
    timeout_s: PositiveFloat = 240.0
    retries: NonNegativeInt = 5
    backoff_s: NonNegativeFloat = 0.5
    token_env: str | None = None
    on_error: Literal["raise", "value"] = "raise"
    error_value: float | None = None
    max_abs: PositiveFloat = 1e6

    def __post_init__(self) -> None:
        """Check the options and read the token; nothing is sent before the first call."""
        self.shown = _shown_address(self.url)
        if (self.on_error == "value") != (self.error_value is not None):
            raise ValueError("on_error=value and error_value, a number, go together; give both or neither")
        if self.error_value is not None:
            self.extras = ("degraded",)
        self.degraded = 0  # samples that got error_value, since the start
        self._last_logged = 0  # `degraded` when it was last logged
        self._left_out: set[str] = set()  # keys of metadata with values that JSON cannot represent
        self._lock = threading.Lock()  # guards these three
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "phalanx"}
        self._secret: re.Pattern[str] | None = None
        if self.token_env is not None:
            token = read_token(self.token_env)
            self._headers["Authorization"] = f"Bearer {token}"
            self._secret = _token_pattern(token)
        self._tls = ssl.create_default_context()
        self._random = random.Random()  # separate from the job's generator, whose numbers retries must not change

    def __call__(
        self, outputs: Outputs, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[float] | RewardOutput:
        """Scores of images [B, 3, H, W] in 0..1, sent with 8 bits per channel, or of B texts. Raises ServerError."""
        sent = to_uint8(outputs) if isinstance(outputs, Tensor) else outputs
        text_of = cache(_image_base64)  # the samples of a prompt share its images
        plain = [self._json_metadata(meta, text_of) for meta in metadata]
        scored = asyncio.run(self._score_all(sent, prompts, plain))
        scores, degraded, texts = (list(values) for values in zip(*scored, strict=True))
        feedback = texts if any(texts) else None
        if self.extras:
            return RewardOutput(scores, {"degraded": degraded}, feedback=feedback)
        missing = any(map(math.isnan, scores))
        problem = f"{self.shown}: its answer has null for a score" if missing else None
        return RewardOutput(scores, problem=problem, feedback=feedback) if missing or feedback else scores

    async def _score_all(self, outputs: Outputs, prompts: list[str], metadata: list[dict[str, Any]]) -> list[Scored]:
        """The scores of all samples, with batch_size samples per request and up to `concurrency` requests at once."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        free = asyncio.Semaphore(self.concurrency)
        limits = httpx2.Timeout(self.read_timeout_s, connect=self.connect_timeout_s, pool=None)
        async with httpx2.AsyncClient(
            headers=self._headers, timeout=limits, verify=self._tls, trust_env=False, follow_redirects=False
        ) as client:

            async def part(first: int) -> list[Scored]:
                batch = slice(first, first + self.batch_size)
                texts = prompts[batch], metadata[batch]
                async with free:
                    # in a thread, so that other requests proceed during the PNG encoding
                    body = await asyncio.to_thread(encode, outputs[batch], *texts, self.encoding)
                    return await self._score_batch(client, deadline, body, len(prompts[batch]))

            parts = await asyncio.gather(*map(part, range(0, len(prompts), self.batch_size)))
        return list(chain.from_iterable(parts))

    async def _score_batch(
        self, client: httpx2.AsyncClient, deadline: float, body: dict[str, Any], count: int
    ) -> list[Scored]:
        """The scores of one request's samples, with error_value for those that are missing, if it is configured."""
        try:
            content = await self._answer_body(client, deadline, body)
            answer = self._checked_answer(content, count)
        except ServerError as error:
            if self.error_value is None:
                raise
            self._count_degraded(count, error)
            return [(self.error_value, 1.0, None)] * count
        absent = answer.scores.count(None)
        if absent and self.error_value is not None:
            self._count_degraded(absent, self._server_error("its answer has null for a score"))
        missing = (math.nan, 0.0) if self.error_value is None else (self.error_value, 1.0)
        scored = []
        for score, text in zip(answer.scores, answer.feedback or [None] * count, strict=True):
            scored.append((*(missing if score is None else (score, 0.0)), text))
        return scored

    async def _answer_body(self, client: httpx2.AsyncClient, deadline: float, body: dict[str, Any]) -> bytes:
        """The body of the first answer with status 200, after retries if necessary."""
        now, tries = asyncio.get_running_loop().time, self.retries + 1
        for attempt in range(1, tries + 1):
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._post_body(client, body)
            except TimeoutError:
                raise self._server_error(f"no answer within timeout_s={self.timeout_s:g}") from None
            except _Retryable as failure:
                problem, wait_s = failure.args
            if attempt == tries:
                break
            backoff_s = min(MAX_PAUSE_S, self.backoff_s * 2 ** (attempt - 1)) * self._random.uniform(0.5, 1.5)
            pause = max(wait_s, backoff_s)
            if now() + pause > deadline:
                late = f"the next one, in {pause:.0f} s, would be past timeout_s={self.timeout_s:g}"
                raise self._server_error(f"{problem} (try {attempt} of {tries}; {late})")
            await asyncio.sleep(pause)
        raise self._server_error(f"{problem} (try {tries} of {tries})")

    async def _post_body(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> bytes:
        """The body of an answer with status 200. Raises _Retryable if a retry may succeed, else ServerError."""
        content = bytearray()
        try:
            async with client.stream("POST", self.url, **body) as response:
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > MAX_ANSWER:
                        raise self._server_error(f"its answer is longer than {MAX_ANSWER} bytes")
        except httpx2.TransportError as error:
            raise _Retryable(self._no_answer(error), 0.0) from None
        status, headers = response.status_code, response.headers
        if status == 200:
            return bytes(content)
        if 300 <= status < 400 and "location" in headers:
            to = self._printable_line(headers["location"])
            raise self._server_error(f"answered {status}, a redirect to {to}, which is not followed; give that as url")
        problem = f"answered {status}: {self._text_of(bytes(content))}"
        if status >= 500 or status in _RETRIED:
            raise _Retryable(problem, _retry_after(headers))
        raise self._server_error(problem)

    def _no_answer(self, error: httpx2.TransportError) -> str:
        """A description of a failed connection."""
        if isinstance(error, httpx2.ConnectTimeout):
            return f"no connection within connect_timeout_s={self.connect_timeout_s:g}"
        if isinstance(error, httpx2.TimeoutException):
            return f"silent for read_timeout_s={self.read_timeout_s:g}"
        if isinstance(error, httpx2.ConnectError):
            return f"no connection ({self._printable_line(str(error))})"
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"the connection broke ({self._printable_line(reason)})"

    def _checked_answer(self, content: bytes, count: int) -> ScoreAnswer:
        """The answer with one score for each sample."""
        try:
            answer = ScoreAnswer.model_validate_json(content)
        except ValidationError as error:
            reason = self._printable_line(complaint(error, values=True))
            raise self._server_error(f"its answer is not usable, {reason}: {self._text_of(content)}") from None
        if len(answer.scores) != count:
            raise self._server_error(f"{len(answer.scores)} scores for {count} samples")
        if answer.feedback is not None and len(answer.feedback) != count:
            raise self._server_error(f"feedback with {len(answer.feedback)} texts for {count} samples")
        for i, score in enumerate(answer.scores):
            if score is not None and abs(score) > self.max_abs:
                raise self._server_error(f"score {i} is {score}; expected numbers up to max_abs={self.max_abs:g}")
        return answer

    def _count_degraded(self, count: int, error: ServerError) -> None:
        """Count samples that get error_value. Log their number at the first ones and whenever it has doubled."""
        with self._lock:
            self.degraded += count
            if self.degraded < 2 * self._last_logged:
                return
            self._last_logged = self.degraded
            # at level error, because only rank 0 shows warnings, and this rank may be the only one affected
            log.error(
                "%s: %d samples have got error_value=%g instead of a score since the start; "
                "the last ones because of %s",
                place(),
                self.degraded,
                self.error_value,
                error,
            )

    def _json_metadata(self, meta: dict[str, Any], text_of: Callable[[Picture], str]) -> dict[str, Any]:
        """A sample's metadata for JSON, with the images of its prompt converted by `text_of`. Values that JSON cannot
        represent are left out, with one warning per key.
        """
        kept = {}
        for key, value in meta.items():
            if isinstance(value, tuple) and all(isinstance(item, Picture) for item in value):
                value = list(map(text_of, value))
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                with self._lock:
                    if key not in self._left_out:
                        self._left_out.add(key)
                        message = "%s: metadata %r is not sent, since JSON cannot hold it (%s)"
                        log.warning(message, self.shown, key, type(value).__name__)
            else:
                kept[key] = value
        return kept

    def _server_error(self, problem: str) -> ServerError:
        return ServerError(f"{self.shown}: {problem}")

    def _text_of(self, content: bytes) -> str:
        """The text of an answer for a message: its `detail`, FastAPI's key for an error, or else its beginning."""
        try:
            return self._printable_line(Refusal.model_validate_json(content).detail)
        except ValidationError:
            return self._printable_line(content.decode("utf-8", "replace"))

    def _printable_line(self, text: str) -> str:
        """A text of the server as one line, without the token, which some servers echo."""
        if self._secret is not None:
            text = self._secret.sub("***", text)  # before the cut, which could leave a part of the token
        line = "".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN])
        line = " ".join(line.split())
        return f"{line[:_SHOWN]}…" if len(line) > _SHOWN else line or "nothing"


def encode(outputs: Outputs, prompts: list[str], metadata: list[dict[str, Any]], encoding: str) -> dict[str, Any]:
    """The body of a request for images uint8 [B, 3, H, W] or texts, as keyword arguments of httpx2."""
    texts: dict[str, Any] = {"prompts": prompts, "metadata": metadata}
    if not isinstance(outputs, Tensor):
        return {"json": {"completions": outputs, **texts}}
    files = []
    for image in outputs:
        buffer = BytesIO()
        pil_image(image).save(buffer, format="PNG", compress_level=1)  # fast, and files are hardly larger
        files.append(buffer.getvalue())
    if encoding == "json":
        return {"json": {"images": [base64.b64encode(file).decode() for file in files], **texts}}
    return {
        "data": {"request": json.dumps(texts)},
        "files": [("images", (f"{i}.png", file, "image/png")) for i, file in enumerate(files)],
    }


def _image_base64(image: Picture) -> str:
    """The image's file in base64. Raises ValueError with a line if the file cannot be read."""
    return base64.b64encode(image.encoded()).decode()


def read_token(variable: str) -> str:
    """The token in an environment variable. Raises ValueError, which does not quote it, for an invalid token."""
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(f"token_env: the environment variable {variable} is not set; expected the server's token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"token_env: the environment variable {variable} is not a token; expected only letters, digits and signs"
        )
    return token


def _token_pattern(token: str) -> re.Pattern[str]:
    """Matches the token in texts: in any case, with signs escaped as in JSON, in Python or in a URL."""
    return re.compile("".join(rf"(?:\\?{re.escape(c)}|%{ord(c):02x}|\\u{ord(c):04x})" for c in token), re.IGNORECASE)


def _shown_address(url: str) -> str:
    """The address for messages, without the query, which may contain a key. Raises ValueError if it is invalid."""
    expected = "expected one such as http://127.0.0.1:8077/score"
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        raise ValueError(f"url={url!r} is not an address; {expected}") from None
    if parsed.userinfo:
        raise ValueError("url contains a user or a password; give a token by token_env")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r} is not an address; {expected}")
    return str(parsed.copy_with(query=None, fragment=None))


def _retry_after(headers: httpx2.Headers) -> float:
    """The seconds that a server asks to wait, given as a number or a date; 0 without a valid Retry-After."""
    value = headers.get("retry-after", "")
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # not a date, or an impossible one
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
