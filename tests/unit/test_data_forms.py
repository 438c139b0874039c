"""Data formats of other trainers and hubs: each is read unchanged, or refused with one line."""

import base64
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from datasets import Dataset, Features, Image, List, Value

from phalanx.config.lm import LMRLConfig
from phalanx.data.data_files import FORMATS, DataError
from phalanx.data.prompts import answer_of, load_prompts, validation_sets
from phalanx.run.rules import load_config
from tests.helpers.checks import refused
from tests.helpers.pairs import write_parquet
from tests.helpers.tiny_vision import picture

KEY = "data.train_files"
USER = {"role": "user", "content": "What is 1+1?"}


def write(path: Path, *rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(files: list[str], **form: Any) -> list[str]:
    return [row.text for row in load_prompts(files, KEY, quoted=False, **form)]


def shards(folder: Path, split: str = "train", ending: str = "jsonl") -> list[str]:
    names = [folder / f"{split}-0000{i}-of-00002.{ending}" for i in range(2)]
    return [write(path, {"prompt": f"{split} {i}"}) for i, path in enumerate(names)]


def test_validation_files_of_one_name_in_two_folders(tmp_path: Path) -> None:
    """As verl's recipes list them: gsm8k/test.parquet and math/test.parquet."""
    files = []
    for name in ("gsm8k", "math"):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "test.parquet", [{"prompt": [{**USER, "content": name}]}])
        files.append(str(tmp_path / name / "test.parquet"))
    own = write(tmp_path / "own.jsonl", {"prompt": "own"})
    sets = validation_sets([*files, own], quoted=False)
    assert {name: prompts[0].text for name, prompts in sets.items()} == {
        "gsm8k_test": "gsm8k",
        "math_test": "math",
        "own": "own",
    }
    with refused(
        f"data.val_files: {own} and {own} would both be the validation set '{tmp_path.name}_own'; rename one of them"
    ):
        validation_sets([own, own])


def test_folders_and_patterns_of_files(tmp_path: Path) -> None:
    shards(tmp_path / "one")
    (tmp_path / "one" / "README.md").write_text("x")
    assert texts([f"{tmp_path}/one"]) == texts([f"{tmp_path}/one/*.jsonl"]) == ["train 0", "train 1"]
    assert texts([f"{tmp_path}/one:train"]) == ["train 0", "train 1"]
    for split in ("train", "test"):  # as in a snapshot of a hub
        shards(tmp_path / "hub" / "data", split)
    assert texts([f"{tmp_path}/hub:test"]) == ["test 0", "test 1"]
    data = f"{tmp_path}/hub/data"
    for file, message in {
        f"{tmp_path}/hub": f" has the splits test, train; name one, e.g. {tmp_path}/hub:test, or all, {data}/*.jsonl",
        f"{tmp_path}/hub:val": ": there is no split 'val'; it has test, train",
        f"{tmp_path}/one/*.parquet": " matches no file",
    }.items():
        with refused(f"{KEY}: {file}{message}"):
            texts([file])
    write(tmp_path / "mixed" / "a.jsonl", {"prompt": "a"})
    (tmp_path / "mixed" / "a.csv").write_text("prompt\na\n")
    with refused(
        f"{KEY}: {tmp_path}/mixed has .csv and .jsonl files; name those of one kind, e.g. {tmp_path}/mixed/*.csv"
    ):
        texts([f"{tmp_path}/mixed"])
    broken = write(tmp_path / "one" / "train-00002-of-00002.jsonl", {"text": "x"})
    with refused(f"{KEY}: {broken}:1: no 'prompt'; it has text"):
        texts([f"{tmp_path}/one"])


def test_validation_sets_of_folders_and_patterns(tmp_path: Path) -> None:
    shards(tmp_path / "hub" / "data", "test")
    write(tmp_path / "sets" / "aime.jsonl", {"prompt": "a"})
    write(tmp_path / "sets" / "math500.jsonl", {"prompt": "b"})
    sets = validation_sets([f"{tmp_path}/hub:test", f"{tmp_path}/sets/*.jsonl", f"{tmp_path}/hub/data/test-*"])
    assert {name: [p.text for p in prompts] for name, prompts in sets.items()} == {
        "hub_test": ["test 0", "test 1"],
        "aime": ["a"],
        "math500": ["b"],
        "test": ["test 0", "test 1"],
    }
    assert [p.group_id for p in sets["hub_test"]] == [0, 1]
    assert [p.text for p in validation_sets([f"{tmp_path}/hub"], limit=1)["hub"]] == ["test 0"]


def test_one_file_needs_no_list() -> None:
    cfg = load_config(LMRLConfig, None, ["model.path=x", "data.train_files=a.parquet", "data.val_files=[b.parquet]"])
    assert (cfg.data.train_files, cfg.data.val_files) == (["a.parquet"], ["b.parquet"])


def test_a_long_prompt_is_for_overlong_prompts_to_judge(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "a" * 120_000}, {"prompt": "b" * 2**22})
    assert [len(text) for text in texts([file])] == [120_000, 2**22]
    file = write(tmp_path / "q.jsonl", {"prompt": "b" * (2**22 + 1)})
    with refused(f"{KEY}: {file}:1: prompt has 4194305 characters; expected at most 4194304"):
        texts([file])


def test_messages_in_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    file = write(tmp_path / "p.jsonl", {"prompt": [system, {"role": "user", "content": parts}]})
    (row,) = load_prompts([file], KEY, quoted=False)
    assert (row.text, row.messages) == ("What is 1+1?", [{"role": "system", "content": "Be brief."}, USER])
    assert load_prompts([file], KEY)[0].text == "What is 1+1?"
    forms = {
        "type: image": {"type": "image"},
        "type: image, image, min_pixels": {"type": "image", "image": "a.png", "min_pixels": 4},
        "type: image_url, image_url": {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
        "type: image, image_id": {"type": "image", "image_id": "a"},
    }
    for keys, image in forms.items():
        file = write(tmp_path / "q.jsonl", {"prompt": [{"role": "user", "content": [image, *parts]}]})
        with refused(
            f"{KEY}: {file}:1: prompt has a part {{{keys}}} of a message; expected the row's images in a column "
            "`images`, and parts {type: image} in their places, or {type: image, image} with the bytes of an image "
            "file, its path beside the data file, or {bytes, path}"
        ):
            texts([file])
    file = write(
        tmp_path / "r.jsonl",
        {"images": ["a.png"], "prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, *parts]}]},
    )
    with refused(f"{KEY}: {file}:1: the row has images in parts of prompt and in the column `images`; expected one"):
        texts([file])


def test_a_chat_and_its_truth_as_json_texts(tmp_path: Path) -> None:
    """verl's columns as .csv holds them, and pandas' NaN for a value that is missing."""
    file = tmp_path / "a.csv"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    texts = [json.dumps(chat), json.dumps({"ground_truth": "5"}), '["not", "a chat"]', "[1", "[]"]
    cells = ['"' + text.replace('"', '""') + '"' for text in texts]
    file.write_text(f"prompt,reward_model\n{cells[0]},{cells[1]}\n{cells[2]},\n{cells[3]},\n{cells[4]},\n")
    rows = load_prompts([str(file)], "data.train_files", quoted=False)
    assert [row.text for row in rows] == ["q", *texts[2:]]
    assert [row.messages for row in rows] == [chat, None, None, None]
    assert [row.meta.get("ground_truth") for row in rows] == ["5", None, None, None]
    file = tmp_path / "b.jsonl"
    file.write_text('{"prompt": "a", "ground_truth": NaN, "answer": 7}\n{"prompt": "b", "answer": NaN}\n')
    rows = load_prompts([str(file)], "data.train_files", quoted=False)
    assert [row.meta.get("ground_truth") for row in rows] == [7, None]


def test_images_in_messages(tmp_path: Path) -> None:
    """In the forms of Qwen, transformers and OpenAI, as paths, bytes or data URLs; other URLs are refused when read."""
    for i in range(2):
        picture(8, 8 + i, seed=i).save(tmp_path / f"{i}.png")
    content = [(tmp_path / f"{i}.png").read_bytes() for i in range(2)]
    url = f"data:image/png;base64,{base64.b64encode(content[1]).decode()}"
    pairs = [
        ({"type": "image", "image": "0.png"}, {"type": "image_url", "image_url": {"url": url}}),
        ({"type": "image", "path": "0.png"}, {"type": "input_image", "image_url": url}),
        ({"type": "image", "url": f"file://{tmp_path / '0.png'}"}, {"type": "image_url", "image_url": "1.png"}),
    ]
    text = {"type": "text", "text": "Which?"}
    lines = [{"prompt": [{"role": "user", "content": [one, text, other]}]} for one, other in pairs]
    files = [write(tmp_path / "p.jsonl", *lines, {"prompt": [{"role": "user", "content": [text]}]})]
    feature = {"type": Value("string"), "text": Value("string"), "image": Image()}
    features = Features({"prompt": List({"role": Value("string"), "content": List(feature)})})
    stored = [
        {"type": "image", "image": {"bytes": content[0]}},
        text,
        {"type": "image", "image": {"bytes": content[1]}},
    ]
    full = [{"text": None, "image": None} | part for part in stored]
    table = Dataset.from_list([{"prompt": [{"role": "user", "content": full}]}], features)
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(str(tmp_path / "folder"))
    rows = load_prompts([*files, f"{tmp_path}/t.parquet", f"{tmp_path}/folder"], KEY, quoted=False)
    without = rows.pop(3)
    assert (without.text, without.messages, without.images) == ("Which?", [{"role": "user", "content": "Which?"}], ())
    for row in rows:
        assert row.messages == [{"role": "user", "content": [{"type": "image"}, text, {"type": "image"}]}]
        assert [image.encoded() for image in row.images] == content and row.text == "Which?"
    far = {"type": "image", "image": "https://x.org/a.png"}
    file = write(tmp_path / "far.jsonl", {"prompt": [{"role": "user", "content": [far, text]}]})
    (row,) = load_prompts([file], KEY, quoted=False)
    with refused(
        f"{KEY}: {file}:1: prompt, image 0: 'https://x.org/a.png' is a URL, and nothing is downloaded; expected the "
        "bytes of an image file, its path beside the data file, or {bytes, path}"
    ):
        row.images[0].check()


def test_chats_with_tools(tmp_path: Path) -> None:
    """Tools, tool calls and their answers are kept. In a Parquet file, all messages have all keys."""
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]}
    answer = {"role": "tool", "name": "add", "content": "2"}
    talk = [USER, call, answer]
    lines = write(
        tmp_path / "p.jsonl",
        {"prompt": talk, "tools": [json.dumps(schema)]},
        {"prompt": talk, "tools": json.dumps([schema])},
    )
    columns = write_parquet(
        tmp_path / "p.parquet", [{"prompt": talk, "tools": [schema]}, {"prompt": [USER], "tools": None}]
    )
    rows = load_prompts([lines, str(columns)], KEY, quoted=False)
    assert [(row.text, row.messages) for row in rows] == [("What is 1+1?", talk)] * 3 + [("What is 1+1?", [USER])]
    assert [row.meta["tools"] for row in rows] == [[schema]] * 3 + [None]
    other = write(tmp_path / "q.jsonl", {"prompt": "saw it", "tools": "hammer"}, {"prompt": "x", "tools": ["saw"]})
    assert [row.meta["tools"] for row in load_prompts([other], KEY, quoted=False)] == ["hammer", ["saw"]]


def test_chats_of_share_gpt(tmp_path: Path) -> None:
    """Messages {from, value}, as LLaMA-Factory and TRL read them, also calls of tools and pairs."""
    call, plain = {"name": "add", "arguments": {"a": 1}}, {"from": "function_call", "value": "add(1)"}
    talk = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is 1+1?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    ours = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    columns = write_parquet(tmp_path / "p.parquet", [{"conversations": talk}])
    Dataset.from_list([{"conversations": ours[1::3]}]).save_to_disk(tmp_path / "with_roles")
    several = [talk[1], talk[2] | {"value": json.dumps([call, call])}, plain]
    lines = write(tmp_path / "p.jsonl", {"conversations": talk}, {"messages": talk}, {"conversations": several})
    form: dict[str, Any] = {"prompt": "messages", "quoted": False, "answered": True}
    rows = load_prompts([str(columns), lines], KEY, **form)
    assert [row.messages for row in rows[:3]] == [ours] * 3
    written = rows[3].messages or []
    assert len(written[1]["tool_calls"]) == 2 and written[2] == {"role": "assistant", "content": "add(1)"}
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": talk[1:2], "chosen": talk[4:], "rejected": "3"})
    (row,) = load_prompts([pairs], KEY, quoted=False)
    assert row.messages == [USER] and row.meta["chosen"] == ours[4:] and row.meta["rejected"] == "3"
    with refused(f"{KEY}: {lines}:1: no 'prompt'; it has conversations"):
        texts([lines])
    with_roles = load_prompts([f"{tmp_path}/with_roles"], KEY, **form)  # as on a hub
    assert with_roles[0].messages == ours[1::3]


def test_completions_of_trl() -> None:
    assert answer_of([{"role": "assistant", "content": "2"}], "completion", "x") == "2"
    assert answer_of([{"role": "assistant", "content": [{"type": "text", "text": "2"}]}], "completion", "x") == "2"
    assert answer_of("2", "completion", "x") == "2" and answer_of(None, "completion", "x") is None
    for value in ([USER], [], [{"role": "assistant", "content": "2"}, USER], [{"role": "assistant", "tool_calls": []}]):
        message = f"x: completion is a chat of {len(value)} messages; expected one of the assistant, or a text"
        with refused(message):
            answer_of(value, "completion", "x")


@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_columns_of_images_stay_on_disk_for_texts(form: str, tmp_path: Path) -> None:
    """Decoded, they would be 400 times as large as the file."""
    picture = tmp_path / "picture.png"
    from PIL import Image as Pictures

    Pictures.new("RGB", (1000, 1000)).save(picture)
    stored, n = {"bytes": picture.read_bytes(), "path": None}, 100
    columns = {"prompt": ["what?"] * n, "answer": ["5"] * n, "images": [[stored]] * n, "image": [stored] * n}
    features = Features(
        {"prompt": Value("string"), "answer": Value("string"), "images": List(Image()), "image": Image()}
    )
    data = Dataset.from_dict(columns, features=features)
    path = tmp_path / f"rows.{form}"
    data.save_to_disk(str(path)) if form == "folder" else data.to_parquet(str(path))
    load_prompts([str(path)], KEY, quoted=False)  # memory of the imports
    before = psutil.Process().memory_info().rss
    rows = load_prompts([str(path)], KEY, quoted=False)
    assert [set(row.meta) for row in rows] == [{"answer", "ground_truth", "images"}] * n
    assert psutil.Process().memory_info().rss - before < 50e6


def edits(folder: Path, **more: Any) -> Path:
    """VeRL-Omni's rows of image editing."""
    from PIL import Image as Pictures

    rows = []
    for i, color in enumerate(("red", "blue")):
        Pictures.new("RGB", (8 + i, 8), color).save(folder / "x.png")
        system = {"role": "system", "content": "s"}
        prompt = [system, {"role": "user", "content": f"Picture 1: <image>make it {color}"}]
        negative = [system, {"role": "user", "content": "Picture 1: <image> "}]
        row = {"data_source": "image_edit", "prompt": prompt, "negative_prompt": negative}
        row |= {"images": [{"bytes": (folder / "x.png").read_bytes()}], "reward_model": {"ground_truth": color}}
        rows.append(row | more)
    return write_parquet(folder / "edit.parquet", rows)


def test_image_editing_of_verl_omni(tmp_path: Path) -> None:
    rows = load_prompts([str(edits(tmp_path))], KEY, images=["image"])
    assert [(row.text, row.negative) for row in rows] == [("make it red", " "), ("make it blue", " ")]
    assert [row.meta["image"].pil().getpixel((0, 0)) for row in rows] == [(255, 0, 0), (0, 0, 255)]
    assert rows[1].meta["image"].pil().size == (9, 8)
    assert [row.meta["ground_truth"] for row in rows] == ["red", "blue"]
    lines = write(tmp_path / "p.jsonl", {"prompt": "<image>make it red", "images": ["x.png"]})
    (row,) = load_prompts([lines], KEY, images=["image"])
    assert row.text == "make it red" and row.meta["image"].pil().size == (9, 8)
    (row,) = load_prompts([lines], KEY)  # for a model without images, it is a text
    assert row.text == "<image>make it red"
    two = load_prompts(
        [write(tmp_path / "q.jsonl", {"prompt": "p", "images": ["x.png", "x.png"]})], KEY, images=["image"]
    )
    with pytest.raises(ValueError, match=r"q\.jsonl:1: image is a list of 2; expected the bytes of an image file"):
        two[0].meta["image"].pil()
    with pytest.raises(DataError, match=r"has no column 'image'; it has prompt$"):
        load_prompts([str(write_parquet(tmp_path / "r.parquet", [{"prompt": "p"}]))], KEY, images=["image"])


OBJECT = 'expected one object per line, {"prompt": "..."}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}\n', ":1: not JSON (the key 'prompt' occurs twice); " + OBJECT),
        ("p.jsonl", '{"prompt": "a", "x": {"y": 1, "y": 1}}\n', ":1: not JSON (the key 'y' occurs twice); " + OBJECT),
        ("p.csv", "prompt,answer,answer\na,b,c\n", " has the column 'answer' twice; rename one of them"),
    ],
)
def test_a_name_that_is_there_twice(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with refused(f"{KEY}: {tmp_path / name}{message}"):
        texts([str(tmp_path / name)])


def test_a_long_cell_and_an_entry_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt\n" + "a" * 200_000 + "\n")
    assert [len(text) for text in texts([str(tmp_path / "p.csv")])] == [200_000]
    for entry in ("", " "):  # the first of which would be the current folder
        with refused(f"{KEY}: {entry!r} names no file; expected {FORMATS}"):
            texts([entry])


ROWS = """
def few():
    yield {"prompt": 'a door with "eta"', "colour": "red"}
    yield {"prompt": "a cat"}

def failing():
    yield {"prompt": "a cat"}
    raise RuntimeError("no network")

def numbers():
    return [1]

def nothing():
    return []
"""


def test_rows_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    assert [(row.text, row.meta) for row in load_prompts([f"{tmp_path}/rows.py:few"], "k")] == [
        ('a door with "eta"', {"colour": "red", "ground_truth": "eta"}),
        ("a cat", {}),
    ]
    sets = validation_sets([f"{tmp_path}/rows.py:few"])
    assert [(name, len(rows)) for name, rows in sets.items()] == [("rows_few", 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fev", "k='{file}:fev': {file} has no 'fev'; did you mean few?"),
        ("failing", "k: {file}:failing, line 8: RuntimeError: no network"),
        ("numbers", "k: {file}:numbers, row 0: int; expected a dict with the columns of a row"),
        ("nothing", "k: {file}:nothing has no prompts"),
    ],
)
def test_a_function_without_rows(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    with pytest.raises(DataError) as error:
        load_prompts([f"{tmp_path}/rows.py:{name}"], "k")
    assert str(error.value) == message.format(file=tmp_path / "rows.py")
