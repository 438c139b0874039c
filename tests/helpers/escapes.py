"""Expressions that try to get out of a confined process, each of which must fail there, and a rank that tries them all.

`python -P tests/helpers/escapes.py SANDBOX JOB UID NEWEST...` behaves like a rank of user UID, whose environment, folder JOB
and life are the aims. For each NEWEST, the newest version of Landlock to use, a forked process is confined by the file
SANDBOX and tries all expressions; "none" does not confine it, and shows that they can succeed. One line of JSON each
has what succeeded, the layers that were missing, the signals that the rank received, and lines of /proc/PID/status.
"""

# ruff: noqa: F401 - the expressions use them

import ctypes
import errno
import fcntl
import importlib.machinery
import json
import mmap
import os
import platform
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()
HERE = "/"  # the job's folder
# Numbers of system calls on x86-64 and on arm64.
CALLS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "ptrace": (101, 117),
    "openat2": (437, 437),
    "open_by_handle_at": (304, 265),
    "statfs": (137, 43),
    "syslog": (103, 116),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "fanotify_init": (300, 262),
    "inotify_init1": (294, 26),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "signalfd4": (289, 74),
    "timer_create": (222, 107),
    "timerfd_create": (283, 85),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "ioprio_set": (251, 30),
    "sched_setattr": (314, 274),
    "move_pages": (279, 239),
    "capset": (126, 91),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "init_module": (175, 105),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "kexec_load": (246, 104),
    "personality": (135, 92),
    "splice": (275, 76),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "fallocate": (285, 47),
    "pwrite64": (18, 68),
    "mlock": (149, 228),
    "mlockall": (151, 230),
    "set_mempolicy": (238, 237),
    "membarrier": (324, 283),
}


def call(name, *arguments):
    """A system call. Raises OSError if it fails."""
    result = LIBC.syscall(CALLS[name][platform.machine() == "aarch64"], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def probe(name, *arguments):
    """A system call that cannot succeed with these arguments. Raises OSError if it is refused as such."""
    try:
        return call(name, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        return error


def read(path):
    with open(path, "rb") as file:
        return file.read(100)


def write(path):
    with open(path, "w") as file:
        file.write("x")
    os.remove(path)


def after_fork(pid):
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)


def through_own_descriptor():
    return read(f"/proc/self/fd/{os.open(HERE + '/secret', os.O_PATH)}")


def inherited():
    for number in range(3, 64):
        try:
            return os.fstat(number), number
        except OSError:
            pass
    raise OSError("there is none")


def no_error(result):
    if not result or result == -1:
        raise OSError("refused")
    return result


def i386():
    """int 0x80 with the number of getpid there."""
    if platform.machine() != "x86_64":
        raise OSError("there is none")
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("b814000000cd80c3"))
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if result < 0:
        raise OSError(-result, "int 0x80")
    return result


def in_thread():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


PATHS = ["/", "/tmp", "/etc", "/home", "/dev", "/dev/shm", "/sys", "/proc", "/run", "/var", "/usr", "/usr/bin", "/opt"]
READS = [
    "inherited()",
    *[f"os.listdir({path!r})" for path in PATHS],
    *[f"read('/proc/' + str(PARENT) + {path!r})" for path in ("/environ", "/cmdline", "/maps", "/status", "/mounts")],
    "read(f'/proc/{PARENT}/task/{PARENT}/environ')",
    "read('/proc/self/environ')",
    "read('/proc/self/mountinfo')",
    "read('/proc/self/status')",
    "read('/proc/thread-self/maps')",
    "read('/proc/1/environ')",
    "read('/proc/net/tcp')",
    "read('/proc/cpuinfo')",
    "read('/proc/keys')",
    "os.open(f'/proc/{PARENT}/mem', os.O_RDONLY)",
    "os.listdir(f'/proc/{PARENT}/fd')",
    "os.listdir(f'/proc/{PARENT}/cwd')",
    "os.listdir(f'/proc/{PARENT}/root/tmp')",
    "os.readlink(f'/proc/{PARENT}/cwd')",
    "os.readlink(f'/proc/{PARENT}/exe')",
    "os.readlink(f'/proc/{PARENT}/ns/net')",
    "os.listdir(HERE)",
    "os.listdir(os.path.expanduser('~'))",
    "read(HERE + '/secret')",
    "read(HERE + '/link')",
    "read('/usr/lib/../..' + HERE + '/secret')",
    "read('/proc/self/root' + HERE + '/secret')",
    "read('/proc/self/cwd' + HERE + '/secret')",
    "through_own_descriptor()",
    "os.open('secret', os.O_RDONLY, dir_fd=os.open(HERE, os.O_PATH))",
    "call('openat2', -100, (HERE + '/secret').encode(), bytes(24), 24)",
    "probe('open_by_handle_at', -100, bytes(200), 0)",
    "no_error(LIBC.open((HERE + '/secret').encode(), 0))",
    "importlib.machinery.SourceFileLoader('x', HERE + '/secret').get_data(HERE + '/secret')",
    "read('/etc/passwd')",
    "read('/etc/shadow')",
    "read('/etc/hosts')",
    "read('/dev/mem')",
    "read('/dev/kmsg')",
    "call('syslog', 10, 0, 0)",
    "call('statfs', b'/', bytes(200))",
    "probe('process_vm_readv', PARENT, 0, 0, 0, 0, 0)",
    "probe('kcmp', PARENT, PARENT, 0, 0, 0)",
    "probe('keyctl', 0, -3, 0)",
    "probe('request_key', b'user', b'x', 0, 0)",
    "probe('pidfd_getfd', -1, 0, 0)",
    "probe('splice', -1, 0, 1, 0, 1, 0)",
    "probe('sendfile', 1, -1, 0, 1)",
    "probe('copy_file_range', -1, 0, 1, 0, 1, 0)",
    "probe('move_pages', PARENT, 0, 0, 0, 0, 0)",
]
SIGNALS = [
    "os.kill(PARENT, signal.SIGUSR1)",
    "os.kill(PARENT, 0)",
    "os.kill(1, 0)",
    "os.kill(-1, 0)",
    "os.killpg(0, 0)",
    "os.kill(os.getpid(), 0)",
    "call('tkill', PARENT, signal.SIGUSR1)",
    "call('tgkill', PARENT, PARENT, signal.SIGUSR1)",
    "call('rt_sigqueueinfo', PARENT, signal.SIGUSR1, struct.pack('iii', signal.SIGUSR1, 0, -1) + bytes(128))",
    "probe('rt_tgsigqueueinfo', PARENT, PARENT, signal.SIGUSR1, 0)",
    "probe('pidfd_send_signal', -1, 0, 0, 0)",
    "call('pidfd_open', PARENT, 0)",
    "probe('ptrace', 0x4206, 2**30, 0, 0)",
    "probe('process_vm_writev', PARENT, 0, 0, 0, 0, 0)",
    "probe('process_madvise', -1, 0, 0, 0, 0)",
    "fcntl.fcntl(1, 8, PARENT)",
    "fcntl.fcntl(1, 8, -os.getppid())",
    "fcntl.fcntl(1, 15, struct.pack('ii', 1, PARENT))",
    "fcntl.fcntl(1, 10, signal.SIGUSR1)",
    "fcntl.fcntl(1, 4, fcntl.fcntl(1, 3) | 0o20000)",
    "fcntl.fcntl(os.open('/usr/lib', 0), 1026, 1)",
    "probe('ioctl', 1, 0x8901, 0)",
    "probe('ioctl', 1, 0x8902, 0)",
    "probe('ioctl', 1, 0x5452, 0)",
    "probe('ioctl', 0, 0x5412, b'x')",
    "probe('ioctl', 0, 0x5410, 0)",
    "call('prctl', 1, 0, 0, 0, 0)",
    "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "os.nice(1)",
    "os.sched_setaffinity(PARENT, os.sched_getaffinity(0))",
    "os.sched_setscheduler(PARENT, os.SCHED_OTHER, os.sched_param(0))",
    "probe('sched_setattr', PARENT, 0, 0)",
    "probe('ioprio_set', 1, PARENT, 0)",
    "resource.prlimit(PARENT, resource.RLIMIT_CORE)",
    "resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))",
    "os.setsid() if os.getpid() != os.getsid(0) else 0",
    "os.setpgid(0, 0)",
    "probe('timer_create', 0, 0, 0)",
]
FREEZES = [  # FITHAW thaws what is not frozen; the filter's own test has FIFREEZE
    "probe('ioctl', os.open('/usr/lib', 0), 0xC0045878, 0)",
    "probe('ioctl', os.open(os.__file__, 0), 0x80086601, bytes(8))",
    "fcntl.fcntl(os.open(os.__file__, 0), 1024, fcntl.F_RDLCK)",
    "fcntl.lockf(os.open(os.__file__, 0), fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH)",
    "fcntl.fcntl(1, 1031, 4096)",
    "mmap.mmap(-1, 2**21, flags=0x40022)",
    "mmap.mmap(-1, 4096, flags=0x2022)",
    "mmap.mmap(-1, 4096).madvise(21)",
    "probe('mlock', 0, 4096)",
    "probe('mlockall', 2**20)",
    "len(mmap.mmap(-1, 2**31))",
    "call('adjtimex', bytes(300))",
    "probe('sethostname', b'x', -1)",
    "probe('reboot', 0, 0, 0, 0)",
    "probe('swapon', b'/nowhere', 0)",
    "probe('acct', b'/nowhere')",
    "probe('quotactl', 0, 0, 0, 0)",
    "probe('init_module', 0, 0, 0)",
    "probe('kexec_load', 0, 2**20, 0, 0)",
    "probe('set_mempolicy', 99, 0, 0)",
    "call('membarrier', 0, 0)",
]
WRITES = [
    *[f"write({path!r} + str(os.getpid()))" for path in ("/tmp/x", "/dev/shm/x", "/var/tmp/x", "/usr/lib/x")],
    "write(HERE + '/new')",
    "os.open(HERE, os.O_TMPFILE | os.O_RDWR)",
    "os.open(HERE + '/made', os.O_RDONLY | os.O_CREAT)",
    "os.open(HERE + '/victim', os.O_RDONLY | os.O_TRUNC)",
    "os.open(HERE + '/victim', os.O_WRONLY | os.O_APPEND)",
    "os.open('/dev/null', os.O_WRONLY)",
    "os.truncate(HERE + '/victim', 0)",
    "os.unlink(HERE + '/victim1')",
    "os.rename(HERE + '/victim2', HERE + '/moved')",
    "os.link(HERE + '/victim', HERE + '/hard')",
    "os.symlink('/etc', HERE + '/soft')",
    "os.mkdir(HERE + '/folder')",
    "os.rmdir(HERE + '/empty')",
    "os.mkfifo(HERE + '/fifo')",
    "os.mknod(HERE + '/node')",
    "os.chmod(HERE + '/victim', 0o777)",
    "os.chown(HERE + '/victim', os.getuid(), -1)",
    "os.utime(HERE + '/victim')",
    "os.setxattr(HERE + '/victim', 'user.x', b'1')",
    "probe('fallocate', -1, 0, 0, 1)",
    "probe('pwrite64', -1, b'x', 1, 0)",
    "probe('shmget', 77, 0, 0)",
    "probe('semget', 77, 0, 0)",
    "probe('msgget', 77, 0)",
    "probe('mq_open', b'nowhere', 0, 0, 0)",
    "probe('add_key', 0, 0, 0, 0, 0)",
    "call('memfd_create', b'x', 0)",
    "probe('memfd_secret', 2**20)",
]
PROCESSES = [
    "after_fork(os.fork())",
    "after_fork(os.forkpty()[0])",
    "after_fork(call('clone', 17, 0, 0, 0, 0))",
    "probe('clone3', 0, 0)",
    "probe('execve', b'/nowhere', 0, 0)",
    "probe('execveat', -100, b'/nowhere', 0, 0, 0)",
    "subprocess.run(['true'])",
    "no_error(os.system('true') == 0)",
    "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    "in_thread()",
    "os.pipe()",
    "os.eventfd(0)",
    "select.epoll()",
    "probe('signalfd4', -1, 0, 0, 0)",
    "call('timerfd_create', 1, 0)",
    "call('inotify_init1', 0)",
    "probe('fanotify_init', 0, 0)",
    "probe('io_uring_setup', 0, 0)",
    "probe('userfaultfd', 2**20)",
    "probe('bpf', 0, 0, 0)",
    "probe('perf_event_open', 0, 0, 0, 0, 0)",
    "probe('seccomp', 99, 0, 0)",
    "call('landlock_create_ruleset', 0, 0, 1)",
    "call('personality', 0)",
    "socket.socket()",
    "socket.socket(socket.AF_INET6)",
    "socket.socket(socket.AF_UNIX)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "socket.socketpair()",
    "call('unshare', 0)",
    "probe('setns', -1, 0)",
    "call('chroot', b'/')",
    "probe('pivot_root', b'/nowhere', b'/nowhere')",
    "probe('mount', 0, b'/nowhere', 0, 0, 0)",
    "probe('umount2', b'/nowhere', 0)",
    "probe('fsopen', b'nowhere', 0)",
    "probe('open_tree', -1, b'/nowhere', 0)",
    "os.setuid(os.getuid())",
    "os.setgroups([])",
    "probe('capset', 0, 0)",
    "no_error(LIBC.syscall(0x40000000 | 39))",
    "i386()",
]
ESCAPES = [*READS, *SIGNALS, *FREEZES, *WRITES, *PROCESSES]


def succeeded() -> list[str]:
    """The expressions that raise nothing."""
    found = []
    for expression in ESCAPES:
        try:
            value = eval(expression, globals())
        except (OSError, RuntimeError, MemoryError, ValueError, subprocess.SubprocessError):
            continue
        found.append(f"{expression} = {value!r:.200}")
    return found


def main(sandbox: str, job: str, uid: int, *versions: str) -> None:
    global HERE, PARENT
    confine = runpy.run_path(sandbox)["confine"]
    os.chdir(job)
    HERE, PARENT = job, os.getpid()
    if os.getpgrp() != PARENT:
        os.setpgid(0, 0)
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/PID belongs to the user again
    signals: list[int] = []
    for number in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, lambda number, frame: signals.append(number))
    for newest in versions:
        (results, result), (ending, end) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(results)
            os.close(end)
            for number, standard in ((ending, 0), (result, 1), (result, 2)):
                os.dup2(number, standard)
            for number in (ending, result):
                os.close(number)
            missing = [] if newest == "none" else confine(2**30, int(newest))
            print(json.dumps([succeeded(), missing]), flush=True)
            os.read(0, 1)
            os._exit(0)
        os.close(result)
        os.close(ending)
        found, missing = json.loads(os.fdopen(results).readline())
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        os.close(end)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kept = {
            name: status[name].strip() for name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "Seccomp", "NoNewPrivs")
        }
        report = {"found": found, "missing": missing, "signals": signals, "ended": ended, "status": kept}
        print(json.dumps(report), flush=True)
        signals = []


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
