"""One command for the first minutes on a GPU: checks that need real kernels, as a table of PASS and FAIL.

    make gpu-smoke                                     # or, where make cannot install anything:
    python benchmarks/gpu_smoke.py [--only attention compile] [--json gpu_smoke.json]

On a GPU with 80 GB it should take under ten minutes, at the real widths of Qwen-Image, SD3.5 and Qwen2.5; on a CPU it
runs the same with tiny shapes. Weights are random, and nothing is downloaded. Each check runs in a separate process: if
it fails, crashes or hangs, that is a FAIL, and the next check runs. Checks that need CUDA show a dash on a CPU. The
exit status is 1 if a line fails.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

# set before torch looks for GPUs: forks of a process that has initialized CUDA cannot use it
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for trainer.deterministic

import smoke_kernels
import smoke_kill
import smoke_lm
import smoke_steps
import torch
from measure import origin
from smoke_lines import FAIL, NONE, PASS, Line, device

from phalanx.telemetry.step_metrics import peak_memory_gb

CHECKS: dict[str, Callable[[], Iterator[Line]]] = {
    "attention": smoke_kernels.attention,
    "exact": smoke_steps.exact,
    "exact_lm": smoke_steps.exact_lm,
    "step": smoke_steps.step,
    "plan": smoke_steps.plan,
    "fsdp": smoke_steps.fsdp,
    "compile": smoke_steps.recompiles,
    "transfers": smoke_kernels.transfers,
    "judge": smoke_kernels.sleeping_judge,
    "vllm": smoke_steps.sleeping_vllm,
    "vllm_judge": smoke_lm.vllm_beside_a_judge,
    "packed": smoke_lm.packed,
    "kill": smoke_kill.kill,
}
LIMIT_S = 240.0  # per check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS)
    )
    parser.add_argument("--json", type=Path, default=Path("outputs/gpu_smoke.json"), help="(outputs/gpu_smoke.json)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.only[0], args.child)
    start, found = time.perf_counter(), {}
    with tempfile.TemporaryDirectory(prefix="phalanx-smoke-") as name:
        for check in args.only:
            begun, cpu = time.perf_counter(), cpu_seconds()
            lines = run(check, Path(name))
            took, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
            found[check] = {"s": round(took, 2), "cpu_s": round(cpu, 2), "lines": [asdict(line) for line in lines]}
            print(f"\n{check}, {took:.1f} s, {cpu:.1f} s of the CPU", *map(row, lines), sep="\n", flush=True)
        places = [json.loads((Path(name) / f"{check}.json").read_text()) for check in args.only]
    where = max(places, key=lambda place: place["peak_gb"])
    states = [line["state"] for check in found.values() for line in check["lines"]]
    took = time.perf_counter() - start
    counts = ", ".join(f"{states.count(state)} {state}" for state in (PASS, FAIL, NONE))
    print(f"\n{counts} in {took:.0f} s on {where['device']}, torch {where['torch']}; {args.json}", flush=True)
    report = for_an_issue(where, {check: each["lines"] for check, each in found.items()})
    print("\nfor an issue:", *report, sep="\n", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    result = {**where, "s": round(took, 1), "issue": report, "checks": found}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if FAIL in states else 0)


PACKAGES = ("phalanx", "transformers", "diffusers", "peft", "accelerate", "vllm", "vllm-omni", "flash-attn", "triton")


def for_an_issue(where: dict[str, Any], checks: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Five lines: device and driver, torch, packages, which lines passed and failed, and the peak of memory."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} -")
    lines = [line for each in checks.values() for line in each]
    states = [line["state"] for line in lines]
    failed = ", ".join(line["name"].strip() for line in lines if line["state"] == FAIL) or "none"
    return [
        f"device: {where['device']}, driver {where['driver']}, Python {where['python']}",
        f"torch: {where['torch']}, CUDA {where['cuda']}, cuDNN {where['cudnn']}, NCCL {where['nccl']}",
        f"packages: {', '.join(versions)}, commit {where['commit']}",
        f"passed: {states.count(PASS)}, without an answer: {states.count(NONE)}, failed: {failed}",
        f"peak memory: {where['peak_gb']:.2f} GB {where['peak_of']}",
    ]


def driver() -> str | None:
    """The version of NVIDIA's driver; None if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None


def state_of(check: str) -> dict[str, Any]:
    """Device, versions and peak memory of a check, from its own process."""
    cuda = torch.cuda.is_available()
    return {
        **origin(device()),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "peak_gb": peak_memory_gb(device()),
        "peak_of": f"{'allocated by torch' if cuda else 'of the process'} in the check {check}",
    }


def run(check: str, folder: Path) -> list[Line]:
    """Run a check in a separate process, and return its lines."""
    file, log = folder / f"{check}.jsonl", folder / f"{check}.log"
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(check, folder)
    )  # a fork need not import again
    process.start()
    process.join(LIMIT_S)
    hung = process.is_alive()
    if hung:
        process.kill()
        process.join()
    lines = [Line(**json.loads(text)) for text in file.read_text().splitlines()] if file.is_file() else []
    if hung:
        lines.append(Line(check, FAIL, LIMIT_S, "s", "it ran longer, and was ended"))
    elif process.exitcode != 0:
        lines.append(Line(check, FAIL, process.exitcode, "", "the process's exit status, or the signal that ended it"))
    if any(line.state == FAIL for line in lines):
        sys.stderr.write("".join(f"{check}| {text}\n" for text in log.read_text().splitlines()[-60:]))
    return lines


def cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def child(check: str, folder: Path) -> NoReturn:
    """Run a check; write its lines to a file in `folder` one by one, and its output to another file."""
    descriptor = os.open(folder / f"{check}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if torch.cuda._is_in_bad_fork():  # an import has initialized CUDA in spite of the variable
        os.execv(sys.executable, [sys.executable, __file__, "--only", check, "--child", str(folder)])
    if device().type == "cpu":
        torch.set_num_threads(1)
    file = folder / f"{check}.json"
    file.write_text(json.dumps(state_of(check)))  # in case the check crashes
    with (folder / f"{check}.jsonl").open("w", buffering=1) as out:
        for line in CHECKS[check]():
            out.write(json.dumps(asdict(line)) + "\n")
    file.write_text(json.dumps(state_of(check)))
    sys.stdout.flush()
    os._exit(0)  # threads of process groups and compilers would keep the interpreter from ending


def row(line: Line) -> str:
    """A line of the table."""
    value = "" if line.value is None else f"{line.value:.3g} {line.unit}"
    return f"  {line.state:<4}  {line.name:<44}  {value:>14}  {line.note}".rstrip()


if __name__ == "__main__":
    main()
