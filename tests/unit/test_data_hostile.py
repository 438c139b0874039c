"""Data files of others: what cannot be read, or would fill the memory, is one line, and nothing waits."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phalanx.config.templates import WIDEST, too_wide
from phalanx.data.parquet import UNPACKED, DataError
from phalanx.data.prompts import load_prompts
from phalanx.zoo.rewards.judge.llm_judge import LlmJudge
from phalanx.zoo.rewards.judge.pairwise_judge import PairwiseJudge

pytestmark = pytest.mark.timeout(60)


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


def bound(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return str(path)


def device(path: Path) -> str:
    return "/dev/zero"


SPECIAL = [pipe, bound, device]


@pytest.mark.parametrize("make", SPECIAL)
@pytest.mark.parametrize("form", [str, lambda path: {"path": path}, lambda path: [path], lambda path: f"file://{path}"])
@pytest.mark.parametrize("read", ["pil", "size", "file_size", "digest"])
def test_an_image_that_is_no_file(make: Callable[[Path], str], form: Any, read: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "<image>What?", "images": form(make(tmp_path / "x"))}))
    (picture,) = load_prompts([str(file)], "k", quoted=False)[0].images
    with pytest.raises(
        ValueError, match=r"^k: .*rows.jsonl:1: images.* cannot be read: neither a file nor a folder: '"
    ):
        picture.pil() if read == "pil" else vars(type(picture))[read].__get__(picture)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
@pytest.mark.parametrize("make", [pipe, bound])
def test_a_data_file_that_is_no_file(make: Callable[[Path], str], ending: str, tmp_path: Path) -> None:
    make(tmp_path / f"rows.{ending}")
    for entry in (tmp_path / f"rows.{ending}", tmp_path / f"*.{ending}", tmp_path):
        with pytest.raises(DataError, match=r"cannot be read: neither a file nor a folder|not a dataset written by"):
            load_prompts([str(entry)], "k")


def test_a_dataset_folder_with_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "dataset_info.json").write_text("{}")
    pipe(tmp_path / "data.arrow")
    with pytest.raises(DataError, match="cannot be read: neither a file nor a folder"):
        load_prompts([str(tmp_path)], "k")


READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
from phalanx.data.prompts import load_prompts
try:
    load_prompts(sys.argv[1:], "k", quoted=False)
except ValueError as error:
    print(error)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])  # in KiB
"""


def repeated(values: Any, count: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(values))


BOMBS = {
    "a million rows": lambda: {"prompt": repeated(["what?"], 10**6)},
    "a long text in each row": lambda: {"prompt": repeated(["a" * 10**6], 10**5)},
    "a long text": lambda: {"prompt": ["q"], "text": ["a" * (UNPACKED // 2)]},
    "a long text in another column": lambda: {"prompt": ["q"] * 1000, "text": repeated(["a" * 10**6], 1000)},
    "long lists": lambda: {"prompt": ["q"] * 50, "list": [[1] * 100_000] * 50},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_parquet_file_that_fills_the_memory(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table(BOMBS[name]()), file, compression="zstd")
    assert file.stat().st_size < 20_000
    # a process of its own, whose memory can be measured and limited
    done = subprocess.run([sys.executable, "-c", READ, str(file)], capture_output=True, text=True)
    line, memory = done.stdout.splitlines()
    assert "rows.parquet has rows of more than 128 MiB in memory, more than 100 times the size of the file" in line
    assert int(memory) < 500 * 1024


def test_rows_that_repeat_within_reason_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    columns = {"prompt": ["what?"] * 20_000, "answer": repeated(["7"], 20_000), "list": [[1, 2]] * 20_000}
    pq.write_table(pa.table(columns), file)
    rows = load_prompts([str(file)], "k", quoted=False)
    assert len(rows) == 20_000
    assert rows[-1].meta == {"answer": "7", "list": [1, 2], "ground_truth": "7"}


@pytest.mark.parametrize("column", [[], None])
@pytest.mark.parametrize("others", [[], [{"prompt": "What is it?", "image": "a.png"}]], ids=["alone", "beside images"])
def test_a_mark_of_an_image_that_the_row_does_not_have(column: Any, others: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "<image>What number is this?"}], "image": column}
    file.write_text("\n".join(map(json.dumps, [row, *others])))
    message = r":1: prompt has places for 1 images \(<image>, or parts {type: image}\), but the row has 0"
    with pytest.raises(DataError, match=message):
        load_prompts([str(file)], "k", quoted=False)
    row["photo"] = row.pop("image")
    file.write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        load_prompts([str(file)], "k", quoted=False, image_key="photo")
    assert load_prompts([str(file)], "k", quoted=False)[0].text == "<image>What number is this?"  # another column


@pytest.mark.parametrize(
    "template", ["{:>999999999}", "{:>9999999999999}", "{0:^10001}", "{:{0}}", "{:\u0661\u0660001}"]
)
def test_a_template_that_would_fill_the_memory(template: str) -> None:
    assert too_wide(template) is not None
    for judge in (LlmJudge, PairwiseJudge):
        with pytest.raises(ValueError, match=f"^template: .* would be filled up to more than {WIDEST} characters$"):
            judge(template=f"{{completion}}{template}")


@pytest.mark.parametrize(
    "template", ["{}", "a {{}} {}", "{:>10000}", "{:0>3}", "{:.999999999}", "{!r}", "{prompt:^80}"]
)
def test_a_template_that_fills_up_within_reason(template: str) -> None:
    assert too_wide(template) is None
