"""Validation records: the files of images and texts, their index, and grids."""

import json
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phalanx.media.grids import CAPTION_LINES, TILE_MAX, TILE_MIN
from phalanx.media.pictures import Picture
from phalanx.telemetry.records import Record, Thumbnail, grid, read_index, save_records, spoken, storable, together
from tests.helpers.logs import TALK, prompt_image, records, start, talk, texts
from tests.helpers.ranks import ROOT


class TestImages:
    def test_files_and_index(self, tmp_path: Path) -> None:
        given = records()
        given[1] = Record("日本語 <b>", float("nan"), given[1].output, 7, scores={"ocr": 0.5, "clip": float("inf")})
        with start(tmp_path) as log:
            log.records(10, "ocr", reversed(given))
        folder = tmp_path / "images/ocr/step_000010"
        names = ["00000.png", "00002.png", "00007.png", "grid.png", "index.jsonl"]
        assert sorted(p.name for p in folder.iterdir()) == names
        index = [json.loads(line) for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()]
        assert index == [
            {"index": 0, "prompt": 'a sign that says "0"', "reward": 0.0, "file": "00000.png"},
            {"index": 2, "prompt": 'a sign that says "2"', "reward": 0.2, "file": "00002.png"},
            {
                "index": 7,
                "prompt": "日本語 <b>",
                "reward": None,
                "scores": {"ocr": 0.5, "clip": None},
                "file": "00007.png",
            },
        ]
        with Image.open(folder / "00007.png") as image:
            assert np.array_equal(np.asarray(image), given[1].output)

    def test_a_later_start_replaces_the_folder(self, tmp_path: Path) -> None:
        save_records(tmp_path, 1, "ocr", records(5))
        folder = save_records(tmp_path, 1, "ocr", records(1))
        assert sorted(p.name for p in folder.iterdir()) == ["00000.png", "grid.png", "index.jsonl"]
        assert [p.name for p in folder.parent.iterdir()] == ["step_000001"]

    def test_no_images(self, tmp_path: Path) -> None:
        folder = save_records(tmp_path, 1, "ocr", [])
        assert [p.name for p in folder.iterdir()] == ["index.jsonl"]

    def test_long_texts_and_escapes_are_harmless_on_the_console(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with start(tmp_path, "console") as log:
            log.records(1, "math", [Record("\x1b[2Jp", 0.5, "a" * 3000 + "end", 0)])
        said = capsys.readouterr().out
        assert "    \\x1b[2Jp\n" in said and " […] " in said and said.endswith("aaaend\n") and len(said) < 800

    def test_conversations_stand_in_the_index(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The console shows the first one, and only the beginning and end of a long text."""
        with start(tmp_path, "console") as log:
            log.records(1, "tools", [talk()])
            log.records(2, "tools", [talk("\x1b[2J" + "6" * 900, turns=9)])
        said = capsys.readouterr().out
        numbers = "2 turns; 1 call; 0.25 s in the environment; rewards 0, 0.5; ended: done"
        first = indent(TALK.replace("\n\n", "\n") + "\n" + numbers, "    ")
        assert said.startswith(f"step 1/4  tools, prompt 0, reward 0.500:\n{first}\nstep 2/4")
        second = said.split("step 2/4")[1]
        assert "\n    [… 8 messages …]\n" in second and second.count("calc(") == 4 and len(second) < 800
        assert "so\n    \\x1b[2J666" in second and "\x1b" not in said
        (row,) = read_index(tmp_path / "samples/tools/step_000001", "text")
        given = talk()
        assert given.conversation is not None
        assert row == {"index": 0, "prompt": "2 * 3?", "reward": 0.5, "text": "<b>6</b>"} | given.conversation

    def test_whatever_was_said_can_be_stored(self, tmp_path: Path) -> None:
        """Numbers that JSON cannot represent, lone surrogates, and custom objects of an environment."""
        calls = [{"function": {"name": "calc", "arguments": {"x": float("nan")}}}, {"name": "bare"}]
        said = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {
                "role": "tool",
                "name": 3,
                "content": [{"text": "a"}],
                "beside": {1: np.int64(2), "b": "\ud800", "c": 0.5},
            },
        ]
        given = talk()
        assert given.conversation is not None
        beside = storable(given.conversation | {"messages": said})
        folder = save_records(tmp_path, 1, "tools", [replace(given, conversation=beside)])
        (row,) = read_index(folder, "text")
        assert row["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"x": "nan"}
        assert row["messages"][1]["beside"] == {"1": "2", "b": "?", "c": 0.5}
        assert spoken(row["messages"]) == [
            ("assistant", 'calc({"x": "nan"})\nbare(null)'),
            ("tool 3", "[{'text': 'a'}]"),
        ]

    def test_the_docs_show_the_console(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def call(tool: str, **arguments: Any) -> dict[str, Any]:
            calls = [{"type": "function", "function": {"name": tool, "arguments": arguments}}]
            return {"role": "assistant", "content": "", "tool_calls": calls}

        messages = [
            {"role": "user", "content": "Sell 2 pears.\n\nThere are 3 goods."},
            call("count", name="pear"),
            {"role": "tool", "name": "count", "content": "5"},
            call("sell", name="pear", amount=2),
            {"role": "tool", "name": "sell", "content": "sold"},
            {"role": "assistant", "content": "Done."},
        ]
        numbers = {"turns": 3, "tool_calls": 2, "ended": "done", "environment_seconds": 0.0012, "turn_rewards": []}
        with start(tmp_path, "console") as log:
            log.records(3, "test", [Record("x", 2 / 3, "Done.", 0, conversation={"messages": messages, **numbers})])
        shown = capsys.readouterr().out
        assert shown in (ROOT / "docs" / "environments.md").read_text()

    def test_a_truncated_text_is_so_in_the_index(self, tmp_path: Path) -> None:
        folder = save_records(tmp_path, 1, "math", [Record("p", 0.5, "a", 0, truncated=True), Record("p", 0.5, "b", 1)])
        assert [row.get("truncated") for row in read_index(folder, "text")] == [True, None]

    def test_texts_stand_in_the_index(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The console shows the first one."""
        given = [Record("a", float("nan"), "", 9), *texts()]
        with start(tmp_path, "console") as log:
            log.records(10, "math", given)
        assert capsys.readouterr().out == (
            "step 10/4  math, prompt 0, reward 0.000:\n    What is 0 + *1*?\n    # 0\n\n      <b>1</b> \\ | 二\n"
            "    ground truth: *1*\n"
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples"]
        folder = tmp_path / "samples/math/step_000010"
        assert [p.name for p in folder.iterdir()] == ["index.jsonl"]
        lines = (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()
        assert lines[0] == (
            r'{"index": 0, "prompt": "What is 0 + *1*?", "reward": 0.0, "scores": {"exact": 0.0}, '
            r'"ground_truth": "*1*", "text": "# 0\n\n  <b>1</b> \\ | 二"}'
        )
        assert [json.loads(line) for line in lines[1:]] == [
            json.loads(lines[0])
            | {"index": 1, "prompt": "What is 1 + *1*?", "reward": 0.25, "text": texts()[1].output}
            | {"scores": {"exact": 0.5}, "ground_truth": "*2*"},
            {"index": 9, "prompt": "a", "reward": None, "text": ""},
        ]
        assert read_index(folder, "text") == [json.loads(line) for line in lines]
        with pytest.raises(ValueError, match=r":1: not a row with index, prompt, reward and file$"):
            read_index(folder)

    def test_tiny_images_are_enlarged_by_whole_pixels_with_captions_below(self) -> None:
        (record,) = records(1, height=4, width=8)
        picture = np.asarray(grid([record]))
        factor = TILE_MIN // 8
        enlarged = record.frames[0].repeat(factor, 0).repeat(factor, 1)
        assert np.array_equal(picture[8 : 8 + 4 * factor, 8 : 8 + TILE_MIN], enlarged)
        below = picture[8 + 4 * factor :]
        assert (below < 128).any()  # text
        assert picture.shape[1] == TILE_MIN + 16

    def test_large_images_shrink_and_four_make_a_square(self) -> None:
        picture = grid(records(4, height=512, width=1024))
        assert picture.width == 2 * TILE_MAX + 3 * 8
        assert picture.height < 2 * (TILE_MAX // 2 + 17 * (CAPTION_LINES + 1)) + 5 * 8

    def test_long_prompts_and_long_words_stay_in_their_tile(self) -> None:
        image = np.full((160, 160, 3), 255, np.uint8)
        for prompt in ("word " * 300, "w" * 3000):
            picture = np.asarray(grid([Record(prompt, 1.0, image, 0)]))
            assert picture.shape[0] <= 160 + 17 * (CAPTION_LINES + 1) + 24
            assert (picture[:, -6:] == 255).all()  # the margin is empty

    @pytest.mark.parametrize("image", [np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)])
    def test_another_layout_is_refused(self, tmp_path: Path, image: Any) -> None:
        with pytest.raises(ValueError) as error:
            save_records(tmp_path, 1, "ocr", [Record("a", 1.0, image, 2)])
        assert str(error.value) == (
            f"images: record 2 is {image.dtype} {list(image.shape)}; expected uint8 [H, W, 3], or [F, H, W, 3]"
        )

    @pytest.mark.parametrize("name", ["../x", "", ".."])
    def test_a_set_cannot_leave_its_folder(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError) as error:
            save_records(tmp_path, 1, name, records())
        assert str(error.value) == f"images: {name!r} cannot name a validation set's folder; use a name without '/'"


def test_images_of_prompts_stand_beside_texts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = prompt_image(), prompt_image(shade=9)
    records = [Record("a", 0.5, "x", 0, images=(one, other)), Record("b", 0.5, "y", 1, images=(one,)), texts()[0]]
    records[2] = replace(records[2], index=2)
    with start(tmp_path, "console") as log:
        log.records(2, "seen", records)
    assert "    [data.val_files: a.jsonl:1: images[0], 300 x 200 pixels]\n" in capsys.readouterr().out
    folder = tmp_path / "samples" / "seen" / "step_000002"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["index.jsonl", one.file, other.file])
    first, second, third = read_index(folder, "text")
    of_one = {"file": one.file, "place": one.place, "height": 200, "width": 300}
    assert (first["images"], second["images"]) == ([of_one, of_one | {"file": other.file}], [of_one])
    assert "images" not in third
    with Image.open(folder / other.file) as image:
        assert np.array_equal(np.asarray(image), other.pixels)
    assert together((one, prompt_image(width=9, shade=1))).size == (39, 20)


def test_images_of_prompts_are_reduced_and_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (1024, 512)).save(tmp_path / "a.jpg", exif=exif)
    made = Thumbnail.of(Picture(lambda: "a.jpg", tmp_path, "place"))
    assert (made.height, made.width, made.pixels.shape) == (1024, 512, (256, 128, 3))
