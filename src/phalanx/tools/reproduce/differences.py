"""`phalanx diff RUN RUN`: the first step, metric and tensor in which two runs differ, and how far.

Only the files of the runs' folders are read. Metrics of time, memory and speed are not results and are left out.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from phalanx.config.messages import cut
from phalanx.exit import show
from phalanx.run.checkpoint import complete
from phalanx.run.checkpoint_reader import Reader
from phalanx.run.provenance import read_provenance
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE, read_config
from phalanx.zoo.loggers.console import plain

NOT_RESULTS = ("perf/", "time/", "step")
PLACES = ("trainer.output_dir", "trainer.resume")  # keys that may differ between equal runs
RELATIVE, ABSOLUTE = 1e-4, 1e-6  # differences of metrics that count as rounding
MOST_LINES = 20  # of differences of one kind that are shown


@dataclass
class Comparison:
    """The differences between two runs.

    settings: lines about what they were started with. first: the first metric that differs, as step, name and values.
    parted: the first that differs by more than rounding. largest: the largest relative difference before it. tensors:
    the relative difference of each; None if there is no checkpoint of the same step.
    """

    steps: int
    settings: list[str]
    first: tuple[int, str, float, float] | None = None
    parted: tuple[int, str, float, float] | None = None
    largest: float = 0.0
    metrics: int = 0
    tensors: dict[str, float] | None = None
    checkpoint: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all results are bit-equal."""
        return self.steps > 0 and self.first is None and not self.missing and not any((self.tensors or {}).values())

    @property
    def within_rounding(self) -> bool:
        """Whether every metric of every step is equal within rounding."""
        return self.steps > 0 and self.parted is None and not self.missing

    def verdict(self) -> str:
        """One sentence about the results."""
        compared = f"{self.steps} steps, {self.metrics} metrics"
        if self.tensors is not None:
            compared += f", {len(self.tensors)} tensors of step {self.checkpoint}"
        if self.steps == 0:
            return "nothing to compare: the runs have no step in common"
        if self.missing:
            return f"different: {'; '.join(self.missing)}"
        if self.equal:
            return f"equal to the last bit ({compared})"
        if self.within_rounding:
            return f"equal within rounding ({compared}): {self._difference(self.first)}; largest {self.largest:.1e}"
        assert self.parted is not None
        return f"different from step {self.parted[0]} ({compared}): {self._difference(self.parted)}"

    def _difference(self, row: tuple[int, str, float, float] | None) -> str:
        if row is None:
            assert self.tensors is not None
            name, distance = next(item for item in self.tensors.items() if item[1])
            return f"the metrics are equal, the first tensor that differs is {name}, by {distance:.1e}"
        step, name, one, other = row
        return f"first in {name} of step {step}, {one!r} and {other!r}, relative difference {relative(one, other):.1e}"

    def lines(self) -> list[str]:
        """The report: what the runs were started with, the tensors that differ, and the verdict."""
        lines = list(self.settings)
        changed = {name: distance for name, distance in (self.tensors or {}).items() if distance}
        if changed:
            worst = max(changed, key=lambda name: changed[name])
            lines.append(f"tensors of step {self.checkpoint}: {len(changed)} of {len(self.tensors or {})} differ")
            lines.append(f"  first {next(iter(changed))}: {next(iter(changed.values())):.1e}")
            lines.append(f"  most {worst}: {changed[worst]:.1e}")
        return [*lines, self.verdict()]


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compare the runs in two folders. Raises ValueError for a folder without metrics."""
    rows = [_rows(one), _rows(other)]
    shared = sorted(rows[0].keys() & rows[1].keys())
    result = Comparison(len(shared), describe_settings(one, other))
    if len(rows[0]) != len(rows[1]):
        result.settings.append(f"steps: {max(rows[0], default=0)} and {max(rows[1], default=0)}")
    names = set[str]()
    for step in shared:
        _compare_rows(result, step, rows[0][step], rows[1][step], names)
    result.metrics = len(names)
    _compare_checkpoints(result, one, other)
    return result


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {METRICS_FILE} in it; give the trainer.output_dir of a run")
    return {row["step"]: row for row in read_metrics(path)}


def _compare_rows(result: Comparison, step: int, one: dict[str, Any], other: dict[str, Any], names: set[str]) -> None:
    lacking = [name for name in one.keys() ^ other.keys() if not name.startswith(NOT_RESULTS)]
    if lacking and not result.missing:
        result.missing.append(f"only one run has {cut(', '.join(sorted(lacking)))} in step {step}")
    for name in one:
        if name.startswith(NOT_RESULTS) or name not in other:
            continue
        names.add(name)
        pair = one[name], other[name]
        if pair[0] == pair[1]:
            continue
        first, second = (math.nan if value is None else float(value) for value in pair)
        row = (step, name, first, second)
        result.first = result.first or row
        within = abs(first - second) <= ABSOLUTE + RELATIVE * max(abs(first), abs(second))
        if not within:
            result.parted = result.parted or row
        elif result.parted is None:
            result.largest = max(result.largest, relative(first, second))


def relative(one: float, other: float) -> float:
    """The difference relative to the larger of both values."""
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def describe_settings(one: Path, other: Path) -> list[str]:
    """Lines about configurations, versions, processors, ranks and input files that differ."""
    configs = [_flat(read_config(folder)[1]) for folder in (one, other)]
    lines = _changes("configuration", configs[0], configs[1], PLACES)
    entries = [read_provenance(one), read_provenance(other)]
    for folder, starts in zip((one, other), entries, strict=True):
        if not starts:
            lines.append(f"{folder}: no provenance.json that can be read; versions and files are not compared")
        elif len(starts) > 1:
            lines.append(f"{folder}: resumed after step {starts[-1]['step']}")
    if entries[0] and entries[1]:
        for name in ("ranks", "versions", "processor", "inputs"):
            lines += _changes(name, _flat(entries[0][0][name]), _flat(entries[1][0][name]))
    return [plain(line) for line in lines]


def _changes(kind: str, one: dict[str, Any], other: dict[str, Any], without: Sequence[str] = ()) -> list[str]:
    changed = []
    for key in sorted(one.keys() | other.keys()):
        if key not in without and one.get(key) != other.get(key):
            changed.append(f"  {key}: {cut(str(one.get(key, '-')))} and {cut(str(other.get(key, '-')))}")
    more = [f"  and {len(changed) - MOST_LINES} more"] if len(changed) > MOST_LINES else []
    return [f"{kind}:", *changed[:MOST_LINES], *more] if changed else []


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by their dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        leaves |= _flat(inner, f"{key}.{name}" if key else str(name))
    return leaves


def newest_checkpoint(*runs: Path) -> Path | None:
    """The checkpoint of the first run whose step is the newest of which all runs have a complete one."""
    for folder in sorted((runs[0] / "checkpoints").glob("step_*"), reverse=True):
        if all(complete(run / "checkpoints" / folder.name) is None for run in runs):
            return folder
    return None


def _compare_checkpoints(result: Comparison, one: Path, other: Path) -> None:
    folder = newest_checkpoint(one, other)
    if folder is None:
        return
    both = [folder, other / "checkpoints" / folder.name]
    entries = [tensor_entries(each) for each in both]
    result.checkpoint, result.tensors = int(folder.name.removeprefix("step_")), {}
    if entries[0].keys() != entries[1].keys():
        lacking = sorted(entries[0].keys() ^ entries[1].keys())
        result.missing.append(f"only one run has {cut(', '.join(lacking))} in its checkpoint")
    for name in sorted(entries[0].keys() & entries[1].keys(), key=_model_order):
        if entries[0][name].size != entries[1][name].size:
            result.missing.append(
                f"{name} has the shape {list(entries[0][name].size)} and {list(entries[1][name].size)}"
            )
            continue
        first, second = (read_tensor(each, name, entry[name]) for each, entry in zip(both, entries, strict=True))
        result.tensors[name] = tensor_distance(first, second)


def _model_order(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """A key that sorts weights before their averages and moments, and layer 2 before layer 10."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
    kinds = name.split(".")[:2]  # a joint run's names begin with the policy
    return 2 if "optim" in kinds else int("model" not in kinds), parts


def tensor_entries(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name. Raises ValueError for a damaged one."""
    entries = Reader(checkpoint).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensor(checkpoint: Path, name: str, entry: TensorStorageMetadata) -> Tensor:
    """One tensor of a checkpoint, whole."""
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=Reader(checkpoint), no_dist=True)
    return state[name]


def tensor_distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference of two tensors, relative to the larger of both norms; 0.0 only if they are equal."""
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    pair = one.double(), other.double()
    norm = max(float(pair[0].norm()), float(pair[1].norm()), 1e-30)
    return max(float((pair[0] - pair[1]).norm()) / norm, 1e-30)


def main(argv: Sequence[str]) -> int:
    """`phalanx diff`; returns 0 if the results are equal to the last bit, 1 if not, 2 for a folder that is no run's."""
    parser = argparse.ArgumentParser(prog="phalanx diff", description=__doc__.partition("\n\n")[0].partition(": ")[2])
    parser.add_argument("runs", metavar="RUN", nargs=2, type=Path, help="trainer.output_dir of a run")
    given = parser.parse_args(argv)
    try:
        result = compare_runs(*given.runs)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    show("\n".join(result.lines()))
    return int(not result.equal)
