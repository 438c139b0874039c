"""Files inside a folder of somebody else, and that the modules which read runs open no file in another way."""

import ast
import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from phalanx.config.files import read_bytes, replace_file
from phalanx.config.inside import (
    append_inside,
    list_inside,
    make_inside,
    open_inside,
    read_inside,
    status_inside,
    write_inside,
)

SOURCE = Path(__file__).parents[2] / "src" / "phalanx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder, given by a link as users do, beside files that no name in it may reach."""
    (tmp_path / "real" / "a" / "b").mkdir(parents=True)
    (tmp_path / "real" / "a" / "b" / "file").write_text("inside")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("outside")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    return tmp_path / "link"


def test_what_is_inside_is_read_written_and_listed(folder: Path) -> None:
    assert read_inside(folder, "a/b/file", 6) == b"inside"
    write_inside(folder, "a/b/file", "newer \ud800")
    assert read_inside(folder, "a//b/./file", 99) == b"newer ?"
    with append_inside(folder, "a/log") as file:
        file.write(b"one ")
    with append_inside(folder, "a/log") as file:
        file.write(b"two")
        file.seek(0)
        assert file.read() == b"one two"
    make_inside(folder, "x/y")
    make_inside(folder, "x/y")
    assert list_inside(folder) == [("a", True), ("x", True)]
    assert list_inside(folder, "a") == [("b", True), ("log", False)]
    assert list_inside(folder, "none") == list_inside(folder, "a/log") == []
    status = status_inside(folder, "a/log")
    assert status is not None and status.st_size == 7 and status_inside(folder, "a/none") is None


@pytest.mark.parametrize("name", ["link", "a/link", "linked/file", "a/loop", "a/relative", "a/linked/b/file"])
def test_no_link_is_followed(name: str, folder: Path, tmp_path: Path) -> None:
    for place in ("link", "a/link"):
        (folder / place).symlink_to(tmp_path / "secret" / "file")
    (folder / "linked").symlink_to(tmp_path / "secret")
    (folder / "a" / "loop").symlink_to("loop")
    (folder / "a" / "relative").symlink_to("b/file")
    (folder / "a" / "linked").symlink_to(".")
    with pytest.raises(OSError, match=r"link|Not a directory|Too many") as error:
        read_inside(folder, name, 99)
    assert error.value.filename == str(folder / name)
    with pytest.raises(OSError, match=r"link|Not a directory|Too many"):
        append_inside(folder, name)
    assert status_inside(folder, name) is None
    assert "link" not in dict(list_inside(folder)) and list_inside(folder, "linked") == []
    if "/" in name.removeprefix("a/"):
        with pytest.raises(OSError, match=r"Not a directory|Too many"):
            write_inside(folder, name, "x")
        with pytest.raises(OSError, match=r"Not a directory|Too many"):
            make_inside(folder, f"{name}/folder")
    else:
        write_inside(folder, name, "x")  # replaces the link itself
        assert not (folder / name).is_symlink() and (folder / name).read_text() == "x"
    assert (tmp_path / "secret" / "file").read_text() == "outside" and len(list((tmp_path / "secret").iterdir())) == 1


@pytest.mark.parametrize(
    "name", ["../secret/file", "a/../../secret/file", "/etc/passwd", "", "a/", "a\0b", "\ud800", "x" * 999]
)
def test_names_that_are_not_inside(name: str, folder: Path) -> None:
    for act in (lambda: read_inside(folder, name, 99), lambda: write_inside(folder, name, "x")):
        with pytest.raises(OSError, match=r"not a name in this folder|surrogates|name too long|No such"):
            act()
    assert status_inside(folder, name) is None


def test_nothing_but_files_is_opened_and_nothing_blocks(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for name, code in (("pipe", errno.EINVAL), ("a", errno.EISDIR)):
        for act in (lambda name=name: open_inside(folder, name), lambda name=name: append_inside(folder, name)):
            with pytest.raises(OSError, match=r"not a regular file|Is a directory") as error:
                act()
            assert error.value.errno == code
    with pytest.raises(OSError, match="not a regular file"):
        open_inside(Path("/dev"), "zero")
    with pytest.raises(OSError, match="neither a file nor a folder"):
        read_bytes(folder / "pipe")
    write_inside(folder, "pipe", "replaced")
    assert read_bytes(folder / "pipe") == b"replaced"


def test_sizes_are_limited(folder: Path) -> None:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        read_inside(folder, "large", 1000)
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        read_bytes(folder / "large", 1000)


def test_a_replaced_file_is_whole_and_keeps_the_rights_of_a_new_one(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(folder / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o640
    done, sizes = threading.Event(), set()

    def read() -> None:
        while not done.is_set():
            sizes.add(len(read_inside(folder, "new", 1 << 20)))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(50):
        write_inside(folder, "new", b"y" * 100_000)
    done.set()
    thread.join()
    assert sizes <= {1, 100_000}
    (folder / "busy").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_inside(folder, "busy", "x")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "busy", "new"]


# -- the modules ------------------------------------------------------------------------------------------------------

# Modules that read or write the folders of runs and evaluations.
READERS = [*SOURCE.glob("telemetry/*.py"), *SOURCE.glob("run/telemetry/*.py"), *SOURCE.glob("zoo/loggers/*.py")]
READERS += [*SOURCE.glob("tools/board/*.py"), SOURCE / "run/folder_lock.py"]
READERS += [SOURCE / f"tools/{name}.py" for name in ("evaluate", "scored", "sample", "export", "generate", "candidate")]
# Calls that open, list or make files, by the last part of their name.
OPENING = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "glob",
    "rglob",
    "iterdir",
    "walk",
    "scandir",
}
OPENING |= {"listdir", "save", "touch", "copyfile", "copy2", "copytree", "move", "symlink_to", "loadtxt", "fromfile"}
OPENING |= {"export_chrome_trace", "safe_load", "memmap", "mkstemp", "link_to", "hardlink_to"}
ALLOWED = {
    "zoo/loggers/mlflow.py: Image.open": "the grid that the same process has just written",
    "zoo/loggers/tensorboard.py: Image.open": "the grid that the same process has just written",
    "run/telemetry/profiles.py: trace.export_chrome_trace": "torch writes to a path, in the folder of the job itself",
    "run/telemetry/profiles.py: plain.open": "what torch has just written",
    "run/telemetry/profiles.py: gzip.open": "beside what torch has just written",
    "run/telemetry/profiles.py: (folder / f'{name}.txt').write_text": "beside what torch has just written",
    "telemetry/records.py: Image.fromarray(shown.pixels).save": "in a folder that was just made, under a new name",
    "telemetry/records.py: side_by_side(pictures(standing(record.frames))).save": "in a folder that was just made",
    "telemetry/records.py: grid(rows).save": "in a folder that was just made",
    "tools/board/report.py: webbrowser.open": "the finished page",
    "tools/board/markup.py: (files('phalanx.tools.board') / 'page' / name).read_text": "a file of the package",
    "tools/board/runs.py: os.open": "/dev/null",
    "tools/board/samples.py: Image.open": "a file that open_inside has opened",
    "tools/board/samples.py: scaled.save": "to memory",
    "tools/board/watch.py: webbrowser.open": "an address",
    "run/folder_lock.py: Path('/proc/sys/kernel/random/boot_id').read_text": "a file of the kernel",
    "tools/generate.py: self.file.open": "the output_file that the user names",
}


def openings(source: str) -> list[str]:
    """The calls in a module that open, list or make files in another way than phalanx.config.inside."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.rsplit(".", 1)[-1] in OPENING:
                calls.append(name)
    return calls


def test_files_of_runs_are_opened_in_one_way() -> None:
    calls = {f"{path.relative_to(SOURCE)}: {call}" for path in READERS for call in openings(path.read_text())}
    assert calls == ALLOWED.keys()


def test_another_way_is_named() -> None:
    assert openings("open(p)\nx.read_text()\nos.scandir(p)\n(a / b).glob('*')") == [
        *("open", "x.read_text", "os.scandir", "(a / b).glob")
    ]
    assert openings("open_inside(a, b)\nread_inside(a, b, 1)\nwrite_inside(a, b, c)") == []
