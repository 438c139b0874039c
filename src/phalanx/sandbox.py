"""Sandbox for a process that runs untrusted code, such as a verifier: no network, no child processes, no file writes.

Three layers, none of which needs privileges: resource limits, a seccomp filter that allows only the system calls of a
computing Python process, and Landlock, which allows reading only the files of Python and its packages. This module
imports only the standard library, because child processes run this file without phalanx.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from pathlib import Path

# Environment variables that a sandboxed process receives, besides those that begin with LC_ or PYTHON. None of them
# contains a token.
_VARIABLES = ("PATH", "LANG", "LD_LIBRARY_PATH")
_FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

# The system calls that a computing Python process needs (memory, clocks, signals to itself, reading files), by number
# on each architecture: AUDIT_ARCH, allowed calls, and {open call: index of the argument that must not request writing}.
# fmt: off
_CALLS: dict[str, tuple[int, tuple[int, ...], dict[int, int]]] = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 24, 25, 28, 32, 33, 35, 36, 38, 39, 60,
         63, 72, 78, 79, 89, 96, 97, 98, 99, 102, 104, 107, 108, 110, 131, 186, 202, 204, 217, 218, 228, 229, 230, 231,
         262, 267, 269, 271, 273, 292, 318, 332, 334, 439),
        {2: 1, 257: 2},
    ),
    "aarch64": (
        0xC00000B7,
        (17, 23, 24, 25, 29, 48, 57, 61, 62, 63, 64, 65, 66, 67, 73, 78, 79, 80, 93, 94, 96, 98, 99, 101, 102, 103, 113,
         114, 115, 123, 124, 132, 134, 135, 139, 160, 163, 165, 169, 172, 173, 174, 175, 176, 177, 178, 179, 214, 215,
         216, 222, 226, 233, 278, 291, 293, 439),
        {56: 2},
    ),
}
# fmt: on
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, on all machines
_READ = 1 << 2 | 1 << 3  # LANDLOCK_ACCESS_FS_READ_FILE and READ_DIR


def environment() -> dict[str, str]:
    """The environment variables of a sandboxed process."""
    variables = dict(_FIXED)
    for name, value in os.environ.items():
        if name in _VARIABLES or name.startswith(("LC_", "PYTHON")):
            variables.setdefault(name, value)
    return variables


def confine(memory: int = 4 * 2**30) -> list[str]:
    """Confine this process permanently, with at most `memory` bytes of address space.

    Returns the names of the layers that this machine does not support.
    """
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    missing = []
    if not sys.platform.startswith("linux"):
        return ["seccomp", "Landlock"]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or not _landlock(libc):
        missing.append("Landlock")
    if not _seccomp(libc):
        missing.append("seccomp")
    return missing


def _landlock(libc: ctypes.CDLL) -> bool:
    """Allow nothing but reading below Python's folders; returns False if the kernel does not support Landlock."""
    abi = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False
    # handle all file access rights that this version of Landlock knows, which denies them unless a rule allows them
    bits = 13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16
    attributes = struct.pack("QQQ", (1 << bits) - 1, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    folders = {*sys.path, sys.prefix + "/lib", sys.base_prefix + "/lib", "/usr/lib", "/usr/lib64", "/lib", "/lib64"}
    for folder in sorted(folders):
        if not Path(folder).is_absolute() or not Path(folder).is_dir():
            continue
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", _READ, descriptor), 0)
        os.close(descriptor)
    confined: bool = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return confined


def _seccomp(libc: ctypes.CDLL) -> bool:
    """Make system calls other than those in _CALLS fail with EPERM; returns False if the filter is not supported."""
    if platform.machine() not in _CALLS:
        return False
    arch, calls, opens = _CALLS[platform.machine()]
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ, BPF_JMP|JSET, BPF_RET

    # struct sock_filter: code, jump offsets if true and if false, operand; loads are offsets in struct seccomp_data
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, _REFUSE), (load, 0, 0, 0)]
    for call in calls:
        program += [(equal, 0, 1, call), (give, 0, 0, _ALLOW)]
    for call, argument in opens.items():
        program += [(equal, 0, 4, call), (load, 0, 0, 16 + 8 * argument), (any_bit, 0, 1, _WRITING)]
        program += [(give, 0, 0, _REFUSE), (give, 0, 0, _ALLOW)]
    program.append((give, 0, 0, _REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(code))  # struct sock_fprog
    accepted: bool = libc.prctl(_SET_SECCOMP, _FILTER, filter_, 0, 0) == 0
    return accepted
