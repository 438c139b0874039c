"""Prompts: every file format, every mistake with its exact message, and the order in which prompts are drawn."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from phalanx.config.messages import cut
from phalanx.data.images import ImageTextData
from phalanx.data.overlap import held_out_overlap
from phalanx.data.prompts import FORMATS, DataError, load_prompts, validation_sets
from phalanx.data.streams import PromptStream
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.pairs import write_parquet

KEY = "data.train_files"


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines(*objects: Any) -> str:
    return "".join(json.dumps(o) + "\n" for o in objects)


def chat(text: Any, system: str = "Describe the image:") -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def rows_of(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", 0, {"i": i}) for i in range(n)]


# --- formats


def test_txt_takes_the_first_quoted_span_as_ground_truth(tmp_path: Path) -> None:
    text = (
        '\ufeffa sign "OPEN 24" and "late"\r\n\r\n  a cat \n“Grüße” on a card\n„Ja“ und nein\nla «une» page\nempty ""\n'
    )
    rows = load_prompts([write(tmp_path / "p.txt", text)], KEY)
    assert rows == [
        Prompt('a sign "OPEN 24" and "late"', 0, {"ground_truth": "OPEN 24"}),
        Prompt("a cat", 0, {}),
        Prompt("“Grüße” on a card", 0, {"ground_truth": "Grüße"}),
        Prompt("„Ja“ und nein", 0, {"ground_truth": "Ja"}),
        Prompt("la «une» page", 0, {"ground_truth": "une"}),
        Prompt('empty ""', 0, {}),
    ]


def test_txt_line_separator_of_unicode_is_text(tmp_path: Path) -> None:
    assert [r.text for r in load_prompts([write(tmp_path / "p.txt", "a\u2028b\nc")], KEY)] == ["a\u2028b", "c"]


def test_jsonl(tmp_path: Path) -> None:
    content = lines(
        {"prompt": 'say "a"', "negative_prompt": "blurry", "data_source": "x", "extra": {"k": [1, 2]}},
        {"prompt": 'say "a"', "ground_truth": "b", "reward_model": {"ground_truth": "c"}},
        {"prompt": 'say "a"', "ground_truth": None, "reward_model": {"ground_truth": "c"}, "negative_prompt": None},
        {"prompt": [*chat("first"), {"role": "assistant", "content": "ok"}, *chat("last")], "negative_prompt": ""},
    )
    assert load_prompts([write(tmp_path / "p.jsonl", content + "\n")], KEY) == [
        Prompt('say "a"', 0, {"data_source": "x", "extra": {"k": [1, 2]}, "ground_truth": "a"}, "blurry"),
        Prompt('say "a"', 0, {"ground_truth": "b", "reward_model": {"ground_truth": "c"}}),
        Prompt('say "a"', 0, {"ground_truth": "c", "reward_model": {"ground_truth": "c"}}),
        Prompt("last", 0, {}, ""),
    ]


def test_rows_of_language_models(tmp_path: Path) -> None:
    """Chats are kept whole, and the ground truth is a column, not a quotation: rows of GSM8K and of verl."""
    talk = [*chat("first"), {"role": "assistant", "content": "ok"}, *chat("last")]
    content = lines(
        {"question": 'say "a"', "answer": "1+1=2\n#### 2"},
        {"question": talk, "reward_model": {"ground_truth": "c"}, "answer": "d"},
        {"question": "none"},
    )
    rows = load_prompts([write(tmp_path / "p.jsonl", content + "\n")], KEY, prompt="question", quoted=False)
    assert [(row.text, row.meta.get("ground_truth"), row.messages) for row in rows] == [
        ('say "a"', "1+1=2\n#### 2", None),
        ("last", "c", talk),
        ("none", None, None),
    ]
    broken = lines({"question": [{"role": "system", "content": "s"}, *talk]}, {"question": talk[: -len(chat("last"))]})
    with refused(
        f"{KEY}: {tmp_path}/q.jsonl:2: question ends with an answer of the assistant; expected a message to be answered"
    ):
        load_prompts([write(tmp_path / "q.jsonl", broken + "\n")], KEY, prompt="question", quoted=False)
    broken = lines({"question": [{"role": "user", "content": "x"}, {"role": "user", "content": ["y"]}]})
    with pytest.raises(DataError, match=r"question contains a part of a message that is not \{type: text, text\}"):
        load_prompts([write(tmp_path / "q.jsonl", broken + "\n")], KEY, prompt="question", quoted=False)
    broken = lines({"question": [{"role": "system"}, {"role": "user", "content": "y"}]})
    with pytest.raises(DataError, match=r"question contains a message that is not \{role, content\}, both texts"):
        load_prompts([write(tmp_path / "q.jsonl", broken + "\n")], KEY, prompt="question", quoted=False)


def test_csv(tmp_path: Path) -> None:
    content = (
        '\ufeffprompt,negative_prompt,ground_truth,colour\r\n"say ""a"", twice",blurry,,red\r\n"two\nlines",,b,\r\n'
    )
    assert load_prompts([write(tmp_path / "p.csv", content)], KEY) == [
        Prompt('say "a", twice', 0, {"colour": "red", "ground_truth": "a"}, "blurry"),
        Prompt("two\nlines", 0, {"colour": None, "ground_truth": "b"}),
    ]


CSV_MISTAKES = [
    ("text,n\na,1\n", ".csv has no column 'prompt'; it has text, n"),
    ("", ".csv has no column 'prompt'; it has none"),
    ("prompt,n\na,1\n,2\n", ".csv:3: the prompt is empty"),
    ("prompt,n\na, b,1\n", ".csv:2: more cells than the header has columns; expected quotes around commas"),
    ('prompt\n"a" b\n', ".csv:2: not CSV (',' expected after '\"')"),
    (b"prompt\ncaf\xe9\n", ".csv: not UTF-8 (invalid continuation byte); save the file as UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), CSV_MISTAKES)
def test_csv_that_cannot_be_read(content: str | bytes, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "p.csv", content)
    with refused(f"{KEY}: {file.removesuffix('.csv')}{message}"):
        load_prompts([file], KEY)


def test_the_column_of_the_prompts(tmp_path: Path) -> None:
    content = {"caption": "a cat", "prompt": "not this"}
    files = [
        write(tmp_path / "p.jsonl", lines(content)),
        write(tmp_path / "p.csv", "caption,prompt\na cat,not this\n"),
        str(write_parquet(tmp_path / "p.parquet", [content])),
    ]
    assert load_prompts(files, KEY, prompt="caption") == [Prompt("a cat", 0, {"prompt": "not this"})] * 3
    plain = write(tmp_path / "p.txt", "a cat\n")
    assert load_prompts([plain], KEY, prompt="caption") == [Prompt("a cat", 0, {})]
    (only,) = validation_sets([files[1]], prompt="caption").values()
    assert only[0].text == "a cat"
    with refused(f"{KEY}: {files[0]}:1: no 'text'; it has caption, prompt"):
        load_prompts(files[:1], KEY, prompt="text")


def test_other_prompts_in_some_places() -> None:
    stream = PromptStream(rows_of(10), 4, seed=3)
    numbers = stream.numbers(0)
    assert [p.text for p in stream.prompts(numbers)] == [p.text for p in stream.batch(0)]
    seen = set()
    for draw in range(6):
        found = stream.renewed(numbers, [1, 3], draw)
        assert found == stream.renewed(numbers, [1, 3], draw)
        assert found[0] == numbers[0] and found[2] == numbers[2]
        seen |= set(found)
        assert found[1] not in numbers and found[3] not in numbers
    assert len(seen) > 6
    few = PromptStream(rows_of(3), 4, seed=3)  # the same ones again, because there are no others
    assert len(few.renewed(few.numbers(0), [0, 1], 0)) == 4


def verl_rows(n: int) -> list[dict[str, Any]]:
    """Rows as VeRL-Omni's data_process/qwenimage_ocr.py writes them."""
    return [
        {
            "data_source": "flow_grpo/ocr",
            "prompt": chat(f'the word "w{i}"'),
            "negative_prompt": chat(" "),
            "ability": "ocr",
            "reward_model": {"style": "model", "ground_truth": f"truth{i}"},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(n)
    ]


def verl_expected(i: int) -> Prompt:
    meta = {k: v for k, v in verl_rows(i + 1)[i].items() if k not in ("prompt", "negative_prompt")}
    return Prompt(f'the word "w{i}"', 0, meta | {"ground_truth": f"truth{i}"}, " ")


def test_parquet_of_verl_omni(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "train.parquet", verl_rows(3))
    assert load_prompts([str(file)], KEY) == [verl_expected(i) for i in range(3)]


def test_rows_of_verl_for_language_models(tmp_path: Path) -> None:
    """GSM8K and MATH as written by verl's scripts, with a system message, in Parquet and JSON Lines."""
    talk = [{"role": "system", "content": "Be brief."}, *chat("1+1?")]
    row = {
        "data_source": "openai/gsm8k",
        "prompt": talk,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "answer": "1+1=2 #### 2", "question": "1+1?"},
    }
    files = [str(write_parquet(tmp_path / "t.parquet", [row])), write(tmp_path / "t.jsonl", lines(row) + "\n")]
    meta = {key: value for key, value in row.items() if key != "prompt"} | {"ground_truth": "2"}
    assert load_prompts(files, KEY, quoted=False) == [Prompt("1+1?", 0, meta, messages=talk)] * 2


def test_parquet_with_plain_columns_and_nulls(tmp_path: Path) -> None:
    table = [{"prompt": 'a "x"', "negative_prompt": "bad"}, {"prompt": "b", "negative_prompt": None}]
    rows = load_prompts([str(write_parquet(tmp_path / "t.parquet", table))], KEY)
    assert rows == [Prompt('a "x"', 0, {"ground_truth": "x"}, "bad"), Prompt("b", 0, {})]


def test_datasets_folder_and_its_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    train, test = Dataset.from_list(verl_rows(2)), Dataset.from_list([{"prompt": "t"}])
    train.save_to_disk(tmp_path / "single")
    DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    DatasetDict({"only": test}).save_to_disk(tmp_path / "one")
    single, both, one = (str(tmp_path / name) for name in ("single", "both", "one"))

    assert load_prompts([single], KEY) == [verl_expected(0), verl_expected(1)]
    assert load_prompts([f"{both}:train", f"{both}:test"], KEY) == [
        verl_expected(0),
        verl_expected(1),
        Prompt("t", 0, {}),
    ]
    assert load_prompts([one], KEY) == [Prompt("t", 0, {})]
    assert list(validation_sets([f"{both}:train", f"{both}:test", one])) == ["both_train", "both_test", "one"]

    for file, message in {
        both: f"has the splits train, test; name one, e.g. {both}:train",
        f"{both}:val": "there is no split 'val'; it has train, test",
        f"{single}:train": f"the dataset has no splits; expected {single}",
    }.items():
        with pytest.raises(ValueError) as error:
            load_prompts([file], KEY)
        assert str(error.value) in (f"{KEY}: {file} {message}", f"{KEY}: {file}: {message}")


def test_files_are_joined_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.txt", "1\n2"), write(tmp_path / "a.jsonl", lines({"prompt": "3"}))]
    assert [r.text for r in load_prompts(files, KEY)] == ["1", "2", "3"]


# --- mistakes

BAD = {
    "latin1.txt": (b"ok\n\nd\xe9j\xe0 vu\n", ":3: not UTF-8 (byte 0xe9); save the file as UTF-8"),
    "empty.txt": (b"\n  \n", " has no prompts"),
    "empty.jsonl": (b"", " has no prompts"),
    "table.tsv": (b"prompt\na\n", f" ends in .tsv; expected {FORMATS}"),
    "noending": (b"a\n", f" has no ending; expected {FORMATS}"),
    "cut.jsonl": (
        b'{"prompt": "a"}\n{"prompt": "b"\n',
        ':2: not JSON (Expecting \',\' delimiter at column 15); expected one object per line, {"prompt": "..."}',
    ),
    "deep.jsonl": (
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        ':1: not JSON (it is nested too deeply); expected one object per line, {"prompt": "..."}',
    ),
    "half.jsonl": (
        b'{"prompt": "a", "note": "\\uD83D\\uDE00"}\n{"prompt": "a", "note": "\\uD800"}\n',
        ':2: not JSON (\\ud800 is half of a surrogate pair, which is not valid text); expected one object per line, {"prompt": "..."}',
    ),
    "digits.jsonl": (
        b'{"prompt": "a", "x": ' + b"9" * 6000 + b"}\n",
        ":1: not JSON (Exceeds the limit (4300 digits) for integer string conversion: value has 6000 digits); "
        'expected one object per line, {"prompt": "..."}',
    ),
    "long.txt": (b"a" * 10**7, ":1: prompt has 10000000 characters; expected at most 4194304"),
    "list.jsonl": (b'["a"]\n', ':1: JSON of type list; expected one object per line, {"prompt": "..."}'),
    "caption.jsonl": (b'{"text": "a", "id": 1}\n', ":1: no 'prompt'; it has text, id"),
    "number.jsonl": (b'{"prompt": 7}\n', ":1: prompt is of type number; expected text, or a chat of texts"),
    "null.jsonl": (b'{"prompt": null}\n', ":1: prompt is of type null; expected text, or a chat of texts"),
    "blank.jsonl": (b'{"prompt": "a"}\n\n{"prompt": " "}\n', ":3: the prompt is empty"),
    "system.jsonl": (
        b'{"prompt": [{"role": "system", "content": "x"}]}\n',
        ":1: prompt is a list without a user message; expected text or [{role, content}]",
    ),
    "parts.jsonl": (
        b'{"prompt": [{"role": "user", "content": [{"type": "audio", "text": "x"}]}]}\n',
        ":1: prompt contains a part of a message that is not {type: text, text}",
    ),
    "pictured.jsonl": (
        b'{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}\n',
        ":1: prompt has a part {type: image, image} of a message; expected the row's images in a column `images`, and "
        "parts {type: image} in their places, or {type: image, image} with the bytes of an image file, its path beside "
        "the data file, or {bytes, path}",
    ),
    "negative.jsonl": (
        b'{"prompt": "a", "negative_prompt": true}\n',
        ":1: negative_prompt is of type boolean; expected text, or a chat of texts",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    file = write(tmp_path / name, content)
    with refused(f"{KEY}: {file}{message}"):
        load_prompts([file], KEY)


def test_bad_parquet(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.parquet", "not parquet at all")
    with pytest.raises(ValueError) as error:
        load_prompts([broken], KEY)
    assert str(error.value).startswith(f"{KEY}: {broken} is not a Parquet file: ") and "\n" not in str(error.value)

    damaged = write_parquet(tmp_path / "page.parquet", [{"prompt": f"prompt {i}"} for i in range(500)])
    content = bytearray(damaged.read_bytes())
    content[4:2000] = bytes(byte ^ 0xA5 for byte in content[4:2000])  # the pages; the footer stays
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=f"^{KEY}: {damaged} is not a Parquet file: "):
        load_prompts([str(damaged)], KEY)

    caption = write_parquet(tmp_path / "caption.parquet", [{"caption": "a", "id": 1}])
    empty = write_parquet(tmp_path / "empty.parquet", [{"prompt": text} for text in ("a", "", "c")])
    for file, message in {
        caption: " has no column 'prompt'; it has caption, id",
        empty: ", row 1: the prompt is empty",
    }.items():
        with refused(f"{KEY}: {file}{message}"):
            load_prompts([str(file)], KEY)


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", "a")
    (tmp_path / "folder").mkdir()
    for file, message in {
        f"{tmp_path}/trian.txt": f"{tmp_path}/trian.txt does not exist; did you mean {tmp_path}/train.txt?",
        f"{tmp_path}/train.txt:test": f"{tmp_path}/train.txt:test does not exist; did you mean {tmp_path}/train.txt?",
        f"{tmp_path}/no/x.parquet": f"{tmp_path}/no/x.parquet does not exist; expected {FORMATS}",
        f"{tmp_path}/folder": f"{tmp_path}/folder is a folder, but not a dataset written by save_to_disk; expected {FORMATS}",
    }.items():
        with refused(f"data.val_files: {message}"):
            load_prompts([file], "data.val_files")
    with refused(f"{KEY} is empty; give a list of files, each {FORMATS}"):
        load_prompts([], KEY)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """They are refused without reading them, since reading a pipe would block."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    (tmp_path / "circle.txt").symlink_to(tmp_path / "circle.txt")
    for file, reason in {
        f"{tmp_path}/pipe.txt": "neither a file nor a folder",
        f"{tmp_path}/endless.txt": "neither a file nor a folder",
        f"{tmp_path}/circle.txt": "Too many levels of symbolic links",
        "x" * 300: "File name too long",
        "~nobody_of_this_name/x.txt": "Could not determine home directory.",
    }.items():
        with refused(f"{KEY}: {cut(file)} cannot be read: {reason}"):
            load_prompts([file], KEY)
        with refused(f"{KEY}: {cut(file)} cannot be read: {reason}"):
            ImageTextData([file], 8, 8)


def test_a_damaged_dataset_folder(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("[1]")
    with pytest.raises(DataError, match=f"^{KEY}: {tmp_path}: the dataset is damaged: TypeError: list indices"):
        load_prompts([str(tmp_path)], KEY)


# --- the stream


def test_every_epoch_holds_every_prompt_once_in_another_order() -> None:
    stream = PromptStream(rows_of(10), batch_size=4, seed=3)
    drawn = [p.text for step in range(10) for p in stream.batch(step)]  # four epochs; batches span their boundaries
    epochs = [drawn[i : i + 10] for i in range(0, 40, 10)]
    assert all(Counter(epoch) == Counter(r.text for r in rows_of(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    def texts(stream: PromptStream, step: int) -> list[str]:
        return [p.text for p in stream.batch(step)]

    forward = PromptStream(rows_of(50), 8, seed=1)
    expected = {step: texts(forward, step) for step in range(20)}
    backward = PromptStream(rows_of(50), 8, seed=1)
    assert {step: texts(backward, step) for step in reversed(range(20))} == expected
    assert texts(PromptStream(rows_of(50), 8, seed=1), 13) == expected[13]  # as in a resumed run
    assert texts(PromptStream(rows_of(50), 8, seed=2), 13) != expected[13]


def test_a_batch_is_the_same_in_another_process() -> None:
    """Ranks are processes with different salts of hash()."""
    code = (
        "from phalanx.data.streams import PromptStream\n"
        "from phalanx.types import Prompt\n"
        "rows = [Prompt(str(i), 0, {}) for i in range(30)]\n"
        "print([p.text for p in PromptStream(rows, 8, seed=5).batch(4)])"
    )
    here = [p.text for p in PromptStream([Prompt(str(i), 0, {}) for i in range(30)], 8, seed=5).batch(4)]
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)


def test_a_batch_carries_the_rows() -> None:
    rows = [Prompt("a", 0, {"ground_truth": "x"}, "bad")]
    assert PromptStream(rows, 2, seed=0).batch(7) == [
        Prompt("a", 0, {"ground_truth": "x"}, "bad"),
        Prompt("a", 1, {"ground_truth": "x"}, "bad"),
    ]


def test_steps() -> None:
    stream = PromptStream(rows_of(30), 3, seed=0)
    assert [stream.steps(e) for e in (0.01, 0.1, 0.5, 1, 1.01, 3)] == [1, 1, 5, 10, 11, 30]


def test_a_batch_larger_than_the_data_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        stream = PromptStream(rows_of(3), 7, seed=0)
        batches = [stream.batch(step) for step in range(3)]
    assert [r.getMessage() for r in caplog.records] == [
        "a batch of 7 prompts exceeds the 3 prompts of the data; it contains some of them several times"
    ]
    assert [len(b) for b in batches] == [7, 7, 7]
    assert [p.group_id for p in batches[1]] == list(range(7))
    assert Counter(p.text for b in batches for p in b) == {"p0": 7, "p1": 7, "p2": 7}


# --- validation


def test_validation_sets(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = write(tmp_path / "ocr.test.txt", 'a "1"\nb\nc')
    second = write(tmp_path / "hard.jsonl", lines({"prompt": "d", "negative_prompt": "e"}))
    assert validation_sets([first, second], limit=2) == {
        "ocr.test": [Prompt('a "1"', 0, {"ground_truth": "1"}), Prompt("b", 1, {})],
        "hard": [Prompt("d", 0, {}, "e")],
    }
    assert len(validation_sets([first])["ocr.test"]) == 3
    assert validation_sets([]) == {}
    twin = write(tmp_path / "other" / "hard.txt", "x")
    assert set(validation_sets([second, twin])) == {f"{tmp_path.name}_hard", "other_hard"}
    same = f"{tmp_path.name}_hard"
    with refused(
        f"data.val_files: {second} and {second} would both be the validation set '{same}'; rename one of them"
    ):
        validation_sets([second, second])


def test_overlap_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    held_out = [Prompt("p1 ", 0, {}), Prompt("p7", 1, {}), Prompt("p2", 2, {})]
    with caplog.at_level(logging.WARNING):
        assert held_out_overlap(rows_of(3), [held_out[1]]) == 0
        assert caplog.records == []
        assert held_out_overlap(rows_of(3), held_out) == 2
    assert [r.getMessage() for r in caplog.records] == [
        "2 of 3 validation prompts are training prompts as well; they do not measure generalization"
    ]


def test_overlap_of_prompts_about_images(tmp_path: Path) -> None:
    """The same instruction about another image is not a training prompt, whatever the size of its file; the same image is,
    under another name too. Images of other instructions are not read.
    """
    (tmp_path / "held_out").mkdir()
    for name, colour in (("red", "#f00"), ("blue", "#00f"), ("held_out/red", "#f00"), ("held_out/green", "#0f0")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.bmp")
    Image.new("RGB", (9, 9), "#f00").save(tmp_path / "held_out" / "large.bmp")

    def rows(file: str, *table: tuple[str, str]) -> list[Prompt]:
        written = write(tmp_path / file, lines(*({"prompt": text, "image": f"{name}.bmp"} for text, name in table)))
        return load_prompts([written], KEY, ("image",))

    train = rows("train.jsonl", ("brighter", "red"), ("darker", "blue"), ("gone", "nowhere"))
    asked = [("brighter", "green"), ("brighter", "large"), ("darker", "red"), ("smaller", "nowhere")]
    assert held_out_overlap(train, rows("held_out/new.jsonl", *asked), "image") == 0
    assert held_out_overlap(train, rows("held_out/old.jsonl", *asked, ("brighter ", "red")), "image") == 1
    with pytest.raises(ValueError, match=r"train.jsonl:3: image: the image cannot be read: No such file"):
        held_out_overlap(train, rows("held_out/gone.jsonl", ("gone", "red")), "image")
