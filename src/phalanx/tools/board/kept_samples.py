"""The validation samples that a run has kept in images/ and samples/; the files may be damaged or written by others."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.config.files import json_object
from phalanx.config.inside import list_inside, open_inside
from phalanx.run.telemetry.curves import is_count, is_finite
from phalanx.run.telemetry.growing_file import MOST_LINE
from phalanx.run.telemetry.run_folder import Run
from phalanx.telemetry.records import IMAGES, SAMPLES, spoken, summary

CONTENT = {IMAGES: "file", SAMPLES: "text"}  # the key of the sample in an index.jsonl, by the run's folder
MOST_INDEX = 1 << 26  # bytes of an index.jsonl that are read
MOST_ROWS = 20_000  # of an index.jsonl

Key = tuple[int, str]  # a sample's index and prompt: equal keys at different steps mean the same prompt and noise


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of an index.jsonl, see phalanx.telemetry.records.save_records. `talk`: the role and text of each message of
    a conversation, and `summary` its summary. `images`: file and title of the prompt's images. If it is damaged, only
    the key is known.
    """

    key: Key
    damaged: bool = False
    reward: float | None = None
    file: str = ""
    video: str | None = None
    text: str | None = None
    truncated: bool = False
    truth: str | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    talk: list[tuple[str, str]] | None = None
    summary: str = ""
    images: list[tuple[str, str]] = field(default_factory=list)


class Kept:
    """The samples of a validation set of a run, at those steps that have any; `rows` has those that were read."""

    def __init__(self, run: Run, kind: str, name: str) -> None:
        self.run, self.kind, self.name = run, kind, name
        self.rows: dict[int, dict[Key, Sample]] = {}
        self.folders: dict[int, str] = {}  # of the steps, in their order, by name below the run's folder
        for folder, is_folder in list_inside(run.folder, f"{kind}/{name}"):
            number = re.fullmatch("step_([0-9]{1,15})", folder)
            # the folder may contain samples of an older run, from steps that this run has not reached
            if number and is_folder and int(number[1]) <= run.last_step():
                self.folders[int(number[1])] = f"{kind}/{name}/{folder}"
        self.folders = dict(sorted(self.folders.items()))
        for ends in list(self.folders), list(self.folders)[::-1]:  # the first and the last step that have samples
            for step in ends:
                if self._read_step(step):
                    break
                self.folders.pop(step, None)

    @property
    def first(self) -> int:
        return min(self.folders)

    @property
    def last(self) -> int:
        return max(self.folders)

    @property
    def steps(self) -> list[int]:
        """The steps with samples."""
        return list(self.folders)

    def damaged(self, step: int) -> int:
        """The number of damaged rows of a step that was read."""
        return sum(sample.damaged for sample in self.rows[step].values())

    def keep(self, steps: Collection[int], keys: Collection[Key]) -> None:
        """Read these steps, and forget all samples but those with the keys."""
        for step in steps:
            rows = self._read_step(step)
            self.rows[step] = {key: rows[key] for key in keys if key in rows}

    def _read_step(self, step: int) -> dict[Key, Sample]:
        if step not in self.rows:
            self.rows[step] = {sample.key: sample for sample in self._step_samples(self.folders[step])}
        return self.rows[step]

    def _step_samples(self, folder: str) -> Iterator[Sample]:
        try:
            with open_inside(self.run.folder, f"{folder}/index.jsonl") as file:
                for number in range(1, MOST_ROWS + 1):
                    line = file.readline(MOST_LINE)
                    if not line or file.tell() > MOST_INDEX:
                        return
                    if line.strip():
                        yield sample_of(json_object(line), number, CONTENT[self.kind])
        except OSError:
            return


def sample_of(row: dict[str, Any] | None, number: int, content: str) -> Sample:
    """The sample in line `number` of an index.jsonl, whose key `content` is "file" or "text"."""
    row = row or {}
    index, prompt = row.get("index"), row.get("prompt")
    if not (is_count(index) and isinstance(prompt, str)):
        return Sample((-number, f"line {number} of index.jsonl"), damaged=True)
    try:
        return Sample((index, prompt), **_sample_fields(row, content))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):  # of values of other types
        return Sample((index, prompt), damaged=True)


def _sample_fields(row: dict[str, Any], content: str) -> dict[str, Any]:
    """The other fields of a Sample. Raises one of several exceptions for values of other types."""
    texts = {"text": row.get("text"), "file": row.get("file", ""), "video": row.get("video")}
    if not isinstance(row[content], str) or not all(isinstance(text, str | None) for text in texts.values()):
        raise TypeError(content)
    fields: dict[str, Any] = texts | {"reward": _finite_number(row["reward"]), "truncated": bool(row.get("truncated"))}
    fields["scores"] = {name: _finite_number(score) for name, score in row.get("scores", {}).items()}
    fields["truth"] = str(row["ground_truth"]) if "ground_truth" in row else None
    if "messages" in row:
        fields |= {"talk": spoken(row["messages"]), "summary": summary(row)}
    fields["images"] = []
    for image in row.get("images", []):
        title = f"{image['place']}, {image['width']} x {image['height']} pixels"
        fields["images"].append((str(image["file"]), title))
    return fields


def _finite_number(value: Any) -> float | None:
    """A number, or None for null, NaN and infinities. Raises TypeError for anything else."""
    if value is not None and not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value) if is_finite(value) else None
