"""`phalanx watch RUN [RUN ...]`: the page of `phalanx report`, updated while the runs train.

An HTTP server that only reads the files in the runs' folders, so it needs no connection to the jobs and works on any
machine that can access the folders. The page polls it for updates. By default it listens on the loopback interface;
with another --host, each request needs the token in the printed address.
"""

import argparse
import hashlib
import ipaddress
import json
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from phalanx.config.inside import list_inside
from phalanx.exit import show_mistake
from phalanx.run.telemetry.run_folder import CONFIG_FILE, METRICS_FILE, Run, key_of
from phalanx.telemetry.records import IMAGES, SAMPLES
from phalanx.tools.board.rank_history import RankHistory
from phalanx.tools.board.report import page_of, run_readers, sections_of
from phalanx.tools.board.runs import Beats, check_run, is_run, last_rows, log_text, overview, run_folders
from phalanx.tools.board.runs_page import RunTable, table_page
from phalanx.tools.board.samples import Room

MOST_WATCHERS = 8  # pages of runs of a folder whose metrics are kept in memory
MOST_COMPARED, MOST_NAMES = 32, 8192  # runs on one page of these, and characters of their names
LOG_BYTES = 1 << 16  # of a log that the page shows
PATHS = ("/sections", "/ranks", "/log", "/table")  # in addition to the page itself
MOST_CONNECTIONS = 64  # concurrent ones, each in a thread
MOST_SILENT = 8  # connections of one address without a complete request
HEAD_S = 10.0  # seconds until a request must be complete


class Watcher:
    """The runs of a page; `ask` answers the page's requests."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [check_run(folder) for folder in dict.fromkeys(folders)]
        self._histories = [RankHistory(folder) for folder in self.folders]
        self._readers, self._scaled = run_readers(self.folders), dict[tuple[int, ...], bytes]()
        self._lock, self._beats = threading.Lock(), Beats()  # each request is handled in a separate thread
        self._runs = self._read_runs()

    def page(self, query: dict[str, str] | None = None) -> tuple[bytes, str]:
        """The page and its Content-Security-Policy; the page of certain runs depends on no query."""
        with self._lock:
            return page_of(self._read_runs(), live=True, room=Room(scaled=self._scaled))

    def ask(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """Answer a request for one of PATHS. Raises ValueError for an invalid query, OSError for missing files."""
        number = int(query.get("run", "0"))
        if not 0 <= number < len(self.folders):
            raise ValueError(f"run={number}: no such run; expected 0 to {len(self.folders) - 1}")
        with self._lock:
            if path == "/sections":
                return self._changed_sections(query.get("seen", ""), query.get("kept", ""))
            if not self.folders[number].is_dir():
                raise FileNotFoundError(f"{self.folders[number]} no longer exists")
            if path == "/ranks":
                return self._rank_data(number, int(query["step"]) if "step" in query else None)
            if path != "/log":
                raise ValueError(f"{path}: this is no folder of runs")
            return {"text": log_text(self.folders[number], int(query.get("rank", "")), LOG_BYTES)}

    def _read_runs(self) -> list[Run]:
        self._runs = [reader.read() for reader in self._readers]
        return self._runs

    def _rank_data(self, number: int, step: int | None) -> dict[str, Any]:
        folder = self.folders[number]
        rows = last_rows(folder)
        advice = self._runs[number].advice
        data = self._histories[number].data(step, rows[-1]["step"] if rows else None, advice)
        line = overview(folder, self._beats.state(folder), data["ranks"])
        of_run = {"state": line.state, "done": line.step, "total": line.total, "eta_s": line.eta_s}
        return of_run | data

    def _changed_sections(self, seen: str, kept: str) -> dict[str, Any]:
        """The sections of the report, if the keys of its files differ from `seen` and `kept`, those of the page."""
        keys = [key_of(folder, METRICS_FILE, CONFIG_FILE) for folder in self.folders]
        now = {"seen": " ".join(keys), "kept": " ".join(map(_key_of_samples, self.folders))}
        if now == {"seen": seen, "kept": kept}:
            return now
        room = Room(scaled=self._scaled)
        return sections_of(self._read_runs(), with_samples=now["kept"] != kept, room=room) | now


def _key_of_samples(folder: Path) -> str:
    """A key that changes whenever a validation of a run is written: each has a new folder."""
    sets = []
    for kind in (IMAGES, SAMPLES):
        for name, is_folder in list_inside(folder, kind):
            if is_folder:
                steps = [step for step, _ in list_inside(folder, f"{kind}/{name}")]
                sets.append(key_of(folder, f"{kind}/{name}", *(f"{kind}/{name}/{step}" for step in steps[-1:])))
    return hashlib.sha256(" ".join(sets).encode()).hexdigest()


class FolderWatcher:
    """The table of the runs below a folder, and the pages of those that a request names in `of`, a JSON list."""

    def __init__(self, root: Path) -> None:
        self._table, self._lock = RunTable(root, Beats().states), threading.Lock()
        self._watchers: dict[tuple[str, ...], Watcher] = {}

    def page(self, query: dict[str, str] | None = None) -> tuple[bytes, str]:
        """The page of the folder or of runs, and its Content-Security-Policy."""
        if query and "of" in query:
            return self._watcher_of(query["of"]).page()
        with self._lock:
            return table_page(self._table.root, self._table.data(), live=True)

    def ask(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """Answer a request for one of PATHS. Raises ValueError for an invalid query, OSError for missing files."""
        if path != "/table":
            return self._watcher_of(query.get("of", "")).ask(path, query)
        with self._lock:
            data = self._table.data()
        key = hashlib.sha256(json.dumps(data).encode()).hexdigest()
        return {"seen": key} if key == query.get("seen") else {"seen": key, "table": data}

    def _watcher_of(self, of: str) -> Watcher:
        """The watcher of these runs; the last ones that were asked for are kept."""
        known = self._table.folders()
        names = None
        if len(of) <= MOST_NAMES:
            with suppress(RecursionError):
                names = json.loads(of)  # its JSONDecodeError is a ValueError
        if not isinstance(names, list) or not 0 < len(names) <= MOST_COMPARED:
            raise ValueError(f"of: expected a list of 1 to {MOST_COMPARED} runs")
        for name in names:
            if not isinstance(name, str) or name not in known:
                raise ValueError("of: no such run")
        with self._lock:
            watcher = self._watchers.pop(tuple(names), None) or Watcher([known[name] for name in names])
            self._watchers[tuple(names)] = watcher
            if len(self._watchers) > MOST_WATCHERS:
                del self._watchers[next(iter(self._watchers))]
            return watcher


def watcher_of(folders: Sequence[Path]) -> Watcher | FolderWatcher:
    """A watcher of these runs, or of the runs below a single folder. Raises ValueError for other folders."""
    if len(folders) == 1 and not is_run(folders[0]) and any(run_folders(folders[0])):
        return FolderWatcher(folders[0])
    return Watcher(folders)


class Server(ThreadingHTTPServer):
    """The server of one page; with token=None everybody who can reach it has access.

    A connection is silent until its request is complete and has the token. The others go before: a silent one is closed
    after HEAD_S, and the oldest of them when its address has more than MOST_SILENT, or when there is no room for a new
    one.
    """

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, watcher: Watcher | FolderWatcher, host: str, port: int, token: str | None) -> None:
        self.watcher, self.token, self.host = watcher, token, host
        self._turn = threading.Lock()
        self._open: set[socket.socket] = set()
        self._silent: dict[socket.socket, tuple[str, float]] = {}  # with address and time, in the order of their begin
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {host}, port {port}: {error}; give another --host or --port") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection if too many are being answered."""
        address = client_address[0]
        with self._turn:
            same = [other for other, (name, _) in self._silent.items() if name == address]
            if len(same) >= MOST_SILENT:
                self._drop_connection(same[0])
            elif len(self._open) >= MOST_CONNECTIONS and self._silent:
                self._drop_connection(next(iter(self._silent)))
            is_full = len(self._open) >= MOST_CONNECTIONS
            if not is_full:
                self._open.add(request)
                self._silent[request] = address, time.monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._turn:
                self._silent.pop(request, None)
                self._open.discard(request)

    def service_actions(self) -> None:
        """Close the connections that have been silent for too long; called between requests."""
        with self._turn:
            late = time.monotonic() - HEAD_S
            for request in [request for request, (_, since) in self._silent.items() if since < late]:
                self._drop_connection(request)

    def _drop_connection(self, request: socket.socket) -> None:
        """Close a silent connection; its thread, which is reading, then ends."""
        del self._silent[request]
        self._open.discard(request)
        with suppress(OSError):  # the client has closed it
            request.shutdown(socket.SHUT_RDWR)

    def has_asked(self, request: socket.socket) -> bool:
        """Note that a request may be answered; False if its connection was closed meanwhile."""
        with self._turn:
            return self._silent.pop(request, None) is not None

    @property
    def url(self) -> str:
        """The address of the page, including the token."""
        name = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        name = f"[{name}]" if ":" in name else name
        query = "" if self.token is None else f"?token={self.token}"
        return f"http://{name}:{self.server_address[1]}/{query}"

    def admits(self, host: str) -> bool:
        """Whether a request's Host header is an IP address or a name of this machine. Otherwise a foreign web page
        could make its own domain name resolve to this machine (DNS rebinding) and read the answers.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # for example "["
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            local = {"localhost", self.host.lower(), socket.gethostname().lower()}
            return name in local or name == self._full_name
        return True

    @cached_property
    def _full_name(self) -> str:
        return socket.getfqdn().lower()  # it may ask a name server, which takes seconds


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests, the only method supported."""

    server: Server
    timeout = HEAD_S  # for each read, and for writing an answer
    server_version, sys_version = "phalanx", ""

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            return self._refuse_request(HTTPStatus.BAD_REQUEST, str(error))
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        token = self.server.token
        if not self.server.admits(self.headers.get("Host", "")):
            return self._refuse_request(HTTPStatus.FORBIDDEN, "unknown host name; use the address that was printed")
        if token is not None and not secrets.compare_digest(query.get("token", "").encode(), token.encode()):
            return self._refuse_request(
                HTTPStatus.FORBIDDEN, "missing or wrong token; use the address that was printed"
            )
        if not self.server.has_asked(self.connection):
            self.close_connection = True
            return None
        if address.path not in ("/", *PATHS):
            return self._refuse_request(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            if address.path == "/":
                page, policy = self.server.watcher.page(query)
                return self._send_data(HTTPStatus.OK, page, "text/html", policy)
            answer = self.server.watcher.ask(address.path, query)
            # browsers cannot parse NaN: raise ValueError for it
            text = json.dumps(answer, separators=(",", ":"), allow_nan=False)
        except (ValueError, OSError) as error:  # for example, a file is being replaced at this moment
            return self._refuse_request(HTTPStatus.BAD_REQUEST, str(error))
        return self._send_data(HTTPStatus.OK, text.encode(), "application/json")

    def _refuse_request(self, status: HTTPStatus, words: str) -> None:
        self._send_data(status, f"{words}\n".encode("utf-8", "replace"), "text/plain")

    def _send_data(self, status: HTTPStatus, data: bytes, kind: str, policy: str = "default-src 'none'") -> None:
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
        """Do not log requests, because their addresses contain the token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for a folder that is not a run's)."""
    parser = argparse.ArgumentParser(prog="phalanx watch", description="Follow runs in a browser while they train.")
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="trainer.output_dir of a run, or a folder that contains runs"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, default 127.0.0.1; non-local ones require a token"
    )
    parser.add_argument("--port", type=int, default=8265, help="default 8265; 0: any free port")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    given = parser.parse_args(argv)
    try:
        watcher = watcher_of(given.runs)
        server = Server(watcher, given.host, given.port, None if is_loopback(given.host) else secrets.token_urlsafe(24))
    except (ValueError, OSError) as error:
        return show_mistake(error)
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
