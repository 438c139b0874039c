"""Install the wheel of dist/ into an empty environment and use the command from there, outside the checkout.

python scripts/try_wheel.py python3.11 python3.12   with all that the wheel requires, and two steps of a quickstart
python scripts/try_wheel.py --light python3.13      with the three packages of LIGHT only, and what needs no torch
Words after -- are further options of pip install, such as -- --extra-index-url URL.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
LIGHT = ("omegaconf", "pydantic", "pyyaml")
TASK = "lib/python*/site-packages/phalanx/shipped/tasks/train_flow_matching.py"
MISTAKE = "error: unknown key trainer.sed; did you mean trainer.seed?"
# the words of a command, its exit status, and a part of what it prints
COMMANDS = (
    ("phalanx --version", 0, VERSION),
    ("phalanx --help", 0, "usage: phalanx COMMAND"),
    ("phalanx configs", 0, "flowgrpo/quickstart"),
    ("phalanx configs words_sft", 0, "train_files"),
    ("phalanx train nothing", 2, "error: expected a task, one of"),
    ("python TASK trainer.sed=1", 2, MISTAKE),
)
WITH_TORCH = (
    ("phalanx train flowgrpo --help", 0, "trainer.total_training_steps"),
    ("phalanx train flowgrpo --config quickstart trainer.sed=1", 2, MISTAKE),
    ("phalanx plan flowgrpo --config quickstart nproc=2", 0, "Plan of 1 node x 2 = 2 ranks"),
    ("phalanx train grpo --config grpo/quickstart trainer.total_training_steps=2 trainer.test_freq=-1", 0, "step 2/2"),
)


def try_wheel(python: str, wheel: Path, light: bool, options: list[str]) -> None:
    """Raise AssertionError at the first command that does something else than COMMANDS says."""
    with tempfile.TemporaryDirectory(prefix="phalanx-wheel-") as name:
        folder = Path(name)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
        pins = ["--constraint", ROOT / "constraints.txt"]
        if light:
            subprocess.run([*pip, *pins, *LIGHT], check=True)
            subprocess.run([*pip, "--no-deps", wheel], check=True, stderr=subprocess.DEVNULL)  # names what is missing
        else:
            subprocess.run([*pip, *pins, wheel], check=True)
        [task] = (folder / "venv").glob(TASK)
        env = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        for line, status, part in (*COMMANDS, *(() if light else WITH_TORCH)):
            program, *words = line.replace("TASK", str(task)).split()
            command = [folder / "venv/bin" / program, *words]
            begin = time.monotonic()
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
            seconds, printed = time.monotonic() - begin, done.stdout + done.stderr
            assert done.returncode == status and part in printed, f"{python}: {line}: {done.returncode}\n{printed}"
            print(f"{seconds:6.1f} s  {line}", flush=True)
    print(f"{python}: {wheel.name} works {'without torch' if light else 'with all that it requires'}")


def main() -> None:
    words, options = sys.argv[1:], list[str]()
    if "--" in words:
        words, options = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--light", action="store_true")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    args = parser.parse_args(words)
    for python in args.pythons:
        try_wheel(python, ROOT / "dist" / f"phalanx-{VERSION}-py3-none-any.whl", args.light, options)


if __name__ == "__main__":
    main()
