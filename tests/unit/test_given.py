"""Rows and functions of a program as files, and what a file says of a function."""

import importlib.util
import linecache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from phalanx.config.messages import ConfigError
from phalanx.config.registry import resolve_object
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.tools.given import Given, source_of

CELLS = count()


def cell(text: str) -> dict[str, Any]:
    """The names of a notebook's cell, run as IPython runs it: in __main__, with its lines in the linecache."""
    name = f"<cell {next(CELLS)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    names = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    return names


def written(folder: Path, key: str, value: Any) -> str:
    """The setting as an override, with its files in the folder."""
    given = Given([(key, value)])
    given.write(folder)
    (word,) = given.words(folder)
    return word


def rows_of(folder: Path, rows: Any, **form: Any) -> list[Any]:
    word = written(folder, "data.train_files", rows)
    (file,) = eval(word.partition("=")[2])
    return load_prompts([file], "data.train_files", **form)


def test_rows_are_read_back(tmp_path: Path) -> None:
    rows = [{"prompt": 'Where is "Ö"?', "answer": np.float64(1.5)}, {"prompt": "And\nthis?", "tags": ["a", None]}]
    for given in (rows, iter(rows), Dataset.from_list([{"prompt": row["prompt"]} for row in rows])):
        prompts = rows_of(tmp_path, given, quoted=False)
        assert [prompt.text for prompt in prompts] == ['Where is "Ö"?', "And\nthis?"]
    prompts = rows_of(tmp_path, rows, quoted=False)
    assert [prompt.meta for prompt in prompts] == [{"answer": 1.5, "ground_truth": 1.5}, {"tags": ["a", None]}]


def test_images_are_read_back(tmp_path: Path) -> None:
    pixels = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    rows = [{"prompt": "x", "image": Image.fromarray(pixels)}]
    for given in (rows, Dataset.from_list(rows)):
        (prompt,) = rows_of(tmp_path, given, quoted=False)
        assert np.array_equal(np.asarray(prompt.images[0].pil()), pixels)
        (prompt,) = rows_of(tmp_path, given, images=("image",))
        assert np.array_equal(np.asarray(prompt.meta["image"].pil()), pixels)


def test_sets_have_their_names(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}]
    for value, names in ((rows, ["val"]), ({"easy": rows, "hard": [{"prompt": "y"}]}, ["easy", "hard"])):
        word = written(tmp_path, "data.val_files", value)
        assert list(validation_sets(eval(word.partition("=")[2]))) == names


def test_files_stay_files(tmp_path: Path) -> None:
    assert written(tmp_path, "data.train_files", "a.jsonl") == 'data.train_files="a.jsonl"'
    assert (
        written(tmp_path, "data", {"train_files": [Path("/a.txt"), "b.txt"]})
        == 'data={"train_files": ["/a.txt", "b.txt"]}'
    )
    assert list(tmp_path.iterdir()) == []


def test_equal_contents_have_equal_paths(tmp_path: Path) -> None:
    one, same = (written(tmp_path, "data.train_files", [{"prompt": "x"}]) for _ in range(2))
    assert one == same != written(tmp_path, "data.train_files", [{"prompt": "y"}])
    functions = [cell(f"def f(x):\n    return {n}")["f"] for n in (1, 1, 2)]
    first, again, other = (written(tmp_path, "reward.functions", [{"path": f}]) for f in functions)
    assert first == again != other


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.train_files", 3, "data.train_files: int; expected rows (dicts), a datasets.Dataset, or files"),
        ("data.train_files", [{"a": {1}}], "data.train_files, row 0: a value of type set; expected texts, numbers, lists, dicts or images"),
        ("optim.lr", {1}, "optim.lr: a value of type set; expected values that YAML has, functions, or rows of data"),
    ],
)  # fmt: skip
def test_a_value_that_no_file_can_hold(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Given([(key, value)])
    assert str(error.value) == message


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("")
    with pytest.raises(ConfigError, match=r"train.jsonl cannot be written: "):
        written(tmp_path, "data.train_files", [{"prompt": "x"}])


def test_a_function_is_itself_here_and_its_source_elsewhere(tmp_path: Path) -> None:
    steps = cell("def steps(completions):\n    return [float('=' in text) for text in completions]")["steps"]
    word = written(tmp_path, "reward", {"functions": [{"path": steps, "weight": 0.5}]})
    (entry,) = eval(word.partition("=")[2])["functions"]
    assert resolve_object(entry["path"], "key", "function") is steps
    file, name = entry["path"].split(":")
    assert imported(file, name)(["1=1", "x"]) == [1.0, 0.0]


def test_a_function_of_a_module_is_named_by_it(tmp_path: Path) -> None:
    word = written(tmp_path, "reward.functions", [{"path": load_prompts}])
    assert word == 'reward.functions=[{"path": "phalanx.data.prompts:load_prompts"}]'


def imported(file: str | Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("elsewhere", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[name]


USES = """
import math as m
import re
from textwrap import dedent
from typing import Any
NUMBER = re.compile("[0-9]+", re.ASCII)
MOST = 3
HALF = 0.5
def digits(text: str) -> int:
    return len(NUMBER.findall(text)) if text else digits("0")
def score(completions: list[str], **columns: Any) -> list[float]:
    return [min(digits(dedent(text)), MOST) + m.floor(HALF) for text in completions]
"""
LAMBDA = "top = 2\nscore = lambda completions, **columns: [top * len(text) for text in completions]"
CLOSURE = """
def made(by):
    def score(completions):
        return [by * len(text) for text in completions]
    return score
score = made(3)
"""


@pytest.mark.parametrize(("text", "scores"), [(USES, [2, 3]), (LAMBDA, [6, 14]), (CLOSURE, [9, 21])])
def test_a_source_stands_alone(text: str, scores: list[float], tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(source_of(cell(text)["score"], "score"))
    assert imported(tmp_path / "score.py", "score")(["1 2", "1 2 3 4"]) == scores


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pair = (lambda a: 1, lambda a: 2)\nscore = pair[0]", "its lines have 2 lambdas"),
        (
            "class Scores:\n    def __call__(self, completions):\n        return [1]\nscore = Scores()",
            "score is of type Scores",
        ),
    ],
)
def test_a_source_that_is_not_here(text: str, reason: str) -> None:
    source = source_of(cell(text)["score"], "score")
    assert source.startswith("# score of a Python program, whose source is not here: ")
    assert reason in source
    compile(source, "score.py", "exec")
    assert (
        source == source_of(cell(text)["score"], "score") != source_of(cell(text.replace("1", "2"))["score"], "score")
    )


def test_a_value_that_is_not_here_is_named(tmp_path: Path) -> None:
    names = cell("held = object()\ndef score(completions):\n    return [float(text is held) for text in completions]")
    source = source_of(names["score"], "score")
    assert "\n# held is not here: held is of type object\n" in source
    (tmp_path / "score.py").write_text(source)
    with pytest.raises(NameError, match="held"):
        imported(tmp_path / "score.py", "score")(["x"])
