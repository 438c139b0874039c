"""Seconds from the command to the first step's row of metrics, compared with an older checkout.

    git worktree add ../before f860b80
    python benchmarks/start.py --beside ../before
    python benchmarks/start.py --beside ../before --ranks 1 2 --runs 7 --config configs/flowgrpo/quickstart.yaml

Each checkout runs its own train.sh, sources and configuration in the environment of this interpreter, alternating. The
job is stopped after the row; the first validation is included. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASK = "tasks/train_flowgrpo.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout, for the ratio")
    parser.add_argument(
        "--config", default="configs/flowgrpo/quickstart.yaml", help="a configuration that both checkouts have"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    checkouts = {"now": ROOT} | ({"before": options.beside.resolve()} if options.beside else {})
    found: dict[str, dict[str, float]] = {}
    for ranks in options.ranks:
        seconds: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(options.runs):
            for name, checkout in checkouts.items():
                seconds[name].append(until_first_row(checkout, options.config, ranks))
        row = {name: statistics.median(each) for name, each in seconds.items()}
        if options.beside:
            pairs = zip(seconds["now"], seconds["before"], strict=True)
            row["ratio"] = statistics.median(now / before for now, before in pairs)
        found[f"{ranks} ranks"] = {name: round(value, 3) for name, value in row.items()}
        print(f"{ranks} ranks: {found[f'{ranks} ranks']}; all: {seconds}", flush=True)
    print(json.dumps(found))


def until_first_row(checkout: Path, config: str, ranks: int) -> float:
    """Seconds until the row of step 1 is printed; then stop the job, and wait until it has ended."""
    env = os.environ | {"NPROC_PER_NODE": str(ranks), "PYTHONPATH": str(checkout / "src")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["sh", "train.sh", TASK, config, f"trainer.output_dir={folder}"]
        begin = time.perf_counter()
        with subprocess.Popen(
            command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job:
            assert job.stdout is not None
            said = ""
            for line in job.stdout:
                said += line
                if line.startswith("step 1/"):
                    seconds = time.perf_counter() - begin
                    break
            else:
                raise SystemExit(f"{checkout}: the job ended without a first row:\n{said}")
            job.terminate()
            job.stdout.read()
    return seconds


if __name__ == "__main__":
    main()
