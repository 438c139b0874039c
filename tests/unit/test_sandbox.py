"""What a confined process is denied, whatever the interpreter's paths are, as the kernel decides it."""

import errno
import os
from pathlib import Path

import pytest

from phalanx import sandbox
from phalanx.environments.built_in.python import Python

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
        "import decimal, json, numpy\n"
        "print(numpy.ones(3).sum())"
    )
    for shape in SHAPES:
        monkeypatch.setenv("PYTHONPATH", shape.replace("JOB", str(job)).replace("HOME", str(home)))
        assert Python().python(script) == "3.0\n", shape
