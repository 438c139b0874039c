"""The pictures of numbers and the vision-language model of the quickstart, as they are shipped."""

import io
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from assets.make import reading
from PIL import Image
from transformers import AutoModelForImageTextToText

from phalanx.engines.transformers import load_processor
from tests.helpers.ranks import ROOT

ASSETS = ROOT / "assets" / "reading"


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return found


def number(row: dict[str, Any]) -> str:
    return str(row["reward_model"]["ground_truth"])


def image(row: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")


def test_they_are_made_again(tmp_path: Path) -> None:
    reading.write_data(tmp_path)
    for name, count in reading.COUNTS.items():
        shipped, made = rows(ASSETS, name), rows(tmp_path, name)
        assert len(shipped) == count and [number(row) for row in made] == [number(row) for row in shipped]
        assert image(made[0]).tobytes() == image(shipped[0]).tobytes()


def test_no_number_is_in_two_files() -> None:
    train, val, test = ({number(row) for row in rows(ASSETS, name)} for name in reading.COUNTS)
    assert not train & val and not train & test and not val & test


def test_the_base_reads_but_not_always_forwards() -> None:
    """As transformers itself generates, for held-out numbers."""
    folder = str(ASSETS / "base")
    assert (ASSETS / "base" / "model.safetensors").stat().st_size < 3e6
    processor = load_processor(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    some = random.Random(0).sample(rows(ASSETS, "val"), 64)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": reading.QUESTION}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(text=[text] * len(some), images=[[image(row)] for row in some], return_tensors="pt")
    assert int((inputs["input_ids"][0] == model.config.image_token_id).sum()) == reading.IMAGE_TOKENS
    out = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    answers = processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [answer == number(row) for answer, row in zip(answers, some, strict=True)]
    assert 0.4 * len(some) < sum(right) < 0.85 * len(some)
    assert sum(answer[1:2] == number(row)[1] for answer, row in zip(answers, some, strict=True)) > 0.8 * len(some)
