"""`phalanx watch`: the answers of its server, access control, and that it reads only the runs' folders."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from phalanx.telemetry.records import Record
from phalanx.tools.board import runs, watch
from phalanx.tools.board.report import write_report
from phalanx.tools.board.watch import Server, Watcher, is_loopback, main
from tests.helpers.checks import wait_for
from tests.helpers.pages import EVIL, Page, add_ranks, logger, run


class Client:
    """A server for some runs, and a client of it."""

    def __init__(self, *folders: Path, token: str | None = None) -> None:
        self.server = Server(Watcher(folders), "127.0.0.1", 0, token)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()  # polls for its end

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[HTTPResponse, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={"Host": f"127.0.0.1:{self.port}" if host is None else host})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    def json(self, path: str) -> Any:
        answer, text = self.ask(path)
        assert answer.status == 200, text
        return json.loads(text)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(add_ranks(run(tmp_path / "run"), text=EVIL))
    yield client
    client.server.shutdown()
    client.server.server_close()


def test_the_page_is_the_report_with_ranks(client: Client, tmp_path: Path) -> None:
    answer, text = client.ask("/")
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:;") and "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy and "http:" not in policy
    (tmp_path / "page.html").write_text(text)
    page, report = Page(tmp_path / "page.html"), Page(write_report(tmp_path / "run"))
    assert page.charts() == report.charts() != []
    assert page.words() == report.words()
    assert "data-live" in text and "data-live" not in report.source.split("<script")[0]
    (embedded,) = re.findall(r'id="of-ranks">(.*?)</script>', report.source)
    live = client.json("/ranks")
    for key in ("spans", "waits", "blame", "steps", "events"):
        assert json.loads(embedded)[0][key] == json.loads(json.dumps(live[key]))
    assert live["blame"] == [[1, 1.0]] and (live["state"], live["done"], live["total"]) == ("dead", 3, 3)


def test_texts_are_never_markup(client: Client, tmp_path: Path) -> None:
    """Prompts, answers, set names, warnings and logs that contain scripts."""
    folder = tmp_path / "evil"
    with logger(folder) as log:
        for step in range(2):
            record = Record(EVIL, 0.5, EVIL, 0, ground_truth=EVIL, scores={EVIL: 1.0, "b": 2.0})
            log.records(step, EVIL.replace("/", "|"), [record])
            log.log(step, {f"reward/{EVIL}": 1.0 + step, "val/a<img src=x>/reward/mean": 1.0})
    (folder / "config.yaml").write_text(f"trainer: {{experiment_name: '{EVIL}'}}\n")
    other = Client(add_ranks(folder, text=EVIL))
    _, text = other.ask("/")
    (tmp_path / "page.html").write_text(text)
    page = Page(tmp_path / "page.html")
    assert EVIL in page.words()
    assert len(page.all("script")) == 5  # two with data, and three of the page
    sections = other.json("/sections")
    for name, html in sections.items():
        if name in ("headline", "samples", "curves", "tables"):
            assert "<script" not in html and not re.search(r"<img(?! class='pixels')(?! tabindex)", html)
    script = (files("phalanx.tools.board") / "page" / "ranks.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert other.json("/log?rank=0") == {"text": f"rank 0 says {EVIL}\n"}
    other.server.shutdown()
    other.server.server_close()


def test_only_what_is_new_is_sent(client: Client, tmp_path: Path) -> None:
    first = client.json("/sections")
    seen = {name: first[name] for name in ("seen", "kept")}
    query = "&".join(f"{name}={value.replace(' ', '%20')}" for name, value in seen.items())
    assert first["samples"] and client.json(f"/sections?{query}") == seen
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.9}\n')
    newer = client.json(f"/sections?{query}")
    assert "samples" not in newer and newer["charts"][0]["series"][0]["x"][-1] == 4


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_it_only_reads(method: str, client: Client) -> None:
    assert client.ask("/", method)[0].status == 501


@pytest.mark.parametrize(
    "path",
    [
        "/../run/config.yaml",
        "/%2e%2e/x",
        "/log?rank=../../secret",
        "/log?rank=-1.5",
        "/log",
        "/log?rank=0&run=1",
        "/ranks?run=-1",
        "/ranks?step=x",
        "/metrics.jsonl",
        "//etc/passwd",
        "/log?rank=..%2f0",
    ],
)
def test_other_paths_are_refused(path: str, client: Client) -> None:
    answer, text = client.ask(path)
    assert answer.status in (400, 404) and answer.headers["Content-Type"].startswith("text/plain")
    assert "Traceback" not in text


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder, secret = add_ranks(run(tmp_path / "run")), tmp_path / "secret"
    secret.write_text("a secret")
    log = folder / "ranks" / "0.log"
    log.unlink()
    log.symlink_to(secret)
    client = Client(folder)
    answer, text = client.ask("/log?rank=0")
    assert answer.status == 400 and "a secret" not in text
    image = folder / "images" / "ocr" / "step_000003" / "00000.png"
    image.rename(tmp_path / "outside.png")
    image.symlink_to(tmp_path / "outside.png")
    assert "image file is missing" in client.ask("/")[1]
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to(secret)
    answer, text = client.ask("/")
    assert answer.status == 200 and "a secret" not in text and "There is no config.yaml" in text
    client.server.shutdown()
    client.server.server_close()


def test_a_token_is_needed_where_others_reach_it(tmp_path: Path) -> None:
    client = Client(run(tmp_path / "run"), token="t0ken")
    for path in ("/", "/?token=", "/?token=t0ke", "/ranks", "/sections?token=t0kenn", "/?token=%ff"):
        assert client.ask(path)[0].status == 403
    assert client.ask("/?token=t0ken")[0].status == 200
    assert urlsplit(client.server.url).query == "token=t0ken"
    client.server.shutdown()
    client.server.server_close()


def test_a_foreign_name_is_refused(client: Client) -> None:
    """As from a page whose domain name was made to resolve to this machine."""
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "localhost.evil.example"):
        assert client.ask("/ranks", host=host)[0].status == 403
    for host in ("localhost", "localhost:9999", "127.0.0.1", "[::1]:5"):  # the port of a tunnel may differ
        assert client.ask("/ranks", host=host)[0].status == 200


def test_what_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "", "::", "10.0.0.1", "node-0")))


def test_a_job_that_falls_silent_is_dead(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SILENCE_S", 0.3)
    for beat in range(3):
        (tmp_path / "run" / "running.json").write_text(json.dumps({"beat": beat, "token": "t"}))
        time.sleep(0.2)
        assert client.json("/ranks")["state"] == "running"
    time.sleep(0.4)
    assert client.json("/ranks")["state"] == "dead"


def test_64_ranks_and_two_runs(tmp_path: Path) -> None:
    one, two = add_ranks(run(tmp_path / "one"), ranks=64), run(tmp_path / "two")
    client = Client(one, two)
    data = client.json("/ranks?run=0")
    assert len(data["ranks"]) == 64 and data["blame"] == [[1, 63.0]]
    assert client.json("/ranks?run=1")["ranks"] == []
    page = client.ask("/")[1]
    assert "Comparison of 2 runs" in page and '["one", "two"]' in page.replace("&quot;", '"')
    client.server.shutdown()
    client.server.server_close()


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "x")]) == 2 and main([str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {tmp_path / 'x'}: no such folder; ") and second.startswith(
        f"error: {tmp_path}: no"
    )


JUNK = [
    ("ranks/1.json", '{"rank": "x", "ranks": 2, "host": "h", "pid": 1, "at": 5}'),
    ("ranks/1.json", '{"rank": 1, "ranks": null, "host": "h", "pid": 1, "at": 5}'),
    ("ranks/1.json", '{"rank": 1, "ranks": 2, "host": 3, "pid": 1, "at": 1e300}'),
    ("ranks/1.json", '{"rank": 7, "ranks": 9, "host": "h", "pid": 1, "at": 5}'),
    ("ranks/1.json", '{"rank": 1, "ranks": 2, "host": "h", "pid": 1, "at": 5, "memory_gb": "much"}'),
    ("ranks/1.json", '{"rank": 1, "ranks": 2, "host": "h", "pid": 1, "at": 5, "memory_gb": NaN}'),
    ("ranks/1.json", f'{{"rank": 1, "ranks": 2, "host": "h", "pid": 1, "at": {"9" * 400}}}'),
    ("ranks/1.json", f'{{"rank": 1, "ranks": 2, "host": "h", "pid": 1, "at": 5, "total": {"9" * 400}}}'),
    ("ranks/1.json", "[" * 100_000),
    ("ranks/1.jsonl", "[" * 100_000 + "\n"),
    ("ranks/1.jsonl", '{"event": "warning", "at": "x"}\n{"phase": "a", "step": "1", "from": 0, "to": 1}\n'),
    ("ranks/1.jsonl", '{"phase": "a", "step": 1, "from": NaN, "to": null}\n{"wait": [], "from": 0, "to": 1}\n'),
    ("running.json", '{"beat": 1}'),
    ("metrics.jsonl", '{"step": 1, "perf/elapsed_s": 1}\n{"step": 2, "perf/elapsed_s": "a"}\n' + "[" * 100_000),
    ("metrics.jsonl", '{"step": 1, "perf/elapsed_s": 1}\n{"step": 2, "perf/elapsed_s": 1e300}\n'),
    ("config.yaml", "trainer: {total_training_steps: many}\n"),
    ("config.yaml", "[" * 1_000),
]


@pytest.mark.parametrize(("name", "content"), JUNK)
def test_junk_in_a_file_hides_nothing_else(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank is still shown, and there is no traceback."""
    folder = add_ranks(run(tmp_path / "run"))
    (folder / name).write_text(content)
    client = Client(folder)
    live = client.json("/ranks")
    assert live["ranks"][0]["rank"] == 0 and [0, "rollout"] in [span[:2] for span in live["spans"]]
    assert client.ask("/")[0].status == 200
    client.server.shutdown()
    client.server.server_close()
    assert runs.main("runs", [str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "node-0" in shown.out and shown.err == ""


def test_what_a_browser_cannot_read_is_refused(
    client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run" / "ranks" / "0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rate": float("nan")}))
    assert "rate" not in client.json("/ranks")["ranks"][0]
    assert client.ask("/", host="[")[0].status == 403
    assert client.ask("http://[/")[0].status == 400
    assert capfd.readouterr().err == ""


def test_a_damaged_sample_is_one_line(client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the file, and the ranks are shown nevertheless."""
    index = tmp_path / "run" / "images" / "ocr" / "step_000003" / "index.jsonl"
    for prompt, beside in (("5", ""), ('"p"', ', "messages": []')):
        index.write_text(f'{{"index": 0, "prompt": {prompt}, "reward": 1.0, "file": "0.png"{beside}}}\n')
        samples = client.json("/sections")["samples"]
        assert "1 line of images/ocr/step_000003/index.jsonl: damaged." in samples
    assert client.ask("/ranks")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_folder_that_vanishes_and_comes_back(client: Client, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    for path in ("/ranks", "/log?rank=0"):
        answer, text = client.ask(path)
        assert (answer.status, text) == (400, f"{tmp_path / 'run'} no longer exists\n")
    answer, text = client.ask("/")
    assert answer.status == 400 and text.startswith(f"{tmp_path / 'run'}: no such folder; ")
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert client.json("/ranks")["done"] == 3 and client.ask("/")[0].status == 200


def test_connections_that_ask_nothing_are_few_and_close_the_page_to_nobody(
    client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether they come from one address or from many; a new one takes the place of the oldest."""
    before, head = threading.active_count(), f"GET /ranks HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nX: ".encode()
    slow = []
    for number in range(3 * watch.MOST_CONNECTIONS):
        source = f"127.0.0.{2 + number % 20}" if number > watch.MOST_CONNECTIONS else "127.0.0.1"
        slow.append(socket.create_connection(("127.0.0.1", client.port), 60, (source, 0)))
        slow[-1].sendall(head)
        if number in (watch.MOST_CONNECTIONS, 3 * watch.MOST_CONNECTIONS - 1):
            assert client.json("/ranks")["done"] == 3
    assert slow[0].recv(1) == b""  # closed without an answer
    wait_for(lambda: threading.active_count() - before <= watch.MOST_CONNECTIONS)
    for connection in slow:
        connection.close()
    wait_for(lambda: threading.active_count() <= before)
    assert capfd.readouterr().err == ""


def test_a_request_has_a_deadline(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte that trickles in would otherwise start the time anew."""
    monkeypatch.setattr(watch, "HEAD_S", 0.5)
    connection = socket.create_connection(("127.0.0.1", client.port), 60)
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        while time.monotonic() < begin + 30:
            connection.sendall(b"G")
            time.sleep(0.05)
    connection.close()


def test_a_wrong_token_gets_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such requests count like those that are not complete."""
    client = Client(run(tmp_path / "run"), token="t0ken")
    assert client.ask("/?token=wrong")[0].status == client.ask("/?token=t0ken", host="evil")[0].status == 403
    wait_for(lambda: not client.server._open)
    pair = socket.socketpair()
    client.server._open.add(pair[0])
    client.server._silent[pair[0]] = "10.0.0.1", time.monotonic()
    assert client.server.has_asked(pair[0]) and not client.server.has_asked(pair[0])
    client.server.shutdown()
    client.server.server_close()


def test_a_token_is_drawn_at_each_start_where_others_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(server: Server) -> None:
        assert (server.token is None) == ("127.0.0.1" in server.url)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", ended)
    for host in ("127.0.0.1", "0.0.0.0", "0.0.0.0"):
        assert main([str(run(tmp_path / "run")), "--host", host, "--port", "0"]) == 130
    here, first, second = capsys.readouterr().out.split()
    assert here.endswith("/") and first != second
    assert all(len(urlsplit(url).query.removeprefix("token=")) == 32 for url in (first, second))


def test_samples_that_lead_out_of_the_folder_are_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with logger(folder) as log:
        log.records(0, "val", [Record("inner prompt", 0.5, "answer", 0)])
        log.records(0, "linked", [Record("outer prompt", 0.5, "answer", 0)])
        for step in range(2):
            log.log(step, {"reward/mean": 1.0 + step})
    index = folder / "samples" / "linked" / "step_000000" / "index.jsonl"
    index.rename(tmp_path / "outside.jsonl")
    index.symlink_to(tmp_path / "outside.jsonl")
    html = Watcher([folder]).ask("/sections", {})["samples"]
    assert "inner prompt" in html and "outer prompt" not in html


def test_a_huge_log_is_read_from_its_end(client: Client, tmp_path: Path) -> None:
    """A sparse file of 5 GB."""
    with (tmp_path / "run" / "ranks" / "0.log").open("r+b") as file:
        file.seek(5 << 30)
        file.write(b"\nthe end\n")
    assert client.json("/log?rank=0")["text"].endswith("\nthe end\n")
    with (tmp_path / "run" / "ranks" / "0.jsonl").open("r+b") as file:
        file.seek(5 << 30)
        file.write(b'\n{"event": "warning", "at": 9.0, "text": "late"}\n')
    assert "late" in [event["text"] for event in client.json("/ranks")["events"]]


@pytest.mark.parametrize("port", ["99999", "taken"])
def test_a_port_that_cannot_be_had_is_one_line(
    client: Client, tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number = str(client.port) if port == "taken" else port
    assert main([str(tmp_path / "run"), "--port", number]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: cannot listen on 127.0.0.1, port {number}: ") and said.count("\n") == 1
