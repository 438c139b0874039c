"""Seconds from the loss of a rank or a node to the next training step: in place, by a restart, and torchelastic alone.

    python -m benchmarks.recovery [--runs 3] [--ranks 1] [--kinds "in place,spare,restart,bare,joins"]

Two nodes of `ranks` ranks each, on this machine, train a tiny SD3 with a LoRA. In the middle of a step, either a rank
of node 1 is killed, whose launcher starts it again, or all processes of node 1 are. With IN_PLACE=1 the others go on;
else all ranks start again (MAX_RESTARTS=3; for a node NNODES=1:2) from the checkpoint of each second step. `spare`: a
third node takes the place of the lost one (SPARES=1); a rank that is lost may come back before. `bare`:
ranks that only import torch and count in an all_reduce, under the same torchrun. `joins`: the lost node is started once
the other goes on alone; seconds from its start to its first step, and how long the other then waits for it. The kinds
take turns. 200 s stand for a job that did not go on. The last line is JSON.
"""

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.exit import end_with_parent
from tests.faults.jobs import Job, kill, steps
from tests.helpers.ranks import free_port, launch_environment
from tests.helpers.tiny import tiny_sd3

LIMIT_S = 200.0
KINDS = ("in place", "spare", "restart", "bare", "joins")
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
SETTINGS = ("model.lora_rank=4", "trainer.save_freq=2", "trainer.total_training_steps=1000")
BARE = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    open(sys.argv[1], "a").write("x" * (dist.get_rank() == 0))
    time.sleep(0.1)
"""


def one(kind: str, lost: str, model: Path, folder: Path, ranks: int) -> list[float]:
    """Seconds from the loss to the next step, with `joins` see joins."""
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": str(ranks)}
    spares = int(kind == "spare")
    if kind in ("in place", "spare", "joins"):
        place |= {"IN_PLACE": "1", "SPARES": str(spares)}
    else:
        place |= {"MAX_RESTARTS": "3", "RDZV_CONF": RENDEZVOUS}
        if lost == "node":
            place |= {"NNODES": "1:2"}
    settings = (*SETTINGS, f"parallel.fsdp_size={ranks}")

    def start(number: int) -> Job:
        env = place | {"NODE_RANK": str(number), "PHASE_S": "0.05"}
        return stack.enter_context(Job(model, folder, *settings, env=env, name=f"node_{number}"))

    with contextlib.ExitStack() as stack:
        nodes = [start(number) for number in range(2 + spares)]
        nodes[0].until(lambda: len(steps(folder)) >= 3 and nodes[0].said.count("waits for a place") == spares)
        nodes[0].until(lambda: nodes[0].phase(0)[2] == "update")
        seconds = [_until_next(lambda: len(steps(folder)), nodes, lost)]
        return joins(folder, nodes[0], lambda: start(1)) if kind == "joins" else seconds


def joins(folder: Path, other: Job, start: Callable[[], Job]) -> list[float]:
    """Seconds from the start of a node to its first step, and between the two steps of the other one around that."""
    last, begin, told = time.monotonic(), time.monotonic(), other.said.count("with nodes 0, 1")
    start()
    done = len(steps(folder))
    while time.monotonic() - begin < LIMIT_S:
        if len(steps(folder)) > done:
            done, before, last = len(steps(folder)), last, time.monotonic()
            if other.said.count("with nodes 0, 1") > told:
                return [last - begin, last - before]
        time.sleep(0.02)
    return [LIMIT_S]


def bare(lost: str, folder: Path, ranks: int) -> list[float]:
    """The same for torchelastic alone."""
    script, log, port = folder / "bare.py", folder / "log", free_port()
    script.write_text(BARE)
    nodes = []
    for number in range(2):
        words = ["torchrun", "--nnodes", "1:2" if lost == "node" else "2", "--nproc-per-node", str(ranks)]
        words += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        words += ["--rdzv-conf", f"is_host={'true' if number == 0 else 'false'},{RENDEZVOUS}", "--rdzv-id", "bare"]
        mark = f"{folder}/bare_{number}"
        nodes.append(_Bare([*words, str(script), str(log)], mark, script))
    with nodes[0], nodes[1]:
        deadline = time.monotonic() + 120
        while not log.exists() or log.stat().st_size < 20:
            assert time.monotonic() < deadline, "torchrun did not start"
            time.sleep(0.05)
        return [_until_next(lambda: log.stat().st_size, nodes, lost)]


class _Bare(Job):
    """A torchrun without train.sh, with a Job's ways to find and kill its processes."""

    def __init__(self, words: list[str], mark: str, script: Path) -> None:
        self._mark, self._script = f"NODE_MARK={mark}\0", str(script)
        self.log = Path(f"{mark}.log")
        with self.log.open("w") as log:
            environment = launch_environment({"NODE_MARK": mark})
            self.process = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
            )

    def ranks(self) -> list[int]:
        return sorted(pid for pid, line in self.processes().items() if f"-u {self._script}" in line)


def _until_next(count: Callable[[], int], nodes: Sequence[Job], lost: str) -> float:
    before, begin = count(), time.monotonic()
    if lost == "node":
        nodes[1].kill_all()
    else:
        kill(nodes[1].ranks()[-1], signal.SIGKILL)
        time.sleep(0.2)  # a step that was nearly over when the rank was killed is not the next one
        before = count()
    while count() <= before and time.monotonic() - begin < LIMIT_S:
        time.sleep(0.02)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        model = tiny_sd3(Path(name) / "sd3")
        for run in range(args.runs):
            for lost in ("rank", "node"):
                for kind in args.kinds.split(","):
                    if kind == "joins" and lost == "rank":  # its node's launcher starts it again at once
                        continue
                    folder = Path(name) / f"{run} {lost} {kind}".replace(" ", "_")
                    folder.mkdir()
                    took = (
                        bare(lost, folder, args.ranks) if kind == "bare" else one(kind, lost, model, folder, args.ranks)
                    )
                    for value, what in zip(took, ("", ", the other waits"), strict=False):
                        seconds[f"{lost}, {kind}{what}"].append(round(value, 1))
                        print(f"{lost} lost, {kind}{what}: {value:.1f} s", file=sys.stderr, flush=True)
    for key, values in seconds.items():
        print(f"{key:20} median {statistics.median(values):5.1f} s of {sorted(values)}")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
