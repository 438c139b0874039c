"""Evaluations and checkpoints of somebody else: as a baseline, as a folder to go on in, and as a place for output."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.tasks import EvaluateConfig
from phalanx.run.checkpoint_folder import complete
from phalanx.run.checkpoint_reader import Reader
from phalanx.run.outputs import place_in_run
from phalanx.tools.board.evaluation import result_of
from phalanx.tools.board.evaluation_files import append_records, keep_chunks, read_records, write_json
from phalanx.tools.board.evaluation_page import Side, write_page
from phalanx.tools.scored import is_complete, stored_in
from tests.helpers.hostile import SECRET, digest, fifo, in_child, in_place_of, linked, png, replaced, rows, sparse
from tests.helpers.pages import EVIL, Page

HEAD: dict[str, Any] = {"model": "m", "baseline": "b", "arguments": {"n": 1}}
IMAGE = "images/test/00000_0.png"


def record(**fields: Any) -> dict[str, Any]:
    row = {"set": "test", "index": 0, "sample": 0, "prompt": "p", "file": IMAGE, "reward": 0.5, "scores": {"a": 0.5}}
    return row | fields


def changed(**fields: Any) -> Callable[[Path], object]:
    return replaced("records.jsonl", rows(record(**fields), record(index=1, scores=fields.get("scores", {"a": 0.5}))))


def evaluation(folder: Path) -> Path:
    (folder / IMAGE).parent.mkdir(parents=True)
    (folder / IMAGE).write_bytes(png(8, 8))
    (folder / "records.jsonl").write_text(rows(record(), record(index=1)))
    (folder / "arguments.json").write_text(json.dumps({"facts": {"n": 1}, "complete": True, "samples": 2}))
    return folder


HOSTILE = {
    "pipes": fifo("records.jsonl", "arguments.json", IMAGE),
    "a pipe as records": fifo("records.jsonl"),
    "a pipe as an image": fifo(IMAGE),
    "a folder as records": in_place_of("records.jsonl"),
    "a folder as an image": in_place_of(IMAGE),
    "a link to records": linked("records.jsonl", "{outside}/records.jsonl"),
    "a link to arguments": linked("arguments.json", "{outside}/arguments.json"),
    "a link to an image": linked(IMAGE, "{outside}/secret.png"),
    "a link as images": linked("images", "{outside}"),
    "a link where the page is written": linked("evaluation.html", "{outside}/secret"),
    "links where results are written": linked("evaluation.json", "{outside}/secret"),
    "an absolute path": changed(file="/etc/passwd"),
    "a path that leads out": changed(file="../outside/secret"),
    "an image that leads out": changed(file="../outside/secret.png"),
    "a device": changed(file="/dev/zero"),
    "sparse records": sparse("records.jsonl"),
    "sparse arguments": sparse("arguments.json"),
    "a sparse image": sparse(IMAGE),
    "a huge image": replaced(IMAGE, png(30_000, 30_000, b"x")),
    "an SVG": replaced(IMAGE, f"<svg onload='{EVIL}'/>"),
    "half an image": replaced(IMAGE, png(8, 8)[:40]),
    "no image": replaced(IMAGE, b""),
    "not UTF-8": replaced("records.jsonl", b"\xff\xfe\x00\n"),
    "half a line": replaced("records.jsonl", '{"set": "test", "index"'),
    "a list": replaced("records.jsonl", "[1]\n"),
    "deep JSON": replaced("records.jsonl", '{"set": ' + "[" * 100_000 + "\n"),
    "arguments of another type": replaced("arguments.json", "[1]"),
    "facts of another type": replaced("arguments.json", '{"facts": [1], "complete": true, "samples": 1}'),
    "a set of another type": changed(set=["test"]),
    "an index of another type": changed(index={"a": 1}),
    "a huge index": changed(index=10**400),
    "a truth as a number": changed(sample=True),
    "a prompt of another type": changed(prompt=5),
    "a reward of another type": changed(reward="much"),
    "a huge reward": changed(reward=10**400),
    "an infinite reward": changed(reward=float("inf")),
    "scores of another type": changed(scores=[0.5]),
    "a score of another type": changed(scores={"a": {}}),
    "answers of another type": changed(answers={"a": [1]}),
    "columns of another type": changed(columns=5),
    "a file of another type": changed(file=["a"]),
    "a text of another type": changed(text={"a": EVIL}),
    "no file": replaced("records.jsonl", rows({name: value for name, value in record().items() if name != "file"})),
    "other scores in one set": replaced("records.jsonl", rows(record(), record(sample=1, scores={"b": 1}))),
    "hostile texts": changed(prompt=EVIL, text=EVIL, file=EVIL, scores={EVIL: 1.0}),
}


def use(folder: Path, here: Path) -> list[str]:
    """Read the evaluation as a baseline, and write its page; returns what is shown."""
    shown = []
    try:
        stored = stored_in(folder)
        complete = stored is not None and is_complete(folder, stored)
        rows = read_records(folder)
    except ValueError as error:  # also a ConfigError
        return [str(error)]
    shown.append(str((stored, complete)))
    now = []
    for row in rows:
        places = {name: row[name] for name in ("set", "index", "sample", "scores")}
        now.append(record(**places, reward=float(row["index"])))
    if rows:
        result = result_of(now, EvaluateConfig(), HEAD, rows)
        page = write_page(here, result, Side(now, here), Side(rows, folder))
        Page(page)
        shown.append(page.read_text())
        write_json(folder, "evaluation.json", result)
        shown.append(write_page(folder, result, Side(rows, folder), Side(now, here)).read_text())
    keep_chunks(folder, [1])
    append_records(folder, now[:1])
    return shown


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_evaluation_is_told_and_no_more(name: str, tmp_path: Path) -> None:
    folder, here = evaluation(tmp_path / "theirs"), evaluation(tmp_path / "mine")
    outside = evaluation(tmp_path / "outside")
    (outside / "secret").write_text(SECRET)
    (outside / "secret.png").write_bytes(png(97, 89))
    (outside / "records.jsonl").write_text(rows(record(prompt=SECRET)))
    (outside / "arguments.json").write_text(json.dumps({"facts": {SECRET: 1}, "complete": True, "samples": 1}))
    HOSTILE[name](folder)
    before = digest(outside)

    def act() -> None:
        for text in use(folder, here):
            assert SECRET not in text and 'width="97"' not in text and "cm9vdDp4Oj" not in text  # "root:x:" in base64
            assert EVIL not in text or "<html" not in text

    assert in_child(act) == ""
    assert digest(outside) == before


def test_a_good_evaluation_is_used(tmp_path: Path) -> None:
    stored, here, there = use(evaluation(tmp_path / "theirs"), evaluation(tmp_path / "mine"))
    assert stored == "({'facts': {'n': 1}, 'complete': True, 'samples': 2}, True)"
    assert here.count("<img") == there.count("<img") == 2 * 2 + 2 + 2  # the prompts that changed, the extremes, and all


@pytest.mark.parametrize("part", ["evaluation", "evaluation/writer", "evaluation/writer/step_000002"])
def test_output_goes_through_no_link_of_a_run(part: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    assert place_in_run(checkpoint, "evaluation", "writer") == tmp_path / "run/evaluation/writer/step_000002"
    (tmp_path / "run" / part).parent.mkdir(parents=True)
    (tmp_path / "run" / part).symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"output_dir: '.*' is a link; give the folder to write to"):
        place_in_run(checkpoint, "evaluation", "writer")


def test_a_checkpoint_of_pipes_and_other_things(tmp_path: Path) -> None:
    """A copy of a checkpoint whose files are links, as in a cache of downloads, is read."""
    progress = {"step": 1, "samples_seen": 1, "updates": 1, "unfinished": None, "rescoring": False}
    meta = json.dumps({"files": {"a": [1, 0]}, "signature": {}, "progress": progress})
    (tmp_path / "blob").write_text(meta)
    (tmp_path / "meta.json").symlink_to("blob")
    (tmp_path / "a").write_text("x")
    assert complete(tmp_path) is None
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    assert complete(tmp_path) == "a is a folder"
    for name in ("meta.json", ".metadata"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    assert str(complete(tmp_path)).startswith("it cannot be read: [Errno 22] neither a file nor a folder")
    with pytest.raises(ValueError, match=r"\.metadata is damaged, or not a checkpoint's: .* neither a file nor"):
        Reader(tmp_path).read_metadata()
    (tmp_path / "arguments.json").mkdir()
    with pytest.raises(ConfigError, match=r"arguments\.json cannot be read: Is a directory; give another folder"):
        stored_in(tmp_path)
