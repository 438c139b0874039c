"""What a confined process is denied, whatever the interpreter's paths are, as the kernel decides it."""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx import sandbox
from phalanx.models.lm.chat import TemplateProcess
from phalanx.rewards.verifier import Verifier
from phalanx.zoo.environments.python import Python
from tests.helpers import escapes
from tests.helpers.checks import wait_for
from tests.helpers.ranks import LIMIT_S, ROOT

ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {  # of system calls whose arguments count
    "x86_64": {"open": 2, "openat": 257, "mmap": 9, "madvise": 28, "ioctl": 16, "fcntl": 72},
    "aarch64": {"openat": 56, "mmap": 222, "madvise": 233, "ioctl": 29, "fcntl": 25},
}
# Calls of which none is a part of computing, by their numbers on x86-64 and on arm64; None: it does not exist there.
DENIED = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "kcmp": (312, 272),
    "prctl": (157, 167),
    "arch_prctl": (158, None),
    "seccomp": (317, 277),
    "personality": (135, 92),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "pipe2": (293, 59),
    "eventfd2": (290, 19),
    "timer_create": (222, 107),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mlock": (149, 228),
    "mlockall": (151, 230),
    "flock": (73, 32),
    "creat": (85, None),
    "openat2": (437, 437),
    "open_by_handle_at": (304, 265),
    "truncate": (76, 45),
    "pwrite64": (18, 68),
    "fallocate": (285, 47),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "linkat": (265, 37),
    "symlinkat": (266, 36),
    "mkdirat": (258, 34),
    "mknodat": (259, 33),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "capset": (126, 91),
    "setuid": (105, 146),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
}
# (call, arguments, allowed): each member of a kind, and the next value that is not
ARGUMENTS = [
    ("open", [0, os.O_RDONLY | os.O_CLOEXEC], True),
    ("open", [0, os.O_RDONLY | os.O_TRUNC], False),
    ("openat", [0, 0, os.O_RDONLY | os.O_DIRECTORY], True),
    *[("openat", [0, 0, flag], False) for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND)],
    ("openat", [0, 0, 0xFFFF0000_00000001], False),
    ("mmap", [0, 4096, 3, 0x22], True),
    ("mmap", [0, 4096, 5, 0x2], True),
    ("mmap", [0, 4096, 3, 0x40022], False),  # MAP_HUGETLB
    ("mmap", [0, 4096, 3, 0x2022], False),  # MAP_LOCKED
    *[("madvise", [0, 4096, advice], True) for advice in (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)],
    *[("madvise", [0, 4096, advice], False) for advice in (9, 10, 12, 20, 21, 22, 23, 100, 101)],  # 100: HWPOISON
    *[("ioctl", [1, request], True) for request in (0x5401, 0x5413, 0x541B, 0x5450, 0x5451, 0xFFFFFFFF_00005401)],
    ("ioctl", [1, 0x5412], False),  # TIOCSTI
    ("ioctl", [1, 0x5452], False),  # FIOASYNC
    ("ioctl", [1, 0x8901], False),  # FIOSETOWN
    ("ioctl", [1, 0x8902], False),  # SIOCSPGRP
    ("ioctl", [1, 0x5410], False),  # TIOCSPGRP
    ("ioctl", [1, 0x540E], False),  # TIOCSCTTY
    ("ioctl", [1, 0xC0045877], False),  # FIFREEZE
    ("ioctl", [1, 0xC0045878], False),  # FITHAW
    ("ioctl", [1, 0xC0185879], False),  # FITRIM
    ("ioctl", [1, 0x40086602], False),  # FS_IOC_SETFLAGS
    ("ioctl", [1, 0x401C5820], False),  # FS_IOC_FSSETXATTR
    ("ioctl", [1, 0x40049409], False),  # FICLONE
    ("ioctl", [1, 0xFFFFFFFF_C0045877], False),
    *[("fcntl", [1, command], True) for command in (0, 1, 2, 3, 4, 5, 1030)],
    ("fcntl", [1, 4, os.O_NONBLOCK | os.O_APPEND], True),  # F_SETFL
    ("fcntl", [1, 4, 0o20000], False),  # O_ASYNC
    ("fcntl", [1, 0xFFFFFFFF_00000004, 0xFFFFFFFF_00002000], False),
    *[
        ("fcntl", [1, command], False) for command in (6, 7, 8, 9, 10, 11, 15, 16, 36, 37, 38)
    ],  # locks, F_SETOWN, F_SETSIG
    *[("fcntl", [1, command], False) for command in (1024, 1025, 1026, 1029, 1031, 1033, 1036)],  # F_SETLEASE, F_NOTIFY
]


def decision(machine: str, number: int, arguments: list[int], arch: int | None = None) -> int:
    """What the filter decides, as the kernel runs it: struct seccomp_data is number, arch, place (8 bytes), arguments."""
    data = [number, ARCHITECTURES[machine] if arch is None else arch, 0, 0]
    for argument in (arguments + [0] * 6)[:6]:
        data += [argument & 0xFFFFFFFF, argument >> 32]
    program, at, loaded = sandbox.seccomp_program(machine), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            loaded = data[operand // 4]
        elif code == 0x15:
            at += if_true if loaded == operand else if_false
        elif code == 0x45:
            at += if_true if loaded & operand else if_false
        else:
            assert code == 0x06
            return operand


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_reads_arguments(machine: str) -> None:
    for call, arguments, allowed in ARGUMENTS:
        if call in NUMBERS[machine]:
            decided = decision(machine, NUMBERS[machine][call], arguments)
            assert decided == (ALLOW if allowed else REFUSE), (call, arguments)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_what_is_no_computing(machine: str) -> None:
    for call, numbers in DENIED.items():
        number = numbers[machine == "aarch64"]
        assert number is None or decision(machine, number, [0] * 6) == REFUSE, call
    for number in range(600):
        assert decision(machine, number | 0x40000000, []) == REFUSE, "x32"
        assert decision(machine, number, [], arch=0x40000003) == REFUSE, "i386"
    allowed = sum(decision(machine, number, []) == ALLOW for number in range(600))
    assert allowed < 75


SECRET = "token-of-the-rank"
SHAPES = [
    "",
    ":",
    ":/opt/lib",
    "/opt/lib:",
    ".",
    "./",
    "/a::/b",
    "..",
    "/",
    "HOME",
    "JOB",
    "JOB/src",
    "~",
    "//",
    "/proc/self/cwd",
]


def test_no_shape_of_pythonpath_opens_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, home = tmp_path / "job", tmp_path / "home"
    for folder in (job / "src", home):
        folder.mkdir(parents=True)
        (folder / "secret").write_text(SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(job)
    script = (
        "import os\n"
        f"paths = [f'/proc/{{os.getppid()}}/environ', '/etc/passwd', {str(job / 'src/secret')!r}, {str(home / 'secret')!r}]\n"
        f"for path in [*paths, '/', {str(job)!r}, {str(home)!r}, {str(Path.home())!r}, '/tmp', '/etc']:\n"
        "    try:\n"
        "        print('READ', path, os.listdir(path) if os.path.isdir(path) else open(path).read())\n"
        "    except PermissionError:\n"
        "        pass\n"
        "import decimal, json\n"
        "print(decimal.Decimal(3))"
    )
    for shape in SHAPES:
        monkeypatch.setenv("PYTHONPATH", shape.replace("JOB", str(job)).replace("HOME", str(home)))
        assert Python().python(script) == "3\n", shape


# --- what a whole process is denied


def tried(uid: int, *versions: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What a rank of a user and its confined processes saw, one result per version of Landlock (see tests/helpers/escapes.py),
    and the files of the job's folder afterwards.
    """
    with tempfile.TemporaryDirectory() as name:  # not below pytest's folder, which no other user reaches
        job = Path(name)
        (job / "empty").mkdir()
        (job / "secret").write_text(SECRET)
        (job / "link").symlink_to("secret")
        for victim in ("victim", "victim1", "victim2"):
            (job / victim).write_text("v")
        for path in (job, *job.iterdir()):
            os.chown(path, uid, -1, follow_symlinks=False)
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                str(ROOT / "tests/helpers/escapes.py"),
                str(sandbox.__file__),
                name,
                str(uid),
                *versions,
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "HF_TOKEN": SECRET},
        )
        assert done.returncode == 0, done.stderr
        left = {path.name: path.read_text() if path.is_file() else "" for path in job.iterdir()}
    return [json.loads(line) for line in done.stdout.splitlines()], left


USERS = pytest.mark.parametrize("user", ["own", "other"])


def of_user(user: str) -> int:
    """This process's user, or one without privileges."""
    if user == "other" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    return os.getuid() if user == "own" else 65534


@USERS
def test_nothing_gets_out(user: str) -> None:
    """With each version of Landlock, as older kernels have it."""
    versions = ["1", "2", "3", "4", "5", "6", "7"]
    results, left = tried(of_user(user), *versions)
    assert len(results) == len(versions)
    for result in results:
        if {"Landlock", "seccomp"} & {*result["missing"]}:
            pytest.skip(f"this machine has no {result['missing']}")
        assert result["missing"] == []
        assert result["found"] == []
        assert result["signals"] == []
        assert result["ended"] == 0
        assert {value.strip("0") for name, value in result["status"].items() if name.startswith("Cap")} == {""}
        assert (result["status"]["Seccomp"], result["status"]["NoNewPrivs"]) == ("2", "1")
    files = {"secret": SECRET, "link": SECRET, "victim": "v", "victim1": "v", "victim2": "v", "empty": ""}
    assert left == files


@pytest.mark.full
@USERS
def test_without_confinement_most_would(user: str) -> None:
    """So that the test above can fail. In a container, fewer succeed."""
    (result,), left = tried(of_user(user), "none")
    assert len(result["found"]) > len(escapes.ESCAPES) / 2
    assert any(SECRET in each for each in result["found"])
    assert signal.SIGUSR1 in result["signals"]
    assert "made" in left and "victim1" not in left


def test_no_script_of_the_tool_gets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, by the tool itself, from a rank in the job's folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text(SECRET)
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    source = Path(escapes.__file__).read_text().partition("\nif __name__")[0]
    text = Python().python(f"{source}\nHERE = {str(tmp_path)!r}\nprint(succeeded())")
    signal.signal(signal.SIGUSR1, before)
    assert text == "[]\n"
    assert received == []
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_layers_that_are_missing_are_named(tmp_path: Path) -> None:
    """Without Landlock; and in a folder that it must open."""
    attempt = "import runpy, sys; print(*runpy.run_path(sys.argv[1])['confine'](2**30, int(sys.argv[2])), sep='; ')"
    for job, newest, missing in (
        (tmp_path, 7, ""),
        (tmp_path, 0, "Landlock"),
        (
            Path(os.__file__).parent / "json",
            7,
            f"Landlock that denies reading the job's folder {os.path.dirname(json.__file__)}",
        ),
    ):
        command = [sys.executable, "-P", "-c", attempt, str(sandbox.__file__), str(newest)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=job)
        assert done.stdout == missing + "\n"


def test_the_check_after_confining_tries(tmp_path: Path) -> None:
    assert sandbox.leaks(ctypes.CDLL(None), str(tmp_path)) == [
        ("Landlock", "reading the parent's environment"),
        ("Landlock", f"reading the job's folder {tmp_path}"),
        ("seccomp", "writing to a file"),
        ("seccomp", "a socket"),
        ("seccomp", "a signal to the parent"),
    ]


@pytest.mark.parametrize("place", [".venv", "."])
def test_an_editable_install_opens_no_folder(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a virtual environment that is the project's folder."""
    project = tmp_path / "project"
    (project / "src/package").mkdir(parents=True)
    (project / "lib").mkdir()
    for path in (project / ".env", project / "lib/answers", project / "src/package/__init__.py"):
        path.write_text(f"TOKEN = '{SECRET}'")
    venv.create(project / place, symlinks=True)
    (packages,) = (project / place / "lib").glob("python*/site-packages")
    (packages / "editable.pth").write_text(str(project / "src"))
    (packages / "installed.py").write_text("VALUE = 7")
    monkeypatch.setattr(sys, "executable", str(project / place / "bin/python"))
    monkeypatch.chdir(project)
    script = (
        f"import installed, os, sys\nprint(installed.VALUE, {str(project / 'src')!r} in sys.path)\n"
        f"for path in ('', '/src', '/src/package/__init__.py', '/.env', '/lib', '/lib/answers'):\n"
        "    try:\n"
        f"        print('READ', path, os.open({str(project)!r} + path, os.O_RDONLY))\n"
        "    except PermissionError:\n"
        "        pass\n"
        "import package\n"
    )
    assert Python().python(script).splitlines()[0] == "7 True"
    assert "READ" not in (text := Python().python(script))
    assert text.endswith("ModuleNotFoundError: No module named 'package'\n")


def template_process() -> None:
    TemplateProcess("{{ messages }}", "2026-01-01").close()


@pytest.mark.parametrize(
    "start",
    [lambda: Python().python("1"), lambda: Verifier("pattern", 5.0).ask("a", "a"), template_process],
    ids=["tool", "verifier", "template"],
)
def test_no_process_inherits_the_environment(
    start: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, shown = tmp_path / "python", tmp_path / "shown"
    python.write_text(f'#!/bin/sh\nenv > {shown}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    values = {"HF_TOKEN": SECRET, "PYTHONPATH": ":.", "PYTHONSTARTUP": "x", "PYTHONHASHSEED": "3", "LC_ALL": "C.UTF-8"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    start()
    names = {line.partition("=")[0] for line in shown.read_text().splitlines()} - {"PWD", "SHLVL", "_", "OLDPWD"}
    assert names >= {"PATH", "LC_ALL", "PYTHONHASHSEED"}
    assert {name for name in names if not name.startswith("LC_")} <= {*sandbox._VARIABLES, *sandbox._FIXED}
    assert SECRET not in shown.read_text()


# --- nothing stays behind

CHILD = ROOT / "src/phalanx/zoo/environments/_child.py"
RANK = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-P", sys.argv[1], "60", str(2**30), "0"], stdin=-1, stdout=-1)
child.stdin.write(b"import time\\nprint('runs')\\ntime.sleep(600)")
child.stdin.close()
child.stdout.readline(), child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_script_dies_with_its_rank() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(CHILD)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_script_whose_rank_has_died_does_not_begin() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", str(CHILD), "60", str(2**30), "0"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.DEVNULL)
    os.close(writing)
    with suppress(BrokenPipeError):
        child.communicate(b"import time\ntime.sleep(600)", timeout=LIMIT_S)
    assert child.wait(LIMIT_S) == 0
