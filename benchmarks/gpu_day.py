"""All of the minutes on a GPU in one command: is it right, and how fast is it. What matters most comes first.

    python benchmarks/gpu_day.py --part right --budget 380 --out DIR
    python benchmarks/gpu_day.py --part fast --budget 400 --out DIR
    python benchmarks/gpu_day.py --record       # on a CPU: the numbers that the stage `tiny` expects

Weights are random, and neither a network nor git is needed. Each stage runs in a process of its own with a limit. A
result is a line of JSON in DIR/results.jsonl, synced as soon as it is known, and a short line here, where everything
fits into 12,000 characters. A stage that no longer fits the budget is skipped. On a CPU the same runs at tiny shapes.
The exit status is 1 if a line fails, or no stage ran.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BEGAN = time.time()
ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # before torch is imported and looks for GPUs
    SETTINGS = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # forks of a process that has initialized CUDA cannot use it
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for trainer.deterministic
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
    }
    os.environ.update({key: value for key, value in SETTINGS.items() if key not in os.environ})
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "src")]

import gpu_fast  # noqa: E402
import gpu_right  # noqa: E402
import gpu_tiny  # noqa: E402
import torch  # noqa: E402
from gpu_lines import RAISED, Line, Part, Stage, adopt_orphans, device, first_line, kill_orphans  # noqa: E402
from measure import cpu_name  # noqa: E402

MOST, TABLE = 12_000, 3_000  # characters of the whole output, and of the table at its end
STATES = {True: "PASS", False: "FAIL", None: "-"}


STAGES: dict[str, Stage] = {**gpu_right.STAGES, **gpu_fast.stages()}


class Results:
    """The lines of all stages, in a file and on stdout."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = os.open(folder / "results.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.unwritten = ""
        self.lines: list[dict[str, Any]] = []
        self.room = MOST - TABLE

    def add(self, stage: str, line: Line) -> None:
        """Write a line; print it while there is room, and failures also later."""
        row = {"stage": stage, "t": round(time.time() - BEGAN, 1), **asdict(line)}
        self.lines.append(row)
        try:
            os.write(self.file, (json.dumps(row, default=str) + "\n").encode())
            os.fsync(self.file)
        except OSError as error:  # such as a full disk; the line is still printed
            self.unwritten = self.unwritten or first_line(error)
        value = "" if line.value is None else f"{line.value:.4g} {line.unit}"
        text = f"{row['t']:5.0f} {STATES[line.good]:4} {stage:9} {line.name:36} {value:>14}  {line.note}".rstrip()
        self.say(text[:170], always=line.good is False)

    def say(self, text: str, always: bool = False) -> None:
        """Print a line while there is room; with `always`, up to a third of the table's."""
        if len(text) < self.room + (TABLE // 3 if always else 0):
            self.room -= len(text) + 1
            print(text, flush=True)

    def failed(self) -> list[str]:
        return [f"{row['stage']}: {row['name'].strip()}" for row in self.lines if row["good"] is False]


def run(name: str, stage: Stage, limit: float, results: Results) -> None:
    """Run a stage for at most `limit` seconds, and end everything that it has started."""
    start = time.monotonic()
    part = Part(stage.run, Path(f"{name}.log").absolute())
    for line in part.results(limit):
        results.add(name, line)
    left = kill_orphans()
    if part.status is None:
        results.add(name, Line("ended at its limit", False, limit, "s"))
    elif part.status not in (0, RAISED):
        results.add(name, Line("exit status, or the signal", False, part.status))
    if part.status != 0 and part.log.is_file():
        for text in part.log.read_text(errors="replace").splitlines()[-6:]:
            results.say(f"      {name}| {text[:140]}")
    note = f"{left} processes that it left were killed" if left else ""
    results.add(name, Line("took", None, time.monotonic() - start, "s", note))


def main(argv: list[str] | None = None, chosen: dict[str, Stage] | None = None) -> int:
    """Run the stages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("right", "fast", "all"), default="all")
    parser.add_argument("--budget", type=float, default=560, metavar="S", help="seconds for everything (560)")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_day"), metavar="DIR", help="(outputs/gpu_day)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="only these stages")
    parser.add_argument("--record", action="store_true", help="record the CPU's numbers of `tiny`")
    args = parser.parse_args(argv)
    known = STAGES if chosen is None else chosen
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        parser.error(f"--only: no stage {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        results = Results(args.out)
        os.chdir(args.out)  # logs of stages go here
    except OSError as error:
        parser.error(f"--out: {error}; expected a folder that can be written")
    if args.record:
        gpu_tiny.record()
        return 0
    adopt_orphans()
    results.say(f"{time.time() - BEGAN:5.0f} {about()}")
    for name, stage in known.items():
        if args.part not in ("all", stage.part) or (args.only and name not in args.only):
            continue
        left = args.budget - (time.time() - BEGAN)
        if left < 0.7 * stage.expected:
            note = f"left of the budget; it takes about {stage.expected:.0f}"
            results.add(name, Line("skipped", None, left, "s", note))
            continue
        run(name, stage, min(stage.limit, left), results)
    print("\n".join(closing(results)), flush=True)
    ran = any(row["name"] != "skipped" for row in results.lines)
    return 1 if results.failed() or not ran else 0


PACKAGES = ("transformers", "diffusers", "peft", "triton", "trl")


def about() -> str:
    """The device and the versions. This process must not initialize CUDA, so that its forks can."""
    card = cpu_name()
    if device().type == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        card = "a GPU without nvidia-smi"
        if shutil.which(command[0]) is not None:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
            card = done.stdout.partition("\n")[0] or card
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return f"{card}, {', '.join(versions)}"


def closing(results: Results) -> list[str]:
    """The last lines, for docs/measurements.md."""
    good, failed = sum(row["good"] is True for row in results.lines), results.failed()
    names = f" ({'; '.join(failed)[:600]})" if failed else ""
    skipped = sum(row["name"] == "skipped" for row in results.lines)
    title = (
        f"{about()}, {time.strftime('%Y-%m-%d')}: {good} lines passed, {len(failed)} failed{names}, {skipped} skipped"
    )
    lost = [f"results.jsonl lacks lines: {results.unwritten}"] if results.unwritten else []
    return ["", *lost, "for docs/measurements.md:", title, *gpu_fast.table(results.lines)]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a process that the driver holds would keep multiprocessing from ending
