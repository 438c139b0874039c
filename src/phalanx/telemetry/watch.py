"""`phalanx watch RUN [RUN ...]`: the page of `phalanx report`, which follows runs while they train.

A server of the standard library that only reads the files of the runs' folders: it needs no connection to the job, and
runs on any machine that sees the folders. The page asks it for what is new. It listens on this machine only, unless
--host says otherwise; then each request needs the token that the printed address has.
"""

import argparse
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from phalanx.telemetry.rank_history import RankHistory
from phalanx.telemetry.records import IMAGES, SAMPLES
from phalanx.telemetry.report import page_of, read_runs, sections_of
from phalanx.telemetry.run_folder import BEAT_S, METRICS_FILE, RANKS, RUNNING_FILE, Run, inside, read_json, tail
from phalanx.telemetry.runs import DEAD, LIVING, check_run, ended, overview

SILENCE_S = 4 * BEAT_S  # without a new beat of the job: it is dead
LOG_BYTES = 1 << 16  # of a log, in the page
PATHS = ("/sections", "/ranks", "/log")  # beside the page itself
MOST_CONNECTIONS = 64  # at once, a thread each
WATCHED_FILES = (METRICS_FILE, "config.yaml", RANKS, IMAGES, SAMPLES)


class Watcher:
    """The runs that a page shows; `ask` answers its requests."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [check_run(folder) for folder in dict.fromkeys(folders)]
        self._histories = [RankHistory(folder) for folder in self.folders]
        self._lock = threading.Lock()  # requests come in threads of their own
        self._beats: list[tuple[dict[str, Any] | None, float]] = [(None, 0.0)] * len(self.folders)
        self._runs()

    def page(self) -> tuple[str, str]:
        """The page, and its policy."""
        with self._lock:
            return page_of(self._runs(), live=True)

    def ask(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """The answer to a request of PATHS. Raises ValueError for one that makes no sense, OSError for lost files."""
        number = int(query.get("run", "0"))
        if not 0 <= number < len(self.folders):
            raise ValueError(f"run {number}: there are {len(self.folders)}")
        with self._lock:
            if path == "/sections":
                return self._sections(query.get("seen", ""), query.get("kept", ""))
            if not self.folders[number].is_dir():
                raise FileNotFoundError(f"{self.folders[number]} is not there any more")
            if path == "/ranks":
                return self._ranks(number, int(query["step"]) if "step" in query else None)
            return self._log(number, int(query.get("rank", "")))

    def _runs(self) -> list[Run]:
        for folder in self.folders:
            for name in WATCHED_FILES:
                inside(folder, folder / name)
        return read_runs(self.folders)

    def _ranks(self, number: int, step: int | None) -> dict[str, Any]:
        folder = self.folders[number]
        line = overview(folder, self._state(number))
        of_run = {"state": line.state, "done": line.step, "total": line.total, "eta_s": line.eta_s}
        return of_run | self._histories[number].data(step)

    def _state(self, number: int) -> str:
        """As phalanx.telemetry.runs.states, without a wait: each request sees whether the beat goes on."""
        folder, now = self.folders[number], time.monotonic()
        job = read_json(folder / RUNNING_FILE)
        if job is None:
            return ended(folder)
        if job != self._beats[number][0]:
            self._beats[number] = job, now
        return LIVING if now - self._beats[number][1] < SILENCE_S else DEAD

    def _log(self, number: int, rank: int) -> dict[str, Any]:
        folder = self.folders[number]
        path = folder / RANKS / f"{rank}.log"
        data = tail(inside(folder, path), LOG_BYTES) if path.is_file() else b""
        return {"text": data.decode("utf-8", "replace")}

    def _sections(self, seen: str, kept: str) -> dict[str, Any]:
        """The sections of the report that have changed since the page got what it has `seen`, by keys of the files."""
        keys = [key_of(folder, (METRICS_FILE, "config.yaml")) for folder in self.folders]
        of_samples = []
        for folder in self.folders:
            steps = [*folder.glob(f"{IMAGES}/*/step_*"), *folder.glob(f"{SAMPLES}/*/step_*")]
            of_samples.append(f"{len(steps)} {max((step.stat().st_mtime_ns for step in steps), default=0)}")
        now = {"seen": " ".join(keys), "kept": " ".join(of_samples)}
        if now == {"seen": seen, "kept": kept}:
            return now
        return sections_of(self._runs(), with_samples=now["kept"] != kept) | now


def key_of(folder: Path, names: Sequence[str]) -> str:
    """Tells one version of files from another."""
    parts = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        parts.append(f"{status.st_size}-{status.st_mtime_ns}")
    return ":".join(parts)


class Server(ThreadingHTTPServer):
    """The server of one page; `token` None lets everybody in who can reach it."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, watcher: Watcher, host: str, port: int, token: str | None) -> None:
        self.watcher, self.token, self.host = watcher, token, host
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen at {host}, port {port}: {error}; give another --host or --port") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or not at all where too many are busy."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As in the class above, which runs it in the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        name = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        name = f"[{name}]" if ":" in name else name
        query = "" if self.token is None else f"?token={self.token}"
        return f"http://{name}:{self.server_address[1]}/{query}"

    def admits(self, host: str) -> bool:
        """Whether a request's Host is an address or a name of this machine: a page of somebody else's could have a name
        of its own lead here (DNS rebinding), and read what this server answers.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # as of "["
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            local = {"localhost", self.host.lower(), socket.gethostname().lower()}
            return name in local or name == socket.getfqdn().lower()  # which may ask a name server, for seconds
        return True


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests; there are no others."""

    server: Server
    timeout = 10  # seconds, for one who connects and asks nothing
    server_version, sys_version = "phalanx", ""

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        token = self.server.token
        if not self.server.admits(self.headers.get("Host", "")):
            return self._refuse(HTTPStatus.FORBIDDEN, "this host is not known here; use the address that was printed")
        if token is not None and not secrets.compare_digest(query.get("token", "").encode(), token.encode()):
            return self._refuse(HTTPStatus.FORBIDDEN, "the token is missing; use the address that was printed")
        if address.path not in ("/", *PATHS):
            return self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            if address.path == "/":
                text, policy = self.server.watcher.page()
                return self._send(HTTPStatus.OK, text, "text/html", policy)
            answer = self.server.watcher.ask(address.path, query)
            # a NaN, which no browser reads, is a ValueError
            text = json.dumps(answer, separators=(",", ":"), allow_nan=False)
        except (ValueError, OSError) as error:  # such as a file that is just being replaced
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        return self._send(HTTPStatus.OK, text, "application/json")

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._send(status, f"{words}\n", "text/plain")

    def _send(self, status: HTTPStatus, text: str, kind: str, policy: str = "default-src 'none'") -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'; base-uri 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        try:
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the page was closed

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line per request: addresses hold the token."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status (2 for a folder that is not a run's)."""
    parser = argparse.ArgumentParser(prog="phalanx watch", description="Follow runs in a browser while they train.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="trainer.output_dir of a run")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen at, with a token; by default only here"
    )
    parser.add_argument("--port", type=int, default=8265, help="by default 8265; 0: a free one")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    given = parser.parse_args(argv)
    try:
        watcher = Watcher(given.runs)
        server = Server(watcher, given.host, given.port, None if is_loopback(given.host) else secrets.token_urlsafe(24))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    with server:
        print(server.url, flush=True)
        if given.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
