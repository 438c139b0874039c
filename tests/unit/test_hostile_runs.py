"""The commands that look at runs, on folders as an attacker may leave them: they end, in one line at most, and nothing
outside is read or written.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.telemetry.records import Record
from phalanx.tools.board import report, runs
from phalanx.tools.board.watch import FolderWatcher, Watcher
from tests.helpers.hostile import RUNS, SECRET, digest, in_child, png, rows
from tests.helpers.pages import EVIL, Page, add_ranks, logger, run

SLOW = {"many metrics", "an image that unpacks to more", "sparse metrics", "sparse files", "a deep tree"}


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


def use(folder: Path) -> list[str]:
    """Use all commands on a run and its parent; returns what they show. Exit statuses other than 0 and 2 fail."""
    if (folder / "running.json").exists():  # a recent sign of life, without which `stop` stops nothing
        os.utime(folder / "running.json", follow_symlinks=False)
    shown = []
    commands: list[tuple[Callable[[], int], tuple[int, ...]]] = [
        (lambda: runs.main("runs", [str(folder.parent)]), (0,)),
        (lambda: runs.main("logs", [str(folder)]), (0, 2)),
        (lambda: runs.main("stop", ["--no-wait", str(folder)]), (0, 2)),
        (lambda: report.main([str(folder)]), (0, 2)),
    ]
    for command, statuses in commands:
        with captured() as out:
            status = command()
        assert status in statuses, out.getvalue()
        assert status == 0 or out.getvalue().splitlines()[-1].startswith("error: "), out.getvalue()
        shown.append(out.getvalue())
    page = folder / "report.html"
    if page.is_file() and not page.is_symlink():
        shown.append(page.read_text())
        if page.stat().st_size < 1 << 20:
            Page(page)
    table = FolderWatcher(folder.parent)
    shown += [table.page()[0].decode(), json.dumps(table.ask("/table", {}), allow_nan=False)]
    try:
        watcher = Watcher([folder])
    except (ValueError, OSError) as error:
        return [*shown, str(error)]
    shown.append(watcher.page()[0].decode())
    for path in ("/sections", "/ranks", "/log"):
        with contextlib.suppress(OSError, ValueError):  # which the server tells in one line
            shown.append(json.dumps(watcher.ask(path, {"rank": "0"}), allow_nan=False))
    return shown


@pytest.fixture(scope="session")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run with all kinds of files, beside a folder with a secret."""
    place = tmp_path_factory.mktemp("hostile")
    folder, outside = add_ranks(run(place / "run")), place / "outside"
    with logger(place / "other") as log:
        for step in (0, 3):
            log.records(step, "talk", [Record("p", 0.5, "t", 0)])
    shutil.move(place / "other" / "samples", folder / "samples")
    shutil.rmtree(place / "other")
    (folder / "running.json").write_text(json.dumps({"token": "t", "pid": 1, "host": "h", "beat": 1}))
    (folder / "profiles").mkdir()
    (outside / "step_000002").mkdir(parents=True)
    line = rows({"index": 0, "prompt": SECRET, "reward": 0.5, "file": "secret.png", "text": SECRET})
    state = {"rank": 0, "ranks": 1, "host": SECRET, "pid": 1, "at": 1.7e9}
    contents = {"index.jsonl": line, "step_000002/index.jsonl": line, "secret": SECRET, "bashrc": SECRET}
    contents |= {
        "metrics.jsonl": rows({"step": 1, SECRET: 1}),
        "config.yaml": f"trainer: {{experiment_name: {SECRET}}}\n",
    }
    contents |= {"beat": json.dumps({"token": SECRET, "pid": 1, "host": SECRET}), "state.json": json.dumps(state)}
    contents |= {"0.json": json.dumps(state), "0.log": SECRET}
    for name, content in contents.items():
        (outside / name).write_text(content)
    (outside / "secret.png").write_bytes(png(97, 89))
    return folder


def test_a_good_run_is_shown_whole(a_run: Path, tmp_path: Path) -> None:
    """So that the cases below fail where they hide too much."""
    shutil.copytree(a_run.parent, tmp_path / "w")
    listed, log, stopped, path, page, *_ = use(tmp_path / "w" / "run")
    assert "node-0" in listed and "rank 0 says" in log and stopped == "asked process 1 on h to stop\n"
    assert (
        Path(path.strip()).is_file() and page.count("<img") == 4 and "<pre>t</pre>" in page and "my &lt;run&gt;" in page
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in RUNS])
def test_a_hostile_run_is_told_and_no_more(name: str, a_run: Path, tmp_path: Path) -> None:
    shutil.copytree(a_run.parent, tmp_path / "w")
    folder = tmp_path / "w" / "run"
    RUNS[name](folder)
    before = digest(tmp_path / "w" / "outside")

    def act() -> None:
        os.chdir(tmp_path)
        os.environ["SECRET"] = SECRET
        shown = use(folder)
        for text in shown:
            assert SECRET not in text and "root:x:" not in text and "Traceback" not in text
            assert 'width="97"' not in text  # the size of the secret image
            assert EVIL not in text or text is not shown[4]

    try:
        assert in_child(act) == ""
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "w" / "d"], check=True)  # pytest cannot remove a deep tree
    assert digest(tmp_path / "w" / "outside") == before
    written = {path.name for path in [*tmp_path.iterdir(), *folder.iterdir()]}
    assert "PWNED" not in written
    assert [name for name in written if name.endswith(".tmp") and not (folder / name).is_symlink()] == []
    names = {path.name for path in (tmp_path / "w").iterdir()}
    assert names == {"run", "outside"}


def test_files_that_only_others_may_read(a_run: Path) -> None:
    """As a user other than root, who may read everything."""
    with tempfile.TemporaryDirectory() as place:
        user, folder = 65534 if os.getuid() == 0 else os.getuid(), Path(place) / "run"
        os.chmod(place, 0o755)
        shutil.copytree(a_run, folder)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, user, -1)
        for name in (
            "metrics.jsonl",
            "config.yaml",
            "running.json",
            "ranks/0.json",
            "ranks/0.log",
            "images",
            "profiles",
        ):
            (folder / name).chmod(0)

        def act() -> None:
            shown = use(folder)
            assert "run " in shown[0] and all("Traceback" not in text for text in shown)
            assert shown[1] == f"error: [Errno 13] Permission denied: '{folder}/ranks/0.log'\n"
            assert "metrics.jsonl cannot be read: Permission denied." in shown[4] and "my &lt;run" not in shown[4]

        assert in_child(act, user=user) == ""


def test_links_that_users_make_are_followed(a_run: Path, tmp_path: Path) -> None:
    """Of outputs/ or a run to another disk, and of checkpoints in a run, which these commands do not read."""
    shutil.copytree(a_run, tmp_path / "disk" / "run")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "disk" / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    (tmp_path / "latest").symlink_to("outputs/run")
    with captured() as out:
        assert runs.main("runs", [str(tmp_path / "outputs")]) == 0
    assert f"{tmp_path}/outputs/run " in out.getvalue()
    _, log, stopped, path, page, *_ = use(tmp_path / "latest")
    assert "rank 0 says" in log and stopped.startswith("asked process 1 on h") and page.count("<img") == 4
    assert path.strip() == str(tmp_path / "latest" / "report.html")
