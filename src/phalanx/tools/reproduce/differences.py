"""`phalanx diff RUN RUN`: the first step, metric and tensor in which two runs differ, and how far.

Only the files of the runs' folders are read. Metrics of time, memory and speed are not results and are left out.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config.load import flat
from phalanx.config.messages import counted, cut
from phalanx.config.shipped import ROOT
from phalanx.exit import show, show_mistake
from phalanx.run.checkpoint_folder import complete
from phalanx.run.checkpoint_reader import tensor_entries
from phalanx.run.provenance import read_provenance
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE, read_config
from phalanx.tools.reproduce.rows import Digest, digest_weights, is_result, read_digests, shared_checkpoints, step_of
from phalanx.tools.reproduce.tensors import LEAST, model_order, read_tensor, tensor_distance
from phalanx.zoo.loggers.console import plain

PLACES = ("trainer.output_dir", "trainer.resume")  # keys that may differ between equal runs
RELATIVE, ABSOLUTE = 1e-4, 1e-6  # differences of metrics that count as rounding
WEIGHTS = 1e-3  # relative differences of weights that do
MOST_LINES = 20  # of differences of one kind that are shown


@dataclass
class Comparison:
    """The differences between two runs.

    settings: lines about what they were started with. first: the first metric that differs, as step, name and values.
    parted: the first that differs by more than rounding. largest: the largest relative difference before it. farthest:
    of those that differ by more than rounding, the metric with the largest relative difference. tensors: the relative
    difference of each in the newest checkpoint, of step `checkpoint`; None if there is none of the same step. by_norm:
    whether these are differences of norms, which are at most those of the tensors, because a row has digests alone.
    layer: the step of the oldest checkpoint that differs, the first layer there in the order of the model, and the
    relative difference of its first such tensor.
    """

    steps: int
    settings: list[str]
    first: tuple[int, str, float, float] | None = None
    parted: tuple[int, str, float, float] | None = None
    farthest: tuple[int, str, float, float] | None = None
    largest: float = 0.0
    metrics: int = 0
    tensors: dict[str, float] | None = None
    by_norm: bool = False
    checkpoint: int = 0
    layer: tuple[int, str, float] | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all results are bit-equal."""
        return self.steps > 0 and self.first is None and not self.missing and not any((self.tensors or {}).values())

    @property
    def parted_weight(self) -> str | None:
        """The first weight that differs by more than rounding; moments, which are small, are not looked at."""
        for name, distance in (self.tensors or {}).items():
            if distance > WEIGHTS and model_order(name)[0] == 0:
                return name
        return None

    @property
    def within_rounding(self) -> bool:
        """Whether every metric of every step, and every weight, is equal within rounding."""
        return self.steps > 0 and self.parted is None and self.parted_weight is None and not self.missing

    def verdict(self) -> str:
        """One sentence about the results."""
        compared = f"{counted(self.steps, 'step')}, {counted(self.metrics, 'metric')}"
        if self.tensors is not None:
            compared += f", {counted(len(self.tensors), 'tensor')} of step {self.checkpoint}"
        if self.steps == 0:
            return "nothing to compare: the runs have no step in common"
        if self.missing and self.parted is None:
            return f"different: {'; '.join(self.missing)}"
        if self.equal:
            return f"equal to the last bit ({compared})"
        if self.within_rounding:
            rounded = f"{self._difference(self.first)}; largest {self.largest:.1e}{self._first_layer()}"
            return f"equal within rounding ({compared}): {rounded}"
        if self.parted is None:
            name = str(self.parted_weight)
            far = (self.tensors or {})[name]
            return f"different ({compared}): no metric by more than rounding, but the weight {name} {self._far(far)}"
        apart = "; ".join([f"{self._difference(self.parted)}{self._farthest()}{self._first_layer()}", *self.missing])
        return f"different from step {self.parted[0]} ({compared}): {apart}"

    def _farthest(self) -> str:
        if self.farthest is None or self.farthest == self.parted:
            return ""
        step, name, one, other = self.farthest
        return f"; most in {name} of step {step}, {one!r} and {other!r}"

    def _first_layer(self) -> str:
        if self.layer is None:
            return ""
        step, name, distance = self.layer
        return f"; the first layer that differs at step {step} is {name}, {self._far(distance)}"

    def _far(self, distance: float) -> str:
        if distance <= LEAST:
            return "in its digest but not in its norm" if self.by_norm else "in its dtype alone"
        return f"by {distance:.1e}{' in its norm' if self.by_norm else ''}"

    def _difference(self, row: tuple[int, str, float, float] | None) -> str:
        if row is None:
            assert self.tensors is not None
            name, distance = next(item for item in self.tensors.items() if item[1])
            return f"the metrics are equal, the first tensor that differs is {name}, {self._far(distance)}"
        step, name, one, other = row
        return f"first in {name} of step {step}, {one!r} and {other!r}, relative difference {relative(one, other):.1e}"

    def lines(self) -> list[str]:
        """The report: what the runs were started with, the tensors that differ, and the verdict."""
        lines = list(self.settings)
        changed = {name: distance for name, distance in (self.tensors or {}).items() if distance}
        if changed:
            worst = max(changed, key=lambda name: changed[name])
            lines.append(f"tensors of step {self.checkpoint}: {len(changed)} of {len(self.tensors or {})} differ")
            lines.append(f"  first {next(iter(changed))}: {self._far(next(iter(changed.values())))}")
            lines.append(f"  most {worst}: {self._far(changed[worst])}")
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
    _compare_checkpoints(result, one, other, max(shared, default=0))
    return result


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {METRICS_FILE} in it; give the trainer.output_dir of a run")
    return {row["step"]: row for row in read_metrics(path)}


def _compare_rows(result: Comparison, step: int, one: dict[str, Any], other: dict[str, Any], names: set[str]) -> None:
    lacking = [*filter(is_result, one.keys() ^ other.keys())]
    if lacking and not result.missing and result.parted is None:  # what comes first is reported
        result.missing.append(f"only one run has {cut(', '.join(sorted(lacking)))} in step {step}")
    for name in one:
        if name == "step" or name not in other or not is_result(name):
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
            result.parted = result.parted or (None if result.missing else row)
            if result.farthest is None or relative(first, second) > relative(*result.farthest[2:]):
                result.farthest = row
        elif result.parted is None:
            result.largest = max(result.largest, relative(first, second))


def relative(one: float, other: float) -> float:
    """The difference relative to the larger of both values, infinite if one of them is not finite."""
    distance = abs(one - other) / max(abs(one), abs(other), 1e-30)
    return distance if math.isfinite(distance) else math.inf


def describe_settings(one: Path, other: Path) -> list[str]:
    """Lines about configurations, versions, processors, ranks and input files that differ."""
    configs = []
    for folder in (one, other):  # shipped files have the same names on all machines
        configs.append({key: value.replace(f"{ROOT}/", "") for key, value in flat(read_config(folder)[1]).items()})
    lines = _changed_lines("configuration", configs[0], configs[1], PLACES)
    entries = [read_provenance(one), read_provenance(other)]
    for folder, starts in zip((one, other), entries, strict=True):
        if not starts:
            lines.append(f"{folder}: no provenance.json that can be read; versions and files are not compared")
        elif len(starts) > 1:
            lines.append(f"{folder}: resumed after step {starts[-1]['step']}")
    if entries[0] and entries[1]:
        for name in ("ranks", "versions", "processor", "inputs"):
            lines += _changed_lines(name, flat(entries[0][0][name]), flat(entries[1][0][name]))
    return [plain(line) for line in lines]


def _changed_lines(kind: str, one: dict[str, str], other: dict[str, str], without: Sequence[str] = ()) -> list[str]:
    changed = []
    for key in sorted(one.keys() | other.keys()):
        if key not in without and one.get(key) != other.get(key):
            changed.append(f"  {key}: {cut(one.get(key, '-'))} and {cut(other.get(key, '-'))}")
    more = [f"  and {len(changed) - MOST_LINES} more"] if len(changed) > MOST_LINES else []
    return [f"{kind}:", *changed[:MOST_LINES], *more] if changed else []


def _compare_checkpoints(result: Comparison, one: Path, other: Path, last: int) -> None:
    """Compare weights up to step `last`: a folder may have later ones, of an earlier run in it."""
    digests = read_digests(one), read_digests(other)
    if digests[0] is not None or digests[1] is not None:
        _compare_digests(result, (one, other), digests, last)
        return
    steps = [name for name in shared_checkpoints(one, other) if step_of(name) <= last]
    if not steps:
        result.settings.append("no checkpoint of a step that both have; weights are not compared")
        return
    result.checkpoint = step_of(steps[0])
    result.tensors, result.missing[:] = _compare_tensors(one / steps[0], other / steps[0], result.missing)
    for name in reversed(steps) if any(result.tensors.values()) else ():
        tensors = result.tensors if name == steps[0] else _compare_tensors(one / name, other / name, [])[0]
        if _note_layer(result, step_of(name), tensors):
            return


def _compare_tensors(one: Path, other: Path, missing: list[str]) -> tuple[dict[str, float], list[str]]:
    """The distance of each tensor that two checkpoints have, and `missing` with lines about the others."""
    entries = tensor_entries(one), tensor_entries(other)
    tensors, lines = dict[str, float](), [*missing, *_lacking_names(entries[0].keys() ^ entries[1].keys())]
    for name in sorted(entries[0].keys() & entries[1].keys(), key=model_order):
        if entries[0][name].size != entries[1][name].size:
            lines.append(f"{name} has the shapes {list(entries[0][name].size)} and {list(entries[1][name].size)}")
            continue
        pair = zip((one, other), entries, strict=True)
        tensors[name] = tensor_distance(*(read_tensor(folder, name, known[name]) for folder, known in pair))
    return tensors, lines


def _note_layer(result: Comparison, step: int, tensors: dict[str, float]) -> bool:
    """Note the first layer whose weights differ; returns whether there is one."""
    for name, distance in tensors.items():
        if distance and model_order(name)[0] == 0:
            result.layer = step, name.rpartition(".")[0], distance
            return True
    return False


def _compare_digests(
    result: Comparison, runs: tuple[Path, Path], digests: Sequence[tuple[int, dict[str, Digest]] | None], last: int
) -> None:
    """Compare weights of which at least one side has only digests: their norms bound the difference from below."""
    step = next(known[0] for known in digests if known is not None)
    if step > last:
        result.settings.append(f"only one run has step {step}, of which weights are recorded; weights are not compared")
        return
    sides = list[dict[str, Digest]]()
    for run, known in zip(runs, digests, strict=True):
        checkpoint = run / "checkpoints" / f"step_{step:06d}"
        if known is None and complete(checkpoint) is None:
            known = step, digest_weights(checkpoint)
        if known is None or known[0] != step:
            result.settings.append(f"{run}: no weights of step {step}; weights are not compared")
            return
        sides.append(known[1])
    result.checkpoint, result.tensors, result.by_norm = step, {}, True
    result.missing += _lacking_names(sides[0].keys() ^ sides[1].keys())
    for name in sorted(sides[0].keys() & sides[1].keys(), key=model_order):
        (digest, norm), (other, other_norm) = sides[0][name], sides[1][name]
        result.tensors[name] = 0.0 if digest == other else max(relative(norm, other_norm), LEAST)
    _note_layer(result, step, result.tensors)


def _lacking_names(names: Iterable[str]) -> list[str]:
    lacking = ", ".join(sorted(names))
    return [f"only one run has the weights {cut(lacking)}"] if lacking else []


def main(argv: Sequence[str]) -> int:
    """`phalanx diff`; returns 0 if the results are equal to the last bit, 1 if not, 2 for a folder that is no run's."""
    parser = argparse.ArgumentParser(prog="phalanx diff", description=__doc__.partition("\n\n")[0].partition(": ")[2])
    parser.add_argument("runs", metavar="RUN", nargs=2, type=Path, help="trainer.output_dir of a run")
    given = parser.parse_args(argv)
    try:
        result = compare_runs(*given.runs)
    except (OSError, ValueError) as error:
        return show_mistake(error)
    show("\n".join(result.lines()))
    return int(not result.equal)
