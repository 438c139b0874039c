"""Data sets of the hub by name, read by `datasets`, which takes a local folder of that relative name as well."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from datasets import Dataset, Features, Image, Value

from phalanx.config.lm import LMRLConfig
from phalanx.data import hub
from phalanx.data.data_files import DataError
from phalanx.data.hub import named
from phalanx.data.images import ImageTextData
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.run.rules import load_config
from phalanx.tools.inputs import check_lm
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_vision import picture

KEY = "data.train_files"
COLUMNS = "?prompt=question&ground_truth=answer"
CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train.parquet}, {split: test, path: main/test.parquet}]}
- {config_name: single, data_files: [{split: train, path: main/train.parquet}]}
---
"""


@contextmanager
def one_line(beginning: str) -> Iterator[None]:
    """Check that the block raises a DataError of one line that begins with the key and these words."""
    with pytest.raises(DataError) as caught:
        yield
    assert str(caught.value).startswith(f"{KEY}: {beginning}") and "\n" not in str(caught.value)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets_cache: None) -> Path:
    """A data set openai/words with two subsets, as the hub has it, below the current folder."""
    folder = tmp_path / "openai" / "words"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for split, count in (("train", 3), ("test", 2)):
        table = {"question": [f"{split} {i}?" for i in range(count)], "answer": [f"#### {i}" for i in range(count)]}
        Dataset.from_dict(table).to_parquet(str(folder / "main" / f"{split}.parquet"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_an_entry_names_subset_split_revision_and_columns() -> None:
    whole = named("hf://openai/gsm8k@1f2e/main:train[:10%]?prompt=question&ground_truth=answer", KEY)
    assert whole == {
        "name": "openai/gsm8k",
        "revision": "1f2e",
        "subset": "main",
        "split": "train[:10%]",
        "columns": {"question": "prompt", "answer": "ground_truth"},
    }
    parts = named("hf://openai/gsm8k", KEY)
    assert parts == {"name": "openai/gsm8k", "revision": None, "subset": None, "split": None, "columns": {}}
    assert named("hf://openai/gsm8k:test", KEY)["split"] == "test"


def test_rows_and_validation_sets(words: Path) -> None:
    rows = load_prompts([f"hf://openai/words/main:train{COLUMNS}"], KEY, quoted=False)
    assert [row.text for row in rows] == ["train 0?", "train 1?", "train 2?"]
    assert [row.meta["ground_truth"] for row in rows] == ["#### 0", "#### 1", "#### 2"]
    assert rows[1].place == f"{KEY}: hf://openai/words/main:train{COLUMNS}, row 1"
    # the only split of a subset needs no name, and a split may be sliced
    assert len(load_prompts(["hf://openai/words/single"], KEY, prompt="question")) == 3
    sets = validation_sets(
        ["hf://openai/words/main:test", "hf://openai/words/main:train[:2]"], prompt="question", quoted=False
    )
    assert {name: [row.text for row in rows] for name, rows in sets.items()} == {
        "words_test": ["test 0?", "test 1?"],
        "words_train_2": ["train 0?", "train 1?"],
    }
    # beside files of other formats
    Path("more.jsonl").write_text(json.dumps({"prompt": "more"}) + "\n")
    assert len(load_prompts(["more.jsonl", f"hf://openai/words/main:test{COLUMNS}"], KEY)) == 3


def loaded(entry: str) -> list[str]:
    return [row.text for row in load_prompts([entry], KEY)]


def test_ranks_that_read_it_at_once(words: Path) -> None:
    """Nothing is in the cache yet, which one of them fills."""
    texts = run_ranks(loaded, 3, f"hf://openai/words/main:train{COLUMNS}")
    assert texts == [["train 0?", "train 1?", "train 2?"]] * 3


def test_a_job_checks_it_before_the_ranks_start(words: Path, lm_folder: Path) -> None:
    files = f"data.train_files=['hf://openai/words/main:train{COLUMNS}']"
    keys = [f"model.path={lm_folder}", "trainer.total_training_steps=1"]
    config = load_config(LMRLConfig, None, [files, *keys])
    check_lm(config)
    # one entry needs no list
    config = load_config(LMRLConfig, None, ["data.train_files=hf://openai/words/main:valid", *keys])
    with one_line('hf://openai/words/main:valid: ValueError: Unknown split "valid".'):
        check_lm(config)


def test_images_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets_cache: None) -> None:
    (tmp_path / "art" / "doors").mkdir(parents=True)
    file = tmp_path / "door.png"
    picture().save(file)
    features = Features({"image": Image(), "text": Value("string")})
    table = Dataset.from_dict({"image": [{"bytes": file.read_bytes(), "path": None}], "text": ["a red door"]}, features)
    table.to_parquet(str(tmp_path / "art" / "doors" / "train.parquet"))
    monkeypatch.chdir(tmp_path)
    data = ImageTextData(["hf://art/doors"], 32, 32, KEY)
    assert len(data) == 1 and data.prompt(0) == "a red door" and data.image(0).shape == (3, 32, 32)
    assert load_prompts(["hf://art/doors:train"], KEY, ("image",), "text")[0].text == "a red door"


MISTAKES = {
    "hf://gsm8k": "hf://gsm8k is not the name of a data set; expected hf://owner/name/subset:split, where the subset",
    "hf://openai/words/main/x:train": "hf://openai/words/main/x:train is not the name of a data set; expected hf://",
    "hf://openai/words/main:train?prompt": "hf://openai/words/main:train?prompt: expected columns as in ?prompt=quest",
    "hf://openai/words/main": "hf://openai/words/main has the splits train, test; name one, e.g. hf://openai/words/main:t",
    "hf://openai/words/mian:train": "hf://openai/words/mian:train: ValueError: BuilderConfig 'mian' not found.",
    "hf://openai/words:train": "hf://openai/words:train: ValueError: Config name is missing.",
    "hf://openai/words/main:train?prompt=text": "hf://openai/words/main:train?prompt=text has no column 'text'; it has qu",
    "hf://openai/words/main:train?answer=question": (
        "hf://openai/words/main:train?answer=question would have the column 'answer' twice; give the other one a name too"
    ),
    "hf://openai/words/main:train": "hf://openai/words/main:train has no column 'prompt'; it has question, answer",
}


@pytest.mark.parametrize("entry", MISTAKES)
def test_a_mistake_is_one_line(entry: str, words: Path) -> None:
    with one_line(MISTAKES[entry]):
        load_prompts([entry], KEY)


def test_without_network_the_cache_is_read_or_one_line_says_so(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself, offline, on a name that is no folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with one_line("hf://openai/absent:train is neither on the hub, as far as it can be reached, nor in the cache"):
        load_prompts(["hf://openai/absent:train"], KEY)

    def unreachable(*args: Any, **options: Any) -> Any:
        raise requests.exceptions.ReadTimeout("read timed out")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with one_line("hf://openai/words/main:train: ReadTimeout: read timed out"):
        hub.load_named("hf://openai/words/main:train", f"{KEY}: hf://openai/words/main:train")
