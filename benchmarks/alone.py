"""Jobs on one process without logs, checkpoints and validation, and programs that run in turns."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RANK |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
QUIET = ("logger=[]", "save_freq=-1", "test_freq=-1", "val_before_train=false", "resume=never")  # keys of trainer


def trainer_of(schema: Any, config: str | Path, steps: int, folder: Path, keys: Iterable[str]) -> Any:
    """The job of a configuration, on this process; its files go to `folder`."""
    from phalanx.run import rl
    from phalanx.run.rules import load_config

    os.environ |= RANK
    os.chdir(ROOT)  # to which the paths in configurations are relative
    trainer = (*QUIET, f"total_training_steps={steps}", f"output_dir={folder}")
    return rl.build(load_config(schema, str(config), [*(f"trainer.{key}" for key in trainer), *keys]))


def in_turns(words: list[str], sides: Iterable[str], runs: int) -> dict[str, list[dict[str, Any]]]:
    """Run the script `words` with `--only SIDE`, `runs` times for each side, on one thread; returns their last lines,
    which are JSON. A failure ends this program.
    """
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    for run in range(runs):
        for side, results in found.items():
            command = [sys.executable, *words, "--only", side]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode != 0:
                sys.exit(f"error: {side} failed\n{done.stderr}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"run {run + 1}, {side}: {results[-1]}", flush=True)
    return found
