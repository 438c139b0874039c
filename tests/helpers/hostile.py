"""Folders of runs as an attacker, or a damaged disk, may leave them: each function of RUNS changes a good one."""

import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.pages import EVIL

SECRET = "a-secret-of-the-user"
MOST_MEMORY = 400 << 20  # bytes beside Python and its libraries, which take 50 MB in these commands
MOST_SECONDS = 120  # far more than a busy machine needs
Change = Callable[[Path], object]
STEP = "images/ocr/step_000003"
TEXTS = "samples/talk/step_000003"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 8)
)


def in_child(
    act: Callable[[], object], most: int = MOST_MEMORY, user: int | None = None, seconds: int = MOST_SECONDS
) -> str:
    """Run a function in a fork with limits of memory and time; returns its traceback, or "" if it has none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        words = "the child died"
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most,) * 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            if user is not None:
                os.setuid(user)
            act()
            words = ""
        except BaseException:  # told by the parent
            words = traceback.format_exc()
        finally:
            os.write(writing, words.encode("utf-8", "replace")[-60_000:] or b"-")
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        words = file.read().decode()
    _, status = os.waitpid(child, 0)
    if words != "-":
        print(words)
    return words.removeprefix("-") if status == 0 else f"ended by signal {status}"


def digest(folder: Path) -> dict[str, str]:
    """The files of a folder with hashes of their contents."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file whose header has this size, with so many black pixels or the given data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = data or zlib.compress(bytes((3 * width + 1) * height), 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def placed(name: str, make: Callable[[Path], object]) -> Change:
    """Something else in place of a file or a folder of the run."""

    def change(run: Path) -> None:
        remove(run / name)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        make(run / name)

    return change


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"old {path.name}"))
    else:
        path.unlink(missing_ok=True)


def replaced(name: str, content: str | bytes) -> Change:
    """Another content of a file."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return placed(name, lambda path: path.write_bytes(data))


def linked(name: str, target: str) -> Change:
    """A link in place of a file or a folder; `{outside}` is a folder with a secret of the user."""

    def change(run: Path) -> None:
        placed(name, lambda path: path.symlink_to(target.format(outside=run.parent / "outside")))(run)

    return change


def fifo(*names: str) -> Change:
    return both(*(placed(name, os.mkfifo) for name in names))


def in_place_of(name: str) -> Change:
    """A folder where a file is expected."""
    return placed(name, Path.mkdir)


def bound(name: str) -> Change:
    """A socket where a file is expected."""

    def bind(path: Path) -> None:
        with contextlib.chdir(path.parent):  # because the path of a socket is short
            socket.socket(socket.AF_UNIX).bind(path.name)

    return placed(name, bind)


def sparse(name: str) -> Change:
    """A file of 1 TB, which needs no room on the disk."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, 1 << 40)

    return placed(name, make)


def rows(*values: Any, ending: str = "\n") -> str:
    return "".join(json.dumps(value) + "\n" for value in values).removesuffix("\n") + ending


def metrics(*values: Any, ending: str = "\n") -> Change:
    good = [{"step": step, "reward/mean": step / 4} for step in range(4)]
    return replaced("metrics.jsonl", rows(*good, *values, ending=ending))


def index(name: str, **fields: Any) -> Change:
    """One row of an index.jsonl, with these fields changed."""
    row = {"index": 0, "prompt": "p", "reward": 0.5, "file": "00000.png", "text": "t"}
    return replaced(f"{name}/index.jsonl", rows(row | fields))


def talk(**fields: Any) -> Change:
    row = {"messages": [], "turns": 1, "tool_calls": 0, "ended": "done", "environment_seconds": 1, "turn_rewards": []}
    return index(TEXTS, **(row | fields))


def state(**fields: Any) -> Change:
    row = {"rank": 0, "ranks": 2, "role": "actor", "host": "h", "pid": 1, "interval": 2.0, "at": 1.7e9, "step": 2}
    return replaced("ranks/0.json", json.dumps(row | fields))


def picture(data: bytes) -> Change:
    return replaced(f"{STEP}/00000.png", data)


def both(*changes: Change) -> Change:
    def change(run: Path) -> None:
        for each in changes:
            each(run)

    return change


def many_files(run: Path) -> None:
    for place in ("ranks", "images", "profiles", STEP):
        (run / place).mkdir(exist_ok=True)
        for i in range(1000):
            (run / place / f"{i + 5}.json").touch()


def deep_tree(run: Path) -> None:
    """Deeper than Python recurses."""
    with contextlib.chdir(run.parent):
        for _ in range(1500):
            Path("d").mkdir()
            os.chdir("d")


def strange_names(run: Path) -> None:
    for name in ("step_abc", "step_", "step_\u0662", f"step_{'9' * 40}", "step_1e3", "-1", EVIL.replace("/", "|")):
        for place in ("profiles", "images/ocr", "samples", "ranks"):
            (run / place / name).mkdir(parents=True)
    os.mkdir(os.fsencode(run) + b"/images/\xff\xfe")
    os.mkdir(os.fsencode(run) + b"/images/\xff\xfe/step_000001")
    (Path(os.fsdecode(os.fsencode(run) + b"/images/\xff\xfe/step_000001/index.jsonl"))).write_text(
        rows({"index": 0, "prompt": "\ud800", "reward": 1, "file": "\udfff"})
    )


def hostile_texts(run: Path) -> None:
    """Scripts, controls and emoji in each text."""
    text = f"{EVIL}\x1b]0;pwn\x07\u202e\U0001f600]]>-->"
    metrics({"step": 4, text: 1, f"val/{text}/reward/mean": 1.0, f"actor/{text}": 2}, {"step": 5, text: 2})(run)
    state(host=text, role=text, phase=text, rate=text, ended=text)(run)
    replaced("running.json", json.dumps({"token": text, "pid": text, "host": text, "beat": 1}))(run)
    replaced("ranks/0.log", text)(run)
    replaced("ranks/0.jsonl", rows({"event": text, "at": 1.7e9, "text": text}, {"phase": text, "from": 1, "to": 2}))(
        run
    )
    replaced("config.yaml", json.dumps({"trainer": {"experiment_name": text}, "model": {"path": text}}))(run)
    said = [{"role": text, "content": text, "tool_calls": [{"function": {"name": text, "arguments": {text: text}}}]}]
    talk(prompt=text, text=text, ground_truth=text, scores={text: 1.0, "b": 2.0}, messages=said, ended=text)(run)


EXCESS = 10**400
RUNS: dict[str, Change] = {
    # pipes, sockets, folders and other things where a file is expected
    "pipes everywhere": fifo(
        *("metrics.jsonl", "config.yaml", "running.json", "ranks/0.json", "ranks/0.jsonl", "ranks/0.log"),
        *(f"{STEP}/index.jsonl", f"{STEP}/00000.png", f"{TEXTS}/index.jsonl", "stop.json", "report.html"),
    ),
    "a pipe as metrics.jsonl": fifo("metrics.jsonl"),
    "a pipe as running.json": fifo("running.json"),
    "a pipe as a rank's state": fifo("ranks/0.json"),
    "a pipe as a rank's lines": fifo("ranks/0.jsonl"),
    "a pipe as a log": fifo("ranks/0.log"),
    "a pipe as an image": fifo(f"{STEP}/00000.png"),
    "a pipe as an index": fifo(f"{STEP}/index.jsonl", f"{TEXTS}/index.jsonl"),
    "a pipe as config.yaml": fifo("config.yaml"),
    "pipes as folders": fifo("ranks", "images", "samples", "profiles", "baseline"),
    "a pipe as .lock": fifo(".lock", "arguments.json", "ended.json"),
    "sockets": both(*map(bound, ("metrics.jsonl", "running.json", "ranks/0.json", "config.yaml", "ranks/0.log"))),
    "folders": both(*map(in_place_of, ("metrics.jsonl", "running.json", "ranks/0.json", "config.yaml", "ranks/0.log"))),
    "folders as results": both(*map(in_place_of, ("report.html", "stop.json", f"{STEP}/00000.png"))),
    "a folder as index": in_place_of(f"{STEP}/index.jsonl"),
    # links
    "a device as metrics.jsonl": linked("metrics.jsonl", "/dev/zero"),
    "devices": both(linked("running.json", "/dev/zero"), linked("config.yaml", "/dev/stdin")),
    "a link to metrics": linked("metrics.jsonl", "{outside}/metrics.jsonl"),
    "a link to a configuration": linked("config.yaml", "{outside}/config.yaml"),
    "a relative link": both(linked("config.yaml", "../outside/config.yaml"), linked("running.json", "../outside/beat")),
    "a link to a log": linked("ranks/0.log", "{outside}/secret"),
    "a link to a state": linked("ranks/0.json", "{outside}/state.json"),
    "a link to an image": linked(f"{STEP}/00000.png", "{outside}/secret.png"),
    "a link to an index": linked(f"{STEP}/index.jsonl", "{outside}/index.jsonl"),
    "links as folders": both(
        linked("ranks", "{outside}"), linked("images", "{outside}"), linked("samples", "{outside}")
    ),
    "a link as a set": both(linked("images/x", "{outside}"), linked("samples/x", "{outside}")),
    "a link as a step": both(linked(STEP, "{outside}"), linked("profiles", "/proc/self")),
    "links in a circle": both(
        *(
            linked("metrics.jsonl", "config.yaml"),
            linked("config.yaml", "metrics.jsonl"),
            linked("images/x", "../images"),
        ),
        linked("samples/x", ".."),
    ),
    "links where files are written": both(
        *(
            linked(name, "{outside}/bashrc")
            for name in ("report.html", "stop.json", "report.html.tmp", "stop.json.tmp")
        ),
        replaced("running.json", json.dumps({"token": "$(touch PWNED)", "pid": 1, "host": "h", "beat": 1})),
    ),
    "paths that lead out": both(
        index(STEP, file="../../../../outside/secret.png", video="/etc/passwd"),
        index(TEXTS, images=[{"file": "../../../../outside/secret.png", "place": "p", "height": 1, "width": 1}]),
    ),
    "absolute paths": both(index(STEP, file="/etc/passwd"), index(TEXTS, images=[{"file": "/etc/passwd"}])),
    # sizes
    "sparse metrics": sparse("metrics.jsonl"),
    "sparse files": both(*map(sparse, ("running.json", "config.yaml", "ranks/0.json", "ranks/0.log", "ranks/0.jsonl"))),
    "a sparse index": sparse(f"{STEP}/index.jsonl"),
    "a sparse image": both(sparse(f"{STEP}/00000.png"), index(STEP, video="00000.png")),
    "a huge image": picture(png(30_000, 30_000, b"x")),
    "a large image": picture(png(12_000, 12_000, b"x")),
    "an image that unpacks to more": picture(png(5_000, 6_000)),
    "an image of no size": picture(png(0, 2**32 - 1, b"x")),
    "a long line": replaced("metrics.jsonl", rows({"step": 1}) + '{"step": 2, "x": "' + "x" * (6 << 20) + '"}\n'),
    "a long text": talk(text="\U0001f600" * 400_000, messages=[{"role": "user", "content": "<&\"'" * 400_000}] * 3),
    "many messages": talk(messages=[{"role": "a", "content": ""}] * 20_000),
    "many files": many_files,
    "many metrics": metrics({"step": 4, **{f"k{i}/x": i for i in range(5100)}}),
    "many values": metrics(*({"step": 4 + i, **{f"actor/{k}": i for k in range(9)}} for i in range(5000))),
    "many events": replaced(
        "ranks/0.jsonl", rows(*({"event": "warning", "at": i, "text": "x" * 99} for i in range(9999)))
    ),
    "a deep tree": deep_tree,
    # texts that are not what they should be
    "not UTF-8": both(
        *(
            replaced(name, b"\xff\xfe\x00\x80\n" * 9)
            for name in ("metrics.jsonl", "config.yaml", f"{TEXTS}/index.jsonl")
        ),
        *(replaced(name, b"\xff\xfe\x00\x80\n" * 9) for name in ("running.json", "ranks/0.json", "ranks/0.log")),
    ),
    "NUL": both(replaced("config.yaml", "a: \0\n"), index(STEP, file="a\0b"), index(TEXTS, prompt="\0", text="\0")),
    "half a file": both(metrics({"step": 9}, ending="")),
    "truncated": both(
        replaced("metrics.jsonl", '{"step": 1}\n{"step": 2, "x"'),
        replaced("ranks/0.json", '{"rank": 0,'),
        replaced(f"{STEP}/index.jsonl", '{"index": 0, "prompt": "p", "re'),
        picture(png(8, 8)[:40]),
    ),
    "other types": both(
        metrics(
            [1], "x", 5, None, {"step": True, "x": 1}, {"step": "5"}, {"step": 6, "reward/mean": "x", "a": [1], "b": {}}
        ),
        replaced("running.json", '["token"]'),
        replaced("config.yaml", "- 1\n"),
        replaced("ranks/0.json", "5"),
    ),
    "a running.json of other types": replaced(
        "running.json", '{"token": {"a": 1}, "pid": [1], "host": null, "beat": {}}'
    ),
    "a state of other types": state(
        pid=-1, phase=["x"], step="a", rate={"b": 1}, memory_gb=1e308, role=5, total="x", ended=[1]
    ),
    "huge numbers in a state": state(pid=10**300, step=10**300, total=EXCESS, ranks=10**15, phase_since=-1e308),
    "huge numbers": metrics(
        *({"step": 10**30, "x": 1}, {"step": -5, "reward/mean": EXCESS}, {"step": 4, "perf/elapsed_s": 1e308}),
        *({"step": 5 + i, "time/rollout": 1.7e308, "reward/mean": (-1) ** i * 1.7e308} for i in range(300)),
    ),
    "no numbers": metrics({"step": 4, "reward/mean": float("nan"), "actor/x": float("inf"), "val/a/reward/mean": None}),
    "huge integers": replaced("metrics.jsonl", '{"step": 1, "x": ' + "9" * 9000 + "}\n"),
    "deep JSON": both(
        replaced("metrics.jsonl", '{"step": 1}\n{"step": 2, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n"),
        replaced("running.json", '{"a":' * 10_000),
        replaced(f"{TEXTS}/index.jsonl", '{"index": ' + "[" * 50_000),
    ),
    "damaged lines of ranks": replaced(
        "ranks/0.jsonl",
        rows(
            *({"event": ["x"], "at": 1.7e9}, {"event": {}, "at": 1.7e9, "text": [1]}, [1], "x", 5),
            *({"event": "start", "at": 1e300, "ranks": {}, "host": [1]}, {"event": "failed", "at": True, "text": None}),
            *(
                {"phase": "update", "step": 10**30, "from": 1e300, "to": -1e300},
                {"wait": 10**40, "from": 0, "to": 1e12},
            ),
            *({"phase": "update", "step": 2, "from": -1e308, "to": 1e308}, {"phase": 5, "step": 1, "from": 1, "to": 2}),
        ),
    ),
    "an index that is no number": both(index(STEP, index={"a": 1}), index(TEXTS, index=[0])),
    "messages of other types": talk(messages="abc", turns="x", tool_calls=None, ended=1, environment_seconds="y"),
    "calls of other types": talk(messages=[{"role": "a", "tool_calls": [5, {"function": "f"}]}, 5, {"content": "x"}]),
    "images of other types": both(index(TEXTS, images="abc"), index(STEP, file=5, scores=[1], video={"a": 1})),
    "rewards of other types": both(index(STEP, reward="much", scores={"a": "x"}), index(TEXTS, reward=EXCESS)),
    "an SVG": picture(f"<svg xmlns='http://www.w3.org/2000/svg' onload='{EVIL}'/>".encode()),
    "a program as an image": picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(PWNED) (w) file closefile\n"),
    "strange names": strange_names,
    "hostile texts": hostile_texts,
    # configurations
    "nested aliases": replaced("config.yaml", BOMB + "trainer: {experiment_name: *a7}\nmodel: {path: *a7}\n"),
    "an alias of itself": replaced("config.yaml", "trainer: &a {experiment_name: *a}\n"),
    "merged aliases": replaced("config.yaml", BOMB.replace("[x,", "[{k: 1},") + "trainer: {<<: *a2}\n"),
    "deep YAML": replaced("config.yaml", "a: " + "[" * 5000 + "]" * 5000 + "\n"),
    "code in YAML": replaced("config.yaml", "trainer: !!python/object/apply:os.system ['touch PWNED']\n"),
    "odd keys": replaced("config.yaml", "? [1, 2]\n: x\n? {a: 1}\n: y\n1: z\nnull: q\n"),
    "sections of other types": replaced(
        "config.yaml", "trainer: {experiment_name: [1], total_training_steps: {a: 1}}\nmodel: 3\n"
    ),
    "an environment variable": replaced("config.yaml", "trainer: {experiment_name: '${oc.env:SECRET}'}\n"),
}
