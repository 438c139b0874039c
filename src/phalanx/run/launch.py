"""torchrun with one-line errors: `python3 -m phalanx.run.launch [torchrun options] tasks/<task>.py ...`.

train.sh starts it on each node. It differs from torchrun in five ways:

- A single rank without restarts is started directly, because torchrun takes as long to load as the rank itself.
- The task checks its command line first, so a mistake is reported once, before any rank starts.
- The first error, printed by a rank, is the last output on the terminal, and the exit status is that of the failed
  rank. torchrun's 40 lines of traceback and banners appear only with PHALANX_TRACEBACK=1.
- If its parent process dies, even by kill -9, the launcher and its ranks die too (see `exit.end_with_parent`).
- It tries to reach node 0 before torch does, so a wrong MASTER_ADDR is reported in one line within seconds, and it
  prints a line while it waits for lost nodes.
"""

import contextlib
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from phalanx.exit import MARKS, STORE, TOLD, end, end_with_parent, in_place, place_of, say
from phalanx.garbage import uncollected

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

PATIENCE_S = 5.0  # wait silently this long for node 0, because nodes need not start together
JOIN_S = 600.0  # torch's own limit
HEED_S = 30  # torch's own limit, after which it kills a rank that ignores SIGTERM
QUIET_S = 10.0  # time without ranks on this node, after which the launcher says that it waits for other nodes
# train.sh's arguments for one rank, if the user sets no others
ALONE = ["--standalone", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "0"]
ALONE += ["--signals-to-handle", "SIGTERM"]
STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # statuses of ranks that were stopped because another one failed


def main(argv: list[str]) -> NoReturn:
    """Run torchrun with these arguments and exit with its status."""
    end_with_parent()
    if in_place() and not sys.platform.startswith("linux"):
        say(f"error: IN_PLACE=1 needs Linux, and this is {sys.platform}; leave it out")
        sys.exit(2)
    verbose = os.environ.get("PHALANX_TRACEBACK") == "1"
    options, task = argv[: len(ALONE)], argv[len(ALONE) :]
    if options == ALONE and not in_place() and not task[0].startswith("-") and not verbose:
        _run_alone(task)
    if not verbose:
        # torch's Python and C++ loggers would repeat at length the errors that are printed here in one line
        logging.disable()
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # read once, when torch is loaded
    with uncollected():
        from torch.distributed import run

        from phalanx.run.keep_store import serving

    args = run.parse_args(argv)
    _, port, first = _node_0(args)
    _check_task(args.training_script, args.training_script_args)
    find_node_0(args)
    _announce_start(args)
    with tempfile.TemporaryDirectory(prefix="phalanx-launch-") as folder:
        os.environ[MARKS] = folder
        if ":" in args.nnodes or in_place():
            _note_signals(Path(folder, TOLD))
        with serving(port) if in_place() and first else contextlib.nullcontext():
            if verbose:
                run.main(argv)
            else:
                _run_torchrun(args, folder)
        sys.exit(_unfinished_status(folder))


def _run_torchrun(args: Namespace, folder: str) -> None:
    """Run torchrun, and exit if it fails. `folder` is where its ranks leave their marks (see `exit.begin`)."""
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

    from phalanx.run.rendezvous import in_words

    del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks must not inherit it
    if args.rdzv_backend == "static" and args.nnodes != "1":
        threading.Thread(target=_count_nodes, args=(args,), daemon=True).start()
    if args.nnodes != "1" and args.max_restarts > 0:
        threading.Thread(target=_tell_of_waiting, args=(args.nnodes,), daemon=True).start()
    try:
        run.run(args)
    except ChildFailedError as error:
        sys.exit(_report_failures(error))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except RendezvousConnectionError as error:
        address, port, _ = _node_0(args)
        stopped = [status for _, status in _read_marks(folder) if status > 128]
        ended = "this node's ranks were stopped" if stopped else "this node's ranks cannot start"
        cause = in_words(error.__cause__ or error)
        say(f"error: node 0 (MASTER_ADDR={address}, MASTER_PORT={port}) has left the job, and {ended}: {cause}")
        sys.exit(stopped[0] if stopped else 1)
    except (DistError, RendezvousError, OSError) as error:
        say(f"error: {in_words(error)}")
        sys.exit(1)
    if not _node_0(args)[2]:
        say("this node's ranks have ended")


def _unfinished_status(folder: str) -> int:
    """The launcher's exit status if all ranks exited with status 0: 1 if some of them left without `exit.end`, else the
    real status of ranks that hid it from torchrun, so as not to be restarted (see `exit.end`).
    """
    ranks = [rank for rank, status in _read_marks(folder) if status < 0]
    if ranks:
        numbers = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        ended = f"ended with status 0 before {'their' if len(ranks) > 1 else 'its'} job was done"
        say(f"error: {numbers} on {socket.gethostname()} {ended}, for example by os._exit in a reward")
    return 1 if ranks else max((status for _, status in _read_marks(folder)), default=0)


def _read_marks(folder: str) -> list[tuple[int, int]]:
    """The ranks that have begun and left a mark, each with its exit status, -1 if it did not record one."""
    marks = []
    for file in Path(folder).iterdir():
        if file.name != TOLD:
            rank, _, status = file.read_text().partition(" ")
            marks.append((int(rank), int(status or -1)))
    return sorted(marks)


def _note_signals(file: Path) -> None:
    """Create `file` for the ranks when this launcher receives SIGTERM, before torchrun passes the signal on to them."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # in addition to torchrun's own handler

    def wait() -> None:
        while signal.SIGTERM not in os.read(reader, 64):
            pass
        file.touch()

    threading.Thread(target=wait, daemon=True).start()


def _run_alone(command: list[str]) -> NoReturn:
    """Run a single rank as torchrun would, and exit with its status."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}  # 0: any free one
    ranks: list[subprocess.Popen[bytes]] = []
    stopped = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for rank in ranks:
            if number == signal.SIGALRM:
                rank.kill()
            else:
                rank.terminate()
                signal.alarm(max(1, int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))))

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix="phalanx-launch-") as folder:
        marks = Path(folder, "marks")
        marks.mkdir()
        report = Path(folder, "error.json")
        environment = os.environ | place | {"TORCHELASTIC_ERROR_FILE": str(report), MARKS: str(marks)}
        ranks.append(subprocess.Popen([sys.executable, "-u", *command], env=environment))
        if stopped:
            ranks[0].terminate()
        status = ranks[0].wait()
        if status == 0:
            sys.exit(_unfinished_status(str(marks)))
        told = report.is_file()
    if not told and not stopped:
        _say_end(0, status)
    sys.exit(status if status >= 0 else 128 - status)


def _check_task(task: str, words: list[str]) -> None:
    """Let the task check its command line; if it reports a mistake, exit with its status."""
    if not Path(task).is_file() or "phalanx.run.cli" not in Path(task).read_text():
        return  # not a task of Phalanx
    child = os.fork()  # the child need not load torch again, which takes longer than the check
    if child == 0:
        logging.disable(logging.NOTSET)
        os.environ["PHALANX_CHECK"] = "1"
        sys.argv, sys.path[0] = [task, *words], str(Path(task).parent)
        runpy.run_path(task, run_name="__main__")
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        sys.exit(status if status > 0 else 128 - status)


def find_node_0(args: Namespace) -> None:
    """Wait until node 0's port answers, or on node 0 itself until its address resolves; report a long wait.

    Exits after JOIN_S seconds.
    """
    address, port, first = _node_0(args)
    if not address:
        return
    at, kept = f"MASTER_ADDR={address}, MASTER_PORT={port}", os.environ.get("STORE_ADDR")
    where = f"the store (STORE_ADDR={kept})" if kept else f"node 0 ({at})"
    begin, told = time.monotonic(), False
    while (problem := _node_problem(address, port, first)) is not None:
        waited = time.monotonic() - begin
        if waited > JOIN_S:
            say(f"error: {where} was not reached within {JOIN_S:.0f} s: {problem}")
            sys.exit(1)
        if waited > PATIENCE_S and not told:
            say(f"waiting for {where}, at most {JOIN_S:.0f} s: {problem}")
            told = True
        time.sleep(0.5)
    if first and not _is_own(address):
        say(f"WARNING: this is node 0, but {at} is not one of its addresses; the job hangs unless it is routed here")


def _announce_start(args: Namespace) -> None:
    """Say that ranks are starting, since they take seconds to load torch. Nodes other than node 0 print little else."""
    address, _, first = _node_0(args)
    nodes = os.environ["NNODES"] if in_place() else args.nnodes
    where = "" if nodes == "1" else f" on each of {nodes} nodes"
    if not first and os.environ.get("NODE_RANK") != "0":
        where = f"; node 0 ({address}) shows the job's progress"
    say(f"starting {args.nproc_per_node} {'rank' if args.nproc_per_node == '1' else 'ranks'}{where}")


def _node_0(args: Namespace) -> tuple[str, int, bool]:
    """Node 0's address and port, and whether this is node 0. The address of a job on one node is empty. With STORE_ADDR
    they are those of the store, which is at no node.
    """
    if in_place():
        address, _, at = os.environ[STORE].rpartition(":")
        return address, int(at), os.environ["NODE_RANK"] == "0" and not os.environ.get("STORE_ADDR")
    if args.standalone:
        return "", 0, True
    if args.rdzv_endpoint:
        address, _, port = args.rdzv_endpoint.rpartition(":")
        return address, int(port), "is_host=true" in args.rdzv_conf
    return args.master_addr, args.master_port, args.node_rank == 0


def _node_problem(address: str, port: int, first: bool) -> str | None:
    """The reason why node 0 cannot be reached, None if it can."""
    try:
        if first:  # nothing listens on its port yet
            socket.getaddrinfo(address, port)
            return None
    except socket.gaierror as error:
        return f"the name cannot be resolved ({error.strerror})"
    from phalanx.run.rendezvous import unreachable

    return unreachable(address, port)


def _is_own(address: str) -> bool:
    """Whether this machine can bind a socket to an address."""
    for family, kind, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.bind(place)
            return True
    return False


def _count_nodes(args: Namespace) -> None:
    """Register this node, and report missing nodes until ranks start. Exits if this node cannot be part of the job."""
    from torch.distributed import DistError, PrefixStore, TCPStore

    from phalanx.run.rendezvous import SAY_S, missing, register, waiting

    begin, told, nodes = time.monotonic(), SAY_S, int(args.nnodes)
    time.sleep(2)  # if torch cannot listen on node 0's port, it has reported that by then
    with contextlib.suppress(DistError):  # torch uses the same store and reports its loss
        store = TCPStore(args.master_addr, args.master_port, wait_for_workers=False)
        at = PrefixStore("nodes", store)
        try:
            register(at, "node", args.node_rank, nodes)
        except ValueError as error:
            end(2, words=f"error: {error}")
        while not _has_ranks():
            waited = time.monotonic() - begin
            if waited > told:
                say(waiting("node", nodes, missing(at, "node", nodes), waited))
                told *= 2
            time.sleep(0.5)


def _tell_of_waiting(nodes: str) -> NoReturn:
    """Say that torch is waiting for other nodes whenever this node's ranks have ended and no new ones have started."""
    ended = None
    while True:
        time.sleep(1)
        if _has_ranks():
            ended = time.monotonic()
        elif ended is not None and time.monotonic() - ended > QUIET_S:
            say(f"this node's ranks have ended; waiting for other nodes (NNODES={nodes}), at most {JOIN_S:.0f} s")
            ended = None


def _has_ranks() -> bool:
    """Whether this process has children."""
    children = ""
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread is gone
            children += file.read_text()
    return bool(children)


def _report_failures(error: "ChildFailedError") -> int:
    """The exit status of failed ranks; prints the cause unless one of the ranks has done so."""
    failures = dict(sorted(error.failures.items(), key=lambda item: item[1].timestamp))
    told = [failure for failure in failures.values() if _has_reported(failure)]
    if told and told[0].exitcode < 128:
        # A rank may notice the loss of a killed one and end before the launcher checks either of them. Ranks that
        # the launcher itself kills, because they ignore SIGTERM, are reported HEED_S later.
        killed = [failure for failure in failures.values() if failure.exitcode == -signal.SIGKILL]
        early = any(failure.timestamp - told[0].timestamp < HEED_S for failure in killed)
        return 128 + signal.SIGKILL if early else told[0].exitcode
    # A rank that died prints nothing; another one reports its loss, and ends because the launcher stops it.
    causes = [rank for rank, failure in failures.items() if failure.exitcode not in STOPPED]
    rank = causes[0] if causes else next(iter(failures))
    first = failures[rank]
    silent = not isinstance(first.message, dict) and first.exitcode > 0  # other ranks know only that it is gone
    if (silent or not told) and isinstance(first.message, dict):
        say(first.message["message"])
    elif silent or not told:
        _say_end(rank, first.exitcode)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def _has_reported(failure: "ProcessFailure") -> bool:
    """Whether this rank has printed its error itself (see `exit.end`)."""
    return isinstance(failure.message, dict) and bool(failure.message["extraInfo"].get("told"))


def _say_end(rank: int, status: int) -> None:
    """Report the exit of a rank that has not reported an error itself."""
    name = place_of(rank)
    if in_place():  # torchrun knows only the ranks of its node
        name = f"local rank {rank} of node {os.environ['NODE_RANK']} on {socket.gethostname()}"
    if status < 0:
        say(f"error: {name} was killed by {signal.Signals(-status).name}, possibly out of memory")
    else:
        say(f"error: {name} ended with status {status}, without a word")


if __name__ == "__main__":
    main(sys.argv[1:])
