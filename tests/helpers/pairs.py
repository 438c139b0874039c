"""Preference data with tiny pictures, in every supported form."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PROMPTS = ["a red wall", "the green sea at night", "blue", "a yellow field"]


def picture(i: int, chosen: bool, size: tuple[int, int] = (40, 36)) -> Image.Image:
    """A plain picture if `chosen`, otherwise noise; `size` is (width, height)."""
    rng = random.Random(f"{i} {chosen}")
    if chosen:
        return Image.new("RGB", size, tuple(rng.randint(0, 255) for _ in range(3)))
    return Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def rows(count: int = len(PROMPTS)) -> list[dict[str, Any]]:
    """Rows with the bytes of image files."""
    return [
        {"prompt": prompt, "chosen": png(picture(i, True)), "rejected": png(picture(i, False)), "source": f"test {i}"}
        for i, prompt in enumerate(PROMPTS[:count])
    ]


def write_parquet(file: Path, table: list[dict[str, Any]]) -> Path:
    """Write rows to a Parquet file."""
    pq.write_table(pa.Table.from_pylist(table), file)
    return file


def write_jsonl(folder: Path) -> Path:
    """Write a .jsonl file with paths, and the pictures next to it."""
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for i, row in enumerate(rows()):
        names = {name: f"pictures/{i}-{name}.png" for name in ("chosen", "rejected")}
        for name, path in names.items():
            (folder / path).write_bytes(row[name])
        lines.append(json.dumps({"prompt": row["prompt"], **names}))
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file
