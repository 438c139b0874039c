"""Sandbox for a process that runs untrusted code, such as a verifier: no network, no child processes, no file writes.

Its layers need no privileges: resource limits, no capabilities, a seccomp filter that allows only the system calls of a
computing Python process, and Landlock, which allows reading only the files of Python and its packages. This module
imports only the standard library, because child processes run this file without phalanx.
"""

import ctypes
import errno
import os
import platform
import resource
import site
import struct
import sys
from collections.abc import Callable
from pathlib import Path

# Environment variables that a sandboxed process receives, besides those that begin with LC_. None of them contains a
# token, and none of them changes what it may read.
_VARIABLES = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONHASHSEED")
_FIXED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # jemalloc prints that it cannot start a thread
}

# The system calls that a computing Python process needs (memory, clocks, reading files), by number on each
# architecture: AUDIT_ARCH, calls that are allowed whatever their arguments, and the numbers of those in _limited_calls.
# fmt: off
_CALLS: dict[str, tuple[int, tuple[int, ...], dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 24, 25, 32, 33, 35, 36, 38, 39, 60, 63, 78, 79,
         89, 96, 97, 98, 99, 102, 104, 107, 108, 110, 131, 186, 202, 204, 217, 218, 228, 229, 230, 231, 262, 267, 269,
         271, 273, 292, 318, 332, 334, 439),
        {"open": 2, "openat": 257, "mmap": 9, "madvise": 28, "ioctl": 16, "fcntl": 72},
    ),
    "aarch64": (
        0xC00000B7,
        (17, 23, 24, 48, 57, 61, 62, 63, 64, 65, 66, 67, 73, 78, 79, 80, 93, 94, 96, 98, 99, 101, 102, 103, 113, 114,
         115, 123, 124, 132, 134, 135, 139, 160, 163, 165, 169, 172, 173, 174, 175, 176, 177, 178, 179, 214, 215, 216,
         226, 278, 291, 293, 439),
        {"openat": 56, "mmap": 222, "madvise": 233, "ioctl": 29, "fcntl": 25},
    ),
}
# fmt: on
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_RESERVED = 0x42000  # MAP_HUGETLB and MAP_LOCKED: memory that others would miss
_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)  # of madvise: not those that evict or poison pages of shared files
_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX
_COMMANDS = (0, 1, 2, 3, 5, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_DUPFD_CLOEXEC
_SET_FLAGS, _ASYNC = 4, 0o20000  # F_SETFL, and O_ASYNC, which sends signals to the descriptor's owner
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_LOAD, _EQUAL, _ANY_BIT, _GIVE = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ, BPF_JMP|JSET, BPF_RET
_DUMPABLE, _SET_SECCOMP, _DROP_BOUND, _NO_NEW_PRIVS, _AMBIENT = 4, 22, 24, 38, 47  # of prctl
_FILTER, _CLEAR_ALL, _CAPABILITIES = 2, 4, 0x20080522  # the latter is the version of the headers of capset
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, on all machines
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3  # LANDLOCK_ACCESS_FS_READ_FILE and READ_DIR
Step = tuple[int, int, int, int]  # of a filter: code, steps to skip if true and if false, operand


def environment() -> dict[str, str]:
    """The environment variables of a sandboxed process."""
    variables = dict(_FIXED)
    for name, value in os.environ.items():
        if name in _VARIABLES or name.startswith("LC_"):
            variables.setdefault(name, value)
    return variables


def command(script: Path, *arguments: str) -> list[str]:
    """The command line of a sandboxed process, which finds packages where this interpreter has them installed."""
    no_user_site = ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, "-P", *no_user_site, str(script), *arguments]


def confine(memory: int = 4 * 2**30, newest: int = 7) -> list[str]:
    """Confine this process permanently, with at most `memory` bytes of address space. Its current folder should be that
    of the job, and becomes "/".

    newest: the newest version of Landlock to use.

    Returns the names of the layers that this machine does not support, or that let through what they should deny.
    """
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    if not sys.platform.startswith("linux"):  # macOS refuses to limit the address space
        return ["seccomp", "Landlock", "limit of memory"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        job = os.getcwd()
    except FileNotFoundError:
        job = "/"
    os.chdir("/")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # a pipe in core_pattern receives dumps whatever the limit is
    packages = [path for path in site.getsitepackages() if os.access(path, os.R_OK)]
    missing = [] if _without_capabilities(libc) else ["empty set of capabilities"]
    missing += [f"right to read {path} without capabilities" for path in packages if not os.access(path, os.R_OK)]
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or not _apply_landlock(libc, newest, job):
        missing.append("Landlock")
    if not _apply_seccomp(libc):
        missing.append("seccomp")
    sys.path_importer_cache.clear()  # it knows modules in folders that are closed now
    return missing + [f"{layer} that denies {what}" for layer, what in leaks(libc, job) if layer not in missing]


def leaks(libc: ctypes.CDLL, job: str) -> list[tuple[str, str]]:
    """Try what a confined process should be denied. Returns the layers that let something through, and what it was."""
    parent = os.getppid()
    passed: list[tuple[str, str]] = []

    def attempt(layer: str, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            return
        passed.append((layer, what))

    def opened(path: str, flags: int = os.O_RDONLY) -> Callable[[], object]:
        return lambda: os.close(os.open(path, flags))

    attempt("Landlock", "reading the parent's environment", opened(f"/proc/{parent}/environ"))
    attempt("Landlock", f"reading the job's folder {job}", opened(job))
    attempt("seccomp", "writing to a file", opened(os.devnull, os.O_WRONLY))
    attempt("seccomp", "a socket", lambda: os.close(libc.socket(1, 1, 0)))  # -1, which cannot be closed, if refused
    attempt("seccomp", "a signal to the parent", lambda: os.kill(parent, 0))
    return passed


def _without_capabilities(libc: ctypes.CDLL) -> bool:
    """Give up all capabilities, which a process of root has; returns False if that is refused."""
    for capability in range(64):
        libc.prctl(_DROP_BOUND, capability, 0, 0, 0)  # refused to other users, who have none to lose
    libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    dropped: bool = libc.capset(struct.pack("Ii", _CAPABILITIES, 0), bytes(24)) == 0
    return dropped


def _readable_paths(job: str) -> list[str]:
    """Python's standard library, the packages installed for it, and shared libraries: the same folders and files
    whatever PYTHONPATH, sys.path and the current folder are.
    """
    paths = {os.path.dirname(os.__file__), *site.getsitepackages(), "/usr/share/zoneinfo"}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib"}
    paths.add(f"{sys.base_exec_prefix}/{sys.platlibdir}")
    if site.ENABLE_USER_SITE:
        paths.add(site.getusersitepackages())
    if sys.prefix != sys.base_prefix:  # of a virtual environment, which may be the project's folder, only libraries
        paths |= set(map(str, filter(Path.is_file, Path(sys.prefix, "lib").glob("lib*.so*"))))
    never = set(map(os.path.realpath, ("/", job, os.path.expanduser("~"))))
    return sorted(path for path in paths if os.path.isabs(path) and os.path.realpath(path) not in never)


def _apply_landlock(libc: ctypes.CDLL, newest: int, job: str) -> bool:
    """Allow nothing but reading Python's files; returns False if the kernel does not support Landlock."""
    abi = min(libc.syscall(_CREATE_RULESET, None, 0, 1), newest)
    if abi < 1:
        return False
    # handle all file access rights that this version of Landlock knows, which denies them unless a rule allows them
    bits = 13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16
    attributes = struct.pack("QQQ", (1 << bits) - 1, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    for path in _readable_paths(job):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it does not exist, or this user cannot reach it
            continue
        rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
    quiet = 1 if abi >= 7 else 0  # LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF: no audit record per refusal
    confined: bool = libc.syscall(_RESTRICT_SELF, ruleset, quiet) == 0
    os.close(ruleset)
    return confined


def _apply_seccomp(libc: ctypes.CDLL) -> bool:
    """Make system calls other than those in _CALLS fail with EPERM; returns False if the filter is not supported."""
    if platform.machine() not in _CALLS:
        return False
    program = seccomp_program(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(code))  # struct sock_fprog
    accepted: bool = libc.prctl(_SET_SECCOMP, _FILTER, filter_, 0, 0) == 0
    return accepted


def seccomp_program(machine: str) -> list[Step]:
    """The filter of an architecture, as steps of struct sock_filter; loads are offsets in struct seccomp_data. Numbers
    of other ABIs (i386, x32) are in no list, so they are refused.
    """
    arch, calls, numbers = _CALLS[machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_GIVE, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    for call in calls:
        program += [(_EQUAL, 0, 1, call), (_GIVE, 0, 0, _ALLOW)]
    for name, steps in _limited_calls().items():
        if name in numbers:
            program += [(_EQUAL, 0, len(steps), numbers[name]), *steps]
    return [*program, (_GIVE, 0, 0, _REFUSE)]


def _limited_calls() -> dict[str, list[Step]]:
    """The system calls that are allowed with some arguments only. The kernel, too, reads the lower 32 bits of these."""
    flags = _forbid_bits(2, _ASYNC)
    return {
        "open": _forbid_bits(1, _WRITING),
        "openat": _forbid_bits(2, _WRITING),
        "mmap": _forbid_bits(3, _RESERVED),
        "madvise": _one_of(2, _ADVICE),
        "ioctl": _one_of(1, _REQUESTS),
        "fcntl": [
            (_LOAD, 0, 0, _argument_offset(1)),
            (_EQUAL, 0, len(flags), _SET_FLAGS),
            *flags,
            *_one_of(1, _COMMANDS),
        ],
    }


def _forbid_bits(argument: int, bits: int) -> list[Step]:
    """Allow a call unless the argument has any of the bits."""
    return [
        (_LOAD, 0, 0, _argument_offset(argument)),
        (_ANY_BIT, 0, 1, bits),
        (_GIVE, 0, 0, _REFUSE),
        (_GIVE, 0, 0, _ALLOW),
    ]


def _one_of(argument: int, values: tuple[int, ...]) -> list[Step]:
    """Allow a call only if the argument is one of the values."""
    steps = [(_LOAD, 0, 0, _argument_offset(argument))]
    for value in values:
        steps += [(_EQUAL, 0, 1, value), (_GIVE, 0, 0, _ALLOW)]
    return [*steps, (_GIVE, 0, 0, _REFUSE)]


def _argument_offset(argument: int) -> int:
    """The place of an argument's lower half in struct seccomp_data."""
    return 16 + 8 * argument
