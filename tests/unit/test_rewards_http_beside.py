"""What the reward `http` sends beside texts, the images of their prompts, and gets beside scores, texts about them."""

import base64
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.media.pictures import Picture, raw_file
from phalanx.rewards import RewardOutput
from phalanx.zoo.rewards.http import Http, ServerError
from tests.helpers.reward_servers import Strange, strange


def test_images_of_prompts_are_sent_as_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Images are sent as the data have them, for any number and size, without a warning."""
    files = [raw_file(torch.full((3, 2, width), width, dtype=torch.uint8)) for width in (4, 64)]
    (tmp_path / "wide.ppm").write_bytes(files[1])
    small = Picture(partial(bytes, files[0]), tmp_path, "row 0")
    wide = Picture(partial(str, "wide.ppm"), tmp_path, "row 0")
    metadata = [{"images": (small, wide), "ground_truth": "4"}, {"images": ()}, {"images": (wide,)}]
    seen: list[Any] = []

    def answer(request: Strange, body: dict[str, Any]) -> None:
        seen.extend(body["metadata"])
        request.reply({"scores": [1.0] * len(body["completions"])})

    with strange(answer) as server:
        assert Http(server.url, batch_size=2, concurrency=1)(["a", "b", "c"], ["p"] * 3, metadata) == [1.0] * 3
    received = [list(map(base64.b64decode, sent["images"])) for sent in seen]
    assert received == [files, [], files[1:]] and seen[0]["ground_truth"] == "4"
    assert not caplog.records


def test_a_file_that_is_gone_is_told() -> None:
    gone = Picture(partial(str, "gone.png"), Path("nowhere"), "data.train_files: a.jsonl, row 3: images[0]")
    with pytest.raises(
        ValueError, match=r"^data.train_files: a.jsonl, row 3: images\[0\]: the image cannot be read: .*"
    ):
        Http("http://127.0.0.1:1/score")(["a"], ["p"], [{"images": (gone,)}])


def test_a_server_says_something_about_some_samples() -> None:
    said = iter([["too long", None], None, ["", "wrong"], ["one"], ["one", 2]])

    def answer(request: Strange, body: dict[str, Any]) -> None:
        request.reply({"scores": [0.0] * len(body["completions"]), "feedback": next(said)})

    with strange(answer) as server:
        ask = Http(server.url, batch_size=2, concurrency=1, retries=0)
        output = ask(["a"] * 6, ["p"] * 6, [{}] * 6)
        assert isinstance(output, RewardOutput)
        assert output.feedback == ["too long", None, None, None, "", "wrong"] and list(output.scores) == [0] * 6
        with pytest.raises(ServerError, match="feedback with 1 texts for 2 samples"):
            ask(["a"] * 2, ["p"] * 2, [{}] * 2)
        with pytest.raises(ServerError, match=r"its answer is not usable, feedback\.1=2 should be a valid string"):
            ask(["a"] * 2, ["p"] * 2, [{}] * 2)
