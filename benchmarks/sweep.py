"""Time and memory of a sweep over learning rates, and of one job for each of them.

    python benchmarks/sweep.py
    python benchmarks/sweep.py --kind text --values 4 --steps 3 12

The LoRA quickstarts, on one rank each, without validation and checkpoints. Jobs and sweep alternate, once for each
number of steps: the difference is the cost of a step, and the rest is that of the start. CPU seconds and peak resident
memory (of the largest process) are the kernel's. Memory of jobs is the sum over them, as if they ran side by side; it
counts pages of libraries, which such jobs would share, in each of them. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RATES = (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3, 3e-3)
# rank, alpha and layers of the text job are those of peft's defaults for a language model
KINDS = {
    "flow": ("tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart_lora.yaml"),
    "text": ("tasks/train_grpo.py", "configs/grpo/quickstart.yaml", "model.lora_rank=16", "model.lora_alpha=32"),
}
PLAIN = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume=never")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="flow")
    parser.add_argument("--values", type=int, default=8, help="learning rates (8)")
    parser.add_argument("--steps", type=int, nargs=2, default=[1, 5], help="two numbers of training steps (1 5)")
    args = parser.parse_args()
    rates, rows = RATES[-args.values :], []
    for steps in args.steps:
        jobs = [job(args.kind, steps, f"optim.lr={rate}") for rate in rates]
        together = job(args.kind, steps, f"sweep.optim.lr={json.dumps(rates)}")
        rows.append({"steps": steps, "jobs": [sum(each) for each in zip(*jobs, strict=True)], "sweep": list(together)})
    print(f"{len(rates)} learning rates of the {args.kind} quickstart with a LoRA: jobs, sweep, and their ratio")
    for row in rows:
        print(f"  {row['steps']:3} steps  {line('CPU s', row, 0)}  {line('peak GB', row, 1)}")
    first, last = rows
    per_step = {name: (last[name][0] - first[name][0]) / (last["steps"] - first["steps"]) for name in ("jobs", "sweep")}
    print(f"  a step     {line('CPU s', {name: [value] for name, value in per_step.items()}, 0)}")
    print(json.dumps({"kind": args.kind, "values": len(rates), "rows": rows, "cpu_s_per_step": per_step}))


def job(kind: str, steps: int, *words: str) -> tuple[float, float]:
    """CPU seconds and peak memory in GB of a job."""
    task, *given = KINDS[kind]
    env = os.environ | {"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="phalanx-sweep-") as folder:
        sizes = (f"trainer.total_training_steps={steps}", f"trainer.output_dir={folder}")
        process = subprocess.Popen(
            ["sh", "train.sh", task, *given, *PLAIN, *sizes, *words], cwd=ROOT, env=env, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)}: the job ended with status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def line(unit: str, row: dict[str, list[float]], column: int) -> str:
    """A measure of jobs and sweep."""
    jobs, sweep = row["jobs"][column], row["sweep"][column]
    return f"{unit} {jobs:.1f} {sweep:.1f} ({sweep / jobs:.2f})"


if __name__ == "__main__":
    main()
