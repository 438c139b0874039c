"""A row of a leaderboard: a run's folder, reduced to what `phalanx verify` needs to repeat it and to compare results.

It has the run's configuration, provenance and metrics without times, and instead of checkpoints `weights.json`: the
step of the last one, and for each weight the first 16 digits of its SHA-256 and its norm.
"""

import hashlib
import json
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config.files import parse_json
from phalanx.config.inside import read_inside, write_inside
from phalanx.config.shipped import ROOT
from phalanx.run.checkpoint_folder import complete
from phalanx.run.checkpoint_reader import tensor_entries
from phalanx.run.provenance import PROVENANCE_FILE
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import CONFIG_FILE, METRICS_FILE
from phalanx.tools.reproduce.tensors import model_order, read_tensor

WEIGHTS_FILE = "weights.json"
NOT_RESULTS = {"perf", "time", "idle"}  # sections of metrics of times, memory and speed
MOST_WEIGHTS = 1 << 24  # bytes of a weights.json
Digest = tuple[str, float]  # of a tensor: the beginning of its SHA-256, and its norm


def write_row(run: Path, row: Path) -> None:
    """Write the row of a finished run. Paths of shipped files become relative, so that other machines find them.

    Raises ValueError for a run without a complete checkpoint, OSError for files that are missing.
    """
    checkpoints = shared_checkpoints(run)
    if not checkpoints:
        raise ValueError(f"{run}: no complete checkpoint, of which a row contains the digests")
    folder = run / checkpoints[0]
    row.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, PROVENANCE_FILE):
        write_inside(row, name, (run / name).read_text().replace(f"{ROOT}/", ""))
    lines = []
    for metrics in read_metrics(run / METRICS_FILE):
        for name in [*filterfalse(is_result, metrics)]:
            del metrics[name]
        lines.append(json.dumps(metrics))
    write_inside(row, METRICS_FILE, "\n".join(lines) + "\n")
    weights = {"step": step_of(folder), "weights": digest_weights(folder)}
    write_inside(row, WEIGHTS_FILE, json.dumps(weights, indent=0) + "\n")


def is_result(metric: str) -> bool:
    """Whether a metric depends on the configuration and the data alone, and not on how long something took."""
    return NOT_RESULTS.isdisjoint(metric.split("/")) and "seconds" not in metric


def shared_checkpoints(*runs: Path) -> list[Path]:
    """The checkpoints, as paths within a run, of the steps of which all runs have a complete one, the newest first."""
    names = list[Path]()
    for folder in sorted((runs[0] / "checkpoints").glob("step_*"), reverse=True):
        if all(complete(run / "checkpoints" / folder.name) is None for run in runs):
            names.append(Path("checkpoints", folder.name))
    return names


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def digest_weights(checkpoint: Path) -> dict[str, Digest]:
    """The digests of a checkpoint's weights, in the order of the model; moments and averages are left out."""
    entries, digests = tensor_entries(checkpoint), dict[str, Digest]()
    for name in sorted(entries, key=model_order):
        if model_order(name)[0] == 0:
            digests[name] = digest_tensor(read_tensor(checkpoint, name, entries[name]))
    return digests


def digest_tensor(tensor: Tensor) -> Digest:
    """The beginning of the SHA-256 of a tensor's dtype and bytes, and its norm."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    name = hashlib.sha256(str(tensor.dtype).encode() + content).hexdigest()[:16]
    return name, float(tensor.double().norm())


def read_digests(row: Path) -> tuple[int, dict[str, Digest]] | None:
    """The step and the digests in a row's weights.json; None if there is no such file. Raises ValueError if it is
    damaged.
    """
    try:
        content: Any = parse_json(read_inside(row, WEIGHTS_FILE, MOST_WEIGHTS).decode())
    except FileNotFoundError:
        return None
    try:
        digests = dict[str, Digest]()
        for name, (digest, norm) in content["weights"].items():
            digests[name] = (str(digest), float(norm))
        return int(content["step"]), digests
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{row / WEIGHTS_FILE}: damaged, or of another program") from error
