"""The files of an evaluation: records.jsonl, to which samples are appended, and others with one object."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from phalanx.config.files import json_object, reading
from phalanx.config.inside import append_inside, open_inside, write_inside
from phalanx.run.telemetry.curves import MOST_COUNT, is_finite
from phalanx.run.telemetry.growing_file import MOST_LINE

RECORDS, RESULT, ARGUMENTS, PAGE = "records.jsonl", "evaluation.json", "arguments.json", "evaluation.html"
ENDED = "ended.json"  # how the last command that used the folder has ended, and its final message
REWARD = "reward"
KEYS = {"set", "index", "sample", "prompt", REWARD, "scores"}

Row = dict[str, Any]


def append_records(folder: Path, rows: Sequence[Row]) -> None:
    """Append rows to a folder's records.jsonl, and sync them to disk. Raises OSError."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    with append_inside(folder, RECORDS) as file:
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())


def keep_chunks(folder: Path, sizes: Sequence[int]) -> int:
    """Truncate records.jsonl after its last complete chunk (chunk i has sizes[i] rows); returns their number."""
    rows, chunks, kept = read_records(folder, is_cut=True), 0, 0
    while chunks < len(sizes) and kept + sizes[chunks] <= len(rows):
        kept += sizes[chunks]
        chunks += 1
    with suppress(FileNotFoundError):
        with open_inside(folder, RECORDS) as file:
            lines = list(islice(file, kept))
        write_inside(folder, RECORDS, b"".join(lines))
    return chunks


def read_records(folder: Path, *, is_cut: bool = False) -> list[Row]:
    """The rows of a folder's records.jsonl; see `each_record`."""
    return list(each_record(folder, is_cut=is_cut))


def each_record(folder: Path, *, is_cut: bool = False) -> Iterator[Row]:
    """The rows of a folder's records.jsonl, one by one. is_cut: ignore an incomplete last line. Raises ValueError for a
    file that cannot be read, and for an invalid row.
    """
    names, path = dict[str, Any](), folder / RECORDS
    with reading(str(path)), suppress(FileNotFoundError), open_inside(folder, RECORDS) as file:
        for number in count(1):
            line = file.readline(MOST_LINE)
            if not line or (is_cut and len(line) < MOST_LINE and not line.endswith(b"\n")):
                return
            row = json_object(line.decode("utf-8", "replace"))
            if (
                row is None
                or not _is_record(row)
                or names.setdefault(row["set"], _record_names(row)) != _record_names(row)
            ):
                raise ValueError(f"{path}:{number}: not a record of an evaluation; delete the file to sample again")
            yield row


def _is_record(row: Row) -> bool:
    """Whether a row has the keys and types that readers rely on; the file may be damaged or written by others."""
    if not row.keys() >= KEYS or not (isinstance(row["set"], str) and isinstance(row["prompt"], str)):
        return False
    counts = all(type(row[name]) is int and 0 <= row[name] < MOST_COUNT for name in ("index", "sample"))
    scores = isinstance(row["scores"], dict) and all(map(_is_score, (row["reward"], *row["scores"].values())))
    answers = row.get("answers", {})
    is_answered = isinstance(answers, dict) and all(isinstance(answer, str | None) for answer in answers.values())
    return counts and scores and is_answered and isinstance(row.get("columns", {}), dict)


def _record_names(row: Row) -> tuple[set[str], set[str], bool]:
    """The names of a record's scores and answers, and whether it has a text: equal in all records of a set."""
    return set(row["scores"]), set(row.get("answers", {})), "text" in row


def _is_score(value: Any) -> bool:
    return value is None or is_finite(value)


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file of an evaluation atomically. Raises OSError."""
    write_inside(folder, name, json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
